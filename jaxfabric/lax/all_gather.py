"""all_gather: every rank gets the arrays of all ranks, in rank order."""

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
)
from jaxfabric._primitive import Collective, Context, Value, collective, ir, lower_as_jax


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, None]:
    del rest
    y = over_rest(x)  # [outer * inner, size, s]
    y = y.reshape(split.outer, split.inner, split.size, *x.shape[1:])
    return jnp.moveaxis(y, 2, 1).reshape(-1, *x.shape[1:]), None


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int
) -> ir.Value:
    own = {"axis_name": axes, "axis_index_groups": groups, "axis_size": size, "tiled": False}
    return lower_as_jax("all_gather", ctx, x, all_gather_dimension=0, **own)


def _transpose(ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str) -> Value:
    del x
    if kind == "invarying":
        # All ranks hold the same cotangent, and each the only copy of its own row's.
        return jax.lax.dynamic_index_in_dim(ct, jax.lax.axis_index(axes), 0, keepdims=False)
    scattered = "unreduced" if kind == "reduced" else "varying"
    return collective("psum_scatter").bind(ct, axes, groups, scattered)


_all_gather = Collective(
    name="all_gather",
    target="jaxfabric_all_gather",
    rows_out=1,
    counterpart=_counterpart,
    over_batch=_over_batch,
    transpose=_transpose,
)


def all_gather(
    x: Any,  # noqa: ANN401
    axis_name: AxisName,
    *,
    axis_index_groups: AxisGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:  # noqa: ANN401
    """Gathers the arrays of all ranks along `axis_name`, as `jax.lax.all_gather`.

    Args:
        x: array, or pytree of arrays, of any shape and dtype.
        axis_name: a mesh axis, the axis of an enclosing `vmap(..., axis_name=)`, or a tuple of
            them; ranks count row-major in the order of the tuple.
        axis_index_groups: lists of indices along `axis_name`, of equal size, that gather apart and
            in the order of each list.
        axis: the dimension of the result along which ranks lie.
        tiled: concatenate along the existing dimension `axis` instead of inserting one.
        to: manual axis type of the result under `check_vma=True`: "varying", "invarying" or
            "reduced". Without groups only, except for "varying".

    Returns:
        Arrays of the shape of `x` with a dimension of the number of ranks n inserted at `axis`, or
        where `tiled` with dimension `axis` n times as long.

    Raises:
        NameError: `axis_name` is not bound here.
        ValueError: the groups differ in size or do not cover all indices once; `to` is unknown.
        NotImplementedError: groups with a vmap over `axis_name`, or with `to`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.all_gather(x, "i", tiled=True, to="invarying"),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
        ... )
        >>> jax.jit(f)(jnp.arange(8))
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    kinds = {"varying", "reduced", "invarying"}
    if to not in kinds:
        raise ValueError(
            f"Got unexpected `to` value for `jaxfabric.lax.all_gather`. Allowed `to` values are: "
            f"{sorted(kinds)}"
        )
    kind = to if _compat.checks_manual_types() else "varying"
    axes = as_axes(axis_name)
    if not axes:
        return x
    groups = as_groups(axis_index_groups)
    if groups is not None and kind != "varying":
        raise NotImplementedError(f"all_gather with axis_index_groups and to={to!r}")

    def leaf(v: Value) -> Value:
        at = canonical_axis("axis", axis, jnp.ndim(v) + (not tiled))
        y = jnp.moveaxis(_all_gather.bind(v, axes, groups, kind), 0, at)
        if not tiled:
            return y
        shape = jnp.shape(v)
        return y.reshape(*shape[:at], y.shape[at] * shape[at], *shape[at + 1 :])

    return jax.tree.map(leaf, x)
