"""What each collective primitive of `jax.lax` is to the fabric: a `Plan`."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric._groups import Axes, Groups, as_axes, as_groups
from jaxfabric._primitive import Aval, Param
from jaxfabric.lax.all_reduce import reduce_locally

Rule = Callable[..., Any]
Sizes = Mapping[Any, int]  # of the axes of the mesh, in its order
Local = Callable[..., jax.Array]


class LeaveToXlaError(Exception):
    """The fabric does not take this use of a collective; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a primitive runs: `after(collective(before(x)))`, with the parameters of the latter."""

    op: str
    axes: Axes
    groups: Groups | None = None
    params: Mapping[str, Param] = dataclasses.field(default_factory=dict)
    before: Local | None = None
    after: Local | None = None


def group_size(sizes: Sizes, axes: Axes, groups: Groups | None = None) -> int:
    """How many ranks one communicator has (that of the first group)."""
    return len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)


def _reduction(op: str, reduction: str) -> Rule:
    def plan(aval: Aval, sizes: Sizes, *, axes: Param, axis_index_groups: Param = None) -> Plan:
        del aval, sizes
        named = tuple(axis for axis in axes if not isinstance(axis, int))
        positional = tuple(axis for axis in axes if isinstance(axis, int))
        if not named:
            raise LeaveToXlaError("it reduces dimensions of the array only")
        before = partial(_reduce, reduction, positional) if positional else None
        groups = as_groups(axis_index_groups, even=False)
        return Plan(op=op, axes=named, groups=groups, before=before)

    return plan


def _reduce(reduction: str, axis: tuple[int, ...], x: jax.Array) -> jax.Array:
    return reduce_locally(reduction, x, axis)


def _all_gather(
    aval: Aval,
    sizes: Sizes,
    *,
    all_gather_dimension: int,
    axis_name: Param,
    axis_size: int,
    tiled: bool,
    axis_index_groups: Param = None,
) -> Plan:
    del sizes
    at = all_gather_dimension
    merged = (*aval.shape[:at], axis_size * aval.shape[at], *aval.shape[at + 1 :]) if tiled else ()

    def after(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, 0, at)
        return y.reshape(merged) if tiled else y

    return Plan(
        op="all_gather",
        axes=as_axes(axis_name),
        groups=as_groups(axis_index_groups),
        after=after,
    )


def _reduce_scatter(
    aval: Aval,
    sizes: Sizes,
    *,
    scatter_dimension: int,
    axis_name: Param,
    axis_size: int,
    tiled: bool,
    axis_index_groups: Param = None,
) -> Plan:
    del sizes
    at = scatter_dimension % len(aval.shape)
    return Plan(
        op="psum_scatter",
        axes=as_axes(axis_name),
        groups=as_groups(axis_index_groups),
        before=partial(_rows, aval.shape, at, axis_size if tiled else None),
    )


def _rows(shape: tuple[int, ...], at: int, split: int | None, x: jax.Array) -> jax.Array:
    """Brings dimension `at` to the front, or where `split` the ranks' parts of it."""
    if split is not None:
        x = x.reshape(*shape[:at], split, shape[at] // split, *shape[at + 1 :])
    return jnp.moveaxis(x, at, 0)


def _all_to_all(
    aval: Aval,
    sizes: Sizes,
    *,
    split_axis: int,
    concat_axis: int,
    axis_name: Param,
    axis_index_groups: Param = None,
    tiled: Param = None,
) -> Plan:
    del tiled  # jax.lax has expanded the dimension, and squeezes the result.
    axes, groups = as_axes(axis_name), as_groups(axis_index_groups)
    size = group_size(sizes, axes, groups)
    shape = list(aval.shape)
    split_axis, concat_axis = split_axis % len(shape), concat_axis % len(shape)
    shape[split_axis] //= size
    shape[concat_axis] *= size

    def after(y: jax.Array) -> jax.Array:
        return jnp.moveaxis(y, 0, concat_axis).reshape(shape)

    return Plan(
        op="all_to_all",
        axes=axes,
        groups=groups,
        before=partial(_rows, aval.shape, split_axis, size),
        after=after,
    )


def _ppermute(aval: Aval, sizes: Sizes, *, axis_name: Param, perm: Param) -> Plan:
    del aval
    # As JAX's own rule: indices count in the order of the mesh, whatever that of the names.
    named = as_axes(axis_name)
    axes = tuple(axis for axis in sizes if axis in named)
    # JAX 0.12 refuses another order by default; older ones have no such setting.
    strict = getattr(jax.config, "jax_raise_on_ppermute_sort_diff", False)
    if strict and [a for a in axes if sizes[a] > 1] != [a for a in named if sizes[a] > 1]:
        raise RuntimeError(
            f"ppermute along {named} needs the order of the mesh, {axes}: name the axes in that "
            "order, or allow others with jax.raise_on_ppermute_sort_diff(False)"
        )
    size = group_size(sizes, axes)
    pairs = tuple((int(source) % size, int(to) % size) for source, to in perm)
    if any(len(set(ranks)) < len(ranks) for ranks in zip(*pairs, strict=True)):
        raise ValueError(f"ppermute sources and destinations must be unique, got {perm}.")
    if not all(-size <= rank < size for pair in perm for rank in pair):
        raise IndexError(f"ppermute sources and destinations must be below {size}, got {perm}.")
    return Plan(op="ppermute", axes=axes, params={"pairs": pairs})


def _pbroadcast(aval: Aval, sizes: Sizes, *, axis_name: Param, source: int) -> Plan:
    del aval
    axes = as_axes(axis_name)
    size = group_size(sizes, axes)
    source = operator.index(source)
    if not 0 <= source < size:
        raise ValueError(f"pbroadcast source {source} is not an index along {axes} ({size})")
    return Plan(op="pbroadcast", axes=axes, params={"root": source})


PLANS: dict[str, Rule] = {
    "psum": _reduction("psum", "sum"),
    "psum_invariant": _reduction("psum", "sum"),
    "unreduced_psum": _reduction("psum", "sum"),
    "pmax": _reduction("pmax", "max"),
    "unreduced_pmax": _reduction("pmax", "max"),
    "pmin": _reduction("pmin", "min"),
    "unreduced_pmin": _reduction("pmin", "min"),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "unreduced_reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}
