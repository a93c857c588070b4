"""What tests/gpu/run.sh makes of its parts: here none is real."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "gpu" / "run.sh"
PART = """#!/bin/sh
case "$*" in
{cases}
esac
"""
# What is called in each part, and the arguments that tell it.
PARTS = {
    "environment": "*gpu_environment.py",
    "build": "*pip\\ install*",
    "kernels": "*kernel_table.py*",
    "plugin": "*pip\\ show*",
    "Python tests": "*pytest*",
    "C++ tests": "",
    "timings": "*--json*",
}


@pytest.mark.parametrize(
    ("statuses", "code", "last"),
    [
        ({}, 0, "timings"),
        ({"environment": 77}, 77, "environment"),
        ({"build": 2}, 1, "build"),
        ({"kernels": 77}, 77, "kernels"),
        ({"kernels": 1}, 1, "timings"),
        ({"C++ tests": 77}, 0, "timings"),
        ({"plugin": 1}, 0, "timings"),
        ({"plugin": 1, "C++ tests": 77}, 77, "timings"),
        ({"plugin": 1, "C++ tests": 77, "timings": 1}, 1, "timings"),
        ({"Python tests": 1}, 1, "timings"),
        ({"C++ tests": 3}, 1, "timings"),
    ],
)
def test_the_exit_code(tmp_path, statuses, code, last):
    copy = tmp_path / "tests" / "gpu" / "run.sh"
    copy.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)
    cases = "\n".join(
        f"  {pattern}) echo 'SKIPPED: {name}'; exit {statuses.get(name, 0)};;"
        for name, pattern in PARTS.items()
        if pattern
    )
    tests = f"echo 'SKIPPED: C++ tests'; exit {statuses.get('C++ tests', 0)}"
    for name, text in {
        "python": PART.format(cases=cases),
        "build/gpu/jaxfabric_gpu_tests": f"#!/bin/sh\n{tests}\n",
        "build/gpu/jaxfabric_gpu_timings": PART.format(cases=cases),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    result = subprocess.run(
        [copy],
        # Without a compute-sanitizer.
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(tmp_path / "python")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    *_, row, total = result.stdout.splitlines()
    assert row.startswith(last)
    assert total.startswith("all ")
