"""Collectives with the signatures and semantics of their namesakes in `jax.lax`.

Call them where `jax.lax`'s can be called: in `jax.shard_map`, inside `jax.jit` or not, in
`jax.pmap`, and in `jax.vmap(..., axis_name=)`. They can be differentiated, batched, rematerialised
and put into control flow. `barrier` has no namesake, nor have `all_reduce_rms_norm`, and
`all_gather_matmul` and `matmul_reduce_scatter`, which have no forward derivatives.

Arrays may be bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64,
complex128, float8_e4m3fn and float8_e5m2. What only moves data also takes other float8 types,
float4_e2m1fn, int2, int4, uint2, uint4 and PRNG keys.
"""

from __future__ import annotations

from jaxfabric.lax.all_gather import all_gather
from jaxfabric.lax.all_reduce import pmax, pmean, pmin, psum
from jaxfabric.lax.all_reduce_rms_norm import all_reduce_rms_norm
from jaxfabric.lax.all_to_all import all_to_all, pswapaxes
from jaxfabric.lax.barrier import barrier
from jaxfabric.lax.broadcast import pbroadcast
from jaxfabric.lax.fused import all_gather_matmul, matmul_reduce_scatter
from jaxfabric.lax.permute import ppermute, precv, psend, pshuffle
from jaxfabric.lax.ragged_all_to_all import ragged_all_to_all
from jaxfabric.lax.reduce_scatter import psum_scatter

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce_rms_norm",
    "all_to_all",
    "barrier",
    "matmul_reduce_scatter",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "precv",
    "psend",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]
