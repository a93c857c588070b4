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
from jaxfabric.bootstrap import service
from jaxfabric.launch import job, links, messages, results
from jaxfabric.launch.hub import Hub

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
def _no_coordination_service(monkeypatch):
    monkeypatch.setattr(service.CoordinationService, "start", lambda *_: None)


def printed(text):
    text.encode()


@contextlib.contextmanager
def hub_of_two_nodes():
    """Node 0 with a hub, and a function that lets the hub take what has come."""
    with selectors.DefaultSelector() as selector:
        with support.socket_on_free_port() as (reservation, port):
            reservation.close()
            nodes = links.Nodes(count=2, rank=0, coordinator=f"127.0.0.1:{port}")
            hub = Hub(nodes, 1, 100, selector, lambda _: None, printed)

        def turn():
            while ready := selector.select(0):
                for key, _ in ready:
                    if selector.get_map().get(key.fd) is key:
                        key.data()

        try:
            yield hub, ("127.0.0.1", port), turn
        finally:
            hub.close()


def hello_of_node_0():
    return {"hello": HELLO["hello"] | {"node": 0, "host": "hosta"}}


def line(message):
    return json.dumps(message).encode() + b"\n"


@pytest.mark.parametrize("seed", range(2))
def test_a_hub_that_is_sent_anything_by_strangers(seed):
    """None of it is more than a connection that ends; the node comes all the same."""
    with hub_of_two_nodes() as (hub, address, turn):
        before = len(support.open_descriptors())
        hub.receive(0, hello_of_node_0())
        admitted = 0
        for words in mutations.mutations([HELLO], 400, seed):
            with socket.create_connection(address) as stranger:
                stranger.sendall(words + b"\n")
                turn()
                assert all(len(each._received) <= 4 << 10 for each in hub._strangers)
                admitted += len(hub._links)
            turn()
            # It was a node after all, which has left: so has the job.
            hub._running = False
        assert 0 < admitted < 100  # Such as from another host.
        assert not hub._strangers
        assert len(support.open_descriptors()) <= before + 2
        with socket.create_connection(address) as node:
            node.sendall(line(HELLO))
            turn()
            assert hub._running
            assert b'{"start": {"first": 1, "total": 2, ' in node.recv(1000)


@pytest.mark.parametrize("seed", range(4))
def test_a_hub_that_is_sent_anything_by_a_node(seed):
    for words in mutations.mutations([*OF_A_NODE, HELLO], 150, seed):
        with hub_of_two_nodes() as (hub, address, turn):
            hub.receive(0, hello_of_node_0())
            with socket.create_connection(address) as node:
                node.sendall(line(HELLO) + words + b"\n" + line(OF_A_NODE[0]))
                turn()
                assert hub._running or hub.join_by
            turn()
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
                node_0.sendall(line(OF_NODE_0[0]) + words + b"\n")
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
