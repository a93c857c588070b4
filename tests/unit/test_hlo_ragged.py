"""Whole-program mode: ragged_all_to_all, which XLA:CPU has no code for."""

from __future__ import annotations

import re

import hlo_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_programs import grid, transformed
from jax.sharding import PartitionSpec as P

from jaxfabric import _compat, hlo

pytestmark = pytest.mark.timeout(120)
RANKS, SLICES, ROWS, OUT = 4, 8, 24, 40


def arrays(dtype, counts):
    """Operands and outputs of all ranks, and what each rank sends where: int[ranks, slices]."""
    rng = np.random.default_rng(6)
    sizes = rng.integers(0, 4, size=(RANKS, SLICES)).astype(counts)
    sizes[:, 3] = 0
    starts = np.stack([rng.permutation(SLICES) * 3 for _ in range(RANKS)]).astype(counts)
    # Slice k of rank r begins where no other one does on its receiver.
    each = SLICES // RANKS
    rank, k = np.indices(sizes.shape)
    places = (((k % each) * RANKS + rank) * 5).astype(counts)
    received = sizes.reshape(RANKS, RANKS, each).transpose(1, 0, 2).reshape(RANKS, SLICES)
    rows = rng.integers(0, 99, size=(RANKS, ROWS, 3)).astype(dtype)
    initial = np.full((RANKS, OUT, 3), 7).astype(dtype)
    return rows, initial, starts, sizes, places, received


def exchanged(rows, initial, starts, sizes, places, received):
    del received
    want = initial.copy()
    for rank in range(RANKS):
        for k, (start, size, place) in enumerate(
            zip(starts[rank], sizes[rank], places[rank], strict=True)
        ):
            to = k // (SLICES // RANKS)
            want[to, place : place + size] = rows[rank, start : start + size]
    return want


def mapped(groups=None):
    def f(*args):
        own = jax.lax.ragged_all_to_all(
            *(x[0] for x in args), axis_name="i", axis_index_groups=groups
        )
        return own[None]

    mesh = grid(i=RANKS)
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)


@pytest.mark.usefixtures("whole_program")
@pytest.mark.parametrize(
    ("dtype", "counts"), [("float32", "int32"), ("bool", "int64"), ("bfloat16", "uint32")]
)
def test_slices_of_any_length(dtype, counts):
    with jax.enable_x64(True):
        given = arrays(jnp.dtype(dtype), counts)
        y = programs.on_fabric(mapped(), *given, ops={"ragged_all_to_all"})
    np.testing.assert_array_equal(y, exchanged(*given))
    (record,) = hlo.records()
    assert record.op == "ragged-all-to-all"


@pytest.mark.usefixtures("whole_program")
def test_ranks_on_their_own():
    """They copy slices, where any other collective of one rank copies its operand."""
    rows, initial, starts, sizes, places, _ = arrays(np.float32, np.int32)
    places = np.tile(np.arange(SLICES, dtype=np.int32) * 5, (RANKS, 1))
    y = programs.on_fabric(
        mapped([[rank] for rank in range(RANKS)]),
        *(rows, initial, starts, sizes, places, sizes),
        ops={"ragged_all_to_all"},
    )
    want = initial.copy()
    for rank, k in np.ndindex(RANKS, SLICES):
        start, size, place = starts[rank, k], sizes[rank, k], places[rank, k]
        want[rank, place : place + size] = rows[rank, start : start + size]
    np.testing.assert_array_equal(y, want)


def relaid(text):
    """Columns instead of rows lie together: the operand's, the output's and the result's."""

    def replace(match):
        root, name, shape, operands, rest = match.groups()
        rows, initial, *metadata = (re.sub(r"/\*.*?\*/", "", o) for o in operands.split(", "))
        lines = [
            f"{name}.rows = f32[{ROWS},3]{{0,1}} copy({rows})",
            f"{name}.initial = {shape}{{0,1}} copy({initial})",
            f"{name}.out = {shape}{{0,1}} ragged-all-to-all({name}.rows, {name}.initial, "
            f"{', '.join(metadata)}){rest}",
            f"{root or ''}{name} = {shape}{{1,0}} copy({name}.out)",
        ]
        return "\n  ".join(lines)

    call = r"(ROOT )?(%[\w.-]+) = (f32\[\d+,3\])\{1,0\} ragged-all-to-all\((.*?)\)(, .*)"
    return re.sub(call, replace, text)


@pytest.mark.usefixtures("whole_program")
def test_rows_that_do_not_lie_together():
    given = arrays(np.float32, np.int32)
    with programs.edited(relaid):
        y = programs.on_fabric(mapped(), *given, ops={"ragged_all_to_all"})
    np.testing.assert_array_equal(y, exchanged(*given))


def exchange(operand, result, counts, slices=4):
    counted = f"{counts}[{slices}]{{0}}"
    result = transformed(
        [
            f"%p0 = {operand} parameter(0)",
            f"%p1 = {result} parameter(1)",
            *(f"%p{i} = {counted} parameter({i})" for i in range(2, 6)),
            f"ROOT %r = {result} ragged-all-to-all(%p0, %p1, %p2, %p3, %p4, %p5), channel_id=1, "
            "replica_groups={{0,1},{2,3}}",
        ]
    )
    text = _compat.parse_hlo(result.data).to_string() if result.data else ""
    ops = re.findall(r" (?!parameter)([\w-]+)\(", text.partition("ENTRY")[2])
    return result.records[0], ops, text


def test_offsets_and_sizes_become_64_bits_wide():
    _, ops, text = exchange("f32[8,3]{1,0}", "f32[6,3]{1,0}", "s32")
    assert ops == ["convert"] * 4 + ["custom-call"]
    assert "members = array<i64: 4, 5, 6, 7>" in text
    assert "group_sizes = array<i64: 2, 2>" in text
    # XLA:GPU fuses after the pass, and crashes where an operand that it fuses has a successor.
    assert "control-predecessors" not in text
    _, ops, _ = exchange("f32[8,3]{1,0}", "f32[6,3]{1,0}", "s64")
    assert ops == ["custom-call"]


def test_one_row_says_nothing_of_the_rows_of_the_other():
    _, ops, _ = exchange("f32[8,3]{0,1}", "f32[1,3]{0,1}", "s64")
    assert ops == ["copy", "custom-call"]


@pytest.mark.parametrize(
    ("operand", "counts", "slices", "reason"),
    [
        ("s4[8,3]{1,0}", "s64", 4, "the element type s4"),
        ("f32[8,3]{1,0}", "s64", 3, "offsets and sizes s64\\[3\\]{0}.* for 2 ranks"),
    ],
)
def test_what_is_left_to_xla(operand, counts, slices, reason):
    record, _, text = exchange(operand, operand, counts, slices)
    assert not record.taken
    assert not text
    assert re.match(reason, record.reason), record.reason
