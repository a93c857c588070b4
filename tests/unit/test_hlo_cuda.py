r"""Whole-program mode: the pass over programs for GPUs, compiled by XLA:GPU without one.

Nothing is run. Needs JAX's CUDA plugin and ptxas, but no driver:

    pip install --target DIR --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION \
        nvidia-cuda-nvcc
    PYTHONPATH=DIR pytest tests/unit/test_hlo_cuda.py

with the version of JAX as VERSION.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.timeout(300)

SCRIPT = pathlib.Path(__file__).with_name("cuda_programs.py")
# By program: what the pass sees, and what calls it becomes.
WANTED = {
    "matmul": (["all-reduce"], ["all_reduce"]),
    "rows to all": (["all-gather"], ["all_gather"]),
    "columns to all": (["all-gather"], ["all_gather"]),
    "rows to columns": (["all-to-all"], ["all_to_all"]),
    "roll": (["collective-permute"], ["permute"]),
    "psum_scatter": (["reduce-scatter"], ["reduce_scatter"]),
    "all_to_all": (["all-to-all"], ["all_to_all"]),
    "pbroadcast": (["collective-broadcast"], ["broadcast"]),
    "several": (["all-reduce"] * 2, ["all_reduce"] * 2),
    "loop": (["all-reduce"], ["all_reduce"]),
    "ragged_all_to_all": (["ragged-all-to-all"], ["ragged_all_to_all"]),
    "a large one": (["all-reduce"] * 2, []),
    "product": (["all-reduce"], []),
}


# By program: why XLA keeps its collectives.
LEFT = {
    "product": ["the reduction multiply"],
    "a large one": [
        "^64 MiB is not below 64 MiB",
        "^the program has all-reduce at cuda_programs.py:[0-9]+: 64 MiB is not below 64 MiB",
    ],
}


def missing() -> str:
    """Why no program can be compiled for a GPU here, or ""."""
    if jax.__version_info__ < (0, 12):
        return "tried with JAX 0.12 only"
    # The namespace jax_plugins is there only if some plugin is.
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs JAX's CUDA plugin: see the file's first lines"
    return ""


@pytest.fixture(scope="module")
def found():
    if reason := missing():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    programs = json.loads(result.stdout.splitlines()[-1])
    if "suitable version of ptxas" in str(programs):
        pytest.skip("needs ptxas: see the file's first lines")
    return programs


# One host with 4 GPUs, and two with 8.
@pytest.mark.parametrize("topology", ["1x1x4", "1x2x8"])
@pytest.mark.parametrize("program", WANTED)
def test_a_program_for_gpus(found, program, topology):
    seen, fabric = WANTED[program]
    left = LEFT.get(program, [])
    got = dict(found[topology][program])
    reasons = got.pop("reasons")
    assert len(reasons) == len(left)
    assert all(re.search(want, got) for want, got in zip(left, reasons, strict=True)), reasons
    xla = seen if left else []
    assert got == {"seen": seen, "fabric": fabric, "xla": xla}


@pytest.mark.parametrize("topology", ["1x1x4", "1x2x8"])
def test_small_calls_are_captured(found, topology):
    """As those are that JAX lowers: see test_cuda_calls.py."""
    assert found[topology]["command buffers"] == {"calls": 6, "captured": 6}


def test_all_programs_are_looked_at(found):
    for programs in found.values():
        assert {*programs} == {*WANTED, "command buffers"}
