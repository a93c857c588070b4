"""64 ranks, each a process with a fabric of its own, find each other.

Without JAX, whose start in 64 processes would take minutes here.
"""

import json
import subprocess
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(120)

RANKS = 64

# Forks the ranks of one host; passes their addresses on, and the addresses of all to them.
HOST = """
import json, os, sys, time
from jaxfabric import _ext
from jaxfabric.config import Config

total, first, count, coordinator, secret = json.loads(sys.argv[1])

def be(rank, report, roster):
    began = time.monotonic()
    options = Config(network_cost="default").options() | {"coordinator": coordinator}
    fabric = _ext.Fabric(rank, total, [rank], options)
    report.write(json.dumps([fabric.address().hex(), time.monotonic() - began]) + "\\n")
    report.flush()
    addresses = [bytes.fromhex(each) for each in json.loads(roster.readline())]
    began = time.monotonic()
    fabric.connect(addresses, bytes.fromhex(secret), 1)
    report.write(json.dumps([time.monotonic() - began, fabric.counters()]) + "\\n")
    report.flush()
    roster.readline()  # Until all are connected.
    fabric.shutdown()

children = []
for rank in range(first, first + count):
    reports, rosters = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for _, reader, writer in children:
            reader.close()
            writer.close()
        os.close(reports[0])
        os.close(rosters[1])
        try:
            be(rank, open(reports[1], "w"), open(rosters[0]))
        finally:
            sys.stdout.flush()
            os._exit(sys.exc_info()[0] is not None)
    os.close(reports[1])
    os.close(rosters[0])
    children.append((pid, open(reports[0]), open(rosters[1], "w")))

def tell_all(line):
    for _, _, writer in children:
        writer.write(line)
        writer.flush()

for _ in range(2):  # addresses, then times
    print(json.dumps([json.loads(reader.readline()) for _, reader, _ in children]), flush=True)
    tell_all(sys.stdin.readline())
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _, _ in children))
"""


def connect_all(commands):
    """Runs HOST with each of the commands, on as many hosts; (seconds, counters) of every rank."""
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        answers = []
        for _ in range(2):
            said = [line for each in running for line in json.loads(each.stdout.readline())]
            answers.append(said)
            for each in running:
                each.stdin.write(json.dumps([address for address, _ in said]) + "\n")
                each.stdin.flush()
        assert [each.wait(60) for each in running] == [0] * len(running)
    finally:
        for each in running:
            each.kill()
            each.communicate()
    made, connected = answers
    return [
        (making + connecting, counters)
        for (_, making), (connecting, counters) in zip(made, connected, strict=True)
    ]


def command_of(first, count, coordinator):
    arguments = json.dumps([RANKS, first, count, coordinator, "5a" * 32])
    return [sys.executable, "-P", "-c", HOST, arguments]


def test_on_one_host():
    report(connect_all([command_of(0, RANKS, "")]), "one host")


def test_on_four_hosts(lab):
    hosts = [lab.host(f"host{number}") for number in range(4)]
    count = RANKS // len(hosts)
    coordinator = f"{hosts[0].ipv4}:{support.new_port()}"
    commands = [
        host.command(*command_of(number * count, count, coordinator))
        for number, host in enumerate(hosts)
    ]
    report(connect_all(commands), "4 hosts")


def report(ranks, where):
    assert len(ranks) == RANKS
    slowest = max(seconds for seconds, _ in ranks)
    # The figure: shown by pytest -s or -rP. The bound is for machines that have other things to do.
    print(f"{RANKS} ranks, {where}: connected in {slowest:.3f} s")
    assert slowest < 30
    assert sum(c["dropped_messages"] + c["refused_connections"] for _, c in ranks) == 0
