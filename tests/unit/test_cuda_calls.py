"""The fabric's calls in programs for GPUs as XLA:GPU compiles them, without a GPU.

Nothing is run. Needs what test_hlo_cuda.py needs, and says there how to get it. Where the core has
no CUDA handlers, what these alone can show is not looked at.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_hlo_cuda import missing

from jaxfabric import _windowed

pytestmark = pytest.mark.timeout(400)

SCRIPT = pathlib.Path(__file__).with_name("cuda_calls.py")
# By program: the calls, in order.
WANTED = {
    "psum": ["all_reduce"],
    "psum of bfloat16": ["all_reduce"],
    "psum of a part": ["all_reduce"],
    "pmax": ["all_reduce"],
    "all_gather": ["all_gather"],
    "all_gather of columns": ["all_gather"],
    "psum_scatter": ["reduce_scatter"],
    "psum_scatter of columns": ["reduce_scatter"],
    "all_to_all": ["all_to_all"],
    "ragged_all_to_all": ["ragged_all_to_all"],
    "ppermute": ["permute"],
    "pbroadcast": ["broadcast"],
    "barrier": ["barrier"],
    "gradient of psum": ["all_reduce"] * 2,
    "gradient of all_gather": ["all_gather", "reduce_scatter"],
    "gradient of psum_scatter": ["reduce_scatter", "all_gather"],
    "gradient of all_to_all": ["all_to_all"] * 2,
    "vmap of all_gather": ["all_gather"],
    "vmap over the axis": ["all_reduce"],
    "loop": ["all_reduce"],
    "several": ["all_reduce", "permute"] * 3,
    "independent": ["all_reduce"] * 5,
    "norm": ["all_reduce_rms_norm"],
    "gradient of norm": ["all_reduce_rms_norm", "all_reduce"],
}
OPERANDS = {"ragged_all_to_all": 6, "all_reduce_rms_norm": 3}
# Where XLA:GPU puts the arrays of its own collectives with --xla_gpu_enable_nccl_user_buffers: what
# an attribute calls memory space 1.
COLLECTIVE_MEMORY = "S(7)"
IN_WINDOWS = " in windows"
COLLECTIVES = ("all-", "reduce-scatter", "ragged-", "collective-", "copy-")


@pytest.fixture(scope="module")
def found():
    if reason := missing():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "JAXFABRIC_GPU_LIMITS": "*/16=64M"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    if "suitable version of ptxas" in result.stderr:
        pytest.skip("needs ptxas: see the first lines of test_hlo_cuda.py")
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def calls(program):
    return [call for call in program["calls"] if call["target"] != "product"]


@pytest.mark.parametrize("name", WANTED)
def test_calls_are_there_in_order(found, name):
    for topology in ("1x1x4", "1x2x8"):
        if topology not in found[name]:
            continue
        program = found[name][topology]
        assert [call["target"] for call in calls(program)] == WANTED[name]
        assert [call["site"] for call in calls(program)] == program["lowered"]
        # What XLA runs is not there.
        assert not [op for op in program["others"] if op.startswith(COLLECTIVES)]
        for call in calls(program):
            assert call["by_position"] == "0"
            assert call["label"]
            assert call["operands"] == OPERANDS.get(call["target"], 1)
            # The fabric copies into memory of its own; what XLA has stays where it is.
            assert call["spaces"] == []


def added(program):
    """Operations that the program has more of than with XLA's own collectives."""
    ours, own = (program[which]["others"] for which in ("1x1x4", "own"))
    return {op: n for op, n in ours.items() if n > own.get(op, 0)}


@pytest.mark.parametrize("name", [*WANTED, "transformer"])
def test_nothing_is_added_around_them(found, name):
    """Compared with the same program with XLA's own collectives, fusions and copies included."""
    if "own" not in found[name]:
        pytest.skip("XLA has no such collective")
    assert not added(found[name])


def test_arrays_that_peers_address_are_where_windows_can_be(found):
    programs = {name: found[name] for name in found if name.endswith(IN_WINDOWS)}
    assert len(programs) >= 10
    for name, program in programs.items():
        own = name.removesuffix(IN_WINDOWS)
        targets = [call["target"] for call in calls(program["1x1x4"])]
        assert [t.removesuffix("_windows") for t in targets] == WANTED[own]
        for call in calls(program["1x1x4"]):
            op = call["target"].removesuffix("_windows")
            # No sum, or less than 1 MiB.
            copies = own in ("pmax", "psum of bfloat16")
            arrays = 0 if copies else _windowed.ARRAYS[op]
            assert (call["target"] == op) == (arrays == 0)
            assert call["operand spaces"] == [COLLECTIVE_MEMORY] * (arrays & 1), name
            assert call["spaces"] == [COLLECTIVE_MEMORY] * (arrays >> 1), name
        assert not added(program)


def test_work_between_halves_stays_there(found):
    """XLA would start late and wait early: see jaxfabric/_overlap.py."""
    order = [call["target"] for call in found["halves"]["1x1x4"]["calls"]]
    products = ["product", "product", "done"]
    assert order == ["all_gather_start", "reduce_scatter_start", *products, *products]
    first, second = (c for c in found["halves"]["1x1x4"]["calls"] if c["target"] == "done")
    starts = {c["site"]: c["target"] for c in calls(found["halves"]["1x1x4"])[:2]}
    assert starts[first["site"]] == "all_gather_start"
    assert starts[second["site"]] == "reduce_scatter_start"
    for done in (first, second):
        assert (done["operands"], done["aliased"], done["spaces"]) == (3, True, [])
    assert not [op for op in found["halves"]["1x1x4"]["others"] if op.startswith("copy")]


def test_products_run_beside_the_pieces(found):
    start, done, product = "all_gather_start", "done", "product"
    order = [call["target"] for call in found["all_gather_matmul"]["1x1x4"]["calls"]]
    assert order == [start, start, done, product, done, product]
    start = "reduce_scatter_start"
    order = [call["target"] for call in found["matmul_reduce_scatter"]["1x1x4"]["calls"]]
    assert order == [product, start, product, start, done, done]


def test_a_transformer_step(found):
    ours, own = found["transformer"]["1x1x4"], found["transformer"]["own"]
    assert [call["site"] for call in calls(ours)] == ours["lowered"]
    assert not [op for op in ours["others"] if op.startswith(COLLECTIVES)]
    assert ours["others"]["product"] == own["others"]["product"]


def test_a_norm_is_the_call_alone(found):
    assert found["norm"]["1x1x4"]["others"] == {}


def test_small_calls_are_captured(found):
    """XLA makes a command buffer of five operations; the handlers say that it may."""
    buffers = found["command buffers"]
    assert buffers["calls"] == 7
    assert buffers["captured"] == buffers["calls"]


def test_all_programs_are_looked_at(found):
    fused = {"all_gather_matmul", "matmul_reduce_scatter"}
    windows = {name for name in found if name.endswith(IN_WINDOWS)}
    assert {*found} == {*WANTED, *fused, *windows, "halves", "transformer", "command buffers"}
