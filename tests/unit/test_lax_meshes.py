"""The collectives on every kind of mesh: permuted, partial, abstract, nested, explicit."""

from __future__ import annotations

import jax
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxfabric
from jaxfabric import lax

GRID = {"i": 2, "j": 4}

MESHES = {
    "reversed": {"devices": [7, 6, 5, 4, 3, 2, 1, 0]},
    "shuffled": {"devices": [3, 0, 6, 5, 1, 7, 4, 2]},
    "explicit": {"explicit": True},
}


@pytest.mark.parametrize("mode", ["jit", "eager"])
@pytest.mark.parametrize("kind", MESHES)
def test_meshes(kind, mode):
    mesh = model.grid(GRID, **MESHES[kind])
    blocks = model.blocks_for(GRID, 4)
    for op in ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast"):
        table = model.calls(op, 4)[:1]
        f = model.per_rank(lambda x: {c.name: c.run(lax, x, ("j",)) for c in table}, mesh)  # noqa: B023
        f = jax.jit(f) if mode == "jit" else f
        model.check(table, f(model.put(blocks, mesh)), blocks, GRID, ("j",))


def test_mesh_over_some_devices_and_another_in_the_next_program():
    for devices in ([5, 1, 6], [2, 7, 0]):
        shape = {"i": 3}
        blocks = model.blocks_for(shape, 3)
        mesh = model.grid(shape, devices=devices)
        for op in ("psum", "all_gather", "psum_scatter"):
            table = model.calls(op, 3)[:1]
            f = jax.jit(
                model.per_rank(lambda x: {c.name: c.run(lax, x, ("i",)) for c in table}, mesh)  # noqa: B023
            )
            model.check(table, f(model.put(blocks, mesh)), blocks, shape, ("i",))


@pytest.mark.parametrize("op", ["psum", "ppermute", "all_gather", "pbroadcast"])
def test_one_program_under_one_mesh_after_another(op):
    """JAX traces the program once for both: what it lowers must not name the first devices."""
    n = 4
    calls = {
        "psum": lambda x: lax.psum(x, "i"),
        "ppermute": lambda x: lax.ppermute(x, "i", [(i, (i + 1) % n) for i in range(n)]),
        "all_gather": lambda x: lax.all_gather(x, "i").reshape(-1)[:1],
        "pbroadcast": lambda x: lax.pbroadcast(x, "i", 2),
    }
    want = {
        "psum": lambda v: np.full(n, v.sum()),
        "ppermute": lambda v: np.roll(v, 1),
        "all_gather": lambda v: np.full(n, v[0]),
        "pbroadcast": lambda v: np.full(n, v[2]),
    }
    spec = PartitionSpec("i")
    # Without a mesh of its own: the one of the context.
    f = jax.jit(jax.shard_map(calls[op], in_specs=spec, out_specs=spec, check_vma=False))
    for first, devices in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [5, 1, 6, 4])):
        mesh = model.grid({"i": n}, devices=devices)
        values = np.arange(n, dtype=np.float32) * 10 + first
        with jax.set_mesh(mesh):
            x = jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))
            np.testing.assert_array_equal(np.asarray(f(x)), want[op](values))


def test_abstract_mesh():
    mesh = model.grid(GRID, devices=[3, 0, 6, 5, 1, 7, 4, 2])
    blocks = model.blocks_for(GRID, 4)
    table = [model.calls(op, 4)[0] for op in ("psum", "all_to_all", "ppermute")]
    f = model.per_rank(lambda x: {c.name: c.run(lax, x, ("j",)) for c in table}, mesh.abstract_mesh)
    model.check(table, jax.jit(f)(model.put(blocks, mesh)), blocks, GRID, ("j",))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_partial_manual(check_vma):
    mesh = model.grid(GRID)
    x = np.arange(8.0 * 4, dtype=np.float32).reshape(8, 4)
    f = jax.shard_map(
        lambda v: (lax.psum(v * 2, "j"), lax.all_gather(v, "j", tiled=True)),
        mesh=mesh,
        axis_names={"j"},
        in_specs=PartitionSpec("j"),
        out_specs=(PartitionSpec(), PartitionSpec("j")),
        check_vma=check_vma,
    )
    spec = jax.sharding.NamedSharding(mesh, PartitionSpec("j", "i"))
    summed, gathered = jax.jit(f)(jax.device_put(x, spec))
    np.testing.assert_array_equal(summed, 2 * x.reshape(4, 2, 4).sum(0))
    np.testing.assert_array_equal(gathered, np.concatenate([x] * 4))


def test_partial_manual_barrier_is_a_clear_error():
    mesh = model.grid(GRID)
    f = jax.shard_map(
        lambda v: lax.barrier("j", v),
        mesh=mesh,
        axis_names={"j"},
        in_specs=PartitionSpec("j"),
        out_specs=PartitionSpec("j"),
    )
    with pytest.raises(NotImplementedError, match=r"barrier .*\['i'\]"):
        jax.jit(f)(np.zeros((8, 4), np.float32))


ORDER = r"axis_name=.*Tracer.*: use the name of an axis .*psum\(x, .*barrier\("
MISTAKES = {
    "the array first": (lambda v: lax.barrier(v, "i"), TypeError, ORDER),
    "the array alone": (lambda v: lax.barrier(v), TypeError, ORDER),
    "psum, the name first": (lambda v: lax.psum("i", v), TypeError, ORDER),
    "all_gather, the name first": (lambda v: lax.all_gather("i", v), TypeError, ORDER),
    "two names": (lambda v: lax.barrier("i", "j"), TypeError, r"x='j': use an array; .*tuple"),
    "unknown": (lambda v: lax.barrier("k", v), NameError, r"axis_name='k' is not bound.*shard_map"),
    "one unknown": (lambda v: lax.barrier(("i", "k")), NameError, r"axis_name='k' is not bound"),
    "nothing": (lambda v: lax.barrier(None), NameError, r"axis_name=None is not bound"),
    "empty": (lambda v: lax.barrier((), v), ValueError, r"axis_name=\(\): .*at least one axis"),
    "twice": (lambda v: lax.barrier(("i", "i"), v), ValueError, r"'i'\): name each axis once"),
    "a dimension": (lambda v: lax.barrier(0, v), TypeError, r"axis_name=0: use the name"),
    "nested": (lambda v: lax.barrier((("i",), "j"), v), TypeError, r"'j'\): use the name"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_axis_is_named_with_the_remedy(mistake):
    f, error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        jax.jit(model.per_rank(f, model.grid(GRID))).trace(np.zeros((8, 4), np.float32))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_nested_shard_maps(check_vma):
    mesh = model.grid(GRID)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)

    def inner(v):
        return lax.psum(lax.psum(v, "j"), "i") if check_vma else lax.psum(v, ("i", "j"))

    def outer(v):
        spec = PartitionSpec(None, "j")
        return jax.shard_map(
            inner, in_specs=spec, out_specs=PartitionSpec(), axis_names={"j"}, check_vma=check_vma
        )(v)

    f = jax.shard_map(
        outer,
        mesh=mesh,
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec(),
        axis_names={"i"},
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x.reshape(2, 4, 4, 2).sum((0, 2)))


def test_without_shardy():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = model.grid(GRID)
    whole = PartitionSpec("i", "j")
    f = jax.shard_map(
        lambda v: (lax.psum(v, "j"), lax.barrier("i", v)),
        mesh=mesh,
        in_specs=whole,
        out_specs=(PartitionSpec("i"), whole),
    )
    part = jax.shard_map(
        lambda v: lax.psum(v, "j"),
        mesh=mesh,
        in_specs=PartitionSpec("j"),
        out_specs=PartitionSpec(),
        axis_names={"j"},
    )
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        summed, held = jax.jit(f)(x)
        with pytest.raises(NotImplementedError, match="without Shardy"):
            jax.jit(part)(x)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    np.testing.assert_array_equal(summed, x.reshape(8, 4, 2).sum(1))
    np.testing.assert_array_equal(held, x)


@pytest.mark.parametrize("module", [jax.lax, lax], ids=["switch", "jaxfabric.lax"])
def test_meshes_of_several_shapes_in_one_program(module):
    line, grid = model.grid({"i": 8}), model.grid({"j": 2, "k": 4})
    whole, rows = PartitionSpec(), PartitionSpec(("j", "k"))
    along_line = jax.shard_map(
        lambda v: module.psum(v, "i"), mesh=line, in_specs=PartitionSpec("i"), out_specs=whole
    )
    along_grid = jax.shard_map(
        lambda v: module.psum(v, "j"), mesh=grid, in_specs=rows, out_specs=PartitionSpec("k")
    )
    values = np.arange(8, dtype=np.float32)
    x = jax.device_put(values, jax.sharding.NamedSharding(grid, rows))
    out = jax.sharding.NamedSharding(line, whole)
    with jaxfabric.enabled():
        f = jax.jit(lambda x: (along_line(x), along_grid(x)), out_shardings=out)
        assert f.lower(x).as_text().count("custom_call @jaxfabric_all_reduce") == 2
        total, sums = f(x)
    np.testing.assert_array_equal(total, [28])
    np.testing.assert_array_equal(sums, values[:4] + values[4:])
