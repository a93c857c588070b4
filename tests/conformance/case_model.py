"""What a case has to return, computed with numpy alone, for all ranks of the mesh at once.

A collective is a function from a list of blocks, one per rank of a communicator, to a list of
results. Inputs are small integers, so that most sums are exact in every dtype and any order of
summation gives the same bits. Derivatives are not written down a second time: the linear maps are
read off the forward model, see `Linear`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from cases import BROADCASTS, DERIVATIVES, RAGGED, REDUCTIONS, Case, dtype_of

Blocks = list[np.ndarray]
STEPS = 3  # Iterations of loops, and elements of batches.


# --- inputs ---


def source(case: Case) -> np.ndarray:
    """Integers 0 to 3 as float32, `[position, block]`, that differ between ranks and elements."""
    lay = case.layout
    shape = (int(np.prod(list(lay.shape.values()))), *lay.block)
    values = np.arange(int(np.prod(shape)))
    return ((values * 7 % 5 + values // 11) % 4).astype(np.float32).reshape(shape)


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """The operand in the case's dtype; `case_programs.cast` is the same in JAX."""
    kind = dtype_of(dtype)
    if dtype == "bool":
        return values % 2 == 1
    if dtype.removeprefix("weak ").startswith(("uint", "key")):
        return values.astype(kind)
    if dtype in ("complex64", "complex128"):
        return ((values - 1) + 1j * (2 - values)).astype(kind)
    return (values - (2 if dtype == "int2" else 1)).astype(kind)


def tangent(case: Case) -> np.ndarray:
    """The direction of derivatives, as `source`."""
    return (source(case) * 3 + 1) % 4


def weights(shape: Sequence[int]) -> np.ndarray:
    """What results are weighted with: cotangents that are the same on all ranks."""
    return (np.arange(int(np.prod(shape))) % 3 + 1.0).reshape(shape)


# --- collectives: blocks of one communicator to its results ---


def total(blocks: Blocks) -> np.ndarray:
    dtype = np.dtype(np.int32) if blocks[0].dtype == np.bool_ else blocks[0].dtype
    wide = np.complex128 if dtype.kind == "c" else np.float64
    if jnp.issubdtype(dtype, jnp.integer):
        wide = np.int64  # From which a cast drops the upper bits.
    return np.sum([np.asarray(block, wide) for block in blocks], axis=0).astype(dtype)


def mean(blocks: Blocks, wide: bool) -> np.ndarray:
    sum_ = total(blocks)
    if jnp.issubdtype(sum_.dtype, jnp.integer):
        sum_ = sum_.astype(np.float64 if wide else np.float32)
    exact = sum_.astype(np.complex128 if sum_.dtype.kind == "c" else np.float64) / len(blocks)
    return exact.astype(sum_.dtype)


def part(block: np.ndarray, rank: int, size: int, axis: int, tiled: bool) -> np.ndarray:
    return np.split(block, size, axis)[rank] if tiled else np.take(block, rank, axis)


def collective(case: Case, blocks: Blocks) -> Blocks:
    """The results of the ranks of one communicator."""
    n, op, tiled = len(blocks), case.base, case.tiled
    join = np.concatenate if tiled else np.stack
    dimension = DIMENSIONS[case.form]
    if op in REDUCTIONS:
        if op in ("psum", "pmean"):
            result = total(blocks) if op == "psum" else mean(blocks, case.wide)
        else:
            f = np.maximum if op == "pmax" else np.minimum
            result = f.reduce(np.stack(blocks)).astype(blocks[0].dtype)
        return [result] * n
    if op.startswith("all_gather"):
        return [join(blocks, dimension)] * n
    if op == "psum_scatter":
        sum_ = total([operand(case, block) for block in blocks])
        return [part(sum_, r, n, dimension, tiled) for r in range(n)]
    if op in ("all_to_all", "pswapaxes"):
        split, concat = (dimension,) * 2 if op == "pswapaxes" else SPLITS[case.form]
        cut = [operand(case, block) for block in blocks]
        return [join([part(b, r, n, split, tiled) for b in cut], concat) for r in range(n)]
    if op in BROADCASTS:
        return [blocks[root(case.form, n)]] * n
    if op == RAGGED:
        return ragged(blocks, slices(case.form, n))
    result = [np.zeros_like(blocks[0]) for _ in blocks]
    pairs = permutation(case.form, n)
    if op == "pshuffle":
        pairs = [(s, d) for d, s in enumerate(order(case.form, n))]
    for source_, destination in pairs:
        result[destination] = blocks[source_]
    return result


# What `form` means; all_to_all without `tiled` removes one dimension and inserts one.
DIMENSIONS = (0, 1, -1)
SPLITS = ((0, 2), (1, 0), (-1, 1))


def operand(case: Case, block: Any) -> Any:
    """A block of which the dimension that is dealt out has one element per rank, if it must."""
    at = SPLITS[case.form][0] if case.base == "all_to_all" else DIMENSIONS[case.form]
    return block if case.tiled or at != 1 else block[:, : case.layout.rows]


def root(form: int, n: int) -> int:
    return (0, n - 1, n // 2)[form]


def permutation(form: int, n: int) -> list[tuple[int, int]]:
    """A ring, a line (one rank gets nothing), and one transfer."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    return (ring, ring[:-1], [(n - 1, 0)])[form]


def order(form: int, n: int) -> list[int]:
    return ([*range(1, n), 0], [*reversed(range(n))], [*range(n)])[form]


def slices(form: int, n: int) -> np.ndarray:
    """`[4, n, K]`: offsets, sizes, offsets at the receiver and sizes to receive, of n ranks.

    One row for each rank, for every second one, or all rows for the next rank in two slices.
    """
    sender, receiver = np.indices((n, n))
    if form < 2:
        size = np.ones((n, n), int) if form == 0 else (sender + receiver) % 2
        three = [x[..., None] for x in (receiver, size, n - 1 - sender)]
    else:
        after = np.array([n // 2, n - n // 2])
        own = ((receiver - sender) % n == 1)[..., None]
        three = [own * x for x in ([0, n // 2], after, [n - n // 2, 0])]
    return np.stack([x.reshape(n, -1) for x in (*three, three[1].transpose(1, 0, 2))])


def ragged(blocks: Blocks, metadata: np.ndarray) -> Blocks:
    """What no slice reaches keeps the value of the rank's own block."""
    results = [block.copy() for block in blocks]
    for block, (begins, sizes, to, _) in zip(blocks, metadata.transpose(1, 0, 2), strict=True):
        for k, (begin, size, at) in enumerate(zip(begins, sizes, to, strict=True)):
            results[k * len(blocks) // len(sizes)][at : at + size] = block[begin : begin + size]
    return results


# --- the mesh ---


def communicators(case: Case) -> list[list[int]]:
    """The communicators as lists of positions, by walking the coordinates of the mesh."""
    lay = case.layout
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for position, coordinates in enumerate(itertools.product(*map(range, lay.shape.values()))):
        at = dict(zip(lay.shape, coordinates, strict=True))
        rank = 0
        for axis in lay.axes:
            rank = rank * lay.shape[axis] + at[axis]
        others = tuple(value for axis, value in at.items() if axis not in lay.axes)
        found.setdefault(others, {})[rank] = position
    whole = [[members[rank] for rank in sorted(members)] for members in found.values()]
    return [[ranks[i] for i in g] for ranks in whole for g in lay.groups or [range(len(ranks))]]


def everywhere(case: Case, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The collective on all communicators of the mesh: `[position, ...]` to the same."""
    result: list[Any] = [None] * len(blocks)
    for ranks in communicators(case):
        for position, y in zip(ranks, collective(case, [blocks[p] for p in ranks]), strict=True):
            result[position] = y
    return np.stack(result)


# --- derivatives ---


class Linear:
    """The derivative of a case's collective at a point: a linear map of the whole mesh.

    Every collective here gives, for each element of its result, a factor times a sum of at most
    one element of each rank. Which ones is found by passing their indices through the model.
    """

    def __init__(self, case: Case, x: np.ndarray) -> None:
        self.inputs = x.shape
        self.mask = np.ones(x.shape)
        self.factor = np.ones(x.shape[0])
        linear = case
        if case.op in ("pmax", "pmin"):
            # Ranks that tie share.
            chosen = x == everywhere(case, x)
            linear = Case(**{**vars_of(case), "op": "psum", "dtype": "float64"})
            self.mask = chosen / everywhere(linear, chosen.astype(np.float64))
        elif case.op == "pmean":
            linear = Case(**{**vars_of(case), "op": "psum", "dtype": "float64"})
            for ranks in communicators(case):
                self.factor[ranks] = 1 / len(ranks)
        ids = np.arange(1.0, x[0].size + 1).reshape(x[0].shape)
        self.sources = []  # For each rank, which of its elements is in an element of the result.
        for position in range(x.shape[0]):
            only = np.zeros(x.shape)
            only[position] = ids
            self.sources.append(everywhere(linear, only).astype(np.int64))
        self.outputs = self.sources[0].shape

    def jvp(self, t: np.ndarray) -> np.ndarray:
        result = np.zeros(self.outputs, t.dtype)
        for source_, values in zip(self.sources, t * self.mask, strict=True):
            result += np.concatenate([[0], values.ravel()])[source_]
        return result * self._factor()

    def vjp(self, ct: np.ndarray) -> np.ndarray:
        """The transpose: every rank's result is one of its own, with a cotangent of its own."""
        result = np.zeros((self.inputs[0], self.mask[0].size + 1), ct.dtype)
        for row, source_ in zip(result, self.sources, strict=True):
            np.add.at(row, source_, ct * self._factor())
        return result[:, 1:].reshape(self.inputs) * self.mask

    def _factor(self) -> np.ndarray:
        return self.factor.reshape(-1, *[1] * (len(self.outputs) - 1))


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def _derivatives(case: Case) -> dict[str, np.ndarray]:
    x, t = (cast(f(case), case.dtype) for f in (source, tangent))
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    linear = Linear(case, x)
    y, dy = everywhere(case, x).astype(wide), linear.jvp(t.astype(wide))
    w = weights(y.shape[1:])
    # A result that is one value for all ranks has one cotangent, which each rank would count.
    copies = np.ones(len(x))
    if case.invariant and case.transform != "grad_outside":
        for ranks in communicators(case):
            copies[ranks] = len(ranks)
    copies = copies.reshape(-1, *[1] * (x.ndim - 1))

    def pulled(ct: np.ndarray) -> np.ndarray:
        return linear.vjp(ct) / copies

    dtype = x.dtype
    if case.transform == "jvp":
        return {"y": y.astype(dtype), "dy": dy.astype(dtype)}
    if case.transform in ("vjp", "linear_transpose"):
        return {"x": pulled(np.broadcast_to(w, y.shape).astype(wide)).astype(dtype)}
    if case.transform == "second_derivative":
        hessian = pulled(6 * w * y * dy).astype(dtype)
        return {"gradient": pulled(3 * w * y * y).astype(dtype), "hessian": hessian}
    return {"gradient": pulled(2 * w * y).astype(dtype)}


# --- cases ---


def expected(case: Case) -> dict[str, np.ndarray]:
    """What each rank gets, by the name of the result: `[position, ...]`."""
    if case.transform in DERIVATIVES:
        return _derivatives(case)
    whole = source(case)

    def f(step: int) -> np.ndarray:
        # Keys are moved as their words, which are equal.
        return everywhere(case, cast((whole + step) % 4, case.dtype))

    if case.transform in ("scan", "vmap"):
        results = {"y": np.stack([f(step) for step in range(STEPS)], 1)}
    elif case.transform == "while":
        results = {"y": f(STEPS - 1)}
    elif case.transform == "inner_jit_twice":
        results = {"first": f(0), "second": f(1)}
    elif case.transform == "cond_between_groups":
        second = np.zeros(len(whole), np.bool_)
        for number, ranks in enumerate(communicators(case)):
            second[ranks] = number % 2
        y = f(0)
        results = {"y": np.where(second.reshape(-1, *[1] * (y.ndim - 1)), f(1), y)}
    else:
        results = {"y": f(0)}
    if case.dtype == "key":
        results = {name: np.stack([y, y], -1) for name, y in results.items()}
    return results
