"""How processes of a job find each other.

jax._src.distributed.global_state and the coordination service's client and server, which have no
public face that lets the launcher host the service or a process connect as a recoverable client.
Read in 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

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
