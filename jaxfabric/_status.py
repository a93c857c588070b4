"""How this process is connected, as `jaxfabric.status` tells it."""

from __future__ import annotations

import dataclasses

from jaxfabric.config import Config


@dataclasses.dataclass(frozen=True)
class Status:
    """What `jaxfabric.status` returns.

    Attributes:
        initialized: whether collectives can run.
        origin: how the processes found each other: "alone", "jaxfabric run", "jax.distributed",
            "initialize", "torchrun", "Open MPI", "Slurm" or "Kubernetes"; None before initialize().
        launcher: what the last four's variables say, in words.
        process_id: this process's number.
        num_processes: how many processes take part.
        ranks: the ids of this process's CPU devices.
        gpus: the ids of its GPUs: ranks of their own, numbered apart from those of CPUs.
        gpu_problem: why there are none, and collectives on GPUs are all left to XLA; else empty.
        gpu_memory: through which memory GPUs reach each other, and why not through a better one;
            empty where the fabric has none.
        windows_problem: why those on the fabric copy their arrays; empty if large ones need not.
        reads_problem: why processes of this host pass large arrays on through shared memory instead
            of reading each other's (process_vm_readv); empty if they read, or there is one only.
        peers: host and pid of every process, in process order.
        failure: text of the first failure, or None while all is well.
        counters: what the core has counted since the start.
        config: the settings in force.
    """

    initialized: bool
    origin: str | None = None
    launcher: str = ""
    process_id: int = 0
    num_processes: int = 1
    ranks: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    gpu_problem: str = ""
    gpu_memory: str = ""
    windows_problem: str = ""
    reads_problem: str = ""
    peers: tuple[str, ...] = ()
    failure: str | None = None
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    config: Config | None = None
