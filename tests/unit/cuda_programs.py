"""Compiles programs for H200 GPUs, on a machine that has none, with the pass over each.

A program of its own: what it registers is for a platform that the suite's process does not have.
Prints as JSON, by topology and name of the program: the collectives that the pass saw, what it says
became of them, and the fabric's calls and XLA's collectives in what was compiled; or an error.
Also how many calls of one program there are, and are captured.
"""

from __future__ import annotations

import json
import re
import tempfile

import cuda_topology  # First: it says which platforms JAX is to have.
import jax
import jax.extend.xla
import jax.numpy as jnp
import numpy as np
from hlo_programs import COLLECTIVE, TARGET, constrain
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfabric import config
from jaxfabric.hlo.transformation import transform

AB = P(("a", "b"))


def programs(mesh):
    """By name: a function, and its arguments as (shape, axes of each dimension)."""

    def per_rank(f, out=AB):
        return jax.shard_map(f, mesh=mesh, in_specs=AB, out_specs=out, check_vma=False)

    def ragged(x):
        count = jnp.ones(mesh.size, jnp.int32)
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
        # Of which one is for XLA, so all are.
        "a large one": (
            per_rank(lambda x: (jax.lax.psum(x, "a"), jax.lax.psum(x.sum(0), "a"))),
            ((mesh.size << 14, 1024), (("a", "b"), None)),
        ),
        "product": (lambda x: x.prod(0), (x, rows)),
    }


def compiled(mesh, records, f, *args):
    records.clear()
    shaped = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*axes)))
        for shape, axes in args
    ]
    try:
        text = jax.jit(f).lower(*shaped).compile().as_text()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "seen": sorted(record.op for record in records),
        "reasons": sorted(record.reason for record in records if not record.taken),
        "fabric": sorted(TARGET.findall(text)),
        "xla": sorted(re.sub("-start$", "", op) for op in COLLECTIVE.findall(text)),
    }


def in_command_buffers(mesh, folder):
    """Of small collectives that depend on each other."""

    def captured(x):
        for _ in range(3):
            x = jnp.tanh(jax.lax.ppermute(jax.lax.psum(x, "a"), "b", [(0, 1), (1, 0)]))
        return x

    axes = (("a", "b"), None)
    x = jax.ShapeDtypeStruct((512, 512), np.float32, sharding=NamedSharding(mesh, P(*axes)))
    f = jax.shard_map(captured, mesh=mesh, in_specs=AB, out_specs=AB, check_vma=False)
    f.__name__ = "captured"
    jax.jit(f).lower(x).compile()
    return cuda_topology.captured_calls(folder)


def main(folder):
    cuda_topology.register()
    records = []
    # For numbers of ranks that the table leaves to XLA.
    limits = config.parse_gpu_limits("", "*/16=64M")

    def callback(data):
        result = transform(data, limits)
        records.extend(result.records)
        return result.data

    jax.extend.xla.register_hlo_module_transformation(callback, name="test", platforms="cuda")
    found = {}
    for hosts, gpus in ((1, 4), (2, 8)):
        mesh = Mesh(np.array(cuda_topology.devices(hosts, gpus)).reshape(2, -1), ("a", "b"))
        found[f"1x{hosts}x{gpus}"] = {
            name: compiled(mesh, records, f, *args) for name, (f, *args) in programs(mesh).items()
        } | {"command buffers": in_command_buffers(mesh, folder)}
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        cuda_topology.dump_captured(folder)
        main(folder)
