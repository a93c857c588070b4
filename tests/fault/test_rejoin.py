"""examples/checkpointed.py goes on after a death, and ends as if nobody had died."""

import os
import re
import signal
import subprocess
import sys

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(180)

EXAMPLE = support.ROOT / "examples" / "checkpointed.py"
STEPS, EVERY, PROCESSES = 500, 25, 3


def command(folder):
    return [str(EXAMPLE), str(folder), f"--steps={STEPS}", f"--every={EVERY}"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    result = support.run_job(*once(tmp_path_factory.mktemp("undisturbed")))
    assert result.returncode == 0, result.explain()
    return result.lines_of(0)


def once(folder):
    script, *arguments = command(folder)
    return (script, PROCESSES, *arguments)


def check_steps(lines, undisturbed, runs=2):
    """No step up to a checkpoint is done twice, and the weights have the same bits."""
    assert sum(line.startswith("begins with step") for line in lines) == runs, lines
    begins = int(lines[-1 - [*reversed(lines)].index(last(lines, "begins"))].split()[-1])
    assert begins in range(EVERY, STEPS, EVERY)
    steps = [line for line in lines if line.startswith("step ")]
    assert steps == [line for line in undisturbed if line.startswith("step ")]
    assert last(lines, "done") == last(undisturbed, "done")


def last(lines, begin):
    return [line for line in lines if line.startswith(begin)][-1]


def test_under_the_launcher_all_start_again(tmp_path, undisturbed):
    options = ("--max-restarts", "1", "--grace", "0")
    job = faults.start(support.launcher(PROCESSES, *command(tmp_path), options=options))
    job.wait_for(f"step {2 * EVERY}:")
    victim = next(pid for pid, text in job.members().items() if is_process(pid, text, "1"))
    faults.kill(victim)
    result = job.finish(90)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    check_steps(result.lines_of(0), undisturbed)


def is_process(pid, text, number):
    if str(EXAMPLE) not in text or " run " in text:
        return False
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"JAXFABRIC_PROCESS_ID={number}\0".encode() in file.read()


def start_each(folder, port, numbers=(0, 1, 2), hosts=None):
    """Here, or the last one on the second of two hosts."""
    ip = hosts[0].ipv4 if hosts else "127.0.0.1"
    more = ("--coordinator", f"{ip}:{port}", "--processes", str(PROCESSES), "--process")
    argv = [sys.executable, "-P", *command(folder), *more]
    lines = {number: [*argv, str(number)] for number in numbers}
    if hosts:
        lines = {n: hosts[n == PROCESSES - 1].command(*line) for n, line in lines.items()}
    return {number: faults.start(line) for number, line in lines.items()}


def start_all(folder):
    """All processes, at work, and the port of their coordinator."""
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
    jobs = start_each(folder, port)
    jobs[0].wait_for(f"step {2 * EVERY}:")
    return jobs, port


def finish_each(jobs):
    results = {number: job.finish(90) for number, job in jobs.items()}
    for result in results.values():
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
    return results


def test_survivors_go_on_with_a_process_that_starts_again(tmp_path, undisturbed):
    jobs, port = start_all(tmp_path)
    faults.kill(jobs[2].process.pid)
    assert jobs[2].finish(30).returncode == -signal.SIGKILL
    for survivor in (0, 1):
        jobs[survivor].wait_for("goes on after: ")
    pid = jobs[2].process.pid
    jobs |= start_each(tmp_path, port, numbers=[2])
    results = finish_each(jobs)
    check_steps(results[0].stdout.splitlines(), undisturbed)
    for survivor in (0, 1):
        assert f"(process 2, pid {pid} on {faults.HOST}) died" in results[survivor].stdout


def test_survivors_on_another_host_go_on_with_a_process_that_starts_again(tmp_path, hosts):
    """Over TCP: what was sent to the one that died is of an earlier start."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = finish_each(start_each(tmp_path / "whole", 46001, hosts=hosts))
    jobs = start_each(tmp_path / "cut", 46002, hosts=hosts)
    jobs[0].wait_for(f"step {2 * EVERY}:")
    faults.kill(jobs[2].process.pid)
    assert jobs[2].finish(30).returncode == -signal.SIGKILL
    for survivor in (0, 1):
        jobs[survivor].wait_for("goes on after: ")
    jobs |= start_each(tmp_path / "cut", 46002, numbers=[2], hosts=hosts)
    results = finish_each(jobs)
    check_steps(results[0].stdout.splitlines(), whole[0].stdout.splitlines())
    for survivor in (0, 1):
        assert re.search(r"\(process 2, pid \d+ on hostb\) died", results[survivor].stdout)


def test_after_the_death_of_process_0_all_are_started_again(tmp_path, undisturbed):
    jobs, port = start_all(tmp_path)
    faults.kill(jobs[0].process.pid)
    first = jobs[0].finish(30)
    for number in (1, 2):
        assert jobs[number].finish(30).returncode == -signal.SIGABRT
    results = finish_each(start_each(tmp_path, port))
    check_steps([*first.stdout.splitlines(), *results[0].stdout.splitlines()], undisturbed)


LEAVES = """
    import sys, time
    import jax, jaxfabric, worker

    jax.config.update("jax_enable_recoverability", True)
    jaxfabric.initialize(sys.argv[1], 2, int(sys.argv[2]))
    psum = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    assert (worker.local(psum(worker.blocks(1)))[0] == 3).all()
    worker.say("leaves")
    if jax.process_index() == 1:
        open(sys.argv[3]).read()  # Until process 0 is about to end, too.
"""


def test_recoverable_processes_leave_together(tmp_path):
    """JAX's own shutdown does not wait for them, and process 0 hosts its service."""
    path = faults.script(tmp_path, LEAVES)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
    jobs = [faults.launch_alone(path, f"127.0.0.1:{port}", n, gate) for n in range(2)]
    for job in jobs:
        job.wait_for('"leaves"')
    with pytest.raises(subprocess.TimeoutExpired):
        jobs[0].process.wait(1.5)  # It must not end yet.
    gate.write_text("go on")
    for job in jobs:
        result = job.finish(30)
        assert result.returncode == 0, result.explain()
        assert not result.leftovers


FEWER = """
    import sys
    import jax, jaxfabric, worker
    import jax.extend.backend

    before, after, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_enable_recoverability", True)
    jaxfabric.initialize(before, 3, process)

    def psum():
        return worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))

    step, x = psum(), worker.blocks(100)
    with worker.failure():
        for i in range(1 << 20):
            step(x).block_until_ready()
            if i == 3:
                worker.say("looping")
    jaxfabric.shutdown()
    del step, x
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    jaxfabric.initialize(after, 2, process)
    assert jax.device_count() == 2
    assert (worker.local(psum()(worker.blocks(100)))[0] == 3).all()
    worker.say("went on")
"""


def test_survivors_go_on_without_the_one_that_died(tmp_path):
    path = faults.script(tmp_path, FEWER)
    with (
        support.socket_on_free_port() as (first, before),
        support.socket_on_free_port() as (
            second,
            after,
        ),
    ):
        first.close()
        second.close()
    addresses = [f"127.0.0.1:{port}" for port in (before, after)]
    jobs = [faults.launch_alone(path, *addresses, n) for n in range(3)]
    for job in jobs:
        job.wait_for('"looping"')
    faults.kill(jobs[2].process.pid)
    assert jobs[2].finish(30).returncode == -signal.SIGKILL
    for job in jobs[:2]:
        result = job.finish(60)
        assert result.returncode == 0, result.explain()
        assert not result.leftovers
        assert "(process 2, pid" in faults.only(result.stdout, None, "raised")["text"]
        faults.only(result.stdout, None, "went on")
