"""How processes and jobs end."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """How one process ended: its exit code (128 + signal if killed), when, and by whom.

    `seconds` counts from the start of its launcher; `node` is that launcher's number.
    """

    process: int
    pid: int
    exit_code: int
    signal: str | None
    seconds: float
    ended_by_launcher: bool
    last_lines: tuple[str, ...]
    node: int = 0
    host: str = ""


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a job ended, the same on all nodes.

    Attributes:
        exit_code: that of the process that failed first, or 0.
        first_failure: its number; None if none failed, or if it was no process: see `failure`.
        seconds: from the first start to the last end.
        processes: one entry for each, in order.
        failure: the first failure in words, or None.
        restarts: how often the job started again; all else is about the last time.
    """

    exit_code: int
    first_failure: int | None
    seconds: float
    processes: tuple[ProcessResult, ...]
    failure: str | None = None
    restarts: int = 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Summary:
        """Reads what dataclasses.asdict() has written."""
        processes = tuple(result_from_json(each) for each in values["processes"])
        return cls(**(values | {"processes": processes}))


def result_from_json(values: dict[str, Any]) -> ProcessResult:
    """Reads what dataclasses.asdict() has written."""
    return ProcessResult(**(values | {"last_lines": tuple(values["last_lines"])}))


def how_it_ended(exit_code: int | None, signal_name: str | None) -> str:
    """Returns the two fields of a ProcessResult in words, such as "exited with status 3"."""
    return f"was killed by {signal_name}" if signal_name else f"exited with status {exit_code}"
