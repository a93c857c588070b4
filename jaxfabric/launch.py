"""`jaxfabric run`: starts the processes of a job on this host and ends them together."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from jaxfabric.bootstrap.service import CoordinationService
from jaxfabric.config import (
    LAUNCHER_VARIABLES,
    Config,
    LauncherEnvironment,
    switch_from_environment,
)

_TERM_SECONDS = 5.0  # From SIGTERM to SIGKILL.
_DRAIN_SECONDS = 1.0  # For output still in the pipes when all processes have ended.
_TAIL_LINES = 20
_LONGEST_LINE = 64 << 10  # Printed in pieces beyond this.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_COLORS = (36, 32, 33, 35, 34, 31)
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """How one process ended: its exit code (128 + signal if killed), when, and by whom."""

    process: int
    pid: int
    exit_code: int
    signal: str | None
    seconds: float
    ended_by_launcher: bool
    last_lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a job ended.

    Attributes:
        exit_code: that of the process that failed first, or 0.
        first_failure: its number, or None.
        seconds: from the first start to the last end.
        processes: one entry for each, in order.
    """

    exit_code: int
    first_failure: int | None
    seconds: float
    processes: tuple[ProcessResult, ...]


@dataclasses.dataclass
class _Stream:
    process: _Process
    source: IO[bytes]
    sink: IO[bytes]
    pending: bytes = b""


@dataclasses.dataclass
class _Process:
    number: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    tail: collections.deque[str]
    code: int | None = None  # As in ProcessResult.
    signal: str | None = None
    ended: float = 0.0
    ended_by_launcher: bool = False


def run(
    command: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int | None = None,
    grace: float = 10.0,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
) -> Summary:
    """Runs a program as the processes of one job on this host, and waits until all have ended.

    Args:
        command: a Python file or any other program, then its arguments.
        num_processes: how many to start.
        devices_per_process: CPU devices of each; default: left to the program.
        grace: seconds that the others have to report and exit after one has failed.
        stdout: where standard output goes, each line prefixed with the number of its process.
        stderr: the same for standard error, and for what the launcher itself has to say.

    Returns:
        How each process ended; `exit_code` is that of the first to fail.

    Raises:
        OSError: the program cannot be started.

    Example:
        >>> run(["true"], 2).exit_code
        0
    """
    sinks = (stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
    return _Job(command, num_processes, devices_per_process, grace, sinks).run()


class _Job:
    def __init__(
        self,
        command: Sequence[str],
        count: int,
        devices: int | None,
        grace: float,
        sinks: tuple[IO[bytes], IO[bytes]],
    ) -> None:
        self.argv = _argv(command)
        self.count = count
        self.devices = devices
        self.grace = grace
        self.sinks = sinks
        self.job_id = secrets.token_hex(8)
        self.selector = selectors.DefaultSelector()
        self.processes: list[_Process] = []
        self.streams: set[int] = set()
        self.first_failure: int | None = None
        self.interrupts = 0
        self.started = time.monotonic()
        # What is done to the processes when `escalate_at` has come; empty once all was done.
        self.escalations: list[tuple[signal.Signals, float]] = []
        self.escalate_at: float | None = None

    def run(self) -> Summary:
        service: CoordinationService | None = None
        config = Config.from_environment()
        # JAX only logs what a plugin raises: with a misspelt switch the program would go on.
        switch_from_environment()
        if self.count > 1:
            service = CoordinationService(self.count, max(1, int(config.heartbeat)))
        restore = self._catch_signals()
        try:
            # Before the service: the threads it starts would make fork() unsafe.
            for number in range(self.count):
                self._start(number, service.address if service else None)
            if service:
                service.start()
            self._loop()
        finally:
            self._end_everything()
            restore()
            if service:
                service.stop()
            self.selector.close()
        return self._summary()

    def _start(self, number: int, coordinator: str | None) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        launcher = LauncherEnvironment(
            coordinator=coordinator, process_id=number, num_processes=self.count, job=self.job_id
        )
        environ |= launcher.variables()
        environ.setdefault("PYTHONUNBUFFERED", "1")
        if self.devices is not None:
            environ["JAX_NUM_CPU_DEVICES"] = str(self.devices)
        popen = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # So that what a process starts itself can be ended with it.
            preexec_fn=_dies_with(os.getpid()),
        )
        tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        process = _Process(number, popen, os.pidfd_open(popen.pid), tail)
        self.processes.append(process)
        self.selector.register(process.pidfd, selectors.EVENT_READ, process)
        for source, sink in zip((popen.stdout, popen.stderr), self.sinks, strict=True):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            self.streams.add(source.fileno())
            self.selector.register(source, selectors.EVENT_READ, _Stream(process, source, sink))

    def _loop(self) -> None:
        while any(p.code is None for p in self.processes):
            self._dispatch(self.escalate_at)
        # Something a process started may hold its pipes open: it is ended with its session.
        drained = time.monotonic() + _DRAIN_SECONDS
        self._signal_all(signal.SIGKILL)
        while self.streams and time.monotonic() < drained:
            self._dispatch(drained)

    def _dispatch(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        ended = []
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, _Stream):
                self._read(key.data)
            elif isinstance(key.data, _Process):
                ended.append(key.data)
            else:
                self._forward(key.data.recv(64))
        for process in ended:
            self._collect(process)
        # Of several that ended at once, one killed by a signal is the cause and not the effect.
        for process in sorted(ended, key=lambda p: p.signal is None):
            self._note_failure(process)
        if self.escalate_at is not None and time.monotonic() >= self.escalate_at:
            self._escalate()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.source.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(stream.source)
            self.streams.discard(stream.source.fileno())
            stream.source.close()
        *lines, stream.pending = (stream.pending + data).split(b"\n")
        if stream.pending and (not data or len(stream.pending) > _LONGEST_LINE):
            lines.append(stream.pending)
            stream.pending = b""
        if not lines:
            return
        prefix = _prefix(stream.process.number, stream.sink)
        stream.process.tail.extend(line.decode(errors="replace") for line in lines)
        self._write(stream.sink, b"".join(prefix + line + b"\n" for line in lines))

    def _write(self, sink: IO[bytes], data: bytes) -> None:
        try:
            sink.write(data)
            sink.flush()
        except (BrokenPipeError, ValueError):
            # Nobody reads any more: end as a program does on SIGPIPE, but with the processes.
            if self.interrupts == 0:
                self.interrupts = 1
                self._signal_all(signal.SIGTERM)
                self._plan((signal.SIGKILL, _TERM_SECONDS))

    def _say(self, text: str) -> None:
        self._write(self.sinks[1], f"jaxfabric: {text}\n".encode())

    def _collect(self, process: _Process) -> None:
        # WNOWAIT keeps the process's number taken, so that signals to its session never reach
        # another one; _end_everything() reaps it.
        result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        process.ended = time.monotonic()
        if result.si_code == os.CLD_EXITED:
            process.code = result.si_status
        else:
            process.signal = signal.Signals(result.si_status).name
            process.code = 128 + result.si_status
        self.selector.unregister(process.pidfd)

    def _note_failure(self, process: _Process) -> None:
        if process.code == 0 or self.first_failure is not None:
            return
        self.first_failure = process.number
        waiting = sum(p.code is None for p in self.processes)
        how = how_it_ended(process.code, process.signal)
        text = f"process {process.number} (pid {process.popen.pid}) {how} after "
        text += f"{process.ended - self.started:.1f} s"
        if waiting:
            text += f"; {waiting} other(s) have {self.grace:g} s to report"
        self._say(text)
        if self.escalate_at is None:
            self._plan((signal.SIGTERM, self.grace), (signal.SIGKILL, _TERM_SECONDS))

    def _plan(self, *escalations: tuple[signal.Signals, float]) -> None:
        self.escalations = list(escalations)
        self.escalate_at = time.monotonic() + escalations[0][1] if escalations else None

    def _escalate(self) -> None:
        number, _ = self.escalations.pop(0)
        late = [p for p in self.processes if p.code is None]
        if late:
            names = ", ".join(str(p.number) for p in late)
            self._say(f"ending process(es) {names} with {number.name}")
        for process in late:
            process.ended_by_launcher = True
        self._signal_all(number)
        self._plan(*self.escalations)

    def _forward(self, numbers: bytes) -> None:
        for number in map(signal.Signals, numbers):
            self._signal_all(number)
            if number not in _ENDING:
                continue
            self.interrupts += 1
            if self.interrupts > 1:
                self._plan((signal.SIGKILL, 0.0))
            elif self.escalate_at is None:
                self._plan((signal.SIGTERM, self.grace), (signal.SIGKILL, _TERM_SECONDS))

    def _signal_all(self, number: signal.Signals) -> None:
        """Signals whoever lives; SIGKILL goes to what ended processes left behind, too."""
        for process in self.processes:
            if process.code is None or number == signal.SIGKILL:
                try:
                    os.killpg(process.popen.pid, number)
                except (ProcessLookupError, PermissionError):
                    continue

    def _end_everything(self) -> None:
        """Leaves no process, zombie or descriptor, also after an error in the launcher."""
        self._signal_all(signal.SIGKILL)
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _Stream):
                key.data.source.close()
        for process in self.processes:
            process.popen.wait()
            os.close(process.pidfd)

    def _catch_signals(self) -> Callable[[], None]:
        """Has signals arrive at the selector; returns what undoes that."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        old_fd = signal.set_wakeup_fd(writer.fileno())
        old = {number: signal.signal(number, lambda *_: None) for number in _FORWARDED}
        self.selector.register(reader, selectors.EVENT_READ, reader)

        def restore() -> None:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

        return restore

    def _summary(self) -> Summary:
        first = self.first_failure
        if first is not None and self.count > 1:
            failed = self.processes[first]
            lines = "".join(f"\n    {line}" for line in failed.tail) or " none"
            how = how_it_ended(failed.code, failed.signal)
            self._say(f"process {first} failed first: it {how}. Its last lines:{lines}")
        results = tuple(
            ProcessResult(
                process=p.number,
                pid=p.popen.pid,
                exit_code=p.code if p.code is not None else 137,
                signal=p.signal,
                seconds=round(p.ended - self.started, 3),
                ended_by_launcher=p.ended_by_launcher,
                last_lines=tuple(p.tail),
            )
            for p in self.processes
        )
        exit_code = 0 if first is None else results[first].exit_code
        return Summary(exit_code, first, round(time.monotonic() - self.started, 3), results)


def _argv(command: Sequence[str]) -> list[str]:
    """A Python file is run by this Python, anything else as it is."""
    if command[0].endswith((".py", ".pyz")):
        return [sys.executable, *command]
    return list(command)


def how_it_ended(exit_code: int | None, signal_name: str | None) -> str:
    """Returns the two fields of a ProcessResult in words, such as "exited with status 3"."""
    return f"was killed by {signal_name}" if signal_name else f"exited with status {exit_code}"


def _prefix(number: int, sink: IO[bytes]) -> bytes:
    text = f"[{number}]"
    if "NO_COLOR" not in os.environ and sink.isatty():
        text = f"\033[{_COLORS[number % len(_COLORS)]}m{text}\033[0m"
    return f"{text} ".encode()


def _dies_with(launcher: int) -> Callable[[], None]:
    """Returns what a child calls before it becomes the program: the launcher's end is its own."""
    prctl: Any = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # It ended before prctl() could take effect.
            os._exit(128 + signal.SIGKILL)

    return before_exec
