"""psum_scatter: rank i gets row i of the sum of all ranks' arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric import _compat
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
from jaxfabric._primitive import Collective, Context, Value, collective, ir, lower_as_jax
from jaxfabric.lax.all_reduce import reduce_locally


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, int]:
    del rest
    row = x.shape[2:]
    x = reduce_locally("sum", x, [0]).reshape(split.outer, split.size, split.inner, *row)
    # The rows of the batch stay together: they belong to one rank of the remaining axes.
    return over_rest(jnp.moveaxis(x, 1, 2).reshape(-1, split.size, *row)), 0


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int
) -> ir.Value:
    own = {"axis_name": axes, "axis_index_groups": groups, "axis_size": size, "tiled": False}
    return lower_as_jax("reduce_scatter", ctx, x, scatter_dimension=0, **own)


def _transpose(ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str) -> Value:
    del x
    gathered = "reduced" if kind == "unreduced" else "varying"
    return collective("all_gather").bind(ct, axes, groups, gathered)


_psum_scatter = Collective(
    name="psum_scatter",
    target="jaxfabric_reduce_scatter",
    reduction="sum",
    attributes=lambda: {"reduction": ir.StringAttr.get("sum")},
    rows_in=1,
    counterpart=_counterpart,
    over_batch=_over_batch,
    transpose=_transpose,
)


def psum_scatter(
    x: Any,  # noqa: ANN401
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisGroups = None,
    tiled: bool = False,
) -> Any:  # noqa: ANN401
    """Sums `x` over all ranks and leaves each rank its share, as `jax.lax.psum_scatter`.

    Equal to `psum(x, axis_name)[axis_index(axis_name)]` for a fraction of the cost.

    Args:
        x: array, or pytree of arrays.
        axis_name: as in `all_gather`.
        scatter_dimension: the dimension of `x` that is dealt out to the ranks.
        axis_index_groups: lists of indices along `axis_name`, of equal size, that sum apart.
        tiled: keep the dimension, which must be a multiple of the number of ranks n; otherwise it
            must be n and goes away.

    Returns:
        Arrays of the shape of `x` without `scatter_dimension`, or where `tiled` with that dimension
        n times shorter.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: the dtype cannot be summed (bool, int4, ...).
        ValueError: the dimension does not fit the number of ranks; the groups differ in size or
            do not cover all indices once.
        NotImplementedError: groups with a vmap over `axis_name`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.psum_scatter(x, "i", tiled=True),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(8.0))
        Array([ 0.,  4.,  8., 12., 16., 20., 24., 28.], dtype=float32)
    """
    axes = _compat.skip_one_sized(as_axes(axis_name))
    if not axes:
        return x
    groups = as_groups(axis_index_groups)

    def leaf(v: Value) -> Value:
        v = jnp.asarray(v)
        at = canonical_axis("scatter_dimension", scatter_dimension, v.ndim)
        size = communicator_size(axes, groups)
        if tiled:
            if v.shape[at] % size:
                raise ValueError(
                    f"tiled reduce_scatter operand scatter dimension size {v.shape[at]} must be "
                    f"divisible by shard_count {size}"
                )
            v = v.reshape(*v.shape[:at], size, v.shape[at] // size, *v.shape[at + 1 :])
        elif v.shape[at] != size:
            raise ValueError(
                f"reduce_scatter operand scatter dimension size {v.shape[at]} must match shard "
                f"count {size}"
            )
        kind = "varying"
        if (
            _compat.checks_manual_types()
            and _compat.manual_state(v, axes, "psum_scatter") == "unreduced"
        ):
            if groups is not None:
                raise NotImplementedError("psum_scatter of an unreduced array with groups")
            kind = "unreduced"
        return _psum_scatter.bind(jnp.moveaxis(v, at, 0), axes, groups, kind)

    return jax.tree.map(leaf, x)
