"""Compiles programs for H200 GPUs, on a machine that has none, with the pass over each.

A program of its own: what it registers is for a platform that the suite's process does not have.
Prints as JSON, by name of the program: the collectives that the pass saw, what it says became of
them, and the fabric's calls and XLA's collectives in what was compiled; or an error.
"""

from __future__ import annotations

import json
import os
import re

# The libraries that a GPU would need are not looked for.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.extend.xla
import jax.numpy as jnp
import numpy as np
from hlo_programs import COLLECTIVE, TARGET, constrain
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfabric import _ext
from jaxfabric.hlo.transformation import transform

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
AB = P(("a", "b"))


def programs(mesh):
    """By name: a function, and its arguments as (shape, axes of each dimension)."""

    def per_rank(f, out=AB):
        return jax.shard_map(f, mesh=mesh, in_specs=AB, out_specs=out, check_vma=False)

    def ragged(x):
        count = jnp.ones(4, jnp.int32)
        return jax.lax.ragged_all_to_all(
            *(x, jnp.zeros_like(x), count * 2, count, count * 3, count), axis_name=("a", "b")
        )

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(jax.lax.psum(x, "a")), x)

    rows, columns, x = ("a", None), (None, "a"), (512, 1024)
    every = (x, (("a", "b"), None))
    return {
        "matmul": (jnp.matmul, (x, ("a", "b")), (x[::-1], ("b", None))),
        "rows to all": (lambda x: constrain(mesh, x * 2), (x, rows)),
        "columns to all": (lambda x: constrain(mesh, x * 2), (x, columns)),
        "rows to columns": (lambda x: constrain(mesh, x * 2, *columns), (x, rows)),
        "roll": (lambda x: constrain(mesh, jnp.roll(x, 1, 0), "a"), (x, rows)),
        "psum_scatter": (
            per_rank(lambda x: jax.lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True)),
            every,
        ),
        "all_to_all": (per_rank(lambda x: jax.lax.all_to_all(x, "a", 1, 0, tiled=True)), every),
        "pbroadcast": (per_rank(lambda x: jax.lax.pbroadcast(x, "a", 1)), every),
        "several": (
            per_rank(lambda x: (jax.lax.psum(x, "a"), jax.lax.psum(x.sum(0), "a"))),
            every,
        ),
        "loop": (per_rank(loop), every),
        "ragged_all_to_all": (per_rank(ragged), every),
        "product": (lambda x: x.prod(0), (x, rows)),
    }


def main():
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x4"
    )
    mesh = Mesh(np.array(topology.devices).reshape(2, 2), ("a", "b"))
    # Their code is not run, but XLA looks for them.
    for name, registration in _ext.type_registrations().items():
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, stages in _ext.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA", api_version=1)
    records = []

    def callback(data):
        result = transform(data)
        records.extend(result.records)
        return result.data

    jax.extend.xla.register_hlo_module_transformation(callback, name="test", platforms="cuda")
    found = {}
    for name, (f, *args) in programs(mesh).items():
        records.clear()
        shaped = [
            jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*axes)))
            for shape, axes in args
        ]
        try:
            text = jax.jit(f).lower(*shaped).compile().as_text()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        found[name] = {
            "seen": sorted(record.op for record in records),
            "reasons": sorted(record.reason for record in records if not record.taken),
            "fabric": sorted(TARGET.findall(text)),
            "xla": sorted(re.sub("-start$", "", op) for op in COLLECTIVE.findall(text)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
