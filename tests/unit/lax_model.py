"""A numpy model of the collectives, and the table of calls that the tests of jaxfabric.lax run.

A mesh of n ranks is modelled as an array with one block per rank in front. Inputs are small
integers, so that sums are exact in every dtype and any order of summation gives the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: `run(lax, x, axes)` traced, against `model(blocks)` for each communicator."""

    op: str
    name: str
    run: object
    model: object
    groups: tuple | None = None
    in_jax: bool = True  # jax.lax on CPU can do it.
    varies: bool = False  # The result differs between ranks.


def total(blocks):
    dtype = np.dtype(np.int32) if blocks[0].dtype == np.bool_ else blocks[0].dtype
    result = np.zeros(blocks[0].shape, np.complex128 if dtype.kind == "c" else np.float64)
    for block in blocks:
        result = result + block
    return result.astype(dtype)


def everywhere(f):
    return lambda blocks: [f(blocks)] * len(blocks)


def mean(blocks):
    sum_ = total(blocks)
    return sum_ / np.float32(len(blocks)) if sum_.dtype.kind in "iu" else sum_ / len(blocks)


def extremum(f):
    return everywhere(lambda blocks: f.reduce(np.stack(blocks)))


def gathered(axis, tiled):
    return everywhere(lambda b: np.concatenate(b, axis) if tiled else np.stack(b, axis))


def part(block, rank, size, axis, tiled):
    return np.split(block, size, axis)[rank] if tiled else np.take(block, rank, axis)


def scattered(axis, tiled):
    return lambda b: [part(total(b), r, len(b), axis, tiled) for r in range(len(b))]


def exchanged(split, concat, tiled):
    join = np.concatenate if tiled else np.stack

    def model(blocks):
        size = len(blocks)
        return [join([part(b, r, size, split, tiled) for b in blocks], concat) for r in range(size)]

    return model


def permuted(pairs):
    def model(blocks):
        result = [np.zeros_like(blocks[0]) for _ in blocks]
        for source, destination in pairs:
            result[destination] = blocks[source]
        return result

    return model


def group_choices(n):
    """Even and uneven axis_index_groups of n ranks, none of them in order."""
    even = {2: ((1,), (0,)), 3: None, 4: ((3, 0), (1, 2)), 8: ((7, 0, 5, 2), (1, 4, 3, 6))}[n]
    return even, ((n - 1,), tuple(range(n - 1)))


def calls(op, n):
    """All calls of `op` on n ranks for blocks of shape (n, 2 * n, n)."""
    even, uneven = group_choices(n)
    table = []

    def add(name, run, model, **kwargs):
        table.append(Call(op, name, run, model, **kwargs))

    reductions = {
        "psum": everywhere(total),
        "pmean": everywhere(mean),
        "pmax": extremum(np.maximum),
        "pmin": extremum(np.minimum),
    }
    if op in reductions:
        model = reductions[op]
        add("all", lambda lax, x, a: getattr(lax, op)(x, a), model)
        for kind, groups in (("even", even), ("uneven", uneven)):
            if groups is None:
                continue
            add(
                f"{kind} groups",
                lambda lax, x, a, g=groups: getattr(lax, op)(x, a, axis_index_groups=g),
                model,
                groups=groups,
                # Of uneven groups jax.lax takes the first one's size for the mean.
                in_jax=not (op == "pmean" and kind == "uneven"),
                varies=True,
            )
        return table

    groupings = [(None, n)] + ([(even, len(even[0]))] if even else [])
    for groups, m in groupings:
        keywords = {} if groups is None else {"axis_index_groups": groups}
        suffix = "" if groups is None else " in groups"
        shared = {"groups": groups, "varies": True}
        if op == "all_gather":
            for axis, tiled in itertools.product((0, 1, -1), (False, True)):
                add(
                    f"axis {axis} tiled {tiled}{suffix}",
                    lambda lax, x, a, d=axis, t=tiled, k=keywords: lax.all_gather(
                        x, a, axis=d, tiled=t, **k
                    ),
                    gathered(axis, tiled),
                    **shared,
                )
        elif op == "psum_scatter":
            for axis, tiled in ((0, False), (2, False), (0, True), (1, True), (-1, True)):
                add(
                    f"dimension {axis} tiled {tiled}{suffix}",
                    lambda lax, x, a, d=axis, t=tiled, k=keywords, m=m: lax.psum_scatter(
                        x if t else x[:m, :, :m], a, scatter_dimension=d, tiled=t, **k
                    ),
                    lambda b, d=axis, t=tiled, m=m: scattered(d, t)(
                        b if t else [v[:m, :, :m] for v in b]
                    ),
                    in_jax=axis >= 0,
                    **shared,
                )
        elif op == "all_to_all":
            for split, concat, tiled in (
                *((0, 0, False), (0, 1, False), (0, 2, False), (2, 0, False), (2, 1, False)),
                *((0, 0, True), (0, 1, True), (1, 0, True), (1, 2, True), (2, 2, True)),
            ):
                add(
                    f"{split} to {concat} tiled {tiled}{suffix}",
                    lambda lax, x, a, s=split, c=concat, t=tiled, k=keywords, m=m: lax.all_to_all(
                        x if t else x[:m, :, :m], a, s, c, tiled=t, **k
                    ),
                    lambda b, s=split, c=concat, t=tiled, m=m: exchanged(s, c, t)(
                        b if t else [v[:m, :, :m] for v in b]
                    ),
                    **shared,
                )
        elif op == "pswapaxes":
            add(
                f"axis 0{suffix}",
                lambda lax, x, a, k=keywords, m=m: lax.pswapaxes(x[:m], a, 0, **k),
                lambda b, m=m: exchanged(0, 0, False)([v[:m] for v in b]),
                **shared,
            )
    if op == "ppermute":
        shift = tuple((i, (i + 1) % n) for i in range(n))
        for name, pairs in (
            ("shift", shift),
            ("line", shift[:-1]),
            ("reverse", tuple((i, n - 1 - i) for i in range(n))),
            ("one", ((n - 1, 0),)),
            ("none", ()),
        ):
            add(
                name,
                lambda lax, x, a, p=pairs: lax.ppermute(x, a, p),
                permuted(pairs),
                varies=True,
                in_jax=bool(pairs),
            )
    if op == "pshuffle":
        order = [*range(1, n), 0]
        add(
            "rotate",
            lambda lax, x, a: lax.pshuffle(x, a, order),
            permuted([(s, d) for d, s in enumerate(order)]),
            varies=True,
        )
    if op == "pbroadcast":
        for root in (0, n - 1):
            add(
                f"from {root}",
                lambda lax, x, a, r=root: lax.pbroadcast(x, a, r),
                everywhere(lambda b, r=root: b[r]),
                varies=True,
                in_jax=False,
            )
    if op == "barrier":
        add(
            "value",
            lambda lax, x, a: lax.barrier(a, x),
            lambda b: b,
            varies=True,
            in_jax=False,
        )
    return table


OPS = (
    *("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "pswapaxes"),
    *("ppermute", "pshuffle", "pbroadcast", "barrier"),
)


def communicators(shape, axes, groups=None):
    """The communicators of a mesh, by walking its coordinates.

    Args:
        shape: axis name to size, in mesh order.
        axes: the collective's axes.
        groups: axis_index_groups.
    """
    found = {}
    for position, coordinates in enumerate(itertools.product(*map(range, shape.values()))):
        at = dict(zip(shape, coordinates, strict=True))
        rank = 0
        for axis in axes:
            rank = rank * shape[axis] + at[axis]
        others = tuple(value for axis, value in at.items() if axis not in axes)
        found.setdefault(others, {})[rank] = position
    whole = [[members[rank] for rank in sorted(members)] for members in found.values()]
    return [[ranks[i] for i in g] for ranks in whole for g in groups or [range(len(ranks))]]


def expected(call, blocks, shape, axes):
    """What every rank of the mesh gets, as a list in mesh order."""
    result = [None] * len(blocks)
    for ranks in communicators(shape, axes, call.groups):
        for position, value in zip(ranks, call.model([blocks[r] for r in ranks]), strict=True):
            result[position] = value
    return result


def check(table, results, blocks, shape, axes):
    """Compares what `Call.run` returned, by name, with the model."""
    for call in table:
        got = np.asarray(results[call.name])
        want = np.stack(expected(call, list(blocks), shape, axes))
        assert got.dtype == want.dtype, call.name
        assert got.shape == want.shape, call.name
        # A division may be compiled to a multiplication, nothing else rounds.
        rtol = 1e-6 if call.op == "pmean" else 0
        np.testing.assert_allclose(got, want, rtol=rtol, err_msg=call.name)


def blocks_for(shape, n, dtype=np.float32, block=None):
    """Small integers that differ between ranks and elements."""
    block = (n, 2 * n, n) if block is None else block
    count = math.prod(shape.values())
    values = np.arange(count * math.prod(block)) * 7 % 5 - (np.dtype(dtype).kind != "u")
    values = np.roll(values, 3) % 2 if np.dtype(dtype) == np.bool_ else values
    return values.reshape(count, *block).astype(dtype)


def grid(shape, *, explicit=False, devices=None):
    """A mesh of the named axis sizes over the first devices, or those given by index."""
    count = math.prod(shape.values())
    all_devices = jax.devices("cpu")
    chosen = all_devices[:count] if devices is None else [all_devices[i] for i in devices]
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(shape)
    array = np.array(chosen).reshape(list(shape.values()))
    return jax.sharding.Mesh(array, tuple(shape), axis_types=types)


def per_rank(f, mesh, *, check_vma=True, **kwargs):
    """shard_map of a function of one block, for an array of blocks (any pytree comes back)."""
    spec = PartitionSpec(tuple(mesh.axis_names))

    def body(blocks):
        return jax.tree.map(lambda y: y[None], f(blocks[0]))

    return jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma, **kwargs
    )


def put(blocks, mesh):
    spec = PartitionSpec(tuple(mesh.axis_names))
    return jax.device_put(blocks, jax.sharding.NamedSharding(mesh, spec))
