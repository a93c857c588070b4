"""Connections between the launchers of a job: JSON objects, one a line, over TCP.

Node 0 listens at the coordinator's address, the others connect. A launcher never runs what it is
sent; it starts and ends its own processes. Who can reach the port can disturb a job, as with JAX's
coordination service: both belong into a network of one's own.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from typing import Any

from jaxfabric.launch.messages import STRANGE

_FIRST_BYTES = 4 << 10  # Of a peer that has not said who it is.
_MOST_BYTES = 64 << 20
_SEND_SECONDS = 10.0
# A host that has gone without a word is noticed after 5 + 4 * 3 s, an outage of 10 s is not.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 4))
_USER_TIMEOUT_MS = 17_000


class JoinError(RuntimeError):
    """The launchers of a job did not come together; the message says which, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """Which of the hosts of a job this one is.

    Attributes:
        count: how many there are.
        rank: this one's number, from 0.
        coordinator: host:port of node 0, where its launcher listens. JAX's coordination service
            takes the port after it.
        join_timeout: how long nodes wait for each other at start, in seconds.
    """

    count: int = 1
    rank: int = 0
    coordinator: str | None = None
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"--node-rank {self.rank} is not below --nnodes {self.count}")
        if self.count > 1:
            if self.coordinator is None:
                raise ValueError(f"--nnodes {self.count} needs --coordinator HOST:PORT of node 0")
            host, port = self.address()
            if not host or not 0 < port < (1 << 16) - 1:
                raise ValueError(
                    f"--coordinator {self.coordinator}: use HOST:PORT, with a port from 1 to 65534 "
                    "(JAX's coordination service takes the port after it)"
                )

    def options(self) -> list[str]:
        """What tells `jaxfabric run` the same."""
        if self.coordinator is None:
            return []
        options = ["--nnodes", str(self.count), "--node-rank", str(self.rank)]
        options += ["--coordinator", self.coordinator]
        return [*options, "--join-timeout", str(self.join_timeout)]

    def address(self) -> tuple[str, int]:
        """Host and port of node 0's launcher."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port) if port.isdecimal() else 0


class Connection:
    """One launcher's end of a connection to another one.

    Args:
        sock: connected.
        known: the other side is the one that was called; else it has to say first who it is.
    """

    def __init__(self, sock: socket.socket, *, known: bool = False) -> None:
        self.socket = sock
        self._known = known
        # The address of the one that was called, as a number; asked for while it is there.
        self.peer_host = str(sock.getpeername()[0]) if known else ""
        self.peer: dict[str, Any] | None = None  # What it said of itself, once it has.
        self._received = b""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; raises OSError if the other side does not take it."""
        self.socket.settimeout(_SEND_SECONDS)
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        finally:
            self.socket.setblocking(False)

    def receive(self) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the messages that have come whole, and why no more will come, if none will."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return [], None
        except OSError as error:
            return [], error.strerror or str(error)
        *lines, self._received = (self._received + data).split(b"\n")
        limit = _MOST_BYTES if self._known or self.peer else _FIRST_BYTES
        strange = max(map(len, (*lines, self._received))) > limit
        try:
            messages = [] if strange else [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            strange = True
        if strange or not all(isinstance(message, dict) for message in messages):
            return [], STRANGE
        return messages, None if data else "its connection is closed"

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self.socket.close()


def listen(nodes: Nodes) -> tuple[socket.socket, str]:
    """Node 0's listener, at the interface of the coordinator's address; and that as a number.

    Raises:
        JoinError: the address cannot be listened at.
    """
    host, port = nodes.address()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise JoinError(f"--coordinator {nodes.coordinator}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(nodes.count + 16)
    except OSError as error:
        listener.close()
        raise JoinError(
            f"node 0 cannot listen at --coordinator {nodes.coordinator}: {error.strerror} (it has "
            "to be an address of the host of --node-rank 0, with a free port)"
        ) from None
    listener.setblocking(False)
    return listener, str(address[0])


def try_to_connect(nodes: Nodes) -> tuple[Connection | None, str]:
    """One attempt of another node to reach node 0; without a connection, why there is none."""
    try:
        sock = socket.create_connection(nodes.address(), timeout=1.0)
        return Connection(sock, known=True), ""
    except OSError as error:
        return None, error.strerror or str(error)


def joined(host: str, port: int) -> str:
    """host:port, as gRPC and people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def deadline_after(seconds: float) -> float:
    """The moment so many seconds from now."""
    return time.monotonic() + seconds
