"""The cases as jobs of two and four processes."""

from __future__ import annotations

import collections
import json
import pathlib
import sys

import conformance_job
import pytest
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
    wanted: collections.Counter[str] = collections.Counter()
    for face, batch in conformance_job.programs(part, PARTS):
        wanted[face.name] += len(batch)
    for rank in range(processes):
        said = json.loads(result.lines_of(rank)[-1])
        assert said["cases"] == wanted
        for face in ON_FABRIC:
            assert said["rows"][face.name] >= wanted[face.name] > 15
    for face in ON_FABRIC:
        tally[f"{face.name} in a job of {processes}"] += said["cases"][face.name]
