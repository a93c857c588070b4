"""shutdown() in the middle of collectives, buffers that others are reading, and starting again."""

import faults
import pytest

pytestmark = pytest.mark.timeout(90)

ENDS = ("raised", "finished")

# Devices of one process read each other's buffers directly, so a shutdown has to take the buffers
# away from readers that are in the middle.
ONE_PROCESS = """
    import threading
    import jax, jaxfabric, worker
    from jaxfabric.lax import all_gather, all_to_all, psum

    jax.config.update("jax_num_cpu_devices", 4)
    jax.devices()
    snapshot = worker.Snapshot()
    jaxfabric.initialize()

    @worker.spmd
    def step(x):
        y = psum(x, "x") / 10
        y = all_to_all(y, "x", 0, 0, tiled=True)
        return all_gather(y, "x", tiled=True)[: x.shape[0]]

    x = worker.blocks(4, 1 << 16)
    step(x).block_until_ready()

    def loop(running):
        error = None
        while error is None:
            try:
                y = step(x).block_until_ready()
            except Exception as caught:
                error = str(caught)
                running.set()
            else:
                assert all((block == 1).all() for block in worker.local(y))
                running.set()
        errors.append(error)

    errors = []
    for _ in range(12):
        running = [threading.Event(), threading.Event()]
        threads = [worker.in_thread(lambda event=event: loop(event)) for event in running]
        for event in running:
            event.wait()
        jaxfabric.shutdown()
        for thread in threads:
            thread.join()
        jaxfabric.initialize()
    # What finished may have finished, and what failed says why.
    worker.say("stopped", errors=errors)
    assert all((block == 1).all() for block in worker.local(step(x)))
    snapshot.check()
"""


def test_shutdown_while_devices_read_each_other(tmp_path):
    path = faults.script(tmp_path, ONE_PROCESS)
    result = faults.launch(path, 1).finish(60)
    assert result.returncode == 0, result.explain()
    faults.assert_clean(result, 0)
    errors = faults.only(result.stdout, 0, "stopped")["errors"]
    assert len(errors) == 24
    for error in errors:
        assert was_shut_down(error), error


def was_shut_down(error):
    """In the middle of it, or before it began."""
    return "jaxfabric was shut down" in error or "jaxfabric is not initialized" in error


# Two devices in each of two processes: all_to_all exchanges streams that go round their rings many
# times, so that each rank waits for all others.
TWO_BY_TWO = """
    import sys
    import jax, jaxfabric, worker

    snapshot = worker.start_twice()
    how = sys.argv[1]

    @worker.spmd
    def step(x):
        def body(_, y):
            y = jaxfabric.lax.all_to_all(y, "x", 0, 0, tiled=True)  # all_to_all
            return jaxfabric.lax.all_to_all(y, "x", 0, 0, tiled=True)  # back
        return jax.lax.fori_loop(0, 5, body, x)

    x = worker.blocks(4, 1 << 18)
    try:
        for i in range(1 << 20):
            y = step(x).block_until_ready()
            if i == 3:
                worker.say("looping")
                if how == "shutdown" and jax.process_index() == 1:
                    # In the middle of the next one.
                    y = step(x)
                    jaxfabric.shutdown()
                    with worker.failure():
                        y.block_until_ready()
                    worker.say("left", descriptors={}, threads=[], mappings=worker.mappings())
                    sys.exit(0)
    except Exception as error:
        for got, want in zip(worker.local(y), worker.local(x), strict=True):
            assert (got == want).all()
        worker.say("raised", text=str(error))
        snapshot.check()
        raise
"""


def calls(path):
    # The operand as the fabric gets it: one row for each rank.
    call = "all_to_all float32[4,1,262144] at "
    return [call + faults.line(path, marker) for marker in ("all_to_all", "back")]


def test_kill_in_the_middle_of_an_exchange(tmp_path):
    path = faults.script(tmp_path, TWO_BY_TWO)
    job = faults.launch(path, 2, "kill", devices=2)
    job.wait_for('"looping"', count=2)
    dying = faults.only(job.output(), 1, "looping")
    killed = faults.kill(dying["pid"])
    result = job.finish(40)
    assert result.returncode == 137, result.explain()
    raised = faults.only(result.stdout, 0, "raised")
    ranks = f"ranks {dying['rank']}, {dying['rank'] + 1}"
    assert f"{ranks} (process 1, pid {dying['pid']} on {faults.HOST}) died" in raised["text"]
    assert any(call in raised["text"] for call in calls(path)), result.explain()
    faults.assert_clean(result, 0)
    survivor = faults.summary(result)["processes"][0]
    assert (survivor["exit_code"], survivor["ended_by_launcher"]) == (1, False)
    faults.measured("killed while reading", raised=raised["time"] - killed)
    assert raised["time"] - killed < 2


def test_shutdown_of_one_process_in_the_middle_of_an_exchange(tmp_path):
    path = faults.script(tmp_path, TWO_BY_TWO)
    result = faults.launch(path, 2, "shutdown", devices=2).finish(40)
    assert result.returncode == 1, result.explain()
    raised = faults.only(result.stdout, 0, "raised")
    leaving = faults.only(result.stdout, 1, "looping")
    assert f"(process 1, pid {leaving['pid']} on {faults.HOST}) has left" in raised["text"]
    assert any(call in raised["text"] for call in calls(path)), result.explain()
    for rank in range(2):
        faults.assert_clean(result, rank)
    # What rank 1 had under way has failed, or was through already.
    ended = [one for one in faults.events(result.stdout, 1) if one["event"] in ENDS]
    assert len(ended) == 1, result.explain()
    if ended[0]["event"] == "raised":
        assert was_shut_down(ended[0]["text"]), result.explain()


# The same processes again and again, with the programs they have; rank 1 has launched them more
# often than rank 0 from the second round on.
AGAIN = """
    import jax, jaxfabric, worker

    for round in range(4):
        jaxfabric.initialize(deadline=0.5)
        if round == 0:
            @worker.spmd
            def step(x):
                y = jaxfabric.lax.psum(x, "x")
                return jaxfabric.lax.all_gather(y, "x", tiled=True)[: x.shape[0]]
            x = worker.blocks(1 << 10)
        for _ in range(3):
            assert all((block == 3).all() for block in worker.local(step(x)))
        if round % 2 == 1 and jax.process_index() == 1:
            for _ in range(2):
                with worker.failure():
                    step(x).block_until_ready()
        jaxfabric.shutdown()
    worker.say("done")
"""


def test_again_after_success_and_after_failure(tmp_path):
    path = faults.script(tmp_path, AGAIN)
    result = faults.launch(path, 2).finish(40)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    assert len(faults.events(result.stdout, 1, "raised")) == 4
    for rank in range(2):
        faults.only(result.stdout, rank, "done")
