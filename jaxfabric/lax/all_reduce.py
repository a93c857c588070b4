"""psum, pmean, pmax, pmin: every rank gets the reduction of all ranks' arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxfabric import _compat
from jaxfabric._groups import Axes, AxisGroups, AxisName, Groups, Split, as_axes, as_groups
from jaxfabric._primitive import Collective, Context, Param, Value, ir, lower_as_jax


def reduce_locally(reduction: str, x: jax.Array, axis: Sequence[int]) -> jax.Array:
    """Reduces dimensions of `x` on this rank, keeping its dtype."""
    dtype = x.dtype
    # As in the fabric: small floats accumulate in float32, and integers keep their width.
    if jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 32:
        x = x.astype(jnp.float32)
    if reduction == "sum":
        return jnp.sum(x, axis=tuple(axis), dtype=x.dtype).astype(dtype)
    return (jnp.max if reduction == "max" else jnp.min)(x, axis=tuple(axis)).astype(dtype)


def _over_batch(
    reduction: str, x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, None]:
    del rest, split
    return over_rest(reduce_locally(reduction, x, [0])), None


def _counterpart(
    name: str, ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int
) -> ir.Value:
    del size
    return lower_as_jax(name, ctx, x, axes=axes, axis_index_groups=groups)


def _sum_transpose(ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str) -> Value:
    del x
    if kind == "varying":
        return _psum.bind(ct, axes, groups)
    typed = _compat.mesh_axes(axes)
    return jax.lax.pcast(ct, typed, to="varying" if kind == "invarying" else "reduced")


def _extremum_jvp(
    op: str, primals: Sequence[Value], tangents: Sequence[Value], **params: Param
) -> tuple[Value, Value]:
    """As the JVP of jnp.max: ranks that tie share the tangent equally."""
    (x,), (tangent,) = primals, tangents
    y = {"pmax": _pmax, "pmin": _pmin}[op].bind(x, **params)
    if isinstance(tangent, ad.Zero):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    if params["kind"] == "unreduced":
        raise NotImplementedError(f"{op} of an unreduced array has no derivative")
    chosen = (x == y).astype(y.dtype)
    total = _psum.bind(tangent * chosen, **params)
    return y, total / _psum.bind(chosen, **params)


def _make(name: str, reduction: str, **rules: Param) -> Collective:
    return Collective(
        name=name,
        target="jaxfabric_all_reduce",
        reduction=reduction,
        attributes=lambda: {"reduction": ir.StringAttr.get(reduction)},
        counterpart=partial(_counterpart, name),
        over_batch=partial(_over_batch, reduction),
        weak_kinds=("invarying", "unreduced"),  # As jax.lax has it.
        **rules,
    )


_psum = _make("psum", "sum", transpose=_sum_transpose)
_pmax = _make("pmax", "max", jvp=partial(_extremum_jvp, "pmax"))
_pmin = _make("pmin", "min", jvp=partial(_extremum_jvp, "pmin"))


def _all_reduce(op: Collective, x: Value, axes: Axes, groups: Groups | None) -> Value:
    positional = [axis for axis in axes if isinstance(axis, int)]
    if positional:
        x = reduce_locally(op.reduction or "", jnp.asarray(x), positional)
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    if not named:
        return x
    if not _compat.checks_manual_types():
        return op.bind(x, named, groups)
    if groups is not None:
        # Ranks of different groups get different results, so the result varies.
        if "unreduced" in _compat.manual_state(x, named, op.name):
            raise NotImplementedError(f"{op.name} of an unreduced array with axis_index_groups")
        return op.bind(x, named, groups)
    # Axes of an enclosing vmap have no manual type. They go first and apart.
    typed = _compat.mesh_axes(named)
    if untyped := tuple(axis for axis in named if axis not in typed):
        x = op.bind(x, untyped)
    if not typed:
        return x
    state = _compat.manual_state(x, typed, op.name)
    return op.bind(x, typed, kind="unreduced" if state == "unreduced" else "invarying")


def _map(
    leaf: Callable[[Value, Axes, Groups | None], Value],
    x: Value,
    axis_name: AxisName,
    axis_index_groups: AxisGroups,
) -> Value:
    axes = _compat.skip_one_sized(as_axes(axis_name))
    if not axes:
        return x
    if axis_index_groups is not None and any(isinstance(axis, int) for axis in axes):
        raise ValueError("axis_index_groups only supported for sums over just named axes")
    groups = as_groups(axis_index_groups, even=False)
    return jax.tree.map(lambda v: leaf(v, axes, groups), x)


def _uneven(groups: Groups | None) -> bool:
    return groups is not None and len(set(map(len, groups))) > 1


def _group_size(axes: Axes, groups: Groups) -> jax.Array:
    """The size of the group that this rank is in."""
    table = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        table[list(group)] = len(group)
    return jnp.asarray(table)[jax.lax.axis_index(axes)]


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: AxisGroups = None) -> Any:  # noqa: ANN401
    """Sums `x` over all ranks along `axis_name`, as `jax.lax.psum`.

    Args:
        x: array, or pytree of arrays, of any shape. Booleans are summed as int32. A value that is
            not traced is the same on all ranks: it is multiplied by their number, without
            communication, so `psum(1, "i")` is the size of axis `i`, a Python int.
        axis_name: a mesh axis, the axis of an enclosing `vmap(..., axis_name=)`, or a tuple of
            them. An integer in the tuple also reduces that dimension of `x`.
        axis_index_groups: lists of indices along `axis_name`, which are summed apart. They must
            cover all indices exactly once and may differ in size.

    Returns:
        Arrays of the shape and type of `x`. Under `check_vma=True` the result is invariant over
        `axis_name`, except with groups, where it varies (jax.lax has no groups there).

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: the dtype cannot be summed (int4, float8_e4m3b11fnuz, ...).
        ValueError: the groups do not cover all indices exactly once.
        NotImplementedError: groups with a vmap over `axis_name`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.psum(x, "i"),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
        ... )
        >>> jax.jit(f)(jnp.arange(8.0))
        Array([12., 16.], dtype=float32)
    """

    def leaf(v: Value, axes: Axes, groups: Groups | None) -> Value:
        if not isinstance(v, jax.core.Tracer):
            if _uneven(groups):
                return v * _group_size(axes, groups or ())
            return jax.lax.psum(v, axes, axis_index_groups=groups)
        return _all_reduce(_psum, v.astype(np.int32) if v.dtype == np.bool_ else v, axes, groups)

    return _map(leaf, x, axis_name, axis_index_groups)


def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: AxisGroups = None) -> Any:  # noqa: ANN401
    """Averages `x` over all ranks along `axis_name`, as `jax.lax.pmean`.

    The mean is `psum(x) / n`; that of integers and booleans is a float.

    Args:
        x: array, or pytree of arrays, of any shape.
        axis_name: as in `psum`.
        axis_index_groups: as in `psum`; the mean is that of the rank's own group.

    Returns:
        Arrays of the shape of `x`.

    Raises:
        NameError, TypeError, ValueError, NotImplementedError: as in `psum`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pmean(x, "i"),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
        ... )
        >>> jax.jit(f)(jnp.arange(8))
        Array([3., 4.], dtype=float32)
    """

    def leaf(v: Value, axes: Axes, groups: Groups | None) -> Value:
        named = tuple(axis for axis in axes if not isinstance(axis, int))
        total = psum(v, axes, axis_index_groups=groups)
        if _uneven(groups):
            return total / _group_size(named, groups or ()).astype(total.dtype)
        count = len(groups[0]) if groups else math.prod(jax.lax.axis_size(a) for a in named)
        return total / (count * math.prod(np.shape(v)[a] for a in axes if isinstance(a, int)))

    return _map(leaf, x, axis_name, axis_index_groups)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisGroups = None) -> Any:  # noqa: ANN401
    """Takes the maximum of `x` over all ranks along `axis_name`, as `jax.lax.pmax`.

    A NaN on any rank gives NaN. Unlike jax.lax.pmax it can be differentiated: ranks that tie share
    the tangent equally.

    Args:
        x: array, or pytree of arrays, of any shape; booleans are or-ed.
        axis_name: as in `psum`.
        axis_index_groups: as in `psum`. The result varies under `check_vma=True`.

    Returns:
        Arrays of the shape and dtype of `x`.

    Raises:
        NameError, ValueError, NotImplementedError: as in `psum`.
        TypeError: the dtype has no order (complex) or cannot be reduced (int4, ...).

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pmax(x, "i"),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
        ... )
        >>> jax.jit(f)(jnp.arange(8))
        Array([6, 7], dtype=int32)
    """
    return _map(partial(_all_reduce, _pmax), x, axis_name, axis_index_groups)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisGroups = None) -> Any:  # noqa: ANN401
    """Takes the minimum of `x` over all ranks along `axis_name`, as `jax.lax.pmin`.

    A NaN on any rank gives NaN. Unlike jax.lax.pmin it can be differentiated: ranks that tie share
    the tangent equally.

    Args:
        x: array, or pytree of arrays, of any shape; booleans are and-ed.
        axis_name: as in `psum`.
        axis_index_groups: as in `psum`. The result varies under `check_vma=True`.

    Returns:
        Arrays of the shape and dtype of `x`.

    Raises:
        NameError, ValueError, NotImplementedError: as in `psum`.
        TypeError: the dtype has no order (complex) or cannot be reduced (int4, ...).

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pmin(x, "i"),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
        ... )
        >>> jax.jit(f)(jnp.arange(8))
        Array([0, 1], dtype=int32)
    """
    return _map(partial(_all_reduce, _pmin), x, axis_name, axis_index_groups)
