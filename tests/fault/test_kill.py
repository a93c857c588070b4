"""A process killed in the middle of a collective: the others say whose, and leave by themselves."""

import signal
import time

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(90)

LOOP = """
    import sys
    import jax, jaxfabric, worker

    if sys.argv[1] == "jax.distributed":
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 3, int(sys.argv[3]))
        jax.devices()
        snapshot = worker.Snapshot()
        jaxfabric.initialize()
    else:
        snapshot = worker.start_twice()
    n = jax.device_count()

    def step(x):
        def body(_, y):
            return jaxfabric.lax.psum(y, "x") / n  # psum
        return jax.lax.fori_loop(0, 20, body, x)

    step = worker.spmd(step)
    x = worker.blocks(1 << 20)
    try:
        for i in range(1 << 20):
            x = step(x).block_until_ready()
            if i == 3:
                worker.say("looping")
    except Exception as error:
        worker.say("raised", type=type(error).__name__, text=str(error))
        if sys.argv[1] != "no shutdown":
            snapshot.check()
        raise
"""


def check_survivor(result, path, said_by, victim, killed):
    """Returns the seconds from the kill to the exception."""
    raised = faults.only(result.stdout, said_by, "raised")
    assert raised["type"] == "JaxRuntimeError", result.explain()
    assert raised["text"] == (
        f"UNAVAILABLE: {faults.name_of(victim)} died, while {faults.rank_of(raised)} was in "
        f"psum float32[{1 << 20}] at {faults.line(path, 'psum')}"
    ), result.explain()
    if faults.events(result.stdout, said_by, "left"):
        faults.assert_clean(result, said_by)
    assert not result.leftovers, result.explain()
    assert raised["time"] - killed < 2, result.explain()
    return raised["time"] - killed


@pytest.mark.parametrize(("n", "victim"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_under_the_launcher_any_process_may_die(tmp_path, n, victim):
    path = faults.script(tmp_path, LOOP)
    job = faults.launch(path, n, "shutdown" if n == 2 else "no shutdown")
    job.wait_for('"looping"', count=n)
    dying = faults.only(job.output(), victim, "looping")
    killed = faults.kill(dying["pid"])
    result = job.finish(30)
    assert result.returncode == 137, result.explain()
    survivors = set(range(n)) - {victim}
    raised = [check_survivor(result, path, rank, dying, killed) for rank in survivors]
    assert len(faults.events(result.stdout, min(survivors), "left")) == (n == 2)
    summary = faults.summary(result)
    assert summary["first_failure"] == victim
    ends = [summary["processes"][rank] for rank in survivors]
    exits = [end["seconds"] - summary["processes"][victim]["seconds"] for end in ends]
    for end, seconds in zip(ends, exits, strict=True):
        assert (end["exit_code"], end["signal"], end["ended_by_launcher"]) == (1, None, False)
        assert seconds < 5, result.explain()
    before, _, last_lines = result.stderr.partition("Its last lines:")
    assert f"process {victim} failed first: it was killed by SIGKILL" in before
    assert '"looping"' in last_lines, result.explain()
    faults.measured(f"n={n} victim={victim}", raised=max(raised), exited=max(exits))


def test_without_the_launcher_a_process_other_than_zero_may_die(tmp_path):
    path = faults.script(tmp_path, LOOP)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
    jobs = [faults.launch_alone(path, "jax.distributed", port, rank) for rank in range(3)]
    for job in jobs:
        job.wait_for('"looping"')
    dying = faults.only(jobs[2].output(), None, "looping")
    killed = faults.kill(dying["pid"])
    survivors = [job.finish(30) for job in jobs[:2]]
    exited = time.monotonic() - killed
    assert jobs[2].finish(30).returncode == -signal.SIGKILL
    raised = [check_survivor(result, path, None, dying, killed) for result in survivors]
    for result in survivors:
        assert result.returncode == 1, result.explain()
    assert exited < 5
    faults.measured("jax.distributed victim=2", raised=max(raised), exited=exited)
