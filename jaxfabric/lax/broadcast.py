"""pbroadcast: every rank gets one rank's array."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric import _compat
from jaxfabric._groups import Axes, AxisName, Groups, Split, as_axes, communicator_size
from jaxfabric._primitive import Collective, Context, Value, collective, ir, lower_as_jax
from jaxfabric.lax.all_gather import all_gather


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split, *, root: int
) -> tuple[Value, None]:
    del rest
    index, sender = split.locate(root)
    return over_rest(x[index], root=sender), None


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int, root: int
) -> ir.Value:
    del groups, size
    return lower_as_jax("pbroadcast", ctx, x, axis_name=axes, source=root)


def _transpose(
    ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str, root: int
) -> Value:
    del x
    total = collective("psum").bind(ct, axes, groups, kind)
    return jnp.where(jax.lax.axis_index(axes) == root, total, jnp.zeros_like(total))


_broadcast = Collective(
    name="pbroadcast",
    target="jaxfabric_broadcast",
    counterpart=_counterpart,
    attributes=lambda root: {"root": _compat.i64(root)},
    over_batch=_over_batch,
    transpose=_transpose,
)


def pbroadcast(x: Any, axis_name: AxisName, source: int | jax.Array) -> Any:  # noqa: ANN401
    """Copies the array of rank `source` to all ranks, as `jax.lax.pbroadcast`.

    Args:
        x: array, or pytree of arrays, of any shape and dtype.
        axis_name: as in `all_gather`.
        source: index along `axis_name`, the same on all ranks. It may be traced (jax.lax takes that
            since 0.12), which costs as much as an `all_gather`.

    Returns:
        Arrays of the shape of `x`. Under `check_vma=True` they vary over `axis_name`.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: `source` is not an integer scalar.
        ValueError: `source` is out of range.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pbroadcast(x, "i", 2),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(4))
        Array([2, 2, 2, 2], dtype=int32)
    """
    axes = as_axes(axis_name)
    if isinstance(source, jax.core.Tracer):
        if source.shape or not jnp.issubdtype(source.dtype, jnp.integer):
            raise TypeError(f"pbroadcast needs an integer scalar as source, got {source.aval}")
        return jax.tree.map(
            lambda v: jax.lax.dynamic_index_in_dim(all_gather(v, axes), source, 0, keepdims=False),
            x,
        )
    try:
        root = operator.index(source)
    except TypeError:
        raise TypeError(f"pbroadcast needs an integer as source, got {source!r}") from None

    def leaf(v: Value) -> Value:
        size = communicator_size(axes, None)
        if not 0 <= root < size:
            raise ValueError(f"pbroadcast source {root} is not an index along {axes} ({size})")
        return _broadcast.bind(v, axes, root=root)

    return jax.tree.map(leaf, x)
