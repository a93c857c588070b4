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

pytestmark = pytest.mark.timeout(600)

SCRIPT = pathlib.Path(__file__).with_name("cuda_calls.py")
DONATED = "psum of a donated array"
# By program: the calls, in order.
WANTED = {
    "psum": ["all_reduce"],
    "psum of bfloat16": ["all_reduce"],
    "psum of a part": ["all_reduce"],
    DONATED: ["all_reduce"],
    "pmax": ["all_reduce"],
    "pmin": ["all_reduce"],
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
# By the op whose halves a program has: the target of the first.
STARTS = {
    "psum": "all_reduce_start",
    "all_gather": "all_gather_start",
    "psum_scatter": "reduce_scatter_start",
    "all_to_all": "all_to_all_start",
    "ppermute": "permute_start",
    "psend": "permute_start",
}
# One host with 4 GPUs, and two with 8.
TOPOLOGIES = ("1x1x4", "1x2x8")
on_topologies = pytest.mark.parametrize("topology", TOPOLOGIES)
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
        timeout=580,
        check=False,
    )
    if "suitable version of ptxas" in result.stderr:
        pytest.skip("needs ptxas: see the first lines of test_hlo_cuda.py")
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def calls(program):
    return [call for call in program["calls"] if call["target"] != "product"]


@pytest.mark.parametrize("name", WANTED)
@on_topologies
def test_calls_are_there_in_order(found, topology, name):
    program = found[name][topology]
    assert [call["target"] for call in calls(program)] == WANTED[name]
    assert [call["site"] for call in calls(program)] == program["lowered"]
    assert program["donated"] == (name == DONATED)
    # What XLA runs is not there.
    assert not [op for op in program["others"] if op.startswith(COLLECTIVES)]
    for call in calls(program):
        assert call["by_position"] == "0"
        assert call["label"]
        assert call["operands"] == OPERANDS.get(call["target"], 1)
        # The fabric copies into memory of its own; what XLA has stays where it is.
        assert call["spaces"] == []


def added(programs, topology):
    """Operations that the program has more of than with XLA's own collectives."""
    ours, own = (programs[which]["others"] for which in (topology, f"{topology}, own"))
    return {op: n for op, n in ours.items() if n > own.get(op, 0)}


@pytest.mark.parametrize("name", [*WANTED, "transformer"])
@on_topologies
def test_nothing_is_added_around_them(found, topology, name):
    """Compared with the same program with XLA's own collectives, fusions and copies included."""
    if f"{topology}, own" not in found[name]:
        pytest.skip("XLA has no such collective")
    assert not added(found[name], topology)


@on_topologies
def test_arrays_that_peers_address_are_where_windows_can_be(found, topology):
    programs = {name: found[name] for name in found if name.endswith(IN_WINDOWS)}
    assert len(programs) >= 10
    for name, program in programs.items():
        own = name.removesuffix(IN_WINDOWS)
        targets = [call["target"] for call in calls(program[topology])]
        assert [t.removesuffix("_windows") for t in targets] == WANTED[own]
        for call in calls(program[topology]):
            op = call["target"].removesuffix("_windows")
            # No sum, or less than 1 MiB.
            copies = own in ("pmax", "psum of bfloat16")
            arrays = 0 if copies else _windowed.ARRAYS[op]
            assert (call["target"] == op) == (arrays == 0)
            assert call["operand spaces"] == [COLLECTIVE_MEMORY] * (arrays & 1), name
            assert call["spaces"] == [COLLECTIVE_MEMORY] * (arrays >> 1), name
        assert not added(program, topology)


@on_topologies
def test_work_between_halves_stays_there(found, topology):
    """XLA would start late and wait early: see jaxfabric/_overlap.py."""
    program = found["halves"][topology]
    order = [call["target"] for call in program["calls"]]
    products = ["product", "product", "done"]
    assert order == ["all_gather_start", "reduce_scatter_start", *products, *products]
    first, second = (c for c in program["calls"] if c["target"] == "done")
    starts = {c["site"]: c["target"] for c in calls(program)[:2]}
    assert starts[first["site"]] == "all_gather_start"
    assert starts[second["site"]] == "reduce_scatter_start"
    for done in (first, second):
        assert (done["operands"], done["aliased"], done["spaces"]) == (3, True, [])
    assert not [op for op in program["others"] if op.startswith("copy")]


@pytest.mark.parametrize("name", STARTS)
@on_topologies
def test_every_op_has_halves(found, topology, name):
    program = found[f"start of {name}"][topology]
    order = [call["target"] for call in program["calls"]]
    assert order == [STARTS[name], "product", "product", "done"]
    start, done = calls(program)
    assert (start["site"], start["operands"], start["spaces"]) == (done["site"], 1, [])
    assert (done["operands"], done["aliased"], done["spaces"]) == (3, True, [])
    assert not [op for op in program["others"] if op.startswith(COLLECTIVES)]


@on_topologies
def test_products_run_beside_the_pieces(found, topology):
    start, done, product = "all_gather_start", "done", "product"
    order = [call["target"] for call in found["all_gather_matmul"][topology]["calls"]]
    assert order == [start, start, done, product, done, product]
    start = "reduce_scatter_start"
    order = [call["target"] for call in found["matmul_reduce_scatter"][topology]["calls"]]
    assert order == [product, start, product, start, done, done]


@on_topologies
def test_a_transformer_step(found, topology):
    ours, own = (found["transformer"][which] for which in (topology, f"{topology}, own"))
    assert [call["site"] for call in calls(ours)] == ours["lowered"]
    assert not [op for op in ours["others"] if op.startswith(COLLECTIVES)]
    assert ours["others"]["product"] == own["others"]["product"]


@on_topologies
def test_a_norm_is_the_call_alone(found, topology):
    assert found["norm"][topology]["others"] == {}


@on_topologies
def test_small_calls_are_captured(found, topology):
    """XLA makes a command buffer of five operations; the handlers say that it may."""
    buffers = found["command buffers"][topology]
    assert buffers["calls"] == 7
    assert buffers["captured"] == buffers["calls"]


def test_all_programs_are_looked_at(found):
    fused = {"all_gather_matmul", "matmul_reduce_scatter"}
    windows = {name for name in found if name.endswith(IN_WINDOWS)}
    starts = {f"start of {name}" for name in STARTS}
    others = {"halves", "transformer", "command buffers"}
    assert {*found} == {*WANTED, *fused, *windows, *starts, *others}
