"""Who a process is, so that another one can name it, and can see that it has ended."""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import time
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process, unmistakably: a pid alone may be another process a moment later."""

    hostname: str
    pid: int
    started: int  # Clock ticks since boot, from /proc/<pid>/stat.
    pid_space: str  # Boot id and pid namespace: pids mean the same only where this is equal.

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Returns the identity of the calling process."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid()), _pid_space())


class Watch:
    """Sees processes end. Those of other hosts cannot be watched and count as alive.

    Example:
        >>> with Watch([ProcessIdentity.own()]) as watch:
        ...     watch.any_gone()
        False
    """

    def __init__(self, processes: Iterable[ProcessIdentity]) -> None:
        self._handles: set[int] = set()
        self._gone = 0
        self._unseen = 0
        for process in processes:
            self._open(process)

    def _open(self, process: ProcessIdentity) -> None:
        if not process.pid_space or process.pid_space != _pid_space():
            self._unseen += 1
            return
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._gone += 1
            return
        except OSError:
            self._unseen += 1
            return
        # The handle is held, so the number cannot change hands after this look.
        if _start_time(process.pid) == process.started:
            self._handles.add(handle)
        else:
            os.close(handle)
            self._gone += 1

    def any_gone(self) -> bool:
        """Whether at least one of the processes has ended."""
        self._poll(0)
        return self._gone > 0

    def wait_until_all_gone(self, timeout: float) -> bool:
        """Waits until all of the processes have ended; returns whether they have."""
        deadline = time.monotonic() + timeout
        while self._handles or self._unseen:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self._poll(remaining)
        return True

    def _poll(self, timeout: float) -> None:
        poller = select.poll()
        for handle in self._handles:
            poller.register(handle, select.POLLIN)
        for handle, _ in poller.poll(timeout * 1000):
            self._handles.discard(handle)
            os.close(handle)
            self._gone += 1

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.pop())


def _pid_space() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return f"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name, in parentheses, may hold spaces and parentheses itself.
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
