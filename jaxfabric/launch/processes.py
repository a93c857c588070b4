"""The processes of one host: how they are started, and what is held of them while they live."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import signal as signals
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from jaxfabric.config import LAUNCHER_VARIABLES, RUN_VARIABLES, LauncherEnvironment
from jaxfabric.launch.results import ProcessResult

_TAIL_LINES = 20
_LONGEST_LINE = 64 << 10  # Printed in pieces beyond this.
_COLORS = (36, 32, 33, 35, 34, 31)
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Stream:
    """Standard output or error of a process, and where its lines go."""

    process: Process
    source: IO[bytes]
    sink: IO[bytes]
    pending: bytes = b""

    def read(self) -> tuple[bytes, bool]:
        """Returns the prefixed lines that have become whole, and whether the stream has ended."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return b"", False
        *lines, self.pending = (self.pending + data).split(b"\n")
        if self.pending and (not data or len(self.pending) > _LONGEST_LINE):
            lines.append(self.pending)
            self.pending = b""
        prefix = _prefix(self.process.number, self.sink)
        self.process.tail.extend(line.decode(errors="replace") for line in lines)
        return b"".join(prefix + line + b"\n" for line in lines), not data


@dataclasses.dataclass
class Process:
    """A process that was started, until `close`.

    Attributes:
        number: its number in the job.
        code: as in ProcessResult; None while it lives.
    """

    number: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    streams: list[Stream]
    tail: collections.deque[str]
    code: int | None = None
    signal: str | None = None
    ended: float = 0.0
    ended_by_launcher: bool = False

    @classmethod
    def start(
        cls, number: int, argv: list[str], environ: dict[str, str], sinks: tuple[IO[bytes], ...]
    ) -> Process:
        """Starts a program in a session of its own, to end with this process."""
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # So that what a process starts itself can be ended with it.
            preexec_fn=dies_with_launcher(),
        )
        tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        process = cls(number, popen, os.pidfd_open(popen.pid), [], tail)
        for source, sink in zip((popen.stdout, popen.stderr), sinks, strict=True):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            process.streams.append(Stream(process, source, sink))
        return process

    def collect(self) -> None:
        """Notes how it ended.

        WNOWAIT keeps the process's number taken, so that signals to its session never reach
        another one; `close` reaps it.
        """
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        if result.si_code == os.CLD_EXITED:
            self.code = result.si_status
        else:
            self.signal = signals.Signals(result.si_status).name
            self.code = 128 + result.si_status

    def send(self, number: signals.Signals) -> None:
        """Signals it if it lives; SIGKILL goes to what an ended process left behind, too."""
        if self.code is None or number == signals.SIGKILL:
            try:
                os.killpg(self.popen.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def close(self) -> None:
        """Reaps it, after SIGKILL, and closes what is held of it."""
        for stream in self.streams:
            stream.source.close()
        self.popen.wait()
        os.close(self.pidfd)

    def result(self, started: float, node: int, host: str) -> ProcessResult:
        """How it ended, with seconds since `started`."""
        return ProcessResult(
            process=self.number,
            pid=self.popen.pid,
            exit_code=self.code if self.code is not None else 137,
            signal=self.signal,
            seconds=round(self.ended - started, 3),
            ended_by_launcher=self.ended_by_launcher,
            last_lines=tuple(self.tail),
            node=node,
            host=host,
        )


def full_argv(command: Sequence[str]) -> list[str]:
    """A Python file is run by this Python, anything else as it is."""
    if command[0].endswith((".py", ".pyz")):
        return [sys.executable, *command]
    return list(command)


def gpus_of(local: int, count: int | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a host's process: the next `count` of those there are.

    Raises:
        ValueError: this launcher's own CUDA_VISIBLE_DEVICES has fewer.
    """
    if count is None:
        return None
    wanted = range(local * count, (local + 1) * count)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, wanted))
    names = [name for name in visible.split(",") if name]
    if wanted.stop > len(names):
        raise ValueError(
            f"--gpus-per-process {count}: {local + 1} processes need {wanted.stop} GPUs, and "
            f"CUDA_VISIBLE_DEVICES={visible} has {len(names)}"
        )
    return ",".join(names[i] for i in wanted)


def environment_of(
    launcher: LauncherEnvironment, devices: int | None, gpus: int | None
) -> dict[str, str]:
    """The variables of a process, with those of its place in the job and its devices."""
    ours = (*LAUNCHER_VARIABLES, *RUN_VARIABLES)
    environ = {k: v for k, v in os.environ.items() if k not in ours} | launcher.variables()
    environ.setdefault("PYTHONUNBUFFERED", "1")
    if devices is not None:
        environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    if (visible := gpus_of(launcher.local_id, gpus)) is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    return environ


def _prefix(number: int, sink: IO[bytes]) -> bytes:
    text = f"[{number}]"
    if "NO_COLOR" not in os.environ and sink.isatty():
        text = f"\033[{_COLORS[number % len(_COLORS)]}m{text}\033[0m"
    return f"{text} ".encode()


def dies_with_launcher() -> Callable[[], None]:
    """Returns what a child calls before it becomes the program: this process's end is its own."""
    launcher = os.getpid()
    prctl: Any = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signals.SIGKILL)
        if os.getppid() != launcher:  # It ended before prctl() could take effect.
            os._exit(128 + signals.SIGKILL)

    return before_exec
