"""The reorder stress, in every composition of processes and devices; see docs/matching.md."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import reorder_job
import support

pytestmark = pytest.mark.timeout(180)

JOB = pathlib.Path(reorder_job.__file__)


def run(tmp_path, processes, devices, *arguments):
    """Runs the job; returns process 0's summary and the orders of entry of all ranks."""
    paths = {"PYTHONPATH": ":".join(sys.path), "JAXFABRIC_DEADLINE": "60"}
    result = support.run_job(
        JOB,
        processes,
        *arguments,
        "--orders",
        str(tmp_path),
        options=("--devices-per-process", str(devices)),
        env=paths,
        timeout=150,
    )
    assert result.returncode == 0, result.explain()
    orders = {}
    for file in tmp_path.glob("*.json"):
        orders |= json.loads(file.read_text())
    assert len(orders) == processes * devices
    return json.loads(result.lines_of(0)[-1]), orders


@pytest.mark.parametrize(
    ("processes", "devices", "runs"),
    [(1, 4, 12), (1, 8, 5), (2, 2, 10), (4, 1, 10), (2, 4, 4)],
    ids=lambda value: str(value),
)
def test_collectives_that_xla_reorders(tmp_path, processes, devices, runs):
    summary, orders = run(tmp_path, processes, devices, str(runs))
    assert summary["runs"] == runs
    launches, different = reorder_job.reordered(orders)
    # Otherwise this has tested nothing.
    assert launches == runs
    assert different > runs / 2, summary


def test_reordered_launches_in_flight(tmp_path):
    summary, _ = run(tmp_path, 2, 2, "12", "--in-flight", "6", "--block", "256", "320")
    assert summary["runs"] == 12


@pytest.mark.parametrize(("processes", "devices", "runs"), [(1, 8, 4), (2, 2, 8)])
def test_collectives_that_xla_reorders_in_whole_programs(tmp_path, processes, devices, runs):
    summary, orders = run(tmp_path, processes, devices, str(runs), "--whole-program")
    assert summary["runs"] == runs
    assert summary["replaced"] > 20
    launches, different = reorder_job.reordered(orders)
    assert launches == runs
    assert different > runs / 2, summary
