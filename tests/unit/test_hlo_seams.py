"""Whole-program mode: buffers that XLA has decided to share before calls are put in."""

from __future__ import annotations

import re

import hlo_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_programs import ALL, grid, on_fabric, transformed
from jax.sharding import PartitionSpec as P

from jaxfabric import _compat, hlo

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("whole_program")
def test_a_loop_whose_values_change_places():
    """One collective becomes two calls, and the result of the first lies where the operand of the
    second was made from."""
    mesh = grid(i=8)

    def f(x):
        def step(_, state):
            a, b = state
            return jax.lax.psum(b, "i") / 8, jax.lax.psum(jnp.tanh(a) * 3, "i") / 8

        return jax.lax.fori_loop(0, 5, step, (x, x * 2))

    x = np.random.default_rng(3).normal(size=(8 * 64, 64)).astype(np.float32)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    got = on_fabric(mapped, x, ops={"all_reduce"}, donate_argnums=0)
    assert len(hlo.records()) == 1, "XLA has not combined them, so this has tested nothing"
    hlo.uninstall()
    jax.clear_caches()
    for ours, theirs in zip(got, jax.jit(mapped)(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("whole_program")
@pytest.mark.parametrize("around", ["nothing", "a loop", "other uses", "operations", "a product"])
def test_what_is_around_an_all_to_all(around):
    """Slices before and a concatenation behind fall away where that is safe."""
    mesh = grid(i=8)
    x = np.random.default_rng(4).normal(size=(8 * 64, 64)).astype(np.float32)

    def exchange(x):
        return jax.lax.all_to_all(x, "i", 0, 0, tiled=True)

    def exchange_blocks(x):
        return x.reshape(8, 8, 8, 64).swapaxes(0, 1).reshape(x.shape)

    def f(x, exchange=exchange, loop=jax.lax.fori_loop):
        if around == "a loop":
            return loop(0, 3, lambda _, x: exchange(x), x)
        if around == "other uses":

            def step(_, x):
                return exchange(x) + x[..., ::-1, :] * x.sum((-2, -1), keepdims=True) / 64

            return loop(0, 3, step, x) + exchange(x) + x
        if around == "operations":
            return exchange(x * x + 1) * 3 - 1
        if around == "a product":
            return exchange(x @ np.ones((64, 64), x.dtype)) @ x
        return exchange(x)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    program, fabric, xla = programs.compiled(mapped, x, donate_argnums=0)
    assert not xla
    assert set(fabric) == {"all_to_all"}
    if around == "a loop":
        assert " concatenate(" not in program.as_text()
        assert "calls=%wrapped_slice" not in program.as_text()

    def loop(start, stop, step, x):
        for i in range(start, stop):
            x = step(i, x)
        return x

    want = f(x.reshape(8, 64, 64), exchange_blocks, loop).reshape(x.shape)
    np.testing.assert_allclose(np.asarray(program(x)), want, rtol=1e-4, atol=1e-4)


def test_calls_of_one_collective_come_after_all_its_operands():
    """The result of one may lie where the operand of another was made from."""
    pair = "(f32[4]{0}, f32[4]{0})"
    result = transformed(
        [
            f"%p = {pair} parameter(0)",
            "%one = f32[4]{0} get-tuple-element(%p), index=0",
            "%two = f32[4]{0} get-tuple-element(%p), index=1",
            "%three = f32[4]{0} copy(%one)",
            f"ROOT %r = {pair} all-reduce(%two, %three), {ALL}, to_apply=%add",
        ]
    )
    text = _compat.parse_hlo(result.data).to_string()
    calls = re.findall(r"= .* custom-call\([^)]*\).*control-predecessors=\{([^}]*)\}", text)
    assert [sorted(call.split(", ")) for call in calls] == [["%three", "%two"]] * 2


def exchange(before, behind):
    parts = "f32[2,4]{1,0}"
    slices = [
        f"%cut{i} = {parts} slice(%x), slice={{[{2 * i}:{2 * i + 2}], [0:4]}}" for i in (0, 1)
    ]
    elements = [f"%g{i} = {parts} get-tuple-element(%r), index={i}" for i in (0, 1)]
    result = transformed(
        [
            "%p = f32[4,4]{1,0} parameter(0)",
            *before,
            *slices,
            f"%r = ({parts}, {parts}) all-to-all(%cut0, %cut1), channel_id=1, replica_groups={{}}",
            *elements,
            *behind,
        ],
        devices=(0, 1),
    )
    lines = _compat.parse_hlo(result.data).to_string().split("ENTRY")[1].splitlines()[1:-1]
    return [match[1] for line in lines if (match := re.search(r" ([\w-]+)\(", line))]


JOIN = "concatenate(%g0, %g1), dimensions={0}"
FROM = "%x = f32[4,4]{1,0} copy(%p)"


@pytest.mark.parametrize(
    ("before", "behind", "ops"),
    [
        # The source is an array of its own: nothing else is needed.
        (
            [FROM],
            [f"%j = f32[4,4]{{1,0}} {JOIN}", "ROOT %o = f32[4,4]{1,0} copy(%j)"],
            ["parameter", "copy", "bitcast", "custom-call", "bitcast", "copy"],
        ),
        # It is the program's argument, whose buffer may be that of the result.
        (
            ["%x = f32[4,4]{1,0} bitcast(%p)"],
            [f"%j = f32[4,4]{{1,0}} {JOIN}", "ROOT %o = f32[4,4]{1,0} copy(%j)"],
            ["parameter", "bitcast", "copy", "bitcast", "custom-call", "bitcast", "copy"],
        ),
        # A slice has another use: what uses it may change the source.
        (
            [FROM],
            [
                f"%j = f32[4,4]{{1,0}} {JOIN}",
                "ROOT %o = (f32[4,4]{1,0}, f32[2,4]{1,0}) tuple(%j, %cut0)",
            ],
            [
                *("parameter", "copy", "slice", "bitcast", "slice", "bitcast", "concatenate"),
                *("custom-call", "bitcast", "tuple"),
            ],
        ),
        # The parts are put together in another order.
        (
            [FROM],
            [
                "%j = f32[4,4]{1,0} concatenate(%g1, %g0), dimensions={0}",
                "ROOT %o = f32[4,4]{1,0} copy(%j)",
            ],
            [
                *("parameter", "copy", "bitcast", "custom-call", "slice", "bitcast", "slice"),
                *("bitcast", "tuple", "get-tuple-element", "get-tuple-element", "concatenate"),
                "copy",
            ],
        ),
        # Not rows, but columns.
        (
            [FROM],
            [
                "%j = f32[2,8]{1,0} concatenate(%g0, %g1), dimensions={1}",
                "ROOT %o = f32[2,8]{1,0} copy(%j)",
            ],
            [
                *("parameter", "copy", "bitcast", "custom-call", "slice", "bitcast", "slice"),
                *("bitcast", "tuple", "get-tuple-element", "get-tuple-element", "concatenate"),
                "copy",
            ],
        ),
    ],
)
def test_seams_of_an_all_to_all(before, behind, ops):
    assert exchange(before, behind) == ops
