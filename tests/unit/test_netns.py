"""The hosts of netns.py and the relay, by what programs on them see."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time

import netns
import netns_wire
import pytest
from relay import BACKWARD, FORWARD, Relay
from support import ROOT

# Listens on a host and says what comes; the other one says what it is told to.
_SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0), family=socket.getaddrinfo(sys.argv[1], 0)[0][0])
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
while data := peer.recv(1 << 16):
    print(data[:5].decode(), flush=True)
"""
_CALL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).send(b"hello")
except OSError as error:
    print(type(error).__name__)
"""


def _serve(host, address):
    server = subprocess.Popen(
        host.command(sys.executable, "-c", _SERVE, address), stdout=subprocess.PIPE, text=True
    )
    return server, server.stdout.readline().strip()


def test_hosts_reach_each_other_by_both_protocols_and_by_name(hosts):
    a, b = hosts
    for address in (b.ipv4, b.ipv6, b.name):
        server, port = _serve(b, address)
        a.run(sys.executable, "-c", _CALL, address, port, "20")
        assert server.communicate(timeout=20)[0] == "hello\n"


def test_a_host_has_its_own_name_processes_and_memory(hosts):
    script = """
        import os, shutil, socket
        shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
        print(socket.gethostname(), shm, sorted(os.listdir("/sys/class/net")), os.getpid() < 9)
        print(os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"))
        open("/dev/null", "w").write("x")
    """
    outputs = [h.run(sys.executable, "-c", textwrap.dedent(script)).stdout for h in hosts]
    (first, second), (first_ids, second_ids) = zip(*(o.splitlines() for o in outputs), strict=True)
    assert first == f"hosta {64 << 20} ['eth0', 'lo'] True"
    assert second == "hostb None ['eth0', 'lo'] True"
    ours = f"{os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')}"
    assert len({first_ids, second_ids, ours}) == 3


def test_a_host_can_be_in_several_networks():
    if reason := netns.unavailable():
        pytest.skip(reason)
    with netns.Lab(("eth0", "docker0")) as lab:
        both, one = lab.host("both"), lab.host("one", networks=("docker0",))
        names = both.run("ls", "/sys/class/net").stdout.split()
        assert names == ["docker0", "eth0", "lo"]
        assert one.addresses.keys() == {"docker0"}
        server, port = _serve(both, both.addresses["docker0"][0])
        one.run(sys.executable, "-c", _CALL, both.addresses["docker0"][0], port, "20")
        assert server.communicate(timeout=20)[0] == "hello\n"


def test_a_cable_is_pulled_and_plugged_in(hosts):
    a, b = hosts
    server, port = _serve(b, b.ipv4)
    b.link(up=False)
    cut = a.run(sys.executable, "-c", _CALL, b.ipv4, port, "0.2")
    assert cut.stdout.strip() in ("TimeoutError", "OSError")
    b.link(up=True)
    a.run(sys.executable, "-c", _CALL, b.ipv4, port, "20")
    assert server.communicate(timeout=20)[0] == "hello\n"


def test_a_network_is_shaped(hosts):
    a, b = hosts
    script = """
        import socket, sys, time
        peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        start = time.monotonic()
        peer.sendall(b"x" * 2_000_000)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        print(time.monotonic() - start)
    """
    a.shape(40)
    server, port = _serve(b, b.ipv4)
    seconds = float(a.run(sys.executable, "-c", textwrap.dedent(script), b.ipv4, port).stdout)
    server.communicate(timeout=20)
    assert seconds > 0.3  # 0.4 s at 40 Mbit/s, less what fits into queues.
    a.shape(None)


def test_a_wire_loses_packets_and_is_late_with_others(hosts):
    a, b = hosts
    serves = """
        import socket, time
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("", 0))
        print(server.getsockname()[1], flush=True)
        while True:
            data, peer = server.recvfrom(100)
            server.sendto(data, peer)
    """
    asks = """
        import socket, sys, time
        own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        own.settimeout(0.3)
        answers, shortest = 0, 9.0
        for _ in range(int(sys.argv[3])):
            start = time.monotonic()
            own.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
            try:
                own.recv(100)
            except TimeoutError:
                continue
            answers += 1
            shortest = min(shortest, time.monotonic() - start)
        print(answers, shortest)
    """
    argv = b.command(sys.executable, "-c", textwrap.dedent(serves))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip()

        def ask(count):
            said = a.run(sys.executable, "-c", textwrap.dedent(asks), b.ipv4, port, str(count))
            return [float(number) for number in said.stdout.split()]

        with netns_wire.Wire(a, b) as wire:
            assert ask(20)[0] == 20
            assert wire.counts()["dropped"] == 0
            wire.tell("delay 0.05 0.01")
            assert ask(3)[1] > 0.1
            wire.tell("delay 0 0")
            wire.tell("loss 0.5")
            assert ask(12)[0] < 12
            assert 0 < wire.counts()["dropped"] < wire.counts()["carried"]
            wire.tell("loss 0")
            wire.tell("cut")
            assert ask(2)[0] == 0
            wire.tell("restore")
            assert ask(2)[0] == 2
        assert ask(2)[0] == 2  # By the switch again.
        server.terminate()


def test_a_program_ends_as_it_does_without_a_host(hosts):
    host, _ = hosts
    for script, number, status in (
        ("import sys; sys.exit(3)", None, 3),
        ("import os; os.abort()", None, -signal.SIGABRT),
        ("import signal; signal.pause()", signal.SIGTERM, -signal.SIGTERM),
        ("import signal; signal.pause()", signal.SIGINT, 7),
        ("import signal; signal.pause()", signal.SIGKILL, -signal.SIGKILL),
    ):
        script = f"import signal; signal.signal(2, lambda *_: exit(7)); print(flush=True); {script}"
        process = subprocess.Popen(
            host.command(sys.executable, "-c", script),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        process.stdout.readline()
        if number is not None:
            process.send_signal(number)
        assert process.wait(20) == status, script
        process.stdout.close()


def test_nothing_is_left_when_the_test_process_is_killed():
    if reason := netns.unavailable():
        pytest.skip(reason)
    script = f"""
        import os, subprocess, sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from netns import Lab
        lab = Lab()
        host = lab.host("hosta")
        program = subprocess.Popen(host.command("sleep", "1000"))
        print(lab.switch.pid, host.pid, program.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -9, ended.stderr
    for pid in map(int, ended.stdout.split()):
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as handle:
            assert select.select([handle], [], [], 20)[0], f"process {pid} is left"


@pytest.fixture
def relayed():
    """A relay, and both ends of a connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as server, Relay(server.getsockname()) as relay:
        near = socket.create_connection(relay.address)
        far, _ = server.accept()
        with near, far:
            for end in (near, far):
                end.settimeout(20)
            yield relay, near, far


def test_a_relay_carries_both_ways_and_ends(relayed):
    relay, near, far = relayed
    near.sendall(b"there")
    assert far.recv(10) == b"there"
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    near.shutdown(socket.SHUT_WR)
    assert far.recv(10) == b""
    far.close()
    assert near.recv(10) == b""
    assert (relay.connections, relay.carried) == (1, {FORWARD: 5, BACKWARD: 4})


def test_a_relay_is_late_and_slow_but_keeps_the_order(relayed):
    relay, near, far = relayed
    relay.delay(0.05, jitter=0.02)
    relay.rate(1e6)
    data = bytes(range(256)) * 400
    start = time.monotonic()
    near.sendall(data)
    got = b""
    while len(got) < len(data):
        got += far.recv(1 << 16)
    assert got == data
    assert time.monotonic() - start > 0.14


def test_a_relay_stalls_one_direction(relayed):
    relay, near, far = relayed
    relay.stall(FORWARD)
    near.sendall(b"there")
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(10)
    far.settimeout(20)
    relay.resume()
    assert far.recv(10) == b"there"


def test_a_relay_half_closes_and_refuses(relayed):
    relay, near, far = relayed
    relay.half_close(FORWARD)
    assert far.recv(10) == b""
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    relay.refuse()
    with socket.create_connection(relay.address) as late, pytest.raises(ConnectionResetError):
        late.recv(10)


def test_a_relay_resets(relayed):
    relay, *ends = relayed
    relay.reset()
    for end in ends:
        with pytest.raises(ConnectionResetError):
            end.recv(10)


def test_a_relay_runs_on_a_host(hosts):
    a, b = hosts
    server, port = _serve(b, b.ipv4)
    with subprocess.Popen(
        a.command(sys.executable, str(ROOT / "tests/relay.py"), "127.0.0.1:0", f"{b.ipv4}:{port}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as relay:
        host, _, relay_port = relay.stdout.readline().strip().rpartition(":")
        relay.stdin.write("delay 0.01 0.01\n")
        relay.stdin.flush()
        assert relay.stdout.readline() == "done\n"
        a.run(sys.executable, "-c", _CALL, host, relay_port, "20")
        assert server.communicate(timeout=20)[0] == "hello\n"
        relay.stdin.close()
