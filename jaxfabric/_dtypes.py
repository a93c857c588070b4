"""Which types the fabric moves and reduces, and what carries those that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

Aval = Any  # JAX's type of an array.
Context = Any  # mlir.LoweringRuleContext
Operation = Any  # ir.Value

# What the fabric moves and reduces as it is. Others are only moved, inside a type of this list.
NATIVE_DTYPES = frozenset(
    np.dtype(t)
    for t in (
        *(bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, jnp.bfloat16, np.float32, np.float64, np.complex64, np.complex128),
        *(jnp.float8_e4m3fn, jnp.float8_e5m2),
    )
)


def check_movable(name: str, dtype: Aval) -> None:
    """Raises TypeError if the fabric cannot move this type at all."""
    if carrier_of(dtype) is None:
        raise TypeError(
            f"jaxfabric.lax.{name} does not take {dtype}: cast it to a supported type first"
        )


def carrier_of(dtype: Aval) -> Aval:
    """A native type that can hold `dtype` while it is moved, or None."""
    if dtype in NATIVE_DTYPES:
        return dtype
    if jnp.issubdtype(dtype, np.integer):  # int4 and so on: one element per byte.
        return np.dtype(np.uint8 if jnp.issubdtype(dtype, np.unsignedinteger) else np.int8)
    if jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits in (4, 8):
        return np.dtype(np.uint8)
    return None


def _pack(x: jax.Array, carrier: Aval) -> jax.Array:
    if jnp.issubdtype(x.dtype, np.floating):
        bits = jnp.uint4 if jnp.finfo(x.dtype).bits == 4 else jnp.uint8
        x = jax.lax.bitcast_convert_type(x, bits)
    return x.astype(carrier)


def _unpack(x: jax.Array, dtype: Aval) -> jax.Array:
    if jnp.issubdtype(dtype, np.floating):
        bits = jnp.uint4 if jnp.finfo(dtype).bits == 4 else jnp.uint8
        return jax.lax.bitcast_convert_type(x.astype(bits), dtype)
    return x.astype(dtype)


def pack(ctx: Context, aval: Aval, x: Operation) -> tuple[Aval, Operation]:
    """Converts `x` to a type that the fabric moves."""
    packed = aval.update(dtype=carrier_of(aval.dtype))
    if packed.dtype == aval.dtype:
        return aval, x
    return packed, _apply(ctx, partial(_pack, carrier=packed.dtype), x, aval, packed)


def unpack(ctx: Context, y: Operation, out: Aval) -> Operation:
    """Converts what the fabric moved back to the type of `out`."""
    packed = out.update(dtype=carrier_of(out.dtype))
    if packed.dtype == out.dtype:
        return y
    return _apply(ctx, partial(_unpack, dtype=out.dtype), y, packed, out)


def _apply(
    ctx: Context, f: Callable[..., jax.Array], x: Operation, aval: Aval, out: Aval
) -> Operation:
    """Emits the operations of `f` between custom calls."""
    rule = mlir.lower_fun(f, multiple_results=False)
    return rule(ctx.replace(primitive=None, avals_in=[aval], avals_out=[out]), x)[0]
