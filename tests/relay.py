"""A TCP relay that is a bad network: late, slow, stuck, or gone.

    with Relay(("127.0.0.1", port)) as relay:
        relay.delay(0.05, jitter=0.01)
        client = socket.create_connection(relay.address)
        relay.stall()

In a program of its own, such as on a host of netns.py, it prints its address and takes the same
words, one command a line, on standard input:

    python relay.py LISTEN_HOST:PORT TARGET_HOST:PORT      delay 0.05 0.01 | stall forward | reset
"""

from __future__ import annotations

import collections
import contextlib
import random
import selectors
import socket
import struct
import sys
import threading
import time

_CHUNK = 64 << 10
_HELD = 1 << 20  # Bytes of a direction that are under way; then the sender has to wait.
FORWARD, BACKWARD = "forward", "backward"  # From who connected to the target, and back.
_BOTH = (FORWARD, BACKWARD)


class _Flow:
    """One direction of one connection: what was read, and when it may go on."""

    def __init__(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        self.name, self.source, self.sink = name, source, sink
        self.chunks: collections.deque[tuple[float, bytes]] = collections.deque()
        self.held = 0
        self.free_at = 0.0  # When the rate allows for the next byte.
        self.last_due = 0.0
        self.ended = False  # The source has said that it sends no more.
        self.closed = False  # And the sink was told.


class Relay:
    """Takes connections at `address` and carries their bytes to and from a target.

    All faults are for the connections that exist and for those that come. Methods may be called
    from any thread; they take effect at once.

    Args:
        target: host and port.
        listen: host and port to listen at; 0: any port.
    """

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = target
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.connections = 0
        self.carried = {FORWARD: 0, BACKWARD: 0}
        self._lock = threading.RLock()
        self._flows: list[_Flow] = []
        self._stalled: set[str] = set()
        self._delay = self._jitter = 0.0
        self._rate: float | None = None
        self._refusing = False
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        for end in (self._waker, self._wake):
            end.setblocking(False)
        self._running = True
        self._thread = threading.Thread(target=self._loop, name="relay", daemon=True)
        self._thread.start()

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """What arrives from now on is late by `seconds` and up to `jitter` more, in order."""
        with self._changing():
            self._delay, self._jitter = seconds, jitter

    def rate(self, bytes_per_second: float | None) -> None:
        """Limits each direction of each connection; None: no limit."""
        with self._changing():
            self._rate = bytes_per_second

    def stall(self, *directions: str) -> None:
        """Stops carrying bytes, with all connections open: both directions, or those named."""
        with self._changing():
            self._stalled |= set(directions or _BOTH)

    def resume(self) -> None:
        """Ends `stall`."""
        with self._changing():
            self._stalled.clear()

    def half_close(self, direction: str = FORWARD) -> None:
        """The receivers of a direction hear that its sender sends no more; the other one goes on.

        What is under way in it is lost.
        """
        with self._changing():
            for flow in self._flows:
                if flow.name == direction and not flow.closed:
                    flow.chunks.clear()
                    flow.held = 0
                    flow.ended = flow.closed = True
                    with contextlib.suppress(OSError):
                        flow.sink.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Both ends of every connection get a reset; new connections are taken."""
        with self._changing():
            self._drop_all(hard=True)

    def refuse(self, refusing: bool = True) -> None:
        """Whether new connections are reset as soon as they have come."""
        with self._changing():
            self._refusing = refusing

    def close(self) -> None:
        """Ends all connections, and the relay. Idempotent."""
        with self._changing():
            self._running = False
        self._thread.join()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _changing(self):
        with self._lock:
            yield
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _loop(self) -> None:
        while True:
            with self._lock:
                if not self._running:
                    self._drop_all(hard=False)
                    break
                timeout = self._watch(time.monotonic())
            ready = [key.fileobj for key, _ in self._selector.select(timeout)]
            with self._lock:
                if self._waker in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._waker.recv(4096)
                if self._listener in ready:
                    self._accept()
                for flow in list(self._flows):
                    self._advance(flow, time.monotonic())
        for end in (self._listener, self._waker, self._wake):
            end.close()
        self._selector.close()

    def _watch(self, now: float) -> float | None:
        """Selects what can be advanced; returns how long nothing can for want of time."""
        events: dict[socket.socket, int] = {
            self._waker: selectors.EVENT_READ,
            self._listener: selectors.EVENT_READ,
        }
        due = []
        for flow in self._flows:
            if flow.name in self._stalled or flow.closed:
                continue
            if not flow.ended and flow.held < _HELD:
                events[flow.source] = events.get(flow.source, 0) | selectors.EVENT_READ
            if flow.chunks and flow.chunks[0][0] <= now:
                events[flow.sink] = events.get(flow.sink, 0) | selectors.EVENT_WRITE
            elif flow.chunks:
                due.append(flow.chunks[0][0] - now)
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in events:
                self._selector.unregister(key.fileobj)
        known = {key.fileobj: key.events for key in self._selector.get_map().values()}
        for file, wanted in events.items():
            if file not in known:
                self._selector.register(file, wanted)
            elif known[file] != wanted:
                self._selector.modify(file, wanted)
        return min(due) if due else None

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        if self._refusing:
            _close(near, hard=True)
            return
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            _close(near, hard=True)
            return
        self.connections += 1
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flows += [_Flow(FORWARD, near, far), _Flow(BACKWARD, far, near)]

    def _advance(self, flow: _Flow, now: float) -> None:
        if flow.closed or flow.name in self._stalled or flow not in self._flows:
            return
        try:
            self._receive(flow, now)
            self._send(flow, now)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(flow.source, flow.sink, hard=True)
            return
        if flow.ended and not flow.chunks:
            flow.closed = True
            with contextlib.suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)
            if all(f.closed for f in self._flows if f.source in (flow.source, flow.sink)):
                self._drop(flow.source, flow.sink, hard=False)

    def _receive(self, flow: _Flow, now: float) -> None:
        if flow.ended or flow.held >= _HELD:
            return
        size = _CHUNK if self._rate is None else max(1, min(_CHUNK, int(self._rate / 50)))
        try:
            data = flow.source.recv(size)
        except BlockingIOError:
            return
        if not data:
            flow.ended = True
            return
        due = now + self._delay + self._random.uniform(0, self._jitter)
        if self._rate is not None:
            flow.free_at = max(flow.free_at, now) + len(data) / self._rate
            due += flow.free_at - now
        flow.last_due = max(flow.last_due, due)
        flow.chunks.append((flow.last_due, data))
        flow.held += len(data)

    def _send(self, flow: _Flow, now: float) -> None:
        while flow.chunks and flow.chunks[0][0] <= now:
            due, data = flow.chunks[0]
            sent = flow.sink.send(data)
            self.carried[flow.name] += sent
            flow.held -= sent
            flow.chunks.popleft()
            if sent < len(data):
                flow.chunks.appendleft((due, data[sent:]))

    def _drop_all(self, *, hard: bool) -> None:
        while self._flows:
            self._drop(self._flows[0].source, self._flows[0].sink, hard=hard)

    def _drop(self, *ends: socket.socket, hard: bool) -> None:
        self._flows = [flow for flow in self._flows if flow.source not in ends]
        for end in ends:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            _close(end, hard=hard)


def _close(end: socket.socket, *, hard: bool) -> None:
    with contextlib.suppress(OSError):
        if hard:  # A reset instead of the regular end.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _main(listen: str, target: str) -> None:
    with Relay(_address(target), _address(listen)) as relay:
        print(f"{relay.address[0]}:{relay.address[1]}", flush=True)
        for line in sys.stdin:
            word, *rest = line.split()
            numbers = [float(x) if x[:1].isdigit() else x for x in rest]
            getattr(relay, word)(*numbers)
            print("done", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
