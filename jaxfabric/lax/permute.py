"""ppermute, pshuffle, psend, precv: ranks pass their arrays on to one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfabric import _compat
from jaxfabric._groups import Axes, AxisName, Groups, Split, as_axes, communicator_size
from jaxfabric._halves import done, start
from jaxfabric._primitive import Collective, Context, Value, ir, lower_as_jax

Pairs = tuple[tuple[int, int], ...]


def _over_batch(
    x: Value, over_rest: Callable[..., Value], rest: Axes, split: Split, *, pairs: Pairs
) -> tuple[Value, int]:
    # One permutation of the remaining axes for each pair of batch elements that has any traffic.
    # Within one, no rank sends twice or receives twice, because no source or destination is twice
    # in `pairs`.
    rounds: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, destination in pairs:
        (i, sender), (j, receiver) = split.locate(source), split.locate(destination)
        rounds.setdefault((i, j), []).append((sender, receiver))
    rows = [jnp.zeros_like(x[0]) for _ in range(split.size)]
    me = jax.lax.axis_index(rest) if rest else 0
    for (i, j), local in rounds.items():
        receives = np.zeros(split.outer * split.inner, np.bool_)
        receives[[receiver for _, receiver in local]] = True
        rows[j] = jnp.where(jnp.asarray(receives)[me], over_rest(x[i], pairs=tuple(local)), rows[j])
    return jnp.stack(rows), 0


def _counterpart(
    ctx: Context, x: ir.Value, *, axes: Axes, groups: Groups | None, size: int, pairs: Pairs
) -> ir.Value:
    """As `jax.lax` has it: indices count in the order of the mesh, whatever that of the names."""
    del groups
    sizes = _compat.lowering_mesh(ctx)[0].shape
    order = sorted(range(len(axes)), key=lambda i: list(sizes).index(axes[i]))
    ranks = np.arange(size).reshape([sizes[axis] for axis in axes])
    in_mesh = np.argsort(ranks.transpose(order).ravel())
    perm = [(int(in_mesh[source]), int(in_mesh[to])) for source, to in pairs]
    return lower_as_jax("ppermute", ctx, x, axis_name=tuple(axes[i] for i in order), perm=perm)


def _transpose(
    ct: Value, x: Value, *, axes: Axes, groups: Groups | None, kind: str, pairs: Pairs
) -> Value:
    del x
    back = tuple((destination, source) for source, destination in pairs)
    return _permute.bind(ct, axes, groups, kind, pairs=back)


_permute = Collective(
    name="ppermute",
    target="jaxfabric_permute",
    counterpart=_counterpart,
    attributes=lambda pairs: {
        "pairs": _compat.i64_array([rank for pair in pairs for rank in pair])
    },
    over_batch=_over_batch,
    transpose=_transpose,
)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:  # noqa: ANN401
    """Sends arrays from rank to rank along `axis_name`, as `jax.lax.ppermute`.

    Unlike in jax.lax, a tuple of axis names may have any order.

    Args:
        x: array, or pytree of arrays, of any shape and dtype.
        axis_name: as in `all_gather`.
        perm: list of pairs `(source, destination)`, indices along `axis_name`; no index may be a
            source twice, or a destination twice.

    Returns:
        Arrays of the shape of `x`: what the rank was sent, or zeros if it was sent nothing.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: `perm` is not a list or tuple of pairs of integers.
        ValueError: an index is out of range or there twice.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 3)]),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(1, 5))
        Array([0, 1, 2, 3], dtype=int32)
    """
    if not isinstance(perm, (list, tuple)):
        raise TypeError(
            "`perm` passed to `jaxfabric.lax.ppermute` must be a list or a tuple. Got perm of type "
            f"{type(perm)}"
        )
    axes = as_axes(axis_name)

    def leaf(v: Value) -> Value:
        pairs = _checked(perm, communicator_size(axes, None))
        if not pairs:
            return jnp.zeros_like(_compat.as_varying(jnp.asarray(v), axes))
        return _permute.bind(v, axes, pairs=pairs)

    return jax.tree.map(leaf, x)


def _checked(perm: Sequence[tuple[int, int]], size: int) -> Pairs:
    try:
        pairs = tuple((index(source), index(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise TypeError(
            f"ppermute needs pairs of integers (source, destination) as `perm`, got {perm}"
        ) from None
    if not all(-size <= rank < size for pair in pairs for rank in pair):
        raise ValueError(f"ppermute sources and destinations must be below {size}, got {perm}.")
    pairs = tuple((source % size, destination % size) for source, destination in pairs)
    if any(len(set(ranks)) < len(ranks) for ranks in zip(*pairs, strict=True)):
        raise ValueError(f"ppermute sources and destinations must be unique, got {perm}.")
    return pairs


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:  # noqa: ANN401
    """Reorders the ranks' arrays along `axis_name`, as `jax.lax.pshuffle`.

    Args:
        x: array, or pytree of arrays, of any shape and dtype.
        axis_name: as in `all_gather`.
        perm: for each index along `axis_name` the index whose array it gets; each exactly once.

    Returns:
        Arrays of the shape of `x`.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: `perm` is not a list of integers.
        ValueError: `perm` is not a permutation.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x: jaxfabric.lax.pshuffle(x, "i", [3, 0, 1, 2]),
        ...     mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        ... )
        >>> jax.jit(f)(jnp.arange(4))
        Array([3, 0, 1, 2], dtype=int32)
    """
    try:
        sources = list(map(index, perm))
    except TypeError:
        raise TypeError(f"pshuffle needs a list of integers as `perm`, got {perm!r}") from None
    if sorted(sources) != list(range(len(sources))):
        raise ValueError(f"`perm` does not represent a permutation: {perm}")
    return ppermute(x, axis_name, list(zip(sources, range(len(sources)), strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sent:
    """What `psend` returns: an array under way, which `precv` alone may use."""

    value: Any
    axes: Axes = dataclasses.field(metadata={"static": True})
    pairs: Pairs = dataclasses.field(metadata={"static": True})
    key_impl: Any = dataclasses.field(metadata={"static": True})


def psend(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:  # noqa: ANN401
    """Begins to send arrays from rank to rank, as `jax.lax.psend` of JAX before 0.12.

    `ppermute` in two parts: what the program has between this and `precv` runs meanwhile. Unlike
    jax.lax's it runs on CPUs too, and can be batched. Neither has derivatives: use `ppermute`.

    Args:
        x: array, or pytree of arrays, of any shape and dtype.
        axis_name: as in `ppermute`.
        perm: as in `ppermute`; `[(2, 0)]` sends one array from rank 2 to rank 0.

    Returns:
        For each array what `precv` needs, in the same jitted function and no loop that this is not
        in.

    Raises:
        NameError, TypeError, ValueError: as in `ppermute`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> def f(x):
        ...     sent = jaxfabric.lax.psend(x, "i", [(2, 0)])
        ...     y = 10 * x
        ...     return y + jaxfabric.lax.precv(sent, jax.typeof(x), "i", [(2, 0)])
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
        >>> jax.jit(f)(jnp.arange(1, 5))
        Array([13, 20, 30, 40], dtype=int32)
    """
    axes = as_axes(axis_name)

    def leaf(v: Value) -> Sent:
        v = jnp.asarray(v)
        pairs, impl = _checked(perm, communicator_size(axes, None)), None
        if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key):
            impl, v = jax.random.key_impl(v), jax.random.key_data(v)
        if pairs:
            return Sent(start("ppermute", v, axes, pairs=pairs), axes, pairs, impl)
        return Sent(jnp.zeros_like(_compat.as_varying(v, axes)), axes, pairs, impl)

    return jax.tree.map(leaf, x)


def precv(
    token: Sent,
    out_shape: Any,  # noqa: ANN401
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
) -> jax.Array:
    """Waits for what ranks send with `psend`, as `jax.lax.precv` of JAX before 0.12.

    Args:
        token: what `psend` returned for the array that this rank sends.
        out_shape: `jax.ShapeDtypeStruct` or the like, equal to that array in shape and dtype.
        axis_name: that of the `psend`.
        perm: that of the `psend`.

    Returns:
        What the rank was sent, or zeros if it was sent nothing.

    Raises:
        TypeError: `token` is not what `psend` returned, or as in `ppermute`.
        ValueError: the `psend` was of another shape, dtype, axis or `perm`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> def f(x):
        ...     sent = jaxfabric.lax.psend(x, "i", [(0, 3)])
        ...     return jaxfabric.lax.precv(sent, x, "i", [(0, 3)])
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
        >>> jax.jit(f)(jnp.arange(1, 5))
        Array([0, 0, 0, 1], dtype=int32)
    """
    if not isinstance(token, Sent):
        raise TypeError(f"precv needs what psend returned as `token`, got {type(token).__name__}")
    axes = as_axes(axis_name)
    if (axes, _checked(perm, communicator_size(axes, None))) != (token.axes, token.pairs):
        raise ValueError(f"precv over {axis_name} with {perm=} gets the token of another psend")
    y = done(token.value)
    if token.key_impl is not None:
        y = jax.random.wrap_key_data(y, impl=token.key_impl)
    if (y.shape, y.dtype) != (tuple(out_shape.shape), out_shape.dtype):
        raise ValueError(f"precv of {out_shape} gets the token of a psend of {jax.typeof(y)}")
    return y
