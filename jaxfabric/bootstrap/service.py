"""The coordination service as the launcher hosts it: a process of its own, on a port of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from jaxfabric import _compat

# The launcher's own path: `python -m` would look into the current directory first.
_PROGRAM = """
import json, sys
sys.path[:], arguments = json.loads(sys.argv[1])
from jaxfabric.bootstrap import service
service.serve(*arguments)
"""


class CoordinationService:
    """JAX's coordination service outside of the job's processes, so that any of them may die.

    It is a process besides, because its threads would make it unsafe for the launcher to fork. The
    port is taken at construction, so processes can be told before the service runs; clients retry
    until it does.

    Args:
        num_processes: how many clients it has.
        heartbeat_timeout: seconds after which a silent client is taken for dead.
        host: the address that it listens at.
        port: the same; 0: any that is free.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self, num_processes: int, heartbeat_timeout: int, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._num_processes = num_processes
        self._heartbeat_timeout = heartbeat_timeout
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        # gRPC binds with SO_REUSEPORT. This socket has it too and never listens: it keeps the port
        # from everyone else, and the kernel never picks a taken port for another bind to port 0.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._reservation = socket.socket(family)
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # A job that starts again takes a port with connections of the service before.
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
        try:
            self._reservation.bind((host, port))
        except OSError as error:
            self._reservation.close()
            raise OSError(
                error.errno,
                f"JAX's coordination service cannot listen at {host}, port {port}: "
                f"{error.strerror}",
            ) from None
        self.port: int = self._reservation.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def start(self, before_exec: Callable[[], None] | None = None) -> None:
        """Starts it; `before_exec` runs in its process first."""
        arguments = (self.address, self._num_processes, self._heartbeat_timeout)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps([sys.path, arguments])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A process that dies is told by the launcher, in one line, not by the service in forty.
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,  # Ctrl-C is for the launcher.
            preexec_fn=before_exec,
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def stop(self) -> None:
        """Ends the service and frees the port. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            os.close(self.pidfd)
        self._reservation.close()


def serve(address: str, num_processes: int, heartbeat_timeout: int) -> None:
    """Is the service until the process is killed. No JAX backend is started, nor JAX imported."""
    service = _compat.start_distributed_service(address, num_processes, heartbeat_timeout)
    while service:
        signal.pause()
