"""Jobs on two hosts, which are network namespaces, with a network that is bad, or breaks."""

import os
import re
import signal
import sys

import faults
import netns_wire
import pytest
import support

pytestmark = pytest.mark.timeout(120)


def raised(job, process):
    job.wait_for('"raised"')
    return faults.only(job.output(), process, "raised")["text"]


def connections(host, pid, peer):
    """(own port, other port) of a process's TCP connections to another host, by kind."""
    lines = host.run("ss", "-tnpH", "state", "established", "dst", peer.ipv4).stdout.splitlines()
    own = [line for line in lines if f"pid={pid}," in line]
    pairs = [tuple(re.findall(r":(\d+)\s", line)) for line in own]
    ports = [port for pair in pairs for port in pair]
    # Those for data are several, to one port.
    data = [pair for pair in pairs if any(ports.count(port) > 1 for port in pair)]
    return {"data": data, "control": [pair for pair in pairs if pair not in data]}


@pytest.mark.parametrize("kind", ["control", "data"])
def test_a_reset_connection_fails_the_job_on_both_hosts(hosts, tmp_path, kind):
    path = faults.script(tmp_path, faults.LOOP)
    lines = support.launchers(hosts, str(path), counts=(1, 1))
    jobs = [faults.start(line) for line in lines]
    for job in jobs:
        job.wait_for('"looping"')
    looping = [faults.only(job.output(), i, "looping") for i, job in enumerate(jobs)]
    found = connections(hosts[0], looping[0]["pid"], hosts[1])
    assert {name: len(pairs) for name, pairs in found.items()} == {"control": 1, "data": 2}
    own, other = found[kind][0]
    hosts[0].run("ss", "-K", "dst", f"{hosts[1].ipv4}:{other}", "sport", "=", own, check=False)
    texts = [raised(job, process) for process, job in enumerate(jobs)]
    for job in jobs:
        result = job.finish(60)
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
    for text, process in zip(texts, (1, 0), strict=True):
        if kind == "control":
            other = faults.only(jobs[process].output(), process, "looping")
            assert text.startswith(f"UNAVAILABLE: rank {other['rank']} (process {process}, pid")
            assert "died, or the connection to it was reset, while rank" in text
        else:  # Both say the same: only one of them may have noticed before it was told.
            assert re.match(r"UNAVAILABLE: process \d, pid \d+ on host[ab] is unreachable: ", text)
            assert "the connection to peer" in text
        assert faults.line(path, "psum") in text


def test_a_host_that_dies_silently_is_named(lab, tmp_path):
    """The processes were described to initialize(): there is no launcher that would notice."""
    hosts = [lab.host("hosta"), lab.host("hostb")]
    path = faults.script(tmp_path, faults.LOOP)
    where = f"{hosts[0].ipv4}:{support.new_port()}"
    jobs = []
    for process, host in enumerate(hosts):
        argv = host.command(sys.executable, "-P", str(path), where, "2", str(process))
        jobs.append(faults.start(argv, unreachable_after=2))
    for job in jobs:
        job.wait_for('"looping"')
    hosts[1].link(up=False)
    hosts[1].close()
    jobs[0].wait_for('"raised"')
    result = jobs[0].finish(30)
    text = faults.only(result.stdout, None, "raised")["text"]
    assert text.startswith("UNAVAILABLE: "), text
    assert "on hostb) is unreachable: no answer for 2 s, while rank 0 (process 0) was in" in text
    assert result.returncode == 0, result.explain()
    assert not result.leftovers, result.explain()
    assert jobs[1].finish(30).returncode == -signal.SIGKILL


BAD_NETWORK = """
    import time
    import jax, jaxfabric, worker
    import numpy as np
    from jaxfabric import lax

    jaxfabric.initialize()
    n = jax.device_count()
    rank = jax.process_index()
    seconds = 0.0
    for count in (1, 1000, 150_000):
        x = worker.blocks(n, count, dtype=np.int32)
        def step(x):
            return [
                lax.psum(x, "x"),
                lax.all_gather(x, "x", tiled=True),
                lax.all_to_all(x, "x", 0, 0, tiled=True),
                lax.ppermute(x, "x", [(r, (r + 1) % n) for r in range(n)]),
            ]
        run = worker.spmd(step)
        jax.block_until_ready(run(x))  # compiled, and connected
        began = time.monotonic()
        ys = jax.block_until_ready(run(x))
        seconds += time.monotonic() - began
        total, gathered, exchanged, passed = (worker.local(y)[0] for y in ys)
        everyone = np.arange(1, n + 1)
        assert (total == everyone.sum()).all() and total.shape == (n, count)
        assert (gathered == everyone.repeat(n)[:, None]).all()
        assert (exchanged == everyone[:, None]).all()
        assert (passed == (rank - 1) % n + 1).all()
    worker.say("right", seconds=seconds)
"""


def run_slowly(hosts, tmp_path):
    """The seconds of three launches that were compiled before, on each process."""
    path = faults.script(tmp_path, BAD_NETWORK)
    jobs = [faults.start(line) for line in support.launchers(hosts, str(path), counts=(1, 1))]
    results = [job.finish(80) for job in jobs]
    for result in results:
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
    return [faults.only(r.stdout, i, "right")["seconds"] for i, r in enumerate(results)]


def test_lost_and_late_packets_cost_time_only(hosts, tmp_path):
    """1 % loss, and 20 ms jitter around a delay of 20 ms, in both directions."""
    with netns_wire.Wire(*hosts) as wire:
        wire.tell("loss 0.01")
        wire.tell("delay 0.01 0.02")
        seconds = run_slowly(hosts, tmp_path)
        counts = wire.counts()
    faults.measured("1 % loss, 20 ms jitter", slowest=max(seconds))
    assert counts["dropped"] > counts["carried"] / 200 > 1
    # Three launches, one after the other, of at least one way of 10 ms each; without the wire all
    # take a few.
    assert min(seconds) > 0.03


def test_a_slow_network_costs_time_only(hosts, tmp_path):
    for host in hosts:
        host.shape(20)
    try:
        seconds = run_slowly(hosts, tmp_path)
    finally:
        for host in hosts:
            host.shape(None)
    faults.measured("20 Mbit/s", slowest=max(seconds))
    # Two of the collectives send all of a rank's block of 1.2 MB, less what fits into queues.
    assert min(seconds) > 2 * 1.2e6 * 8 / 20e6 / 2


# Programs of one name: the first call of the one is where that of the other is.
AHEAD = """
    import jax, jaxfabric, worker
    from jaxfabric import lax

    jaxfabric.initialize()
    one = worker.spmd(lambda x: lax.ppermute(x, "x", [(0, 1)]))
    other = worker.spmd(lambda x: lax.psum(x, "x"))
    x, y = worker.blocks(1 << 18), worker.blocks(3)
    passed, total = one(x), other(y)
    assert (worker.local(total)[0] == 3).all()
    assert (worker.local(passed)[0] == jax.process_index()).all()
    assert jaxfabric.status().failure is None
    worker.say("right")
"""


def test_a_rank_whose_data_are_on_their_way_is_not_elsewhere(hosts, tmp_path):
    """Process 0 is done with the first call, and waits in the next one, where process 1 is not."""
    path = faults.script(tmp_path, AHEAD)
    for host in hosts:
        host.shape(8)
    try:
        lines = support.launchers(hosts, str(path), counts=(1, 1))
        jobs = [faults.start(line, mismatch_after=0.05) for line in lines]
        results = [job.finish(80) for job in jobs]
    finally:
        for host in hosts:
            host.shape(None)
    for process, result in enumerate(results):
        assert result.returncode == 0, result.explain()
        faults.only(result.stdout, process, "right")


# Stops where what its connections have sent can be looked at, until a pipe is closed.
LARGE = """
    import sys
    import jax, jaxfabric, worker
    import numpy as np

    def pause(what):
        worker.say(what)
        open(sys.argv[1] + str(jax.process_index())).read()

    jaxfabric.initialize()
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    x = worker.blocks(1 << 22)
    psum(x).block_until_ready()
    pause("connected")
    assert (worker.local(psum(x))[0] == 3).all()
    pause("sent")
"""
SIZE = 4 << 22


def sent(host, pid, peer):
    """Bytes that each of a process's TCP connections to another host has sent so far, by ports."""
    lines = host.run("ss", "-tinpHO", "state", "established", "dst", peer.ipv4).stdout.splitlines()
    own = [line for line in lines if f"pid={pid}," in line]
    ports = [tuple(re.findall(r":(\d+)\s", line)[:2]) for line in own]
    return {
        port: int(re.search(r"bytes_sent:(\d+)", line)[1])
        for port, line in zip(ports, own, strict=True)
    }


@pytest.mark.parametrize("tcp_sockets", [1, 2, 4])
def test_a_large_message_takes_all_connections(hosts, tmp_path, tcp_sockets):
    for process in range(2):
        os.mkfifo(tmp_path / f"pipe{process}")
    path = faults.script(tmp_path, LARGE)
    lines = support.launchers(hosts, str(path), str(tmp_path / "pipe"), counts=(1, 1))
    jobs = [faults.start(line, tcp_sockets=tcp_sockets) for line in lines]
    counts = {}
    for event in ("connected", "sent"):
        for job in jobs:
            job.wait_for(f'"{event}"')
        pids = [faults.only(job.output(), i, event)["pid"] for i, job in enumerate(jobs)]
        counts[event] = [sent(hosts[i], pids[i], hosts[1 - i]) for i in range(2)]
        for process in range(2):
            (tmp_path / f"pipe{process}").write_text("")
    for job in jobs:
        result = job.finish(60)
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
    # Those for control messages are quiet.
    for before, after in zip(counts["connected"], counts["sent"], strict=True):
        assert before.keys() == after.keys(), counts
        grown = sorted(after[port] - before[port] for port in after)
        busy = [count for count in grown if count > 1 << 20]
        assert len(busy) == tcp_sockets, counts
        # One half for the other to sum up, and the sum of the other half.
        assert SIZE <= sum(busy) < 1.1 * SIZE, counts
        assert min(busy) > 0.8 * SIZE / tcp_sockets, counts
