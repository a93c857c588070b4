"""A rank that does not come: stuck, gone or stopped."""

import os
import signal

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(60)

# Rank 1 is elsewhere until rank 0 has failed; then both start anew, and go on together with the
# programs they have.
NEVER = """
    import os, sys
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    gate = sys.argv[1]
    first = jax.process_index() == 0
    x = worker.blocks(64)

    @worker.spmd
    def step(x):
        return jaxfabric.lax.psum(x, "x")  # psum

    @worker.spmd
    def after(x):
        return jaxfabric.lax.all_gather(x, "x", tiled=True)  # all_gather

    for _ in range(3):
        step(x).block_until_ready()
    if not first:
        worker.say("elsewhere")
        open(gate).read()  # Until the other one writes.
        with worker.failure():
            after(x).block_until_ready()
    else:
        worker.say("waits")
        with worker.failure():
            step(x).block_until_ready()
        # The first failure stays.
        with worker.failure():
            after(x).block_until_ready()
        open(gate, "w").write("go on")
    jaxfabric.shutdown()
    jaxfabric.shutdown()
    jaxfabric.initialize()
    assert jaxfabric.status().failure is None
    for _ in range(2):
        assert all((block == 3).all() for block in worker.local(step(x)))
        assert all((block[64:] == 2).all() for block in worker.local(after(x)))
    worker.say("done")
"""


def test_error_after_the_deadline_says_where_the_rank_was_last_seen(tmp_path):
    path = faults.script(tmp_path, NEVER)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    result = faults.launch(path, 2, gate, deadline=2).finish(40)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    waits = faults.only(result.stdout, 0, "waits")
    late = faults.only(result.stdout, 1, "elsewhere")
    raised, again = faults.events(result.stdout, 0, "raised")
    seconds = raised["time"] - waits["time"]
    faults.measured("never arrives, deadline 2", raised=seconds)
    assert 2 <= seconds < 3, result.explain()
    call = f"psum float32[64] at {faults.line(path, 'psum')}"
    for part in (
        "DEADLINE_EXCEEDED: rank 0 (process 0) waited 2",
        f"s in {call} for {faults.name_of(late)}, last seen in {call}, launch 2",
    ):
        assert part in raised["text"], result.explain()
    assert again["time"] - raised["time"] < 1
    assert raised["text"].partition(": ")[2] in again["text"]
    # The late one learns the same when it comes.
    assert raised["text"].partition(": ")[2] in faults.only(result.stdout, 1, "raised")["text"]
    for rank in range(2):
        faults.only(result.stdout, rank, "done")


LEAVES = """
    import sys
    import jax, jaxfabric, worker

    how = sys.argv[1]
    if len(sys.argv) > 2:
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
    jaxfabric.initialize()

    @worker.spmd
    def step(x):
        return jaxfabric.lax.psum(x, "x")  # psum

    x = worker.blocks(1 << 16)
    for _ in range(3):
        step(x).block_until_ready()
    if jax.process_index() == 1:
        worker.say("leaving")
        if how == "raise":
            raise ValueError("unrelated")
        sys.exit(0 if how == "return" else 3)
    try:
        step(x).block_until_ready()
    except Exception as error:
        worker.say("raised", text=str(error))
        raise
"""


def check_left(result, path, leaving, raised):
    seconds = raised["time"] - leaving["time"]
    assert f"{faults.name_of(leaving)} has left" in raised["text"], result.explain()
    call = f"psum float32[{1 << 16}] at {faults.line(path, 'psum')}"
    assert f"{faults.rank_of(raised)} waits for it in {call}" in raised["text"], result.explain()
    assert seconds < 2, result.explain()
    return seconds


@pytest.mark.parametrize(("how", "code"), [("return", 1), ("exit", 3), ("raise", 1)])
def test_a_rank_that_leaves_while_another_waits(tmp_path, how, code):
    path = faults.script(tmp_path, LEAVES)
    result = faults.launch(path, 2, how).finish(40)
    assert result.returncode == code, result.explain()
    assert not result.leftovers
    leaving = faults.only(result.stdout, 1, "leaving")
    raised = faults.only(result.stdout, 0, "raised")
    seconds = check_left(result, path, leaving, raised)
    summary = faults.summary(result)
    assert summary["first_failure"] == (0 if how == "return" else 1)
    assert not any(one["ended_by_launcher"] for one in summary["processes"])
    if how == "raise":
        assert "ValueError: unrelated" in result.stderr.partition("Its last lines:")[2]
    ends = [one["seconds"] for one in summary["processes"]]
    faults.measured(f"leaves by {how}", raised=seconds, exited=ends[0] - ends[1])
    assert ends[0] - ends[1] < 5


def test_a_rank_that_fails_without_the_launcher(tmp_path):
    path = faults.script(tmp_path, LEAVES)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
    jobs = [faults.launch_alone(path, "raise", port, rank) for rank in range(2)]
    results = [job.finish(40) for job in jobs]
    for result in results:
        assert result.returncode == 1, result.explain()
        assert not result.leftovers
    leaving = faults.only(results[1].stdout, None, "leaving")
    raised = faults.only(results[0].stdout, None, "raised")
    seconds = check_left(results[0], path, leaving, raised)
    faults.measured("leaves by raise, without the launcher", raised=seconds)


STOPPED = """
    import itertools, os, sys
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    end, op = sys.argv[1:]
    # 256 KiB for each device, half of it for the other: a size that is read from the other
    # process's buffers.
    x = worker.blocks(2, 1 << 16)

    @worker.spmd
    def step(x):
        if op == "psum":
            return jaxfabric.lax.psum(x, "x") / 3 * (1 + jax.lax.axis_index("x"))
        y = jaxfabric.lax.all_to_all(x, "x", 0, 0, tiled=True)  # all_to_all
        return jaxfabric.lax.all_to_all(y, "x", 0, 0, tiled=True)

    @worker.spmd
    def any_rank(flag):
        return jaxfabric.lax.pmax(flag, "x")

    try:
        y = x
        for i in itertools.count():
            y = step(y).block_until_ready()
            if i == 3:
                worker.say("looping")
            if i % 50 == 0:
                told = worker.blocks(1) * os.path.exists(end)
                if worker.local(any_rank(told))[0] > 0:
                    break
    except Exception as error:
        worker.say("raised", text=str(error))
        raise
    for got, want in zip(worker.local(y), worker.local(x), strict=True):
        assert (got == want).all()
    worker.say("done")
"""


# More announcements than a socket takes while nobody reads it.
MANY = """
    import sys
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    x = worker.blocks(256, 256)

    @worker.spmd
    def many(x):
        return [jaxfabric.lax.psum(x, "x") for _ in range(320)]

    compiled = many.lower(x).compile()
    worker.say("compiled")
    if jax.process_index() == 0:
        open(sys.argv[1]).read()
    for y in compiled(x):
        assert all((block == 3).all() for block in worker.local(y))
    worker.say("done")
"""


def test_a_rank_stopped_while_its_peer_sets_up_many_collectives(tmp_path):
    path = faults.script(tmp_path, MANY)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = faults.launch(path, 2, gate, deadline=30, warn_after=2, mismatch_after=0.05)
    job.wait_for('"compiled"', count=2)
    # Rank 1 waits for rank 0 when it is stopped, or is about to.
    stopped = faults.only(job.output(), 1, "compiled")
    faults.kill(stopped["pid"], signal.SIGSTOP)
    gate.write_text("go on")
    job.wait_for("rank 0 (process 0) has waited 2", stream=2)
    faults.kill(stopped["pid"], signal.SIGCONT)
    result = job.finish(40)
    assert result.returncode == 0, result.explain()
    for rank in range(2):
        faults.only(result.stdout, rank, "done")


@pytest.mark.parametrize("op", ["psum", "all_to_all"])
def test_a_stop_shorter_than_the_deadline_changes_nothing(tmp_path, op):
    path = faults.script(tmp_path, STOPPED)
    end = tmp_path / "end"
    job = faults.launch(path, 2, end, op, deadline=30, warn_after=0.3, mismatch_after=0.1)
    job.wait_for('"looping"', count=2)
    stopped = faults.only(job.output(), 1, "looping")
    faults.kill(stopped["pid"], signal.SIGSTOP)
    job.wait_for("rank 0 (process 0) has waited", stream=2)
    job.wait_for(f"for {faults.name_of(stopped)}", stream=2)
    faults.kill(stopped["pid"], signal.SIGCONT)
    end.touch()
    result = job.finish(40)
    assert result.returncode == 0, result.explain()
    for rank in range(2):
        faults.only(result.stdout, rank, "done")


def test_a_rank_stopped_for_good_in_the_middle_of_reading(tmp_path):
    path = faults.script(tmp_path, STOPPED)
    job = faults.launch(path, 2, tmp_path / "never", "all_to_all", deadline=1)
    job.wait_for('"looping"', count=2)
    stopped = faults.only(job.output(), 1, "looping")
    since = faults.kill(stopped["pid"], signal.SIGSTOP)
    job.wait_for("jaxfabric: process 0 (pid", stream=2)
    job.wait_for("exited with status 1", stream=2)
    faults.kill(stopped["pid"], signal.SIGCONT)
    result = job.finish(40)
    assert result.returncode == 1, result.explain()
    assert not result.leftovers
    raised = faults.only(result.stdout, 0, "raised")
    faults.measured("stopped for good, deadline 1", raised=raised["time"] - since)
    assert raised["time"] - since < 2, result.explain()
    assert "DEADLINE_EXCEEDED" in raised["text"]
    assert faults.name_of(stopped) in raised["text"], result.explain()
    # Once it goes on it ends with the same error, or with what it saw itself: a rank that is gone.
    assert faults.only(result.stdout, 1, "raised")
    assert faults.summary(result)["processes"][1]["exit_code"] == 1, result.explain()


CROWD = """
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    crowd = worker.spmd(lambda x: [jaxfabric.lax.psum(x[: k + 1], "x") for k in range(20)])
    try:
        jax.block_until_ready(crowd(worker.blocks(20)))
    except Exception as error:
        worker.say("raised", text=str(error))
"""


def test_more_collectives_than_cells(tmp_path):
    path = faults.script(tmp_path, CROWD)
    job = faults.launch(path, 2, segment_bytes=65536, deadline=1, warn_after=0.1)
    result = job.finish(40)
    why = "no cell is free for one more collective call (6 are in use); raise"
    waits = [line for line in result.stderr.splitlines() if "has waited" in line]
    assert any(why in line for line in waits), result.explain()
    for rank in range(2):
        raised = faults.only(result.stdout, rank, "raised")
        assert "RESOURCE_EXHAUSTED" in raised["text"], result.explain()
        assert why in raised["text"], result.explain()
