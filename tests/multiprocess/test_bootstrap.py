"""Real jobs: the bootstrap on the fake core, with JAX's own collectives on top."""

import json
import os
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(180)


PSUM = """
    import fake_core
    FakeFabric = fake_core.install()
    import jaxfabric
    jaxfabric.initialize()
    import jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.make_array_from_callback(
        (n,), NamedSharding(mesh, P("x")), lambda index: jnp.arange(1.0, n + 1)[index])
    psum = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    status = jaxfabric.status()
    print(status.origin, status.process_id, status.num_processes, n, float(psum(x)[0]))
    print(FakeFabric.instances[0].addresses)
    print(FakeFabric.instances[0].local_ranks == list(status.ranks), len(status.ranks))
"""
TESTS = {"PYTHONPATH": os.pathsep.join([str(support.ROOT / "tests"), *sys.path])}


@pytest.mark.parametrize(("n", "devices"), [(2, 1), (2, 2), (1, 4)])
def test_job_under_the_launcher(tmp_path, n, devices):
    script = support.write_script(tmp_path, PSUM)
    options = ("--devices-per-process", str(devices))
    result = support.run_job(script, n, options=options, env=TESTS)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    total = n * devices
    origin = "jaxfabric run" if n > 1 else "alone"
    for rank in range(n):
        lines = result.lines_of(rank)
        assert len(lines) == 3, result.explain()
        first, addresses, ranks = lines
        assert first == f"{origin} {rank} {n} {total} {total * (total + 1) / 2}"
        assert addresses == str([f"address of {i}".encode() for i in range(n)])
        assert ranks == f"True {devices}"
    assert result.seconds < 30


LEAVING = """
    import os, signal, sys, time
    import fake_core
    FakeFabric = fake_core.install()
    import jax, jaxfabric
    from jaxfabric.bootstrap import identity
    from jaxfabric import runtime
    how, rank = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        if how == "jax":
            jax.distributed.initialize(f"127.0.0.1:{sys.argv[4]}", 3, rank)
            jaxfabric.initialize()
        else:
            jaxfabric.initialize(f"127.0.0.1:{sys.argv[4]}", 3, rank)
        victim = int(sys.argv[3])
    else:
        jaxfabric.initialize()
        rank, victim = runtime._membership.process_id, rank
    membership = runtime._membership
    membership.client.wait_at_barrier("all are here", 60000)
    if rank == victim and how == "raise":
        raise ValueError("an error of the program")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with identity.Watch([membership.members[victim].identity]) as watch:
        assert watch.wait_until_all_gone(30)
    start = time.monotonic()
    import atexit
    atexit.register(lambda: print("left after", time.monotonic() - start, flush=True))
    FakeFabric.instances[0].text = f"rank {victim} died"
    raise RuntimeError(FakeFabric.instances[0].text)
"""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_any_process_may_die_under_the_launcher(tmp_path, how, victim):
    script = support.write_script(tmp_path, LEAVING)
    options = ("--json",)
    result = support.run_job(script, 3, how, str(victim), options=options, env=TESTS)
    assert result.returncode == (137 if how == "kill" else 1), result.explain()
    assert not result.leftovers
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["first_failure"] == victim
    victim_end = summary["processes"][victim]["seconds"]
    for rank in {0, 1, 2} - {victim}:
        end = summary["processes"][rank]
        assert (end["exit_code"], end["signal"]) == (1, None), result.explain()
        assert end["seconds"] - victim_end < 5


@pytest.mark.parametrize("how", ["jax", "initialize"])
def test_a_process_other_than_zero_may_die_where_process_zero_hosts_the_service(tmp_path, how):
    script = support.write_script(tmp_path, LEAVING)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
        jobs = [
            support.Job([sys.executable, str(script), how, str(rank), "2", str(port)], TESTS)
            for rank in range(3)
        ]
        results = [job.finish(60) for job in jobs]
    assert results[2].returncode == -9
    for result in results[:2]:
        assert result.returncode == 1, result.explain()
        assert "rank 2 died" in result.stderr
        assert "left after" in result.stdout
        assert not result.leftovers
    assert "process 0 hosts JAX's coordination service" in results[0].stderr
    assert "hosts JAX's" not in results[1].stderr


def test_a_missing_process_is_named(tmp_path):
    script = support.write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["JAXFABRIC_PROCESS_ID"] == "1":
            sys.exit(0)
        import fake_core
        fake_core.install()
        import jaxfabric
        jaxfabric.initialize(connect_timeout=1)
        """,
    )
    result = support.run_job(script, 2, env=TESTS)
    assert result.returncode == 1, result.explain()
    assert "not all 2 processes came" in result.stderr
    assert not result.leftovers


ENDING = """
    import os, signal, sys
    import fake_core
    FakeFabric = fake_core.install()
    import jax, jaxfabric
    from jaxfabric import runtime
    how, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(f"127.0.0.1:{port}", 3, rank)
    jaxfabric.initialize()
    runtime._membership.client.wait_at_barrier("all are here", 60000)
    if how == "unnoticed" and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("exit 0", "exit 1"):
        if rank == int(how[-1]):
            sys.exit(3)
        FakeFabric.instances[0].text = "a rank has left"
        sys.exit(4)
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("clean", [0, 0, 0]),
        # No collective was in flight, nobody has seen a failure.
        ("unnoticed", [0, 0, -9]),
        # One leaves in the middle of the program, the others fail for it.
        ("exit 0", [3, 4, 4]),
        ("exit 1", [4, 3, 4]),
    ],
)
def test_exit_never_waits_for_the_dead(tmp_path, how, expected):
    script = support.write_script(tmp_path, ENDING)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
        jobs = [
            support.Job([sys.executable, str(script), how, str(rank), str(port)], TESTS)
            for rank in range(3)
        ]
        results = [job.finish(60) for job in jobs]
    explanation = "\n".join(result.explain() for result in results)
    assert [result.returncode for result in results] == expected, explanation
    assert max(result.seconds for result in results) < 15, explanation
    assert not any(result.leftovers for result in results)
