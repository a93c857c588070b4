"""One process of `jaxfabric bench`: times collectives of one implementation, and checks them."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
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
    lax = _connect(job["implementation"])
    devices = jax.devices()
    if len(devices) != job["ranks"]:
        raise SystemExit(f"JAX has {len(devices)} CPU devices instead of {job['ranks']}")
    mesh = Mesh(np.array(devices), (_AXIS,))
    meet = _Case(lax, mesh, "psum", 4, calls=2)
    for number, (op, size) in enumerate(job["cases"]):
        signal.setitimer(signal.ITIMER_REAL, job["timeout"])
        us, wrong = _measure(lax, mesh, meet, op, size)
        row = {"process": jax.process_index(), "case": number, "us": us, "wrong": wrong}
        print(json.dumps(row), file=results)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _connect(implementation: str) -> ModuleType:
    """Joins the job; returns where the implementation's collectives are."""
    os.environ.pop(SWITCH_VARIABLE, None)  # It would put the fabric beneath jax.lax.
    jax.config.update("jax_platforms", "cpu")
    if implementation == "jaxfabric":
        import jaxfabric

        jaxfabric.initialize()
        return jaxfabric.lax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    membership.join(None, None, None, Config.from_environment())
    return jax.lax


def _measure(
    lax: ModuleType, mesh: Mesh, meet: _Case, op: str, size: int
) -> tuple[float, str | None]:
    """Returns the median of the microseconds per call, and what is wrong with the result."""
    calls, repeats = (200, 9) if size <= 1 << 16 else (60, 9) if size < 1 << 20 else (20, 5)
    case = _Case(lax, mesh, op, size, calls)
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


class _Case:
    """One op at one size: a jitted program of dependent calls, its buffers, and what is right."""

    def __init__(self, lax: ModuleType, mesh: Mesh, op: str, size: int, calls: int) -> None:
        ranks, length = mesh.size, size // 4
        given = length // ranks if op == "all_gather" else length
        self.received = length // ranks if op == "psum_scatter" else length
        assert calls % 2 == 0, calls  # The last one is then always given the same.

        def program(x: jax.Array, out: jax.Array) -> _State:
            def call(_: jax.Array, state: _State) -> _State:
                x, out = state[0], _collective(lax, op, state[0], ranks)
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
                return values(_rank(index, length))

            return jax.make_array_from_callback((length * ranks,), NamedSharding(mesh, spec), shard)

        self.state = (
            place(lambda rank: _values(rank, given), given),
            place(lambda _: np.zeros(self.received, np.float32), self.received),
        )
        self.expected = {
            rank: _expected(op, rank, ranks, lambda r: _values(r, given, last=True))
            for shard in self.state[1].addressable_shards
            for rank in (_rank(shard.index, self.received),)
        }

    def run(self) -> None:
        """Runs all calls."""
        self.state = jax.block_until_ready(self.program(*self.state))

    def difference(self) -> str | None:
        """Compares what this process's ranks hold with numpy; describes the first difference."""
        for shard in self.state[1].addressable_shards:
            rank = _rank(shard.index, self.received)
            got, expected = np.asarray(shard.data), self.expected[rank]
            wrong = np.flatnonzero(got != expected)
            if wrong.size:
                return (
                    f"rank {rank} got {wrong.size} of {got.size} values wrong, the first of them "
                    f"{got[wrong[0]]:g} instead of {expected[wrong[0]]:g} at {wrong[0]}"
                )
        return None


def _rank(index: Any, length: int) -> int:  # noqa: ANN401
    """Whose shard that is, in an array of one shard of this length for each rank."""
    return (index[0].start or 0) // length


def _collective(lax: ModuleType, op: str, x: jax.Array, ranks: int) -> jax.Array:
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
