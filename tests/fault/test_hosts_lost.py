"""Jobs on two hosts, which are network namespaces, when a process or the network between fails."""

import os
import re
import threading
import time

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(120)

# Ends when a file is there: on all processes after the same step.
LOOP = """
    import os, sys
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    n = jax.device_count()
    step = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x") / n)  # psum
    x = worker.blocks(int(sys.argv[1]))
    with worker.failure():
        for i in range(1 << 20):
            x = step(x).block_until_ready()
            if i == 3:
                worker.say("looping")
            if i % 20 == 19:
                told = worker.blocks(1) * os.path.exists(sys.argv[2])
                if worker.local(step(told))[0].any():
                    break
"""


def start(hosts, path, *arguments, **settings):
    """A process on each host; the settings become JAXFABRIC_* variables."""
    lines = support.launchers(hosts, str(path), *map(str, arguments), counts=(1, 1))
    jobs = [faults.start(line, **settings) for line in lines]
    for job in jobs:
        job.wait_for('"looping"')
    return jobs


def finish(jobs):
    """All have ended, with nothing left of them."""
    for job in jobs:
        result = job.finish(60)
        assert not result.leftovers, result.explain()


def raised(job, process):
    job.wait_for('"raised"')
    return faults.only(job.output(), process, "raised")


def test_a_killed_process_is_named_on_the_other_host(hosts, tmp_path):
    path = faults.script(tmp_path, LOOP)
    jobs = start(hosts, path, 1 << 18, tmp_path / "end")
    dying = faults.only(jobs[1].output(), 1, "looping")
    hosts[1].run("kill", "-9", str(dying["pid"]))
    killed = time.monotonic()
    said = raised(jobs[0], 0)
    assert time.monotonic() - killed < 10  # a deadline is 300
    finish(jobs)
    assert said["type"] == "JaxRuntimeError"
    assert said["text"].startswith(f"UNAVAILABLE: rank {dying['rank']} (process 1, pid")
    # Its kernel resets a connection that it had not read to the end.
    how = r"on hostb\) died(, or the connection to it was reset)?, while rank 0 \(process 0\) was"
    assert re.search(how + " in psum", said["text"]), said["text"]
    assert faults.line(path, "psum") in said["text"]


def test_a_host_that_cannot_be_reached_any_more_is_named_on_both(hosts, tmp_path):
    path = faults.script(tmp_path, LOOP)
    jobs = start(hosts, path, 1 << 18, tmp_path / "end", unreachable_after=3)
    hosts[1].link(up=False)
    try:
        texts = [raised(job, process)["text"] for process, job in enumerate(jobs)]
        finish(jobs)
    finally:
        hosts[1].link(up=True)
    for text, other in zip(texts, ("hostb", "hosta"), strict=True):
        assert text.startswith("UNAVAILABLE: "), text
        assert f"on {other}) is unreachable: no answer for 3 s" in text


@pytest.mark.parametrize("count", [1, 1 << 18])
def test_a_second_without_network_is_survived(hosts, tmp_path, count):
    path = faults.script(tmp_path, LOOP)
    jobs = start(hosts, path, count, tmp_path / "end")
    hosts[1].link(up=False)
    threading.Event().wait(1)  # The outage itself.
    hosts[1].link(up=True)
    (tmp_path / "end").touch()
    results = [job.finish(60) for job in jobs]
    for process, result in enumerate(results):
        assert result.returncode == 0, result.explain()
        faults.only(result.stdout, process, "finished")


def test_a_process_that_is_stopped_for_a_while_is_waited_for(hosts, tmp_path):
    path = faults.script(tmp_path, LOOP)
    jobs = start(hosts, path, 1 << 18, tmp_path / "end", unreachable_after=2)
    pid = str(faults.only(jobs[1].output(), 1, "looping")["pid"])
    hosts[1].run("kill", "-STOP", pid)
    threading.Event().wait(5)  # Longer than a host may be silent.
    hosts[1].run("kill", "-CONT", pid)
    (tmp_path / "end").touch()
    for process, job in enumerate(jobs):
        result = job.finish(60)
        assert result.returncode == 0, result.explain()
        faults.only(result.stdout, process, "finished")


def test_a_process_that_stays_stopped_is_named_at_the_deadline(hosts, tmp_path):
    path = faults.script(tmp_path, LOOP)
    jobs = start(hosts, path, 1 << 18, tmp_path / "end", unreachable_after=2, deadline=4)
    stopped = faults.only(jobs[1].output(), 1, "looping")
    hosts[1].run("kill", "-STOP", str(stopped["pid"]))
    text = raised(jobs[0], 0)["text"]
    hosts[1].run("kill", "-KILL", str(stopped["pid"]))
    finish(jobs)
    assert text.startswith("DEADLINE_EXCEEDED: rank 0 (process 0) waited 4"), text
    assert f"for rank {stopped['rank']} (process 1, pid {stopped['pid']} on hostb)" in text


# Process 0 sends to process 1, which is stopped by then, and leaves.
LEAVING = """
    import os, sys, time
    import jax, jaxfabric, worker

    jaxfabric.initialize()
    send = worker.spmd(lambda x: jaxfabric.lax.ppermute(x, "x", [(0, 1)]))
    x = worker.blocks(int(sys.argv[1]))
    send(x).block_until_ready()
    worker.say("looping")
    with open(sys.argv[2]) as told:
        told.read()
    if jax.process_index() == 0:
        def sends():
            with worker.failure():
                send(x).block_until_ready()
        before = jaxfabric.status().counters["handed_off"]
        thread = worker.in_thread(sends)
        while jaxfabric.status().counters["handed_off"] == before:
            time.sleep(0.01)
        began = time.monotonic()
        jaxfabric.shutdown()
        worker.say("left", seconds=time.monotonic() - began)
        thread.join()
        os._exit(0)
"""


def test_leaving_does_not_wait_for_a_stopped_peer_for_ever(hosts, tmp_path):
    path = faults.script(tmp_path, LEAVING)
    os.mkfifo(tmp_path / "told")
    jobs = start(hosts, path, 1 << 26, tmp_path / "told")
    stopped = faults.only(jobs[1].output(), 1, "looping")
    hosts[1].run("kill", "-STOP", str(stopped["pid"]))
    (tmp_path / "told").write_text("")
    jobs[0].wait_for('"left"')
    assert faults.only(jobs[0].output(), 0, "left")["seconds"] < 20
    assert raised(jobs[0], 0)["text"].startswith("CANCELLED: jaxfabric was shut down")
    hosts[1].run("kill", "-KILL", str(stopped["pid"]))
    finish(jobs)
