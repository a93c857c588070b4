"""Launchers that are sent anything: by strangers, by nodes that are in the job, by node 0."""

import contextlib
import io
import json
import selectors
import socket

import mutations
import pytest
import support

import jaxfabric
from jaxfabric.launch import hub as hubs
from jaxfabric.launch import job, links, messages, results

pytestmark = pytest.mark.timeout(120)

RESULT = {
    "process": 1,
    "pid": 77,
    "exit_code": 7,
    "signal": None,
    "seconds": 1.5,
    "ended_by_launcher": False,
    "last_lines": ["the reason", "\u2026"],
    "node": 1,
    "host": "hostb",
}
FAILED = {"process": 1, "exit_code": 7, "text": "process 1 (pid 77) exited with status 7"}
HELLO = {
    "hello": {
        "node": 1,
        "nodes": 2,
        "processes": 1,
        "host": "hostb",
        "version": jaxfabric.__version__,
    }
}
OF_A_NODE = [
    {"failed": FAILED | {"seconds": 1.5}},
    {"failed": FAILED | {"process": None}},
    {"signal": 2, "kill": False},
    {"ended": [RESULT, RESULT | {"signal": "SIGKILL", "exit_code": 137}]},
]
START = {"first": 1, "total": 2, "host": "10.0.0.1", "port": 4801, "job": "ab", "restarts": 0}
OUTCOME = {
    "exit_code": 7,
    "first_failure": 1,
    "seconds": 2.5,
    "processes": [RESULT],
    "failure": "process 1 exited with status 7",
    "restarts": 0,
}
OF_NODE_0 = [
    {"start": START},
    {"failed": FAILED},
    {"signal": 15, "kill": True},
    {"again": {"number": 1, "of": 2}},
    {"outcome": OUTCOME},
    {"outcome": OUTCOME | {"first_failure": 5}},
    {"refused": "only 1 of 2 nodes came"},
]


def test_what_launchers_say_has_the_shapes():
    assert messages.is_hello(HELLO)
    assert messages.is_hello({"hello": HELLO["hello"] | {"more": "in a later version"}})
    assert all(map(messages.is_of_a_node, OF_A_NODE))
    assert all(map(messages.is_of_node_0, OF_NODE_0))
    assert not any(map(messages.is_of_a_node, (HELLO, *OF_NODE_0[3:])))


@pytest.fixture(autouse=True)
def _without_ports_of_its_own(monkeypatch):
    """No coordination service, and a listener where the kernel likes."""

    def listen(_):
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        return listener, "127.0.0.1"

    monkeypatch.setattr(hubs, "listen", listen)
    monkeypatch.setattr(hubs.Hub, "_start_service", lambda _, __, port: port)


def printed(text):
    text.encode()


@contextlib.contextmanager
def hub_of_two_nodes():
    """Node 0 with a hub."""
    with selectors.DefaultSelector() as selector:
        nodes = links.Nodes(count=2, rank=0, coordinator="127.0.0.1:4800")
        hub = hubs.Hub(nodes, 1, 100, selector, lambda _: None, printed)
        try:
            yield hub
        finally:
            hub.close()


def tell(hub, words, later=b""):
    """Sends words to a hub, and lets it do what it does until it has closed the connection.

    What is to be sent later follows its first answer. Returns what it has answered.
    """
    answer = b""
    with socket.create_connection(hub._listener.getsockname()) as node:
        node.sendall(words)
        if not later:
            node.shutdown(socket.SHUT_WR)
        node.setblocking(False)
        while True:
            for key, _ in hub._selector.select(0.001):
                if hub._selector.get_map().get(key.fd) is key:
                    key.data()
            assert all(len(each._received) <= 4 << 10 for each in hub._strangers)
            try:
                data = node.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return answer
            if not data:
                return answer
            answer += data
            if later:
                node.sendall(later)
                node.shutdown(socket.SHUT_WR)
                later = b""


def hello_of_node_0():
    return {"hello": HELLO["hello"] | {"node": 0, "host": "hosta"}}


def line(message):
    return json.dumps(message).encode() + b"\n"


@pytest.mark.parametrize("seed", range(2))
def test_a_hub_that_is_sent_anything_by_strangers(seed):
    """None of it is more than a connection that ends; the node comes all the same."""
    with hub_of_two_nodes() as hub:
        before = support.open_descriptors()
        hub.receive(0, hello_of_node_0())
        admitted = 0
        for words in mutations.mutations([HELLO], 400, seed):
            tell(hub, words + b"\n")
            # Perhaps it was a node after all, which has left: so has the job.
            admitted += hub._running
            hub._running = False
        assert 0 < admitted < 100  # Such as with the name of another host.
        assert support.open_descriptors() == before
        assert b'{"start": {"first": 1, "total": 2, ' in tell(hub, line(HELLO))
        assert hub._running


@pytest.mark.parametrize("seed", range(4))
def test_a_hub_that_is_sent_anything_by_a_node(seed):
    for words in mutations.mutations([*OF_A_NODE, HELLO], 150, seed):
        with hub_of_two_nodes() as hub:
            hub.receive(0, hello_of_node_0())
            answer = tell(hub, line(HELLO), words + b"\n" + line(OF_A_NODE[0]))
            assert answer.startswith(b'{"start": {')
            assert hub._running
            assert not hub._links


@pytest.mark.parametrize("seed", range(4))
def test_a_launcher_that_is_sent_anything_by_node_0(seed, monkeypatch):
    monkeypatch.setattr(job.Job, "_start_process", lambda *_: None)
    before = support.open_descriptors()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        nodes = links.Nodes(count=2, rank=1, coordinator=address)
        for words in mutations.mutations(OF_NODE_0, 250, seed):
            launcher = job.Job(["true"], 1, nodes, 0, 1.0, (io.BytesIO(), io.BytesIO()))
            launcher._connect()
            node_0, _ = listener.accept()
            with launcher.selector, node_0, launcher.link.socket:
                node_0.sendall(line(OF_NODE_0[0]))
                while launcher.total != START["total"]:
                    launcher.selector.select()
                    launcher._read_link()
                node_0.sendall(words + b"\n")
                node_0.close()
                with contextlib.suppress(links.JoinError):
                    # Until the job has ended, or node 0 has gone.
                    while launcher.link is not None and launcher.outcome is None:
                        launcher.selector.select()
                        launcher._read_link()
    assert support.open_descriptors() == before


def test_a_failed_process_of_a_launcher_that_has_gone_since():
    """It is in no result: only its failure is known."""
    err = io.BytesIO()
    launcher = job.Job(["true"], 2, links.Nodes(), 0, 1.0, (io.BytesIO(), err))
    with launcher.selector:
        launcher._finish(results.Summary.from_json(OUTCOME | {"first_failure": 5}))
    assert err.getvalue() == b"jaxfabric: the job failed: process 1 exited with status 7\n"
