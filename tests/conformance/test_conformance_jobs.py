"""The cases as jobs of two and four processes."""

from __future__ import annotations

import json
import pathlib
import sys

import chosen
import conformance_job
import pytest
import runner
import support
from faces import ON_FABRIC

pytestmark = pytest.mark.timeout(280)

JOB = pathlib.Path(conformance_job.__file__)
PARTS = 2  # One for each composition: together they run all cases of the jobs.


@pytest.mark.parametrize(("part", "processes", "devices"), [(0, 2, 4), (1, 4, 2)])
def test_job(part, processes, devices, tally):
    result = support.run_job(
        JOB,
        processes,
        str(part),
        str(PARTS),
        options=("--devices-per-process", str(devices)),
        env={"PYTHONPATH": ":".join([str(JOB.parent), *sys.path]), "JAXFABRIC_DEADLINE": "60"},
        timeout=260,
    )
    assert result.returncode == 0, result.explain()
    batches = runner.batches(chosen.for_jobs())[part::PARTS]
    members = [case for batch in batches for case in batch]
    for rank in range(processes):
        said = json.loads(result.lines_of(rank)[-1])
        for face in ON_FABRIC:
            wanted = [c for c in members if face.takes(c) and conformance_job.across(c, face)]
            assert len(wanted) > 30
            assert said["cases"][face.name] == len(wanted)
            assert said["rows"][face.name] >= len(wanted)
    for face in ON_FABRIC:
        tally[f"{face.name} in a job of {processes}"] += said["cases"][face.name]
