"""`jaxfabric run`: starts the processes of a job, on one host or several, and ends them together.

job.py is what every launcher does for its own host. The launcher of node 0 has a hub.py besides,
which decides for all: who takes part, when a job starts, ends, and starts again. links.py carries
their messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from jaxfabric.launch.job import Job
from jaxfabric.launch.links import JoinError, Nodes
from jaxfabric.launch.results import ProcessResult, Summary, how_it_ended

__all__ = ["JoinError", "Nodes", "ProcessResult", "Summary", "how_it_ended", "run"]


def run(
    command: Sequence[str],
    num_processes: int,
    *,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    devices_per_process: int | None = None,
    gpus_per_process: int | None = None,
    grace: float = 10.0,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
) -> Summary:
    """Runs a program as the processes of one job, and waits until all have ended.

    Args:
        command: a Python file or any other program, then its arguments.
        num_processes: how many to start on this host.
        nodes: which of several hosts this one is; default: the only one.
        max_restarts: how often the whole job starts again after a failure (node 0's counts).
        devices_per_process: CPU devices of each; default: left to the program.
        gpus_per_process: GPUs of each, apart from those of the others; default: left to it.
        grace: seconds that the others have to report and exit after one has failed.
        stdout: where standard output goes, each line prefixed with the number of its process.
        stderr: the same for standard error, and for what the launcher itself has to say.

    Returns:
        How each process of the job ended; `exit_code` is that of the first to fail.

    Raises:
        OSError: the program cannot be started.
        ValueError: a setting has a value it cannot have, or there are not so many GPUs.
        JoinError: not all nodes came, this one was refused, or node 0's ports are taken.

    Example:
        >>> run(["true"], 2).exit_code
        0
    """
    sinks = (stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
    return Job(
        command,
        num_processes,
        nodes or Nodes(),
        max_restarts,
        grace,
        sinks,
        devices_per_process,
        gpus_per_process,
    ).run()
