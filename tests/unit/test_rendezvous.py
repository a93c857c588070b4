"""The exchange of addresses, on a store in memory."""

import dataclasses
import json
import subprocess
import sys
import threading
import time

import mutations
import pytest
import support

from jaxfabric.bootstrap import identity, rendezvous
from jaxfabric.bootstrap.membership import Membership

pytestmark = pytest.mark.timeout(120)


class FakeStore:
    """The part of jax.distributed's client that the exchange uses."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: no such key")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            self.values.pop(key, None)


def exchange_all(store, members, timeout=10.0, absent=()):
    results = [None] * len(members)

    def take_part(process):
        try:
            results[process] = rendezvous.exchange(
                store, process, len(members), members[process], timeout
            )
        except rendezvous.RendezvousError as error:
            results[process] = error

    threads = [
        threading.Thread(target=take_part, args=(process,))
        for process in range(len(members))
        if process not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def some_members(n, **agreed):
    own = identity.ProcessIdentity.own()
    return [rendezvous.Member(own, bytes([i, 255 - i]), dict(agreed)) for i in range(n)]


def test_exchange_gives_all_members_in_order_and_leaves_the_store_empty():
    store = FakeStore()
    members = some_members(4, version="1")
    for _ in range(3):
        rosters = exchange_all(store, members)
        assert [roster.members for roster in rosters] == [members] * 4
        assert store.values == {}


def test_exchange_takes_no_answer_from_an_earlier_round():
    store = FakeStore()
    store.key_value_set("jaxfabric/hello/1", json.dumps({"uid": "old"}))
    store.key_value_set("jaxfabric/roster/old", "{}")
    members = some_members(2)
    # Process 1 has not started when process 0 looks: what process 0 finds is overwritten only then.
    store.key_value_delete("jaxfabric/hello/1")
    assert [roster.members for roster in exchange_all(store, members)] == [members] * 2


def test_all_learn_one_secret_that_is_new_in_every_round():
    store = FakeStore()
    rounds = [exchange_all(store, some_members(3)) for _ in range(3)]
    for rosters in rounds:
        assert rosters == [rosters[0]] * 3
        assert len(rosters[0].secret) == 32
    assert len({rosters[0].secret for rosters in rounds}) == 3
    assert len({rosters[0].incarnation for rosters in rounds}) == 3


def test_clocks_that_are_set_back_change_nothing(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    rounds = [exchange_all(store, some_members(2)) for _ in range(2)]
    assert rounds[0][0].incarnation != rounds[1][0].incarnation


def test_all_learn_who_is_missing():
    errors = exchange_all(FakeStore(), some_members(3), timeout=0.2, absent=(2,))
    assert errors[2] is None
    for error in errors[:2]:
        assert "missing: process 2" in str(error)
        assert "connect_timeout" in str(error)


@pytest.mark.parametrize("process", [0, 1])
def test_all_learn_who_cannot_take_part(process):
    store = FakeStore()
    members = some_members(3)
    members[process] = dataclasses.replace(members[process], problem="no sockets left")
    errors = exchange_all(store, members, timeout=20)
    assert str(errors[process]) == "no sockets left"
    host = members[0].identity.hostname
    for other in {0, 1, 2} - {process}:
        assert (
            str(errors[other]) == f"process {process} on {host} cannot take part: no sockets left"
        )
    assert store.values == {}


def test_process_zero_is_missing():
    store = FakeStore()
    (_, error) = exchange_all_without_zero(store)
    assert "heard nothing from process 0" in str(error)
    assert store.values == {}


def exchange_all_without_zero(store):
    store_get = store.blocking_key_value_get
    store.blocking_key_value_get = lambda key, _: store_get(key, 10)
    return exchange_all(store, some_members(2), timeout=0.1, absent=(0,))


def test_all_learn_what_differs():
    members = some_members(2, version="1")
    members[1].agreed["version"] = "2"
    for error in exchange_all(FakeStore(), members):
        assert "version differs: 1 on process 0, 2 on process 1" in str(error)


@pytest.mark.parametrize("seed", range(3))
def test_process_zero_reads_anything(seed):
    """Every round ends with an answer, or an error of the documented kind, on all that listen."""
    members = some_members(2, version="1")
    store = FakeStore()
    store.key_value_set("jaxfabric/hello/1", members[1]._encode("ab"))
    valid = json.loads(store.values["jaxfabric/hello/1"])
    understood = 0
    for words in mutations.mutations([valid], 300, seed):
        store = FakeStore()
        store.key_value_set("jaxfabric/hello/1", words.decode(errors="replace"))
        if roster := roster_of(store, 0, members):
            understood += 1
            assert [member.agreed for member in roster.members] == [{"version": "1"}] * 2
        assert all(key.startswith("jaxfabric/roster/") for key in store.values)
    assert 0 < understood < 150


def roster_of(store, process, members):
    """What an exchange gives a process, or None if that is an error of the documented kind."""
    try:
        return rendezvous.exchange(store, process, len(members), members[process], 5)
    except rendezvous.RendezvousError:
        return None


@pytest.mark.parametrize("seed", range(3))
def test_a_process_reads_anything_that_process_zero_answers(seed):
    members = some_members(2, version="1")
    hellos = [json.loads(member._encode("ab")) for member in members]
    valid = [
        {"members": hellos, "secret": "00" * 32, "incarnation": 1 << 63},
        {"error": "only 1 of 2 processes called"},
    ]

    store = FakeStore()
    understood = 0
    for words in mutations.mutations(valid, 300, seed):
        store.blocking_key_value_get = lambda *_, words=words: words.decode(errors="replace")
        if roster := roster_of(store, 1, members):
            understood += 1
            assert [type(each) for each in roster.members] == [rendezvous.Member] * 2
    assert 0 < understood < 150


def test_a_process_that_says_more_is_of_another_version():
    store = FakeStore()
    members = some_members(2, version="1")
    hello = json.loads(members[1]._encode("ab")) | {"more": 1}
    hello["agreed"]["version"], hello["identity"]["more"] = "2", 1
    store.key_value_set("jaxfabric/hello/1", json.dumps(hello))
    with pytest.raises(rendezvous.RendezvousError, match="version differs: 1 on process 0, 2 on"):
        rendezvous.exchange(store, 0, 2, members[0], 5)


def test_watch_sees_processes_end():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        own = identity.ProcessIdentity.own()
        started = identity._start_time(child.pid)
        alive = identity.ProcessIdentity("here", child.pid, started, own.pid_space)
        reused = identity.ProcessIdentity("here", child.pid, started - 1, own.pid_space)
        elsewhere = identity.ProcessIdentity("there", child.pid, started, "another boot")
        before = support.open_descriptors()
        with identity.Watch([reused]) as watch:
            assert watch.any_gone()
            assert watch.wait_until_all_gone(5)
        with identity.Watch([elsewhere]) as watch:
            assert not watch.any_gone()
            assert not watch.wait_until_all_gone(0.01)
        with identity.Watch([alive, reused]) as watch:
            assert not watch.wait_until_all_gone(0.01)
            child.stdin.close()
            assert watch.wait_until_all_gone(30)
        assert len(support.open_descriptors()) == len(before) - 1  # The child's standard input.
    with identity.Watch([alive]) as watch:
        assert watch.any_gone()


@pytest.mark.parametrize(
    ("coordinator", "ip"),
    [
        ("10.0.0.1:1234", "10.0.0.1:1234"),
        ("[fd00::1]:1234", "[fd00::1]:1234"),
        ("no-such-host.invalid:1", ""),
        ("10.0.0.1", ""),
        (None, ""),
    ],
)
def test_the_coordinators_ip(coordinator, ip):
    assert Membership("alone", coordinator=coordinator).coordinator_ip() == ip
