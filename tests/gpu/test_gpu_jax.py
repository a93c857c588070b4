"""JAX programs with collectives between processes, on the GPUs of this machine."""

from __future__ import annotations

import jax
import pytest
import support

from jaxfabric import _windowed

JOB = support.ROOT / "tests" / "gpu" / "gpu_job.py"
GRAPHS = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


@pytest.fixture(scope="module")
def gpus():
    """How many there are; an error, not a skip, where JAX cannot use those of the driver."""
    return len(jax.devices("gpu"))


def run(processes, gpus, each=1, **env):
    env = {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAXFABRIC_GPU_LIMITS": "*=1G",
        "JAXFABRIC_DEADLINE": "60",
        # Processes share the memory of a GPU.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **env,
    }
    result = support.run_job(JOB, processes, "gpu", str(gpus), str(each), env=env, timeout=170)
    assert result.returncode == 0, result.explain()
    for process in range(processes):
        assert result.lines_of(process)[-1] == "done", result.explain()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", ["", GRAPHS], ids=["streams", "graphs"])
def test_processes_that_share_a_gpu(gpus, flags):
    run(2, 1, XLA_FLAGS=flags)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", ["", GRAPHS], ids=["streams", "graphs"])
def test_processes_with_a_gpu_each(gpus, flags):
    if gpus < 2:
        pytest.skip("needs two GPUs")
    run(min(gpus, 8), gpus, XLA_FLAGS=flags)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", ["", GRAPHS], ids=["streams", "graphs"])
def test_a_process_with_all_gpus(gpus, flags):
    if gpus < 2:
        pytest.skip("needs two GPUs")
    run(1, gpus, min(gpus, 8), XLA_FLAGS=flags)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", ["", GRAPHS], ids=["streams", "graphs"])
def test_arrays_in_windows(gpus, flags):
    """NCCL has one rank on a GPU."""
    if gpus < 2:
        pytest.skip("needs two GPUs")
    if problem := _windowed.problem():
        pytest.skip(f"no windows: {problem}")
    run(min(gpus, 8), gpus, XLA_FLAGS=flags, JAXFABRIC_GPU_WINDOWS="on")
