"""Hosts with two networks: a job listens, and connects, on the one that it has been given only."""

import os
import re

import faults
import netns
import pytest
import support

pytestmark = pytest.mark.timeout(120)

# Stops where all its sockets listen, and again when all are connected, until a pipe is closed.
PROGRAM = """
    import json, os, sys
    import jax, jaxfabric, worker
    from jaxfabric.bootstrap import rendezvous

    def pause(what):
        print(json.dumps({"event": what, "pid": os.getpid()}), flush=True)
        open(sys.argv[1] + os.environ["JAXFABRIC_PROCESS_ID"]).read()

    def exchange(*arguments, exchange=rendezvous.exchange):
        pause("listening")
        return exchange(*arguments)

    rendezvous.exchange = exchange
    jaxfabric.initialize()
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    assert (worker.local(psum(worker.blocks(3)))[0] == 3).all()
    pause("connected")
"""
# Below those that the kernel gives to connections, one of which could be taken for ours.
PORTS = range(20000, 20010)


@pytest.fixture
def two_networks():
    if reason := netns.unavailable():
        pytest.skip(reason)
    with netns.Lab(networks=("eth0", "eth1")) as lab:
        yield lab.host("hosta"), lab.host("hostb")


def sockets(host, *options):
    """The pids, and both ends as (address, port), of TCP sockets in the host's network."""
    found = []
    for line in host.run("ss", "-tnpH", *options).stdout.splitlines():
        pids = {int(pid) for pid in re.findall(r"pid=(\d+),", line)}
        ends = [text.rpartition(":") for text in re.findall(r"\S+:(?:\d+|\*)(?=\s)", line)[:2]]
        # An IPv4 address of a socket for both families is written as one of IPv6.
        found.append(
            (pids, *((host.strip("[]").removeprefix("::ffff:"), port) for host, _, port in ends))
        )
    return found


@pytest.mark.parametrize("setting", [None, "eth1", "fd77:2::/64"])
@pytest.mark.parametrize("version", [4, 6])
def test_a_job_keeps_to_the_network_it_is_given(two_networks, tmp_path, version, setting):
    hosts = two_networks
    # Without a setting they take the interface that is in the coordinator's subnet.
    at = hosts[0].addresses["eth0" if setting else "eth1"][version == 6]
    number = support.new_port()
    address = f"[{at}]:{number}" if version == 6 else f"{at}:{number}"
    # A name means the first address of the interface.
    wanted_version = {None: version, "eth1": 4}.get(setting, 6)
    chosen = [host.addresses["eth1"][wanted_version == 6] for host in hosts]
    for process in range(2):
        os.mkfifo(tmp_path / f"pipe{process}")
    path = faults.script(tmp_path, PROGRAM)
    pipes = str(tmp_path / "pipe")
    lines = support.launchers(hosts, str(path), pipes, counts=(1, 1), address=address)
    settings = {"net_port_range": f"{PORTS[0]}-{PORTS[-1]}"}
    settings |= {"net_interface": setting} if setting else {}
    jobs = [faults.start(line, **settings) for line in lines]

    def listening(event):
        """The ports of each process; asserts that all else listens where it should."""
        ports = []
        for process, (job, host) in enumerate(zip(jobs, hosts, strict=True)):
            job.wait_for(f'"{event}"')
            pid = faults.only(job.output(), process, event)["pid"]
            found = sockets(host, "-l")
            of_process = [own for pids, own, _ in found if pid in pids]
            ours = [own for own in of_process if int(own[1]) in PORTS]
            assert {where for where, _ in ours} == {chosen[process]}, found
            # Gloo, which XLA brings along, listens at the address that the host's name has.
            assert len(of_process) == len(ours) + 1, found
            # Of node 0: its launcher, and JAX's coordination service. Nothing else is there.
            others = [own for pids, own, _ in found if pid not in pids]
            of_node_0 = [(at, str(number)), (at, str(number + 1))]
            assert sorted(others) == ([] if process else of_node_0), found
            ports.append({port for _, port in ours})
        for process in range(2):
            (tmp_path / f"pipe{process}").write_text("")
        return ports

    # For control messages, until all are connected, and for data.
    assert [len(ports) for ports in listening("listening")] == [2, 2]
    for job in jobs:
        job.wait_for('"connected"')
    established = sockets(hosts[0], "state", "established")
    assert [len(ports) for ports in listening("connected")] == [1, 1]
    # One for control messages, and two for data.
    between = [
        (own[0], peer[0]) for _, own, peer in established if {int(own[1]), int(peer[1])} & {*PORTS}
    ]
    assert between == [(chosen[0], chosen[1])] * 3, established
    for job in jobs:
        result = job.finish(60)
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
