"""What a process may use, compared with what a job of its size needs."""

from __future__ import annotations

import os
import resource

# Segment, wake-ups, timers, listeners and threads' own, and some for the program.
_OF_ITS_OWN = 16
# JAX's client, and Gloo, which XLA starts. Short of them the process would be aborted, or told
# that other processes have not come.
_OF_JAX = 16


def require_files_to_join(connections: int) -> None:
    """Lets the process open as many files as it takes to join a job, by its soft limit.

    Args:
        connections: how many come to JAX's coordination service, if it is in this process.

    Raises:
        RuntimeError: the hard limit forbids it.
    """
    _require(_OF_JAX + connections, "to join a job it")


def require_files(num_processes: int, tcp_sockets: int) -> None:
    """Lets the process open as many files as the fabric can need, by its soft limit.

    Raises RuntimeError if the hard one forbids it. Connections for data are opened when they are
    first used: without this they would fail then.
    """
    # Of each other process, and for one of this host, whose memory needs fewer: see its channel.
    needed = _OF_ITS_OWN + (num_processes - 1) * (1 + max(1, tcp_sockets))
    _require(needed, f"a job of {num_processes} processes")


def _require(needed: int, who: str) -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # There is not one left.
        used = allowed
    if used + needed <= allowed:
        return
    # The program keeps what it had.
    wanted = allowed + needed if most == resource.RLIM_INFINITY else min(allowed + needed, most)
    if used + needed <= wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        return
    raise RuntimeError(
        f"this process may have {most} files open and has {used}; {who} may need {needed} more: "
        f"raise the limit (ulimit -n {used + needed + 256}, "
        "LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
    )
