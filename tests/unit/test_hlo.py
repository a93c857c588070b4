"""Whole-program mode: what the partitioner inserts runs on the fabric, and is right."""

from __future__ import annotations

import re

import hlo_programs as programs
import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from hlo_programs import constrain, grid, on_fabric, put
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfabric
from jaxfabric import _compat, hlo

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("whole_program")]


def numbers(*shape, dtype=np.float32):
    return (np.arange(np.prod(shape)) % 13 - 6).reshape(shape).astype(dtype)


def test_a_sharded_contraction_is_an_all_reduce():
    mesh = grid(a=2, b=4)
    x, w = numbers(8, 16), numbers(16, 8)
    y, total = on_fabric(
        lambda x, w: (y := constrain(mesh, x @ w, "a", None), y.sum()),
        *(put(mesh, x, "a", "b"), put(mesh, w, "b", None)),
        ops={"all_reduce"},
    )
    np.testing.assert_array_equal(y, x @ w)
    assert total == (x @ w).sum()
    assert {r.op for r in hlo.records()} == {"all-reduce"}
    assert all(re.fullmatch(r"test_hlo.py:\d+", r.source) for r in hlo.records())
    assert max(r.bytes for r in hlo.records()) == 4 * 8 * 4
    assert {r.module for r in hlo.records()} == {"jit__lambda"}


@pytest.mark.parametrize(
    ("before", "after", "ops"),
    [
        (("i", None), (None, None), {"all_gather"}),
        ((None, "i"), (None, None), {"all_gather"}),
        (("i", None), (None, "i"), {"all_to_all"}),
        ((None, "i"), ("i", None), {"all_to_all"}),
    ],
)
def test_resharding(before, after, ops):
    mesh = grid(i=8)
    x = numbers(16, 24)
    wanted = NamedSharding(mesh, P(*after))
    y = on_fabric(lambda x: x * 1, put(mesh, x, *before), ops=ops, out_shardings=wanted)
    np.testing.assert_array_equal(y, x)


def test_a_shift_is_a_permute():
    mesh = grid(i=8)
    x = numbers(16, 3)
    y = on_fabric(
        lambda x: constrain(mesh, jnp.roll(x, 1, 0), "i"), put(mesh, x, "i"), ops={"permute"}
    )
    np.testing.assert_array_equal(y, np.roll(x, 1, 0))


@pytest.mark.parametrize("op", [op for op in model.OPS if op != "barrier"])
@pytest.mark.parametrize("axes", [("i",), ("j", "i")])
def test_jax_lax_in_shard_map(op, axes):
    """Calls of the table that jax.lax can do on CPU devices."""
    shape = {"i": 2, "j": 2}
    if op in {"ppermute", "pshuffle"}:
        axes = tuple(sorted(axes))  # In another order jax.lax refuses, or sorts them.
    n = int(np.prod([shape[a] for a in axes]))
    table = [call for call in model.calls(op, n) if call.in_jax]
    if op in {"all_gather", "psum_scatter", "all_to_all"}:
        # Groups of one rank become copies whatever the operation: the others have them. Without
        # tiles jax.lax reshapes around a call with them, in groups or not.
        of_some = [call for call in table if call.groups and n > 2 and "tiled True" in call.name]
        table = [call for call in table if call.groups is None] + of_some
    if not table:
        pytest.skip("jax.lax has no such collective on CPU devices")
    blocks = numbers(4, n, 2 * n, n)
    mesh = model.grid(shape, devices=[3, 0, 6, 5])

    def f(x):
        return {call.name: call.run(jax.lax, x, axes) for call in table}

    program, fabric, xla = programs.compiled(model.per_rank(f, mesh, check_vma=False), blocks)
    assert fabric
    assert not xla
    assert all(record.taken for record in hlo.records())
    model.check(table, program(blocks), blocks, shape, axes)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float64", "complex64"]
)
def test_types(dtype):
    with jax.enable_x64(True):
        mesh = grid(i=8)
        x = np.asarray(
            jnp.asarray(numbers(16, 8) > 0 if dtype == "bool" else numbers(16, 8), dtype)
        )

        def f(x):
            total = jax.lax.psum(x, "i")
            greatest = total if dtype == "complex64" else jax.lax.pmax(x, "i")
            return total, greatest, jax.lax.all_gather(x, "i"), jax.lax.ppermute(x, "i", [(0, 5)])

        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=P("i"), out_specs=(P(), P(), P(), P("i")), check_vma=False
        )
        total, greatest, rows, moved = on_fabric(
            mapped, x, ops={"all_reduce", "all_gather", "permute"}
        )
        blocks = x.reshape(8, 2, 8)
        want = blocks.astype(total.dtype).sum(0, dtype=total.dtype)
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(greatest, total if dtype == "complex64" else blocks.max(0))
        np.testing.assert_array_equal(rows, blocks)
        want = np.zeros_like(blocks)
        want[5] = blocks[0]
        np.testing.assert_array_equal(moved.reshape(blocks.shape), want)


def test_several_reductions_become_one_of_a_tuple():
    mesh = grid(i=8)
    x, y = numbers(16, 8), numbers(8, 3)

    def f(x, y):
        return jax.lax.psum(x, "i"), jax.lax.psum(y, "i"), jax.lax.pmin(x, "i")

    with_out_specs = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)
    a, b, c = on_fabric(with_out_specs, x, y, ops={"all_reduce"})
    np.testing.assert_array_equal(a, x.reshape(8, 2, 8).sum(0))
    np.testing.assert_array_equal(b, y.reshape(8, 1, 3).sum(0))
    np.testing.assert_array_equal(c, x.reshape(8, 2, 8).min(0))
    # XLA has combined the two sums: this is what the test is about.
    assert [r.op for r in hlo.records()] == ["all-reduce"] * 2
    assert 4 * (16 + 3) in {r.bytes for r in hlo.records()}


def test_partial_manual():
    """An axis that is the compiler's inside shard_map; jaxfabric.lax alone would gather it."""
    mesh = grid(a=2, b=4)
    x, w = numbers(8, 16), numbers(16, 4)

    def f(x, w):
        return jax.lax.psum(jnp.tanh(x) @ w, "a")

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"}, check_vma=False
    )
    args = put(mesh, x, "a", "b"), put(mesh, w, "b", None)
    y = on_fabric(mapped, *args, ops={"all_reduce"})
    np.testing.assert_allclose(y, (np.tanh(x) @ w).reshape(2, 4, 4).sum(0), rtol=1e-5)


def test_donated_arguments():
    """The buffer of an argument is that of the result, which the copies of XLA must respect."""
    mesh = grid(i=8)
    x = numbers(16, 512)
    f = jax.shard_map(
        lambda x: (jax.lax.psum(x, "i"), jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]) + x),
        **{"mesh": mesh, "in_specs": P("i"), "out_specs": P("i"), "check_vma": False},
    )
    program, _, xla = programs.compiled(f, put(mesh, x, "i"), donate_argnums=0)
    assert not xla
    donated = "input_output_alias" in program.as_text()
    assert donated != _compat.forgets_donation()
    given = put(mesh, x, "i")
    total, moved = program(given)
    assert given.is_deleted() == donated
    blocks = x.reshape(8, 2, 512)
    np.testing.assert_array_equal(total, np.tile(blocks.sum(0), (8, 1)))
    want = blocks.copy()
    want[:2] += blocks[1::-1]
    np.testing.assert_array_equal(moved, want.reshape(x.shape))


def test_loops_and_branches():
    mesh = grid(a=2, b=4)
    x = numbers(8, 64)

    def f(x):
        def step(i, x):
            x = jax.lax.psum(x, "b") - jax.lax.ppermute(x, "b", [(0, 1), (2, 3)])
            first = jax.lax.axis_index("a") == 0  # Not the same on all ranks: a group's own.
            return jax.lax.cond(first & (i > 0), lambda x: jax.lax.pmax(x, "b"), lambda x: x + i, x)

        x, _ = jax.lax.scan(lambda x, i: (step(i, x), None), x, jnp.arange(3))
        return jax.lax.while_loop(
            lambda x: jax.lax.pmax(x.max(), "b") < 1e4, lambda x: x * 2 + 3, x
        )

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False
    )
    got = on_fabric(mapped, x, ops={"all_reduce", "permute"}, donate_argnums=0)
    hlo.uninstall()
    jax.clear_caches()
    np.testing.assert_array_equal(got, jax.jit(mapped)(x))


def test_gradient_of_a_sharded_network():
    mesh = grid(data=2, model=4)
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(16, 32)).astype(np.float32),
        "b1": np.zeros(32, np.float32),
        "w2": rng.normal(size=(32, 4)).astype(np.float32),
    }
    specs = {"w1": (None, "model"), "b1": ("model",), "w2": ("model", None)}
    x, y = (rng.normal(size=(8, n)).astype(np.float32) for n in (16, 4))

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w["w1"] + w["b1"]) @ w["w2"] - y) ** 2)

    def step(w, x, y):
        value, grads = jax.value_and_grad(loss)(w, x, y)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
        return value, {name: constrain(mesh, v, *specs[name]) for name, v in new.items()}

    sharded = {name: put(mesh, value, *specs[name]) for name, value in weights.items()}
    args = sharded, put(mesh, x, "data"), put(mesh, y, "data")
    value, new = on_fabric(step, *args, ops={"all_reduce"}, donate_argnums=0)
    hlo.uninstall()
    want, want_new = jax.jit(step)(weights, x, y)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), new, want_new)


def test_constants_come_through():
    """Also those that HLO text abbreviates, or cannot write exactly."""
    mesh = grid(i=8)
    rng = np.random.default_rng(1)
    table = rng.normal(size=(3, 5000)).astype(np.float32)
    table[0, :3] = np.float32([-0.0, np.inf, np.uint32(0x7FC12345).view(np.float32)])

    def f(x):
        return jax.lax.psum(x, "i") * 0 + table[:, ::-1]

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(None, "i"), out_specs=P(), check_vma=False)
    y = on_fabric(mapped, np.zeros((3, 8 * 5000), np.float32), ops={"all_reduce"})
    np.testing.assert_array_equal(y, table[:, ::-1])


def test_many_independent_collectives_in_equal_inner_programs():
    """Enough and large enough that devices enter them in different orders."""
    mesh = grid(i=8)
    inner = jax.jit(lambda x: jax.lax.psum(x, "i") + 1)

    def f(x):
        return sum(inner(x * k) * k + jax.lax.all_gather(x + k, "i").sum(0) for k in range(12))

    x = numbers(8 * 64, 64)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)
    program, _, xla = programs.compiled(mapped, x)
    assert not xla
    total = x.reshape(8, 64, 64).sum(0)
    want = sum((total * k + 1) * k + total + 8 * k for k in range(12))
    for _ in range(10):
        np.testing.assert_array_equal(program(x), want)


def test_with_jaxfabric_lax_in_one_program():
    mesh = grid(a=2, b=4)
    x = numbers(8, 16)

    def f(x):
        return jaxfabric.lax.psum(x, "a") * jax.lax.psum(x, "a")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)
    y = on_fabric(lambda x: mapped(x).sum(0), put(mesh, x, "a"), ops={"all_reduce"})
    np.testing.assert_array_equal(y, (x.reshape(2, 4, 16).sum(0) ** 2).sum(0))
