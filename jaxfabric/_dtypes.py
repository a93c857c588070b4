"""Which types the fabric moves and reduces, and how others travel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DType = Any  # np.dtype, or one of ml_dtypes.

# What the fabric moves and reduces as it is. Others are only moved, inside a type of this list.
NATIVE_DTYPES = frozenset(
    np.dtype(t)
    for t in (
        *(bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, jnp.bfloat16, np.float32, np.float64, np.complex64, np.complex128),
        *(jnp.float8_e4m3fn, jnp.float8_e5m2),
    )
)


def carrier_of(dtype: DType) -> DType:
    """Returns a native type that can hold `dtype` while it is moved, or None."""
    if dtype in NATIVE_DTYPES:
        return dtype
    if jnp.issubdtype(dtype, np.integer):  # int4 and so on: one element per byte.
        return np.dtype(np.uint8 if jnp.issubdtype(dtype, np.unsignedinteger) else np.int8)
    if jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits in (4, 8):
        return np.dtype(np.uint8)
    return None


def pack(x: jax.Array, carrier: DType) -> jax.Array:
    """Returns the elements of `x` in a native type."""
    if jnp.issubdtype(x.dtype, np.floating):
        bits = jnp.uint4 if jnp.finfo(x.dtype).bits == 4 else jnp.uint8
        x = jax.lax.bitcast_convert_type(x, bits)
    return x.astype(carrier)


def unpack(x: jax.Array, dtype: DType) -> jax.Array:
    """Undoes `pack`."""
    if jnp.issubdtype(dtype, np.floating):
        bits = jnp.uint4 if jnp.finfo(dtype).bits == 4 else jnp.uint8
        return jax.lax.bitcast_convert_type(x.astype(bits), dtype)
    return x.astype(dtype)
