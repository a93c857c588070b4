"""jaxfabric.lax against numpy; each type, and jax.lax beside it, in tests/conformance."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxfabric import lax

LINE = {"i": 8}
GRID = {"i": 2, "j": 4}

AXES = {
    "line": (LINE, ("i",)),
    "minor": (GRID, ("j",)),
    "major": (GRID, ("i",)),
    "both": (GRID, ("i", "j")),
    "swapped": (GRID, ("j", "i")),
}


def size_of(shape, axes):
    return int(np.prod([shape[axis] for axis in axes]))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("where", AXES)
@pytest.mark.parametrize("op", model.OPS)
def test_values(op, where, check_vma):
    shape, axes = AXES[where]
    n = size_of(shape, axes)
    table = model.calls(op, n)
    blocks = model.blocks_for(shape, n)
    mesh = model.grid(shape)

    f = model.per_rank(
        lambda x: {call.name: call.run(lax, x, axes) for call in table}, mesh, check_vma=check_vma
    )
    model.check(table, jax.jit(f)(blocks), blocks, shape, axes)


def test_mean_of_integers_is_float_and_sum_of_booleans_is_integer():
    mesh = model.grid(LINE)
    f = model.per_rank(
        lambda x: (lax.pmean(x, "i"), lax.psum(x > 3, "i"), lax.pmean(x > 3, "i")), mesh
    )
    a, b, c = jax.jit(f)(np.arange(8))
    assert (a.dtype, b.dtype, c.dtype) == (jnp.float32, jnp.int32, jnp.float32)
    assert (a[0], b[0], c[0]) == (3.5, 4, 0.5)


def test_mean_of_wide_integers_over_uneven_groups_is_as_wide():
    mesh = model.grid({"i": 4})
    with jax.enable_x64(True):
        f = model.per_rank(
            lambda x: (
                lax.pmean(x, "i", axis_index_groups=[[0], [1, 2, 3]]),
                lax.pmean(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
            ),
            mesh,
        )
        uneven, even = jax.jit(f)(np.arange(4, dtype=np.int64))
    assert (uneven.dtype, even.dtype) == (np.float64, np.float64)
    np.testing.assert_array_equal(uneven, [0, 2, 2, 2])


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("op", ["psum", "pmax", "all_gather", "ppermute", "psum_scatter"])
def test_results_are_as_weakly_typed_as_those_of_jax_lax(op, check_vma):
    mesh = model.grid({"i": 4})
    call = {
        "ppermute": lambda m, v: m.ppermute(v, "i", [(0, 1)]),
        "psum_scatter": lambda m, v: m.psum_scatter(v, "i"),
    }.get(op, lambda m, v: getattr(m, op)(v, "i"))

    def weak(module):
        f = model.per_rank(
            lambda x: call(module, jnp.where(x > 1, 2.0, 1.0)), mesh, check_vma=check_vma
        )
        return jax.jit(f).trace(np.zeros((4, 4), np.float32)).jaxpr.out_avals[0].weak_type

    assert weak(lax) == weak(jax.lax)


def test_signed_zero_nan_and_infinity_survive_moves():
    values = np.array([[-0.0, np.nan], [np.inf, -np.inf], [1e-45, -0.0], [0.0, 1.0]], np.float32)
    mesh = model.grid({"i": 4})
    f = model.per_rank(
        lambda x: (lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]), lax.pmax(x, "i")), mesh
    )
    moved, largest = jax.jit(f)(values)
    np.testing.assert_array_equal(
        np.asarray(moved).view(np.uint32), np.roll(values, 1, 0).view(np.uint32)
    )
    np.testing.assert_array_equal(np.asarray(largest[0]), [np.inf, np.nan])


@pytest.mark.parametrize("block", [(), (1,), (0,), (4, 0), (3, 5)], ids=str)
def test_edge_shapes(block):
    shape = {"i": 4}
    blocks = model.blocks_for(shape, 4, block=block)
    mesh = model.grid(shape)

    def f(x):
        wide = jnp.broadcast_to(x, (4, *x.shape)) * jnp.arange(4.0).reshape(4, *[1] * x.ndim)
        return {
            "psum": lax.psum(x, "i"),
            "all_gather": lax.all_gather(x, "i"),
            "psum_scatter": lax.psum_scatter(wide, "i"),
            "all_to_all": lax.all_to_all(wide, "i", 0, 0),
            "ppermute": lax.ppermute(x, "i", [(0, 3)]),
            "pbroadcast": lax.pbroadcast(x, "i", 1),
            "barrier": lax.barrier("i", x),
        }

    results = jax.tree.map(np.asarray, jax.jit(model.per_rank(f, mesh))(blocks))
    sums = blocks.sum(0)
    np.testing.assert_array_equal(results["psum"], np.stack([sums] * 4))
    np.testing.assert_array_equal(results["all_gather"], np.stack([blocks] * 4))
    np.testing.assert_array_equal(results["psum_scatter"], np.stack([sums * r for r in range(4)]))
    np.testing.assert_array_equal(results["all_to_all"], np.stack([blocks * r for r in range(4)]))
    np.testing.assert_array_equal(results["ppermute"][3], blocks[0])
    assert not results["ppermute"][:3].any()
    np.testing.assert_array_equal(results["pbroadcast"], np.stack([blocks[1]] * 4))
    np.testing.assert_array_equal(results["barrier"], blocks)


@pytest.mark.parametrize("op", model.OPS)
def test_one_rank_needs_no_fabric(op):
    mesh = model.grid({"i": 1, "j": 4})
    calls = {
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True),
        "pswapaxes": lambda x: lax.pswapaxes(x[None], "i", 0)[0],
        "all_gather": lambda x: lax.all_gather(x, "i", tiled=True),
        "ppermute": lambda x: lax.ppermute(x, "i", [(0, 0)]),
        "pshuffle": lambda x: lax.pshuffle(x, "i", [0]),
        "pbroadcast": lambda x: lax.pbroadcast(x, "i", 0),
        "barrier": lambda x: lax.barrier("i", x),
    }
    f = jax.jit(model.per_rank(calls.get(op, lambda x: getattr(lax, op)(x, "i")), mesh))
    x = model.blocks_for({"j": 4}, 4)
    assert "jaxfabric" not in f.lower(x).as_text()
    np.testing.assert_array_equal(np.asarray(f(x)), x)


def test_pytrees_and_constants():
    mesh = model.grid(LINE)

    def f(x):
        tree = {"a": x, "b": [x.astype(jnp.int32), 3]}
        return (
            lax.psum(tree, "i"),
            lax.all_gather(tree["b"][:1], "i"),
            lax.barrier("i", tree),
            jax.tree.map(lambda v: v, lax.ppermute({"a": x}, "i", [(0, 1)])),
        )

    sums, gathered, held, _ = jax.jit(
        model.per_rank(lambda x: jax.tree.map(jnp.asarray, f(x)), mesh)
    )(np.arange(8.0))
    assert sums["a"][0] == 28
    assert sums["b"][1][0] == 24
    assert gathered[0].shape == (8, 8)
    assert held["b"][1][0] == 3

    def size(x):
        assert lax.psum(1, "i") == 8
        assert lax.psum(2, ("i",), axis_index_groups=[[0, 1], [2, 3], [4, 5], [6, 7]]) == 4
        assert lax.pmean(2.0, "i") == 2.0
        uneven = [[0], [1, 2, 3, 4, 5, 6, 7]]
        return lax.psum(1, "i", axis_index_groups=uneven), lax.pmax(x, ())

    sizes, same = jax.jit(model.per_rank(size, mesh))(np.arange(8.0))
    np.testing.assert_array_equal(sizes, [1] + [7] * 7)
    np.testing.assert_array_equal(same, np.arange(8.0))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_positional_axes(check_vma):
    mesh = model.grid({"i": 4})
    x = np.arange(4 * 6.0).reshape(4, 2, 3)
    f = model.per_rank(
        lambda v: (
            lax.psum(v, ("i", 0)),
            lax.pmax(v, ("i", 1)),
            lax.pmean(v, (0, "i")),
            lax.psum(v, 0),
        ),
        mesh,
        check_vma=check_vma,
    )
    both, largest, mean, local = jax.jit(f)(x)
    np.testing.assert_array_equal(both[0], x.sum((0, 1)))
    np.testing.assert_array_equal(largest[0], x.max((0, 2)))
    np.testing.assert_allclose(mean[0], x.mean((0, 1)))
    np.testing.assert_array_equal(local, x.sum(1))


def test_random_keys_move():
    mesh = model.grid({"i": 4})
    keys = jax.random.split(jax.random.key(0), 4)
    f = jax.shard_map(
        lambda k: lax.ppermute(k, "i", [(i, (i + 1) % 4) for i in range(4)]),
        mesh=mesh,
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec("i"),
    )
    moved = jax.jit(f)(keys)
    np.testing.assert_array_equal(
        jax.random.key_data(moved), np.roll(jax.random.key_data(keys), 1, 0)
    )


def test_broadcast_from_a_traced_source():
    mesh = model.grid({"i": 4})
    f = jax.jit(
        lambda x, r: jax.shard_map(
            lambda v, r: lax.pbroadcast(v, "i", r),
            mesh=mesh,
            in_specs=(PartitionSpec("i"), PartitionSpec()),
            out_specs=PartitionSpec("i"),
        )(x, r)
    )
    for root in range(4):
        np.testing.assert_array_equal(f(np.arange(4), root), [root] * 4)


def test_types_under_check_vma():
    mesh = model.grid(GRID)

    def varying(v):
        return set(jax.typeof(v).mat.varying)

    def f(x):
        wide = jnp.zeros((4, 4)) + x
        once = lax.psum(x, "i")
        assert varying(once) == {"j"}
        assert varying(lax.psum(x, ("i", "j"))) == set()
        assert varying(lax.pmax(once, "j")) == set()
        assert varying(lax.psum(x, "j", axis_index_groups=[[0, 1], [2, 3]])) == {"i", "j"}
        # Invariant operands are cast, as jax.lax does.
        assert varying(lax.all_gather(once, "i")) == {"i", "j"}
        assert varying(lax.all_gather(x, "i", to="invarying")) == {"j"}
        assert varying(lax.psum_scatter(wide, "j")) == {"i", "j"}
        assert varying(lax.all_to_all(wide, "j", 0, 0)) == {"i", "j"}
        assert varying(lax.ppermute(x, "i", [(0, 1)])) == {"i", "j"}
        assert varying(lax.pbroadcast(x, "i", 0)) == {"i", "j"}
        assert varying(lax.barrier("i", once)) == {"j"}
        reduced = jax.typeof(lax.all_gather(x, "i", to="reduced")).mat
        assert (set(reduced.varying), set(reduced.reduced)) == ({"j"}, {"i"})
        partial = jax.lax.pcast(x, "i", to="unreduced")
        assert varying(lax.psum(partial, "i")) == {"j"}
        rows = lax.psum_scatter(jax.lax.pcast(wide, "j", to="unreduced"), "j")
        return lax.psum(x, ("i", "j")), lax.psum(partial, "i"), lax.psum(rows, "i")

    total, over_i, rows = jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=PartitionSpec(("i", "j")),
            out_specs=(PartitionSpec(), PartitionSpec("j"), PartitionSpec("j")),
        )
    )(np.arange(8.0))
    np.testing.assert_array_equal(total, [28])
    np.testing.assert_array_equal(over_i, [4, 6, 8, 10])
    np.testing.assert_array_equal(rows, [28] * 16)


@pytest.mark.parametrize("op", [op for op in model.OPS if op != "barrier"])
def test_signatures(op):
    def shape(f):
        return [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]

    assert shape(getattr(lax, op)) == shape(getattr(jax.lax, op))
    assert op in lax.__all__
