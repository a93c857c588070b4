"""The coordination service as the launcher hosts it: on loopback, on a port of its own."""

from __future__ import annotations

import os
import socket
from typing import Any

from jaxfabric import _compat


class CoordinationService:
    """JAX's coordination service outside of the job's processes, so that any of them may die.

    The port is taken at construction, so processes can be told before the service runs; clients
    retry until it does.
    """

    def __init__(self, num_processes: int, heartbeat_timeout: int) -> None:
        self._num_processes = num_processes
        self._heartbeat_timeout = heartbeat_timeout
        self._service: Any = None
        # gRPC binds with SO_REUSEPORT. This socket has it too and never listens: it keeps the port
        # from everyone else, and the kernel never picks a taken port for another bind to port 0.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._reservation.getsockname()[1]}"

    def start(self) -> None:
        """Starts answering. No JAX backend is started, JAX itself is not even imported."""
        # A process that dies is told by the launcher, in one line, not by the service in forty.
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        self._service = _compat.start_distributed_service(
            self.address, self._num_processes, self._heartbeat_timeout
        )

    def stop(self) -> None:
        """Ends the service and frees the port. Idempotent."""
        if self._service is not None:
            self._service.shutdown()
            self._service = None
        self._reservation.close()
