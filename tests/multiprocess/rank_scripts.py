"""Scripts for several processes, with a mesh over all their devices and helpers to check it."""

from __future__ import annotations

import sys

import support

HEAD = """
import os, sys, threading
import numpy as np
import jaxfabric
jaxfabric.initialize()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxfabric import lax

n = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
process = jax.process_index()

def spread(f, out_specs=P("i"), **options):
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=out_specs, check_vma=False),
        **options)

def array(block):
    "block(rank) is the part of each rank."
    blocks = [np.asarray(block(rank)) for rank in range(n)]
    whole = np.concatenate(blocks)
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, P("i")), lambda at: whole[at])

def parts(y):
    "rank -> its part, of this process."
    return {s.index[0].start // s.data.shape[0]: np.asarray(s.data) for s in y.addressable_shards}

def same(y, want):
    for rank, part in parts(y).items():
        np.testing.assert_array_equal(part, want(rank))
"""
TAIL = """
print("done", flush=True)
"""


def environment(env=None):
    """What the processes of a job need to find this package and to fail in time."""
    return {"PYTHONPATH": ":".join(sys.path), "JAXFABRIC_DEADLINE": "40"} | (env or {})


def run(tmp_path, body, processes=2, devices=2, env=None, arguments=(), timeout=120):
    script = support.write_script(tmp_path, HEAD + body + TAIL)
    return support.run_job(
        script,
        processes,
        *arguments,
        options=("--devices-per-process", str(devices)),
        env=environment(env),
        timeout=timeout,
    )


def succeeds(result, processes=2):
    assert result.returncode == 0, result.explain()
    for rank in range(processes):
        assert result.lines_of(rank)[-1] == "done", result.explain()
