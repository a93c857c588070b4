"""What soak.py runs on every process: random collectives, each compared with numpy bit by bit.

All processes draw the same numbers, so each knows what the others have and what must come out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np
import worker
from jax.sharding import NamedSharding

import jaxfabric
from jaxfabric import lax

DTYPES = (
    *(np.dtype(name) for name in ("float32", "float64", "float16", "int8", "int32", "uint64")),
    np.dtype(ml_dtypes.bfloat16),
)
# Collectives of one program: they run at the same time, in any order.
TOGETHER = 4
LARGEST = 1 << 15
POOL = 1 << 22
Blocks = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Op:
    """run(x, groups), and what each rank of a group gets from the blocks of the group."""

    run: Callable
    model: Callable[[Blocks, int], np.ndarray]
    reduces: bool = False


def _total(blocks: Blocks) -> np.ndarray:
    return np.sum(np.stack(blocks), axis=0, dtype=np.float64).astype(blocks[0].dtype)


OPS = {
    "psum": Op(
        lambda x, g: lax.psum(x, "x", axis_index_groups=g),
        lambda blocks, _: _total(blocks),
        reduces=True,
    ),
    "pmax": Op(
        lambda x, g: lax.pmax(x, "x", axis_index_groups=g),
        lambda blocks, _: np.max(np.stack(blocks), axis=0),
        reduces=True,
    ),
    "psum_scatter": Op(
        lambda x, g: lax.psum_scatter(x, "x", axis_index_groups=g, tiled=True),
        lambda blocks, rank: _total(blocks)[rank : rank + 1],
        reduces=True,
    ),
    "all_gather": Op(
        lambda x, g: lax.all_gather(x, "x", axis_index_groups=g, tiled=True),
        lambda blocks, _: np.concatenate(blocks),
    ),
    "all_to_all": Op(
        lambda x, g: lax.all_to_all(x, "x", 0, 0, axis_index_groups=g, tiled=True),
        lambda blocks, rank: np.stack([block[rank] for block in blocks]),
    ),
    "ppermute": Op(
        lambda x, _: lax.ppermute(x, "x", [(r, (r + 3) % 4) for r in range(4)]),
        lambda blocks, rank: blocks[(rank + 1) % 4],
    ),
    "pbroadcast": Op(lambda x, _: lax.pbroadcast(x, "x", 2), lambda blocks, _: blocks[2]),
}
# The first two ranks are on one host.
GROUPS = (None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [2, 1]])


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    dtype: np.dtype
    groups: list[list[int]] | None
    columns: int

    @classmethod
    def draw(cls, random: np.random.Generator) -> Case:
        name = str(random.choice(list(OPS)))
        whole = name in ("ppermute", "pbroadcast")
        groups = None if whole else GROUPS[random.integers(len(GROUPS))]
        columns = int(np.exp(random.uniform(0, np.log(LARGEST))))
        return cls(name, DTYPES[random.integers(len(DTYPES))], groups, columns)

    def group_of(self, rank: int) -> list[int]:
        return next((g for g in self.groups or [[*range(4)]] if rank in g), [])

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.group_of(0)), self.columns)

    def block(self, pool: np.ndarray, offset: int) -> np.ndarray:
        """Small numbers where they are added, and any bits where they are only moved."""
        size = self.shape[0] * self.columns
        if OPS[self.name].reduces:
            return (pool[offset : offset + size] % 8).astype(self.dtype).reshape(self.shape)
        return (
            pool[offset : offset + size * self.dtype.itemsize].view(self.dtype).reshape(self.shape)
        )


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


# Those that the core starts once; the others are of pools, up to a limit.
FIXED = {f"jf-{name}\n" for name in ("control", "network", "progress")}


def held() -> dict[str, int]:
    """What must not grow."""
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return {
        "kib": int(fields["VmRSS"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
        "fixed threads": sum(name in FIXED for name in names),
    }


def compile_program(cases: list[Case]) -> Callable:
    return worker.spmd(lambda xs: [OPS[c.name].run(x, c.groups) for c, x in zip(cases, xs)])  # noqa: B905


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--collectives", type=int)
    parser.add_argument("--programs", type=int)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jaxfabric.initialize()
    random = np.random.default_rng(options.seed)
    pool = random.integers(0, 256, POOL, dtype=np.uint8)
    sets = [[Case.draw(random) for _ in range(TOGETHER)] for _ in range(options.programs)]
    programs = [compile_program(cases) for cases in sets]
    sharding = NamedSharding(worker.mesh(), worker.P)
    own, n = jax.process_index(), jax.device_count()
    launches = -(-options.collectives // TOGETHER)
    room = POOL - 4 * LARGEST * 8
    wrong = 0
    for launch in range(launches):
        # First each once: what compiling takes is not growth.
        chosen = launch if launch < len(sets) else int(random.integers(len(sets)))
        offsets = random.integers(0, room, (TOGETHER, n))
        cases = sets[chosen]
        blocks = [
            [case.block(pool, offset) for offset in row]
            for case, row in zip(cases, offsets, strict=True)
        ]
        arrays = [
            jax.make_array_from_process_local_data(
                sharding, row[own], (n * row[own].shape[0], case.columns)
            )
            for case, row in zip(cases, blocks, strict=True)
        ]
        for case, row, y in zip(cases, blocks, programs[chosen](arrays), strict=True):
            group = case.group_of(own)
            want = OPS[case.name].model([row[r] for r in group], group.index(own))
            differ = int((bits(worker.local(y)[0]) != bits(want)).sum())
            if differ:
                wrong += differ
                worker.say("wrong", case=str(case), launch=launch, bytes=differ)
        if launch == len(sets) or (launch + 1) % max(1, launches // 10) == 0:
            worker.say("at", collectives=(launch + 1) * TOGETHER, **held())
    worker.say("done", collectives=launches * TOGETHER, wrong=wrong)


if __name__ == "__main__":
    main()
