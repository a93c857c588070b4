"""`jaxfabric run` on several hosts, which are network namespaces."""

import contextlib
import json
import os
import signal
import socket
import sys

import pytest
import rank_scripts
import support

pytestmark = pytest.mark.timeout(120)


def start(hosts, script, *arguments, counts=(1, 1), options=(), env=None, address=None):
    """Starts a job with a launcher on each of the hosts."""
    lines = support.launchers(
        hosts, str(script), *arguments, counts=counts, options=options, address=address
    )
    return [support.Job(line, env) for line in lines]


def finish(jobs):
    results = [job.finish(60) for job in jobs]
    text = "\n".join(result.explain() for result in results)
    assert not any(result.leftovers for result in results), text
    return results, text


# Says where it is, then does what is asked of its process number and restart count. Those that
# wait say so in a pipe beside the program; one that fails does so when `waiting` others wait.
PROGRAM = """
    import os, signal, socket, sys
    signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15})
    pipe = os.open(os.path.dirname(sys.argv[0]) + "/pipe", os.O_RDWR)
    number = os.environ["JAXFABRIC_PROCESS_ID"]
    count = os.environ["JAXFABRIC_RESTART_COUNT"]
    print(f"here is {number} of {os.environ['JAXFABRIC_NUM_PROCESSES']} on", end=" ")
    print(socket.gethostname(), "restart", count, flush=True)
    asked = dict(x.split("=") for x in sys.argv[1:])
    what = asked.get(f"{number}.{count}", "end")
    if what == "fail":
        for _ in range(int(asked.get("waiting", 0))):
            os.read(pipe, 1)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "fail":
        print("the reason", flush=True)
        sys.exit(7)
    if what == "wait":
        os.write(pipe, b"x")
        print("got", signal.sigwait({2, 15}).name, flush=True)
        sys.exit(5)
"""


@pytest.fixture
def program(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return support.write_script(tmp_path, PROGRAM)


def test_processes_are_numbered_host_by_host(hosts, program):
    (first, second), text = finish(start(hosts, program, counts=(2, 3), options=("--json",)))
    assert [first.returncode, second.returncode] == [0, 0], text
    for number in range(5):
        result, host = (first, "hosta") if number < 2 else (second, "hostb")
        assert result.lines_of(number) == [f"here is {number} of 5 on {host} restart 0"], text
    summaries = [json.loads(result.stdout.splitlines()[-1]) for result in (first, second)]
    assert summaries[0] == summaries[1]
    assert [(p["process"], p["node"], p["host"]) for p in summaries[0]["processes"]] == [
        *((n, 0, "hosta") for n in (0, 1)),
        *((n, 1, "hostb") for n in (2, 3, 4)),
    ]


def test_last_lines_may_be_long(hosts, tmp_path):
    script = support.write_script(tmp_path, "for _ in range(20): print('x' * 1000)")
    results, text = finish(start(hosts, script, options=("--json",)))
    for result in results:
        assert result.returncode == 0, text
        processes = json.loads(result.stdout.splitlines()[-1])["processes"]
        assert all(len(process["last_lines"]) == 20 for process in processes), text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_failure_on_one_host_ends_the_job_on_both(hosts, program, victim):
    what = ["waiting=2", *(f"{number}.0=wait" for number in range(3) if number != victim)]
    options = ("--grace", "0.1")
    jobs = start(hosts, program, *what, f"{victim}.0=fail", counts=(2, 1), options=options)
    results, text = finish(jobs)
    host = "hosta" if victim < 2 else "hostb"
    for result in results:
        assert result.returncode == 7, text
        assert f"process {victim} (pid " in result.stderr, text
        assert f" on {host}) exited with status 7" in result.stderr, text
        assert f"process {victim} on {host} failed first: it exited" in result.stderr, text
        assert "    the reason" in result.stderr, text
    for number in {0, 1, 2} - {victim}:
        assert "got SIGTERM" in results[number // 2].lines_of(number), text


@pytest.mark.parametrize("node", [0, 1])
def test_an_interrupt_anywhere_ends_the_job_everywhere(hosts, program, node):
    jobs = start(hosts, program, "0.0=wait", "1.0=wait", options=("--max-restarts", "1"))
    for job in jobs:
        job.wait_for("here is")
    jobs[node].process.send_signal(signal.SIGINT)
    results, text = finish(jobs)
    for number, result in enumerate(results):
        assert result.returncode == 5, text
        assert "got SIGINT" in result.lines_of(number), text
        assert "again" not in result.stderr, text


@pytest.mark.parametrize("node", [0, 1])
def test_the_death_of_a_launcher_ends_the_job(hosts, program, node):
    jobs = start(hosts, program, "0.0=wait", "1.0=wait", options=("--grace", "0.1"))
    for job in jobs:
        job.wait_for("here is")
    jobs[node].process.kill()
    assert not jobs[node].wait_until_empty()
    results, text = finish(jobs)
    other = results[1 - node]
    assert other.returncode == 1, text
    where = ["node 0 at 10.77.1.1:", "node 1 on hostb"][node]
    assert f"the launcher of {where}" in other.stderr, text
    assert "has gone" in other.stderr, text
    assert "got SIGTERM" in other.lines_of(1 - node), text


def test_a_job_starts_again_on_all_hosts(hosts, program):
    what = ("1.0=kill", "1.1=fail")
    options = ("--max-restarts", "2", "--json")
    results, text = finish(start(hosts, program, *what, options=options))
    for number, result in enumerate(results):
        assert result.returncode == 0, text
        host = ["hosta", "hostb"][number]
        for count in range(3):
            assert f"here is {number} of 2 on {host} restart {count}" in result.stdout, text
        assert "starting the job again, restart 2 of 2" in result.stderr, text
        assert json.loads(result.stdout.splitlines()[-1])["restarts"] == 2


def test_restarts_are_counted(hosts, program):
    what = [f"1.{count}=fail" for count in range(9)]
    results, text = finish(start(hosts, program, *what, options=("--max-restarts", "1")))
    for result in results:
        assert result.returncode == 7, text
        assert "restart 1 of 1" in result.stderr, text


def test_a_launcher_that_is_started_anew_takes_part_in_the_restart(hosts, program):
    what = ("0.0=wait", "1.0=wait")
    options = ("--grace", "0", "--max-restarts", "1")
    address = f"[{hosts[0].ipv6}]:{support.new_port()}"
    jobs = start(hosts, program, *what, options=options, address=address)
    for job in jobs:
        job.wait_for("here is")
    jobs[1].process.kill()
    assert not jobs[1].wait_until_empty()
    jobs[0].wait_for("restart 1 of 1", stream=2)
    where = ("--nnodes", "2", "--node-rank", "1", "--coordinator", address)
    argv = support.launcher(2, str(program), *what, options=(*where, *options))
    jobs.append(support.Job(hosts[1].command(*argv)))
    (first, _, third), text = finish(jobs)
    assert (first.returncode, third.returncode) == (0, 0), text
    assert "here is 0 of 3 on hosta restart 1" in first.stdout, text
    assert "here is 2 of 3 on hostb restart 1" in third.stdout, text


def test_a_program_that_cannot_be_run_on_one_host(hosts, program):
    where = (
        "--nnodes",
        "2",
        "--coordinator",
        f"{hosts[0].ipv4}:{support.new_port()}",
        "--grace",
        "0",
    )
    jobs = []
    for rank, command in enumerate(([str(program), "0.0=wait"], ["/no/such/program"])):
        argv = support.launcher(1, *command, options=(*where, "--node-rank", str(rank)))
        jobs.append(support.Job(hosts[rank].command(*argv)))
    results, text = finish(jobs)
    assert [result.returncode for result in results] == [127, 127], text
    assert "node 1 on hostb cannot run /no/such/program" in results[0].stderr, text


JOB = (
    rank_scripts.HEAD
    + """
status = jaxfabric.status()
total = parts(spread(lambda x: lax.psum(x, "i"))(array(lambda rank: [rank + 1.0])))
print(process, jax.process_count(), status.origin, float(next(iter(total.values()))[0]))
print([peer.partition(":")[0] for peer in status.peers], flush=True)
if sys.argv[1:] == [f"{process}.{os.environ.get('JAXFABRIC_RESTART_COUNT')}"]:
    os.kill(os.getpid(), 9)
"""
)
TESTS = {"PYTHONPATH": os.pathsep.join([str(support.ROOT / "tests"), *sys.path])}


def test_a_job_across_hosts_and_again_after_a_restart(hosts, tmp_path):
    script = support.write_script(tmp_path, JOB)
    address = f"hosta:{support.new_port()}"
    options = ("--max-restarts", "1", "--grace", "0")
    jobs = start(hosts, script, "1.0", counts=(1, 1), options=options, env=TESTS, address=address)
    results, text = finish(jobs)
    for number, result in enumerate(results):
        assert result.returncode == 0, text
        lines = [f"{number} 2 jaxfabric run 3.0", "['hosta', 'hostb']"]
        # The first time, process 0 may have been ended before it could print.
        assert result.lines_of(number)[-2:] == lines, text
        assert "restart 1 of 1" in result.stderr, text
    assert len(results[1].lines_of(1)) == 4, text


def test_variables_of_slurm_connect_hosts(hosts, tmp_path):
    script = support.write_script(tmp_path, JOB)
    jobs = []
    for rank, host in enumerate(hosts):
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "hosta,hostb",
        }
        jobs.append(support.Job(host.command(sys.executable, str(script)), TESTS | slurm))
    results, text = finish(jobs)
    for rank, result in enumerate(results):
        assert result.returncode == 0, text
        assert f"{rank} 2 Slurm 3.0\n['hosta', 'hostb']" in result.stdout, text


def on_this_host(rank, port, *options, nodes=2):
    where = ("--nnodes", str(nodes), "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{port}")
    return support.Job(support.launcher(1, "true", options=(*where, *options)))


@pytest.fixture
def port():
    """A free one before another free one."""
    while True:
        with support.socket_on_free_port() as (reservation, number):
            reservation.close()
            with contextlib.suppress(OSError, OverflowError), socket.socket() as after:
                after.bind(("127.0.0.1", number + 1))
                return number


def test_a_node_that_does_not_come_is_named(port):
    jobs = [on_this_host(rank, port, "--join-timeout", "1", nodes=3) for rank in (0, 2)]
    results, text = finish(jobs)
    assert [result.returncode for result in results] == [1, 1], text
    for result in results:
        assert f"only 2 of 3 nodes came to 127.0.0.1:{port} within 1 s; missing: node 1 " in (
            result.stderr
        ), text


def test_node_0_that_does_not_come(port):
    result = on_this_host(1, port, "--join-timeout", "0.3").finish(30)
    assert result.returncode == 1
    assert f"node 1 did not reach node 0 at 127.0.0.1:{port} within 0.3 s: " in result.stderr


def test_strangers_and_nodes_that_do_not_fit_are_refused(port):
    first = on_this_host(0, port)
    wrong = on_this_host(1, port, nodes=3).finish(30)
    assert wrong.returncode == 1, wrong.explain()
    assert "node 1 has --nnodes 3, node 0 has 2" in wrong.stderr
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"hello": 3}\n',
        b"x" * 9000,
        b"[" * 4000 + b"\n",
        b'{"hello"',
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(20)
            while stranger.recv(1000):
                pass
    results, text = finish([first, on_this_host(1, port)])
    assert [result.returncode for result in results] == [0, 0], text


def test_an_address_of_another_host(hosts, program):
    address = f"{hosts[1].ipv4}:{support.new_port()}"
    jobs = start(hosts[:1], program, address=address, options=("--nnodes", "2"), counts=(1,))
    (result,), text = finish(jobs)
    assert result.returncode == 1, text
    assert f"node 0 cannot listen at --coordinator {address}: Cannot assign" in result.stderr, text


def test_an_interrupt_before_all_nodes_have_come(port):
    # Its handlers are there when it listens.
    job = on_this_host(0, port)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
    job.process.send_signal(signal.SIGINT)
    result = job.finish(30)
    assert result.returncode == 130, result.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nnodes", "2"), "--nnodes 2 needs --node-rank"),
        (("--nnodes", "2", "--node-rank", "0"), "needs --coordinator HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "2", "--coordinator", "h:1"), "is not below --nnodes 2"),
        (("--nnodes", "2", "--node-rank", "0", "--coordinator", "h"), "use HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--coordinator", "h:65535"), "1 to 65534"),
        (("--nnodes", "x"), "--nnodes x: use a whole number"),
        (("--node-rank", "1"), "give --nnodes too"),
    ],
)
def test_options_that_do_not_fit(capsys, options, message):
    from jaxfabric import cli

    assert cli.main(["run", "-n", "1", *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def test_options_from_the_environment(capsys, monkeypatch):
    from jaxfabric import cli

    monkeypatch.setenv("JAXFABRIC_RUN_NNODES", "2")
    monkeypatch.setenv("JAXFABRIC_RUN_NODE_RANK", "5")
    assert cli.main(["run", "-n", "1", "--", "true"]) == 2
    assert "--node-rank 5 is not below --nnodes 2" in capsys.readouterr().err
    monkeypatch.setenv("JAXFABRIC_RUN_NODE_RANK", "one")
    assert cli.main(["run", "-n", "1", "--", "true"]) == 2
    assert "JAXFABRIC_RUN_NODE_RANK one: use a whole number" in capsys.readouterr().err


# On one host all of jaxfabric takes part.
RESTARTED = """
    import os, signal
    import jax, jax.numpy as jnp
    import jaxfabric
    jaxfabric.initialize()
    mesh = jax.make_mesh((2,), ("x",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(), out_specs=jax.P())
    def total():
        return jaxfabric.lax.psum(1.0 + jax.lax.axis_index("x"), "x")

    print(float(total()), os.environ["JAXFABRIC_RESTART_COUNT"], flush=True)
    if jax.process_index() == 1 and os.environ["JAXFABRIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        total().block_until_ready()
    print("done")
"""


def test_a_job_of_one_host_starts_again_when_a_process_is_killed(tmp_path):
    script = support.write_script(tmp_path, RESTARTED)
    result = support.run_job(script, 2, options=("--max-restarts", "1"))
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    for number in range(2):
        assert result.lines_of(number) == ["3.0 0", "3.0 1", "done"], result.explain()
    assert "process 1 (pid " in result.stderr
    assert "restart 1 of 1" in result.stderr


def test_the_end_of_the_coordination_service_ends_the_job(program):
    argv = support.launcher(2, str(program), "0.0=wait", "1.0=wait", options=("--grace", "0"))
    job = support.Job(argv)
    job.wait_for("here is", count=2)
    (service,) = (pid for pid, command in job.members().items() if "service.serve" in command)
    os.kill(service, signal.SIGKILL)
    (result,), text = finish([job])
    assert result.returncode == 1, text
    assert "JAX's coordination service at 127.0.0.1 has ended" in result.stderr, text
