"""The programs that tests/gpu runs on GPUs are right: the same on CPUs."""

from __future__ import annotations

import pytest
import support
from rank_scripts import succeeds

pytestmark = pytest.mark.timeout(180)


def test_on_cpus(tmp_path):
    job = support.ROOT / "tests" / "gpu" / "gpu_job.py"
    succeeds(
        support.run_job(
            job,
            2,
            "cpu",
            "0",
            env={"PYTHONPATH": support.plugin_path(tmp_path), "JAXFABRIC_DEADLINE": "40"},
        )
    )
