"""A wire between two hosts of netns.py that loses packets, and is late with the others.

    with Wire(a, b) as wire:
        wire.tell("loss 0.01")
        wire.tell("delay 0.01 0.02")

Linux has netem for that, which not every kernel has. This one needs packet sockets only, and sees
every packet of the two hosts' first network, which it takes out of the switch until it is closed.
What it does to TCP is real: packets are lost, and overtake each other where their delay differs.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import netns

_SOL_PACKET, _IGNORE_OUTGOING, _VNET_HDR, _ETH_P_ALL = 263, 23, 15, 3
_VNET_HDR_BYTES = 10
_LARGEST = (64 << 10) + 64
_SIOCETHTOOL, _ETHTOOL_STSO, _ETHTOOL_SGSO = 0x8946, 0x1F, 0x24
# Packets under way in one direction; more are dropped, as a router does.
_QUEUE = 2000


class Wire:
    """Starts the program below in the network of the switch. A context manager."""

    def __init__(self, *hosts: netns.Host) -> None:
        self._hosts = hosts
        self._process: subprocess.Popen[str] | None = None

    def tell(self, command: str) -> str:
        """Gives a command, waits until it is in force, and returns the answer.

        "loss P": each packet is dropped with this probability. "delay S J": each is late by S to
        S + J seconds. "cut", "restore": nothing comes through until it is restored. "counts": how
        many packets have been "carried" and "dropped", as JSON.
        """
        assert self._process is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def counts(self) -> dict[str, int]:
        return json.loads(self.tell("counts"))

    def __enter__(self) -> Wire:
        ports = []
        for host in self._hosts:
            ports.append(host.unplug())
            # Packets as they are on a real wire: not put together to larger ones.
            host.run(sys.executable, "-I", "-S", __file__, "unsegmented", host.first_network)
        program = (sys.executable, "-I", "-S", __file__)
        self._process = self._hosts[0].lab.switch_program(*program, *ports)
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        for host in self._hosts:
            host.plug_in()


def unsegmented(device: str) -> None:
    """Takes a network device's ability to send many packets as one."""
    with socket.socket() as any_socket:
        for command in (_ETHTOOL_STSO, _ETHTOOL_SGSO):
            _ethtool(any_socket, device, struct.pack("II", command, 0))


def _ethtool(any_socket: socket.socket, device: str, command: bytes) -> None:
    import array
    import fcntl

    value = array.array("B", command)
    request = struct.pack("16sP16x", device.encode(), value.buffer_info()[0])
    fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


class _Program:
    def __init__(self, *ports: str) -> None:
        self._ends = [self._open(port) for port in ports]
        self._other = dict(zip(self._ends, reversed(self._ends), strict=True))
        self._waiting: list[tuple[float, int, socket.socket, bytes]] = []
        self._loss = self._delay = self._jitter = 0.0
        self._connected = True
        self._random = random.Random(1)
        self.counts = {"carried": 0, "dropped": 0}
        self._number = 0

    @staticmethod
    def _open(port: str) -> socket.socket:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # Checksums that the sender has left to its network card stay to be done.
        end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
        end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        with contextlib.suppress(PermissionError):
            end.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
        end.bind((port, _ETH_P_ALL))
        end.setblocking(False)
        return end

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for end in self._ends:
            selector.register(end, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            timeout = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for key, _ in selector.select(timeout):
                if key.fileobj is not sys.stdin:
                    self._receive(key.fileobj)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                print(self._obey(*line.split()), flush=True)
            self._deliver()

    def _obey(self, word: str, *numbers: str) -> str:
        values = [float(number) for number in numbers]
        if word == "loss":
            (self._loss,) = values
        elif word == "delay":
            self._delay, self._jitter = values
        elif word in ("cut", "restore"):
            self._connected = word == "restore"
        elif word == "counts":
            return json.dumps(self.counts)
        else:
            return f"unknown: {word}"
        return "done"

    def _receive(self, end: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                packet = end.recv(_LARGEST)
                lost = not self._connected or self._random.random() < self._loss
                if lost or len(self._waiting) >= 2 * _QUEUE:
                    self.counts["dropped"] += 1
                    continue
                late = self._delay + self._random.uniform(0, self._jitter)
                self._number += 1
                entry = (time.monotonic() + late, self._number, self._other[end], packet)
                heapq.heappush(self._waiting, entry)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(self._waiting)
            try:
                end.send(packet)
                self.counts["carried"] += 1
            except OSError:  # The host is gone, or its card is full.
                self.counts["dropped"] += 1


def _main(*arguments: str) -> None:
    if arguments[0] == "unsegmented":
        return unsegmented(arguments[1])
    program = _Program(*arguments)
    print("ready", flush=True)
    program.run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
