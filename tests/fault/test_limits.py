"""Machines that give less than usual: descriptors, ports, system calls; and two jobs at once."""

import os
import platform
import subprocess
import sys
import textwrap

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(120)

# Process 1 may open some more files than it has open at the start: `few`.
FEW_FILES = """
    import os, resource, sys, time
    import jax, jaxfabric, worker

    if os.environ["JAXFABRIC_PROCESS_ID"] == "1":
        files = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        print("files", files)
    began = time.monotonic()
    try:
        jaxfabric.initialize()
    except Exception as error:
        print("after", time.monotonic() - began)
        print(type(error).__name__, error, flush=True)
        raise
"""


def test_too_few_descriptors_are_told_at_the_start(tmp_path):
    path = faults.script(tmp_path, FEW_FILES)
    result = faults.launch(path, 2, 24).finish(40)
    assert result.returncode == 1, result.explain()
    assert not result.leftovers
    files, seconds, text = result.lines_of(1)
    limit = files.removeprefix("files ")
    assert text.startswith(f"RuntimeError this process may have {limit} files open and has ")
    assert "a job of 2 processes may need 19 more: raise the limit (ulimit -n " in text
    seconds, other = result.lines_of(0)
    assert other.startswith("RendezvousError process 1 on "), result.explain()
    assert f"cannot take part: this process may have {limit} files open" in other
    # Nobody has waited for a deadline.
    assert float(seconds.removeprefix("after ")) < 15, result.explain()
    assert not any(p["ended_by_launcher"] for p in faults.summary(result)["processes"])


@pytest.mark.parametrize("few", [0, 3, 8])
def test_too_few_descriptors_to_join_are_told_too(tmp_path, few):
    """The other process does not learn it from this one: the launcher ends the job."""
    path = str(faults.script(tmp_path, FEW_FILES))
    argv = support.launcher(2, path, str(few), options=("--json", "--grace", "0"))
    result = faults.start(argv).finish(40)
    assert result.returncode == 1, result.explain()
    assert not result.leftovers
    files, _, text = result.lines_of(1)
    limit = files.removeprefix("files ")
    assert text.startswith(f"RuntimeError this process may have {limit} files open and has ")
    assert "to join a job it may need 16 more: raise the limit (ulimit -n " in text
    assert faults.summary(result)["first_failure"] == 1, result.explain()


RAISES = """
    import os, resource
    import jax, jaxfabric, worker

    files = len(os.listdir("/proc/self/fd")) + 24
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    jaxfabric.initialize()
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    assert (worker.local(psum(worker.blocks(3)))[0] == 3).all()
    print("more", resource.getrlimit(resource.RLIMIT_NOFILE)[0] - files)
    print("most", resource.getrlimit(resource.RLIMIT_NOFILE)[1] - most, flush=True)
"""


def test_a_soft_limit_is_raised(tmp_path):
    result = faults.launch(faults.script(tmp_path, RAISES), 2).finish(60)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    for process in range(2):
        assert result.lines_of(process) == ["more 19", "most 0"], result.explain()


STARTS = """
    import time
    import jax, jaxfabric, worker

    began = time.monotonic()
    with worker.failure():
        jaxfabric.initialize()
        psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
        assert (worker.local(psum(worker.blocks(3)))[0] == 3).all()
    worker.say("after", seconds=time.monotonic() - began)
"""


def start_on(hosts, path, **settings):
    lines = support.launchers(hosts, str(path), counts=(1, 1))
    return [faults.start(line, **settings) for line in lines]


OCCUPIES = """
    import socket, sys
    other = socket.create_server((sys.argv[1], int(sys.argv[2])))
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("enough", [True, False])
def test_a_port_range_without_two_free_ports_is_told_at_the_start(hosts, tmp_path, enough):
    """On one host of two: both learn it at once."""
    path = faults.script(tmp_path, STARTS)
    other = [sys.executable, "-c", textwrap.dedent(OCCUPIES), hosts[1].ipv4, "20001"]
    with subprocess.Popen(
        hosts[1].command(*other), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as occupying:
        assert occupying.stdout.readline() == "there\n"
        ports = "20000-20002" if enough else "20000-20001"
        jobs = start_on(hosts, path, net_port_range=ports, connect_timeout=30)
        results = [job.finish(60) for job in jobs]
        occupying.stdin.close()
    for process, result in enumerate(results):
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
        if enough:
            faults.only(result.stdout, process, "finished")
            continue
        text = faults.only(result.stdout, process, "raised")["text"]
        assert text == (
            "process 1 on hostb cannot be reached from other hosts: RESOURCE_EXHAUSTED: port range "
            f"exhausted: none of ports 20000-20001 is free on {hosts[1].ipv4}; widen "
            "net_port_range (JAXFABRIC_NET_PORT_RANGE): every process needs two"
        )
        assert faults.only(result.stdout, process, "after")["seconds"] < 15, result.explain()


def test_a_congestion_control_that_a_kernel_does_not_have_is_told_at_the_start(hosts, tmp_path):
    """Of process 1 alone: a setting may differ."""
    path = faults.script(tmp_path, STARTS)
    lines = support.launchers(hosts, str(path), counts=(1, 1))
    jobs = [
        faults.start(line, **({"tcp_congestion_control": "no_such_one"} if host else {}))
        for host, line in enumerate(lines)
    ]
    for process, result in enumerate([job.finish(60) for job in jobs]):
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
        text = faults.only(result.stdout, process, "raised")["text"]
        assert "process 1 on hostb cannot be reached from other hosts: " in text
        assert 'tcp_congestion_control "no_such_one" (allowed to every process are reno' in text
        assert faults.only(result.stdout, process, "after")["seconds"] < 15, result.explain()


# The kernel refuses process_vm_readv, as the profiles of some containers do. Installed before
# threads are started, and for good. Elsewhere the number of the system call is another one.
FORBIDS = """
    import ctypes, json, os, struct, sys

    def forbid(number, error):
        load, jump, ret = 0x20, 0x15, 0x06
        code = [(load, 0, 0, 0), (jump, 0, 1, number), (ret, 0, 0, 0x50000 | error),
                (ret, 0, 0, 0x7FFF0000)]
        filters = b"".join(struct.pack("HBBI", op, yes, no, value) for op, yes, no, value in code)
        program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(
            keep := ctypes.create_string_buffer(filters)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP

    forbidden = os.environ["JAXFABRIC_PROCESS_ID"] in sys.argv[1:]
    if forbidden:
        forbid(310, 1)
    import jax, jaxfabric, worker
    import numpy as np

    jaxfabric.initialize()
    n = jax.device_count()
    exchange = worker.spmd(lambda x: jaxfabric.lax.all_to_all(x, "x", 0, 0, tiled=True))
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    for count in (10, 1 << 18):
        x = worker.blocks(n, count)
        want = np.arange(1, n + 1)
        assert (worker.local(exchange(x))[0] == want[:, None]).all()
        assert (worker.local(psum(x))[0] == want.sum()).all()
    status = jaxfabric.status()
    worker.say("right", reads=status.counters["process_reads"], problem=status.reads_problem)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the system calls of x86-64")
@pytest.mark.parametrize("forbidden", [(), (1,), (0, 1)])
def test_without_process_vm_readv(tmp_path, forbidden):
    path = faults.script(tmp_path, FORBIDS)
    result = faults.launch(path, 2, *forbidden).finish(60)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    for rank in range(2):
        right = faults.only(result.stdout, rank, "right")
        if forbidden:
            assert right["reads"] == 0
            assert "process_vm_readv does not work" in right["problem"], right
            assert rank not in forbidden or "not permitted" in right["problem"], right
        else:  # Where there is a core for each.
            assert (right["reads"] == 1) == (right["problem"] == ""), right
            assert right["problem"] in ("", "2 ranks share 1 core(s)"), right


def test_two_jobs_on_the_same_two_hosts(hosts, tmp_path):
    """And on one host: both have two processes on each."""
    path = faults.script(tmp_path, TOGETHER)
    arguments = [str(tmp_path / name) for name in ("first", "second")]
    for name in arguments:
        os.mkfifo(name)
    jobs = []
    for own, other in (arguments, arguments[::-1]):
        lines = support.launchers(hosts, str(path), own, other, counts=(2, 2))
        jobs.append([faults.start(line) for line in lines])
    for number, job in enumerate(jobs):
        for node, launcher in enumerate(job):
            result = launcher.finish(90)
            assert result.returncode == 0, result.explain()
            assert not result.leftovers, result.explain()
            for process in (2 * node, 2 * node + 1):
                assert faults.only(result.stdout, process, "right")["sum"] == 10 * (number + 1)


# Each job begins its collectives when the other one is ready, too.
TOGETHER = """
    import os, sys
    import jax, jaxfabric, worker
    import numpy as np

    jaxfabric.initialize()
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    factor = 1 + (os.path.basename(sys.argv[1]) == "second")
    x = worker.blocks(1 << 14, dtype=np.int32) * factor
    psum(x).block_until_ready()
    if jax.process_index() == 0:
        own, other = (os.open(name, os.O_RDWR) for name in sys.argv[1:])
        os.write(other, b"x")
        os.read(own, 1)
    for _ in range(30):
        total = worker.local(psum(x))[0]
        assert (total == 10 * factor).all()
    worker.say("right", sum=int(total[0]))
"""
