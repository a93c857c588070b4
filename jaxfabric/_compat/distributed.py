"""How processes of a job find each other.

jax._src.distributed.global_state and the coordination service's client and server, which have no
public face that lets the launcher host the service or a process connect as a recoverable client;
and jax._src.clusters, whose ClusterEnv is asked by jax.distributed.initialize() for what it is not
given. Read in 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def distributed_state() -> Any:  # noqa: ANN401
    """Returns JAX's own record of the distributed job (its `client` is None outside of one)."""
    from jax._src import distributed

    return distributed.global_state


def backends_are_initialized() -> bool:
    """Whether a JAX backend exists already, after which no distributed client can be added."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def recoverability_enabled() -> bool:
    """Whether `jax_enable_recoverability` is set: JAX tasks may then die without their peers."""
    from jax._src import distributed

    return bool(distributed._ENABLE_RECOVERABILITY.value)


def start_distributed_service(address: str, num_processes: int, heartbeat_timeout: int) -> Any:  # noqa: ANN401
    """Starts a coordination service whose clients may die without taking the others along.

    Imports jaxlib only: no JAX backend comes to life in the process that hosts the service.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=heartbeat_timeout,
        shutdown_timeout=5,
        recoverable=True,
    )


def connect_distributed_client(
    address: str,
    num_processes: int,
    process_id: int,
    init_timeout: int,
    heartbeat_timeout: int,
) -> Any:  # noqa: ANN401
    """Connects a recoverable client and makes it the one JAX uses.

    `shutdown_on_destruction=False`, because the shutdown of a job with a dead member blocks.

    Raises:
        RuntimeError: not all processes came within `init_timeout` and a few seconds.
    """
    from jax._src import distributed
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=init_timeout,
        shutdown_timeout=5,
        heartbeat_timeout=heartbeat_timeout,
        # Without a callback jaxlib ends the process where connect() fails. It cannot call this one
        # (its argument has no Python type), so connect() raises RuntimeError("std::bad_cast").
        missed_heartbeat_callback=lambda *_: None,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    state.client = client
    return client


@functools.cache
def register_cluster(find: Callable[[], Any]) -> bool:
    """Lets `jax.distributed.initialize()` ask `find` for jobs that it does not find by itself.

    JAX takes the first of its cluster environments that is there, and this one comes last.

    Args:
        find: returns a ClusterJob, see bootstrap/clusters.py, or None; raises ValueError.

    Returns:
        Whether this JAX has such environments where the known versions have them.
    """
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError:
        return False

    class JaxfabricCluster(ClusterEnv):  # JAX remembers its subclasses.
        name = "jaxfabric"
        _needed = False

        @classmethod
        def is_env_present(cls) -> bool:
            cls._needed = False
            try:
                return find() is not None
            except ValueError:
                return True  # Raised again if JAX needs to know.

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            return find().coordinator

        @classmethod
        def get_process_count(cls) -> int:
            cls._needed = True
            return find().num_processes

        @classmethod
        def get_process_id(cls) -> int:
            cls._needed = True
            return find().process_id

        @classmethod
        def get_local_process_id(cls) -> int | None:
            # JAX asks also where the program has said all, and may have chosen its GPUs.
            gpus = find().local_gpus() if cls._needed else None
            return gpus[0] if gpus else None

    return True
