"""A numpy model of ragged_all_to_all, and arguments for it: one row per rank in every array."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxfabric import lax

SPEC = PartitionSpec("i")


def slices(n, each, rows, seed=0, dtype=np.int32):
    """Random slices, one row of each array per rank, that overlap nowhere.

    An operand and a result have `n * rows` rows: `rows` for each rank that they are for or from.
    """
    random = np.random.default_rng(seed)
    room = rows // each
    shape = (n, n, each)  # sender, receiver, slice
    sizes = random.integers(0, room + 1, shape)
    sizes[0, -1] = 0
    sizes[-1, 0] = room
    begin = np.arange(n)[:, None] * rows + np.arange(each) * room
    spare = room - sizes
    input_offsets = begin[None] + random.integers(0, spare + 1)
    output_offsets = begin[:, None] + random.integers(0, spare + 1)
    recv_sizes = sizes.transpose(1, 0, 2)
    arrays = (input_offsets, sizes, output_offsets, recv_sizes)
    return tuple(a.reshape(n, n * each).astype(dtype) for a in arrays)


def expected(operands, outputs, metadata, groups=None):
    """What every rank gets."""
    results = [np.array(output) for output in outputs]
    for group in groups or [range(len(operands))]:
        each = metadata[0].shape[1] // len(group)
        for sender in group:
            start, size, to, _ = (array[sender] for array in metadata)
            for k in range(len(group) * each):
                rows = operands[sender][start[k] : start[k] + size[k]]
                results[group[k // each]][to[k] : to[k] + size[k]] = rows
    return np.stack(results)


def blocks(n, rows, tail=(3,), dtype=np.float32, seed=1):
    random = np.random.default_rng(seed)
    x, y = random.integers(-7, 8, (2, n, rows, *tail))
    if np.dtype(dtype) == np.bool_:
        return x > 0, y > 0
    return x.astype(dtype), y.astype(dtype)


def spread(f, mesh, check_vma=True, spec=SPEC):
    """shard_map of a function of one rank's arrays, for arrays with one block per rank."""

    def body(*arrays):
        return jax.tree.map(lambda y: y[None], f(*(a[0] for a in arrays)))

    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def call(x, y, *metadata, **kwargs):
    return lax.ragged_all_to_all(x, y, *metadata, **{"axis_name": "i", **kwargs})
