"""The end of JAX's coordination service, and of who hosts it, in a job on several hosts."""

import signal
import sys
import time

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(90)


def test_the_service_of_the_launcher_dies(hosts, tmp_path):
    path = faults.script(tmp_path, faults.LOOP)
    jobs = [faults.start(line) for line in support.launchers(hosts, str(path), counts=(1, 2))]
    jobs[0].wait_for('"looping"')
    jobs[1].wait_for('"looping"', count=2)
    (service,) = (p for p, command in jobs[0].members().items() if "service.serve" in command)
    killed = faults.kill(service)
    results = [job.finish(40) for job in jobs]
    faults.measured("the service dies", all_ended=time.monotonic() - killed)
    for result in results:
        assert result.returncode == 1, result.explain()
        assert not result.leftovers, result.explain()
        said = f"JAX's coordination service at {hosts[0].ipv4} has ended"
        assert said in result.stderr, result.explain()


def test_process_0_dies_where_it_hosts_the_service(hosts, tmp_path):
    path = faults.script(tmp_path, faults.LOOP)
    where = f"{hosts[0].ipv4}:{support.new_port()}"
    jobs = []
    for process, host in enumerate(hosts):
        argv = host.command(sys.executable, "-P", str(path), where, "2", str(process))
        jobs.append(faults.start(argv))
    for job in jobs:
        job.wait_for('"looping"')
    pid = faults.only(jobs[0].output(), None, "looping")["pid"]
    began = time.monotonic()
    hosts[0].run("kill", "-9", str(pid))
    first, other = (job.finish(40) for job in jobs)
    seconds = time.monotonic() - began
    faults.measured("process 0 dies", other_ended=seconds)
    assert first.returncode == -signal.SIGKILL
    assert "process 0 hosts JAX's coordination service: if it dies, JAX aborts" in first.stderr
    # JAX ends it, says so, and may be faster than the exception.
    assert other.returncode == -signal.SIGABRT, other.explain()
    assert "JAX distributed service detected fatal errors" in other.stderr, other.explain()
    for said in faults.events(other.stdout, event="raised"):
        assert "process 0" in said["text"], other.explain()
    assert seconds < 10, other.explain()
    for result in (first, other):
        assert not result.leftovers, result.explain()
