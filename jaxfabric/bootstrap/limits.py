"""What a process may use, compared with what a job of its size needs."""

from __future__ import annotations

import os
import resource

# Segment, wake-ups, timers, listeners and threads' own, and some for the program.
_OF_ITS_OWN = 16


def require_files(num_processes: int, tcp_sockets: int) -> None:
    """Raises RuntimeError if the process may not open as many files as the fabric can need.

    Connections for data are opened when they are first used: without this they would fail then.
    """
    # Of each other process, and for one of this host, whose memory needs fewer: see its channel.
    needed = _OF_ITS_OWN + (num_processes - 1) * (1 + max(1, tcp_sockets))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return
    used = len(os.listdir("/proc/self/fd"))
    if used + needed > allowed:
        raise RuntimeError(
            f"this process may have {allowed} files open and has {used}; a job of {num_processes} "
            f"processes may need {needed} more: raise the limit (ulimit -n {used + needed + 256}, "
            "LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
        )
