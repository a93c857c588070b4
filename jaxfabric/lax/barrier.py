"""barrier: no rank goes on before every rank has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric._groups import Axes, AxisName, Split, as_axes
from jaxfabric._primitive import Collective, Param, Value


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split
) -> tuple[Value, int]:
    del rest, split
    return over_rest(x), 0


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], **params: Param
) -> tuple[Value, Value]:
    """The values wait, the derivatives do not."""
    return _barrier.bind(*primals, **params), tangents[0]


_barrier = Collective(
    name="barrier",
    target="jaxfabric_barrier",
    side_effect=True,
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
    axes = as_axes(axis_name)
    if not axes:
        return x
    if not jax.tree.leaves(x):
        _barrier.bind(jnp.zeros((), jnp.int32), axes, kind="effect")
        return x
    return jax.tree.map(partial(_barrier.bind, axes=axes), x)
