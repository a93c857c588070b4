"""tests/gpu/run.sh where it cannot run: everywhere without a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(60)


def test_without_a_driver_it_says_so_and_is_skipped():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        reason = f"SKIPPED: needs an NVIDIA driver ({error})"
    else:
        pytest.skip("there is a driver")
    result = subprocess.run(
        [support.ROOT / "tests" / "gpu" / "run.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 77, result.stdout + result.stderr
    table = result.stdout.split("=== GPU checks\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["environment", "all"]
    assert reason in table[0]
