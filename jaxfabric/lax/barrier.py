"""barrier: no rank goes on before every rank has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfabric import _compat
from jaxfabric._emit import lower_locally
from jaxfabric._groups import Axes, AxisName, Groups, Split, as_axes
from jaxfabric._primitive import Collective, Context, Param, Value, hlo, ir, lower_as_jax


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, int]:
    del rest, split
    return over_rest(x), 0


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int
) -> ir.Value:
    """A sum of what XLA does not know, on which the result depends.

    XLA has no barrier: where nothing depends on it, it is dropped.
    """
    del size
    (aval,) = ctx.avals_in
    scalar = _compat.with_shape(aval, ()).update(dtype=np.dtype(np.int32), weak_type=False)
    index = lower_locally(ctx, partial(jax.lax.axis_index, axes), (), (), scalar)
    x, index = hlo.OptimizationBarrierOp([x, index]).results
    own = {"axes": axes, "axis_index_groups": groups}
    inner = ctx.replace(avals_in=[scalar], avals_out=[scalar])
    total = lower_as_jax("psum", inner, index, **own)

    def hold_back(x: jax.Array, total: jax.Array) -> jax.Array:
        return jnp.where(total >= 0, x, jnp.zeros_like(x))

    return lower_locally(ctx, hold_back, (x, total), (aval, scalar), aval)


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], **params: Param
) -> tuple[Value, Value]:
    """The values wait, the derivatives do not."""
    return _barrier.bind(*primals, **params), tangents[0]


_barrier = Collective(
    name="barrier",
    target="jaxfabric_barrier",
    side_effect=True,
    counterpart=_counterpart,
    over_batch=_over_batch,
    jvp=_jvp,
)


def barrier(axis_name: AxisName, x: Any = None) -> Any:  # noqa: ANN401
    """Waits until every rank along `axis_name` has called it.

    Programs are dataflow: the barrier orders what `x` is computed from, on all ranks, before what
    the result is used for. What does not depend on either has no order with respect to it.

    Args:
        axis_name: as in `psum`.
        x: array, or pytree of arrays, of any shape and dtype, to hold back; with None, or a pytree
            without arrays, the program still waits, at some time before it ends.

    Returns:
        `x`, of the same manual axis type. Its derivative passes through without a barrier.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: `axis_name` is an array, a dimension or something else that is no name.
        ValueError: `axis_name` is empty, or names an axis twice.
        NotImplementedError: in a shard_map that leaves mesh axes to the compiler.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.barrier("i", x),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(4))
        Array([0, 1, 2, 3], dtype=int32)
    """
    axes = _checked(axis_name)
    if isinstance(x, str):
        raise TypeError(f"x={x!r}: use an array; several axes are a tuple, barrier(('i', 'j'), x)")
    if not jax.tree.leaves(x):
        _barrier.bind(jnp.zeros((), jnp.int32), axes, kind="effect")
        return x
    return jax.tree.map(partial(_barrier.bind, axes=axes), x)


def _checked(axis_name: AxisName) -> Axes:
    axes = as_axes(axis_name)
    if not axes:
        raise ValueError(
            f"axis_name={axis_name!r}: a barrier needs at least one axis to wait along"
        )
    for axis in axes:
        if isinstance(axis, (int, tuple)):
            raise TypeError(f"axis_name={axis_name!r}: use the name of an axis or a tuple of names")
        try:
            jax.lax.axis_size(axis)
        except NameError:
            raise NameError(
                f"axis_name={axis!r} is not bound here: use an axis of the enclosing jax.shard_map "
                "or jax.vmap(..., axis_name=)"
            ) from None
    return axes
