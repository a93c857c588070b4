"""The programs that tests/gpu runs on GPUs are right: the same on CPUs."""

from __future__ import annotations

import pytest
import support
from rank_scripts import succeeds

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(("processes", "each"), [(2, 1), (1, 3)])
def test_on_cpus(tmp_path, processes, each):
    job = support.ROOT / "tests" / "gpu" / "gpu_job.py"
    succeeds(
        support.run_job(
            job,
            processes,
            "cpu",
            "0",
            str(each),
            env={
                "PYTHONPATH": support.plugin_path(tmp_path),
                "JAXFABRIC_DEADLINE": "40",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={each}",
            },
        ),
        processes,
    )
