"""Collectives with the products that stand next to them in transformers.

The products go in pieces: while one is computed, the next piece is under way between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric import _compat
from jaxfabric._groups import Axes, AxisName, as_axes, communicator_size
from jaxfabric._halves import done, start
from jaxfabric._primitive import Value, collective

# Pieces below so many bytes cost more than they hide.
_LEAST_PIECE = 256 << 10


def all_gather_matmul(
    x: Any,  # noqa: ANN401
    w: Any,  # noqa: ANN401
    axis_name: AxisName,
    *,
    pieces: int | None = None,
) -> jax.Array:
    """Multiplies the rows of all ranks with `w`: `all_gather(x, axis_name, tiled=True) @ w`.

    The rows come in pieces: the product of one runs beside the gathering of the next.

    Args:
        x: array `[m, k]`, the rank's rows.
        w: array `[k, p]`; it may differ between ranks, as the columns of a larger matrix.
        axis_name: as in `all_gather`.
        pieces: how many; it must divide m. Default: up to 4, none smaller than 256 KiB.

    Returns:
        Array `[n * m, p]` for n ranks, which varies over `axis_name`. It can be batched, and
        differentiated in reverse.

    Raises:
        NameError: `axis_name` is not bound here.
        ValueError: the shapes do not fit, or `pieces` does not divide m.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x, w: jaxfabric.lax.all_gather_matmul(x, w, "i"),
        ...     mesh=mesh, in_specs=(jax.P("i"), jax.P(None, "i")), out_specs=jax.P(None, "i"),
        ... )
        >>> x, w = jnp.arange(8.0).reshape(4, 2), jnp.ones((2, 4))
        >>> bool((jax.jit(f)(x, w) == x @ w).all())
        True
    """
    axes = as_axes(axis_name)
    x, w = _varying(axes, "all_gather_matmul", x, w)
    size = communicator_size(axes, None)
    count = _pieces("all_gather_matmul", pieces, x.shape[0], size * x.nbytes)
    return _as_one(_gather_multiply)(x, w, axes, count)


def matmul_reduce_scatter(
    x: Any,  # noqa: ANN401
    w: Any,  # noqa: ANN401
    axis_name: AxisName,
    *,
    pieces: int | None = None,
) -> jax.Array:
    """Sums `x @ w` over all ranks and leaves each its rows: `psum_scatter(x @ w, tiled=True)`.

    The rows go in pieces: the sum of one runs beside the product of the next.

    Args:
        x: array `[n * m, k]` for n ranks.
        w: array `[k, p]`; with `x` a rank's part of a longer sum, as the rows of a larger matrix.
        axis_name: as in `psum_scatter`.
        pieces: how many; it must divide m. Default: up to 4, none smaller than 256 KiB.

    Returns:
        Array `[m, p]`: rows `i * m` up to `(i + 1) * m` of the sum on rank i. It can be batched,
        and differentiated in reverse.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: the dtype cannot be summed.
        ValueError: the shapes do not fit, or `pieces` does not divide m.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> f = jax.shard_map(
        ...     lambda x, w: jaxfabric.lax.matmul_reduce_scatter(x, w, "i"),
        ...     mesh=mesh, in_specs=(jax.P(None, "i"), jax.P("i")), out_specs=jax.P("i"),
        ... )
        >>> x, w = jnp.arange(32.0).reshape(8, 4), jnp.ones((4, 2))
        >>> bool((jax.jit(f)(x, w) == x @ w).all())
        True
    """
    axes = as_axes(axis_name)
    x, w = _varying(axes, "matmul_reduce_scatter", x, w)
    size = communicator_size(axes, None)
    if x.shape[0] % size:
        raise ValueError(
            f"matmul_reduce_scatter: the {x.shape[0]} rows of x cannot be dealt out to {size} ranks"
        )
    result = x.shape[0] * w.shape[1] * jnp.result_type(x, w).itemsize
    count = _pieces("matmul_reduce_scatter", pieces, x.shape[0] // size, result)
    return _as_one(_multiply_scatter)(x, w, axes, count)


def _as_one(f: Any) -> Any:  # noqa: ANN401
    """One program also where the call is in none, since halves must be of the same.

    Inlined while it is traced, so that its collectives have the line of the call.
    """
    inline = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)  # An enum in JAX 0.12.
    return jax.jit(f, static_argnums=(2, 3), inline=inline)


def _varying(axes: Axes, name: str, x: Value, w: Value) -> tuple[Value, Value]:
    """Checks shapes; both vary over all that either does, so that derivatives do too."""
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"{name} needs x [m, k] and w [k, p], got {x.shape} and {w.shape}")
    over = tuple({*axes}.union(*(jax.typeof(v).mat.varying for v in (x, w))))
    return _compat.as_varying(x, over), _compat.as_varying(w, over)


def _pieces(name: str, wanted: int | None, rows: int, size_bytes: int) -> int:
    if wanted is None:
        fit = (n for n in (4, 2) if rows % n == 0 and size_bytes // n >= _LEAST_PIECE)
        return next(fit, 1)
    if wanted < 1 or rows % wanted:
        raise ValueError(f"{name} pieces={wanted}: use a divisor of the {rows} rows of each rank")
    return wanted


def _gathered(x: Value, axes: Axes, count: int) -> Iterator[Value]:
    """The pieces of all ranks' rows, [n, m / count, k]; each is waited for when it is asked for."""
    if count == 1:
        yield collective("all_gather").bind(x, axes)
        return
    for begun in [start("all_gather", piece, axes) for piece in jnp.split(x, count)]:
        yield done(begun)


def _interleaved(pieces: list[Value]) -> Value:
    """Rows in the order of the ranks from pieces [n, m / count, p] that have some of each."""
    rows = jnp.stack(pieces, 1)
    return rows.reshape(-1, rows.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_multiply(x: Value, w: Value, axes: Axes, count: int) -> Value:
    return _interleaved([rows @ w for rows in _gathered(x, axes, count)])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _multiply_scatter(x: Value, w: Value, axes: Axes, count: int) -> Value:
    n = communicator_size(axes, None)
    x = x.reshape(n, count, -1, x.shape[1])
    if count == 1:
        return collective("psum_scatter").bind(x[:, 0] @ w, axes)
    begun = [start("psum_scatter", x[:, i] @ w, axes) for i in range(count)]
    return jnp.concatenate([done(piece) for piece in begun])


def _keep(f: Any, x: Value, w: Value, axes: Axes, count: int) -> tuple[Value, Any]:  # noqa: ANN401
    return f(x, w, axes, count), (x, w)


def _gather_multiply_back(
    axes: Axes, count: int, kept: tuple[Value, Value], ct: Value
) -> tuple[Value, Value]:
    x, w = kept
    x_ct = _multiply_scatter(ct, w.T, axes, count).astype(x.dtype)
    # The rows are gathered again: kept they would be n times as many.
    parts = ct.reshape(communicator_size(axes, None), count, -1, ct.shape[1])
    pairs = enumerate(_gathered(x, axes, count))
    w_ct = sum(jnp.einsum("nmk,nmp->kp", rows, parts[:, i]) for i, rows in pairs)
    return x_ct, jnp.asarray(w_ct).astype(w.dtype)


def _multiply_scatter_back(
    axes: Axes, count: int, kept: tuple[Value, Value], ct: Value
) -> tuple[Value, Value]:
    x, w = kept
    parts = x.reshape(communicator_size(axes, None), count, -1, x.shape[1])
    x_cts, w_ct = [], jnp.zeros((), ct.dtype)
    for i, rows in enumerate(_gathered(ct, axes, count)):
        x_cts.append(rows @ w.T)
        w_ct = w_ct + jnp.einsum("nmk,nmp->kp", parts[:, i], rows)
    return _interleaved(x_cts).astype(x.dtype), w_ct.astype(w.dtype)


_gather_multiply.defvjp(partial(_keep, _gather_multiply), _gather_multiply_back)
_multiply_scatter.defvjp(partial(_keep, _multiply_scatter), _multiply_scatter_back)
