"""What the scripts of the fault tests share. Runs in the processes of a job, not in pytest."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxfabric

P = PartitionSpec("x")


def say(event: str, **fields: Any) -> None:
    """Tells the test, in one line; `time` is the clock that all processes of the host share."""
    who = {"pid": os.getpid(), "process": jax.process_index(), "rank": jax.local_devices()[0].id}
    line = json.dumps({"event": event, "time": time.monotonic(), **who, **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def mesh() -> jax.sharding.Mesh:
    """All devices of the job along the axis x."""
    return jax.sharding.Mesh(np.array(jax.devices()), ("x",))


def spmd(f: Callable, abstract: bool = False) -> Callable:
    """Jits `f`, which sees one device's block, over all devices."""
    over = mesh().abstract_mesh if abstract else mesh()
    return jax.jit(jax.shard_map(f, mesh=over, in_specs=P, out_specs=P, check_vma=False))


def blocks(*shape: int, dtype: Any = np.float32) -> jax.Array:
    """One block of this shape per device, full of 1 + the device's position."""
    n = jax.device_count()
    sharding = NamedSharding(mesh(), P)

    def block(index: tuple[slice, ...]) -> np.ndarray:
        return np.full(shape, 1 + (index[0].start or 0) // shape[0], dtype)

    return jax.make_array_from_callback((n * shape[0], *shape[1:]), sharding, block)


def local(x: jax.Array) -> list[np.ndarray]:
    """The blocks of this process's devices."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]


@contextlib.contextmanager
def failure(then: Callable[[], None] | None = None) -> Iterator[None]:
    """Expects an error, says which, and goes on."""
    try:
        yield
    except Exception as error:
        say("raised", type=type(error).__name__, text=str(error))
        if then is not None:
            then()
    else:
        say("finished")


def fabric_threads() -> list[str]:
    """Names of the threads that belong to the fabric."""
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("jf-"))


def descriptors() -> dict[str, int]:
    """How many open files there are of each kind; sockets of JAX's TCP connections not counted."""
    tcp = set()
    for table in ("tcp", "tcp6"):
        lines = pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        tcp |= {f"socket:[{line.split()[9]}]" for line in lines}
    kinds: dict[str, int] = {}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if target not in tcp and not target.startswith("/proc/"):
                kind = target.partition("[")[0] if target.startswith("socket") else target
                kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def mappings() -> int:
    """How many mappings of the fabric's shared memory there are."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:jaxfabric")


class Snapshot:
    """What this process holds before the fabric starts; `check` says what it holds too much."""

    def __init__(self) -> None:
        self._before = descriptors()

    def check(self) -> None:
        jaxfabric.shutdown()
        after = descriptors()
        extra = {k: n - self._before.get(k, 0) for k, n in after.items()}
        say(
            "left",
            descriptors={kind: n for kind, n in extra.items() if n > 0},
            threads=fabric_threads(),
            mappings=mappings(),
        )


def start_twice(**settings: Any) -> Snapshot:
    """Initializes, shuts down and initializes again; the snapshot is from between the two."""
    jaxfabric.initialize(**settings)
    assert "jf-progress" in fabric_threads()
    assert mappings() > 0 or jax.process_count() == 1
    jaxfabric.shutdown()
    snapshot = Snapshot()
    jaxfabric.initialize(**settings)
    return snapshot


def in_thread(f: Callable[[], None]) -> threading.Thread:
    """Runs `f` beside the main thread."""
    thread = threading.Thread(target=f)
    thread.start()
    return thread
