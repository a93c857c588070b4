"""One process of `jaxfabric bench`: times collectives of one implementation, and checks them."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfabric.bootstrap import membership
from jaxfabric.config import SWITCH_VARIABLE, Config

_AXIS = "ranks"
_TOP = 15  # Inputs are whole numbers up to this, which float32 adds up exactly.

_State = tuple[jax.Array, jax.Array]  # Of a program: its input, and its last result.


def main() -> None:
    """Measures what the JSON in sys.argv[1] asks for; prints one line of JSON for each case."""
    job = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A case that takes too long ends the process by SIGALRM, whatever it waits in, and says where
    # all threads were: any of them may get the signal.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.setitimer(signal.ITIMER_REAL, job["timeout"])
    # Gloo talks on stdout, which is for results.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = _connect(job["implementation"])
    if side.ranks != job["ranks"]:
        raise SystemExit(f"{side.ranks} ranks came together instead of {job['ranks']}")
    meet = _Case(side, "psum", 4, calls=2)
    together = _Together(side)
    for number, (op, size) in enumerate(job["cases"]):
        signal.setitimer(signal.ITIMER_REAL, job["timeout"])
        us, wrong = together.slowest(*_measure(side, meet, op, size))
        print(json.dumps({"case": number, "us": us, "wrong": wrong}), file=results)
    signal.setitimer(signal.ITIMER_REAL, 0)


@dataclasses.dataclass(frozen=True)
class _Side:
    """An implementation: its collectives with the signatures of jax.lax, and who is here.

    The mesh holds all `ranks`, or those of this process, of which `first` is the lowest.
    """

    lax: ModuleType | SimpleNamespace
    mesh: Mesh
    ranks: int
    first: int = 0


def _connect(implementation: str) -> _Side:
    """Joins the job."""
    os.environ.pop(SWITCH_VARIABLE, None)  # It would put the fabric beneath jax.lax.
    jax.config.update("jax_platforms", "cpu")
    lax: ModuleType | SimpleNamespace = jax.lax
    mpi: Any = None
    if implementation == "jaxfabric":
        import jaxfabric

        jaxfabric.initialize()
        lax = jaxfabric.lax
    elif implementation == "mpi4jax":
        from mpi4py import MPI

        mpi = MPI.COMM_WORLD
        lax = _mpi4jax(mpi, MPI.SUM)
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        membership.join(None, None, None, Config.from_environment())
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    return _Side(lax, mesh, mpi.size, mpi.rank) if mpi else _Side(lax, mesh, mesh.size)


def _mpi4jax(comm: Any, add: Any) -> SimpleNamespace:  # noqa: ANN401
    import mpi4jax

    def exchange(x: jax.Array) -> jax.Array:
        return mpi4jax.alltoall(x.reshape(comm.size, -1), comm=comm)

    def shift(x: jax.Array, _: str, pairs: list[tuple[int, int]]) -> jax.Array:
        source = next(source for source, target in pairs if target == comm.rank)
        return mpi4jax.sendrecv(x, x, source, dict(pairs)[comm.rank], comm=comm)

    return SimpleNamespace(
        psum=lambda x, _: mpi4jax.allreduce(x, add, comm=comm),
        all_gather=lambda x, _, tiled: mpi4jax.allgather(x, comm=comm).reshape(-1),
        # It has no reduce-scatter: this moves as few bytes.
        psum_scatter=lambda x, _, tiled: exchange(x).sum(axis=0),
        all_to_all=lambda x, _, split, concat, tiled: exchange(x).reshape(-1),
        ppermute=shift,
    )


def _measure(side: _Side, meet: _Case, op: str, size: int) -> tuple[float, str | None]:
    """Returns the median of the microseconds per call, and what is wrong with the result."""
    calls, repeats = (200, 9) if size <= 1 << 16 else (60, 9) if size < 1 << 20 else (20, 5)
    case = _Case(side, op, size, calls)
    case.run()
    wrong = case.difference()
    times = []
    for _ in range(repeats):
        meet.run()  # So that no rank's time holds its wait for another one to begin.
        begin = time.perf_counter()
        case.run()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    # A rank that has seen a wrong result goes on: the others would wait for it.
    return statistics.median(times), wrong or case.difference()


class _Together:
    """Tells every process, those of other hosts included, what all of them have measured."""

    def __init__(self, side: _Side) -> None:
        spec = PartitionSpec(_AXIS)
        self.side = side
        self.sharding = NamedSharding(side.mesh, spec)
        self.program = jax.jit(
            jax.shard_map(
                lambda x: side.lax.all_gather(x, _AXIS, tiled=True),
                mesh=side.mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        )

    def slowest(self, us: float, wrong: str | None) -> tuple[float, str | None]:
        """Returns the longest time of all, and what is wrong, here or elsewhere."""
        own = np.array([us, wrong is not None], np.float32)
        given = jax.make_array_from_callback(
            (2 * self.side.mesh.size,), self.sharding, lambda _: own
        )
        every = np.asarray(self.program(given).addressable_shards[0].data).reshape(-1, 2)
        if every[:, 1].any() and wrong is None:
            wrong = "another rank, whose process says which, got values wrong"
        return float(every[:, 0].max()), wrong


class _Case:
    """One op at one size: a jitted program of dependent calls, its buffers, and what is right."""

    def __init__(self, side: _Side, op: str, size: int, calls: int) -> None:
        mesh, ranks, length = side.mesh, side.ranks, size // 4
        given = length // ranks if op == "all_gather" else length
        self.first = side.first
        self.received = length // ranks if op == "psum_scatter" else length
        assert calls % 2 == 0, calls  # The last one is then always given the same.

        def program(x: jax.Array, out: jax.Array) -> _State:
            def call(_: jax.Array, state: _State) -> _State:
                x, out = state[0], _collective(side.lax, op, state[0], ranks)
                # The next input depends on this result, though no right result is negative: the
                # calls can be neither hoisted nor overlapped. It differs from this input, so that
                # the result of the call before is a wrong one.
                first = jnp.where(out[:1] < 0, out[:1], _TOP - x[:1])
                return jax.lax.dynamic_update_slice(x, first, (0,)), out

            return jax.lax.fori_loop(0, calls, call, (x, out))

        spec = PartitionSpec(_AXIS)
        self.program = jax.jit(
            jax.shard_map(
                program, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
            ),
            donate_argnums=(0, 1),  # What comes out goes in again: nothing else copies it.
        )

        def place(values: Callable[[int], np.ndarray], length: int) -> jax.Array:
            def shard(index: Any) -> np.ndarray:  # noqa: ANN401
                return values(self._rank(index, length))

            return jax.make_array_from_callback(
                (length * mesh.size,), NamedSharding(mesh, spec), shard
            )

        self.state = (
            place(lambda rank: _values(rank, given), given),
            place(lambda _: np.zeros(self.received, np.float32), self.received),
        )
        self.expected = {
            rank: _expected(op, rank, ranks, lambda r: _values(r, given, last=True))
            for shard in self.state[1].addressable_shards
            for rank in (self._rank(shard.index, self.received),)
        }

    def run(self) -> None:
        """Runs all calls."""
        self.state = jax.block_until_ready(self.program(*self.state))

    def difference(self) -> str | None:
        """Compares what this process's ranks hold with numpy; describes the first difference."""
        for shard in self.state[1].addressable_shards:
            rank = self._rank(shard.index, self.received)
            got, expected = np.asarray(shard.data), self.expected[rank]
            wrong = np.flatnonzero(got != expected)
            if wrong.size:
                return (
                    f"rank {rank} got {wrong.size} of {got.size} values wrong, the first of them "
                    f"{got[wrong[0]]:g} instead of {expected[wrong[0]]:g} at {wrong[0]}"
                )
        return None

    def _rank(self, index: Any, length: int) -> int:  # noqa: ANN401
        """Whose shard that is, in an array of one shard of this length for each rank."""
        return self.first + (index[0].start or 0) // length


def _collective(lax: ModuleType | SimpleNamespace, op: str, x: jax.Array, ranks: int) -> jax.Array:
    if op == "psum":
        return lax.psum(x, _AXIS)
    if op == "all_gather":
        return lax.all_gather(x, _AXIS, tiled=True)
    if op == "psum_scatter":
        return lax.psum_scatter(x, _AXIS, tiled=True)
    if op == "all_to_all":
        return lax.all_to_all(x, _AXIS, 0, 0, tiled=True)
    assert op == "ppermute", op
    return lax.ppermute(x, _AXIS, [(rank, (rank + 1) % ranks) for rank in range(ranks)])


def _values(rank: int, length: int, last: bool = False) -> np.ndarray:
    """What a rank gives to the first call, or to the last."""
    values = np.random.default_rng(rank).integers(0, _TOP + 1, length, np.uint8)
    if last:
        values[0] = _TOP - values[0]
    return values.astype(np.float32)


def _expected(op: str, rank: int, ranks: int, given: Callable[[int], np.ndarray]) -> np.ndarray:
    """What numpy says the rank receives."""
    if op == "ppermute":
        return given((rank - 1) % ranks)
    parts = (
        given(r) if op in ("psum", "all_gather") else np.split(given(r), ranks)[rank]
        for r in range(ranks)
    )
    if op in ("psum", "psum_scatter"):
        return np.asarray(sum(parts))
    return np.concatenate(list(parts))
