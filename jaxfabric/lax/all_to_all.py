"""all_to_all, pswapaxes: rank i gets row i of every rank's array, in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric._groups import (
    Axes,
    AxisGroups,
    AxisName,
    Groups,
    Split,
    as_axes,
    as_groups,
    canonical_axis,
    communicator_size,
)
from jaxfabric._primitive import Collective, Context, Value, ir, lower_as_jax


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, int]:
    del rest
    row = x.shape[2:]
    mesh = (split.outer, split.inner)

    def permuted(v: Value, *order: int) -> Value:
        return v.transpose(*order, *range(len(order), v.ndim))

    # From [source, outer, destination, inner] to rows for the remaining axes.
    x = permuted(x.reshape(split.size, split.outer, split.size, split.inner, *row), 1, 3, 2, 0)
    y = over_rest(x.reshape(-1, split.size, split.size, *row))
    y = permuted(y.reshape(*mesh, split.size, split.size, *row), 2, 0, 3, 1)
    return y.reshape(split.size, -1, *row), 0


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int
) -> ir.Value:
    del size
    own = {"axis_name": axes, "axis_index_groups": groups, "tiled": True}
    return lower_as_jax("all_to_all", ctx, x, split_axis=0, concat_axis=0, **own)


def _transpose(ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str) -> Value:
    del x
    return _all_to_all.bind(ct, axes, groups, kind)


_all_to_all = Collective(
    name="all_to_all",
    target="jaxfabric_all_to_all",
    rows_in=1,
    counterpart=_counterpart,
    rows_out=1,
    over_batch=_over_batch,
    transpose=_transpose,
    weak_kinds=(),  # As jax.lax has it.
)


def all_to_all(
    x: Any,  # noqa: ANN401
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisGroups = None,
    tiled: bool = False,
) -> Any:  # noqa: ANN401
    """Deals dimension `split_axis` out to the ranks and collects theirs, as `jax.lax.all_to_all`.

    Args:
        x: array, or pytree of arrays, of any dtype.
        axis_name: as in `all_gather`.
        split_axis: the dimension of `x` of which rank i gets the i-th part.
        concat_axis: the dimension of the result along which the parts of the ranks lie.
        axis_index_groups: lists of indices along `axis_name`, of equal size, that exchange apart.
        tiled: split and concatenate existing dimensions, so that the rank of `x` stays.

    Returns:
        With n ranks, and where `tiled`, arrays of the shape of `x` with `split_axis` n times
        shorter and `concat_axis` n times longer. Otherwise `split_axis`, which must be n, goes
        away, and a dimension of n is inserted at `concat_axis`.

    Raises:
        NameError: `axis_name` is not bound here.
        ValueError: the dimension does not fit the number of ranks; the groups differ in size or
            do not cover all indices once.
        NotImplementedError: groups with a vmap over `axis_name`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.all_to_all(x, "i", 1, 0, tiled=True),
        ...     mesh=mesh, in_specs=jax.P("i", None), out_specs=jax.P(None, "i"),
        ... )
        >>> bool((jax.jit(f)(jnp.arange(16).reshape(4, 4)) == jnp.arange(16).reshape(4, 4)).all())
        True
    """
    axes = as_axes(axis_name)
    groups = as_groups(axis_index_groups)

    def leaf(v: Value) -> Value:
        v = jnp.asarray(v)
        split = canonical_axis("split_axis", split_axis, v.ndim)
        concat = canonical_axis("concat_axis", concat_axis, v.ndim)
        size = communicator_size(axes, groups)
        if not tiled:
            if v.shape[split] != size:
                raise ValueError(
                    "all_to_all requires the size of the mapped axis axis_name to equal "
                    f"x.shape[split_axis], but they are {size} and {v.shape[split]} respectively."
                )
            return jnp.moveaxis(
                _all_to_all.bind(jnp.moveaxis(v, split, 0), axes, groups), 0, concat
            )
        if v.shape[split] % size:
            raise ValueError(
                f"The size of all_to_all split_axis ({v.shape[split]}) has to be divisible by the "
                f"size of the named axis {axis_name} ({size})"
            )
        part = (*v.shape[:split], v.shape[split] // size, *v.shape[split + 1 :])
        v = v.reshape(*part[:split], size, *part[split:])
        y = jnp.moveaxis(_all_to_all.bind(jnp.moveaxis(v, split, 0), axes, groups), 0, concat)
        return y.reshape(*part[:concat], size * part[concat], *part[concat + 1 :])

    return jax.tree.map(leaf, x)


def pswapaxes(
    x: Any,  # noqa: ANN401
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: AxisGroups = None,
) -> Any:  # noqa: ANN401
    """Swaps the ranks along `axis_name` with dimension `axis`, as `jax.lax.pswapaxes`.

    Args:
        x: array, or pytree of arrays, whose dimension `axis` has as many elements as there are
            ranks.
        axis_name: as in `all_gather`.
        axis: the dimension to swap.
        axis_index_groups: as in `all_to_all`.

    Returns:
        Arrays of the shape of `x`.

    Raises:
        NameError, ValueError, NotImplementedError: as in `all_to_all`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pswapaxes(x[0], "i", 0)[None],
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(16).reshape(4, 4))[1]
        Array([ 1,  5,  9, 13], dtype=int32)
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)
