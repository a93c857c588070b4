"""Runs scripts as jobs of several processes, and looks for what they leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import netns

ROOT = pathlib.Path(__file__).resolve().parent.parent
_MARKER = "MARKER_OF_A_TEST_JOB"
# What Gloo says, which threads of one process may say at once, piece by piece.
_GLOO = re.compile(
    r"(\d|\[Gloo\] Rank | is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : )*"
)
_ports = itertools.count(4800, 2)


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a job ended; `leftovers` names what it left on the machine."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]

    def lines_of(self, process: int) -> list[str]:
        """What a process printed to stdout, without prefixes and without what Gloo says."""
        prefix = f"[{process}] "
        lines = [x.removeprefix(prefix) for x in self.stdout.splitlines() if x.startswith(prefix)]
        return [line for line in lines if line.isdigit() or not _GLOO.fullmatch(line)]

    def explain(self) -> str:
        """For assertion messages."""
        return (
            f"status {self.returncode} after {self.seconds:.1f} s, left: {self.leftovers}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class Job:
    """A program that has been started, marked so that all its processes can be found."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None) -> None:
        self._marker = uuid.uuid4().hex
        self._shm = _shm_entries()
        self._started = time.monotonic()
        self._output = {1: b"", 2: b""}
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(env) | {_MARKER: self._marker},
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._pump, args=(number, stream), daemon=True)
            for number, stream in ((1, self.process.stdout), (2, self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _pump(self, number: int, stream) -> None:
        while data := os.read(stream.fileno(), 1 << 16):
            with self._changed:
                self._output[number] += data
                self._changed.notify_all()

    def wait_for(self, text: str, timeout: float = 60, count: int = 1, stream: int = 1) -> None:
        """Waits until stdout (or stream 2, stderr) holds `text` so many times."""
        wanted = text.encode()
        with self._changed:
            seen = self._changed.wait_for(
                lambda: (
                    self._output[stream].count(wanted) >= count or self.process.poll() is not None
                ),
                timeout,
            )
            output = b"".join(self._output.values()).decode(errors="replace")
        assert seen, f"no {text!r} in {timeout} s:\n{output}"
        assert output.count(text) >= count, f"ended without {text!r}:\n{output}"

    def output(self) -> str:
        """What has come on stdout so far."""
        with self._changed:
            return self._output[1].decode(errors="replace")

    def members(self) -> dict[int, str]:
        """Pids and command lines of all processes of this job that live."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                if f"{_MARKER}={self._marker}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def wait_until_empty(self, timeout: float = 10) -> dict[int, str]:
        """Waits until no process of the job lives; returns those that do after the timeout."""
        deadline = time.monotonic() + timeout
        for pid in self.members():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            with os.fdopen(handle):
                poller = select.poll()
                poller.register(handle, select.POLLIN)
                poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return self.members()

    def finish(self, timeout: float = 120) -> JobResult:
        """Waits for the end of the job; kills it, and fails, after the timeout."""
        try:
            self.process.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        seconds = time.monotonic() - self._started
        leftovers = [f"process {pid}: {command}" for pid, command in self.members().items()]
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        leftovers += [f"/dev/shm/{name}" for name in _unused(_shm_entries() - self._shm)]
        result = JobResult(
            self.process.returncode,
            self._output[1].decode(errors="replace"),
            self._output[2].decode(errors="replace"),
            seconds,
            leftovers,
        )
        assert not late, f"still running after {timeout} s\n{result.explain()}"
        return result


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a test job: no settings from outside."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAXFABRIC_", "JAX_", "XLA_"))}
    env["JAX_PLATFORMS"] = "cpu"
    return env | (extra or {})


def launcher(n: int, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs a program as a job of n processes."""
    # -P: the installed package, not the source tree that the tests may be started in.
    return [sys.executable, "-P", "-m", "jaxfabric", "run", "-n", str(n), *options, "--", *command]


def launchers(
    hosts: Sequence[netns.Host],
    *command: str,
    counts: Sequence[int],
    options: tuple[str, ...] = (),
    address: str | None = None,
) -> list[list[str]]:
    """The command lines, one for each host, that run a program as one job on several hosts.

    Args:
        hosts: the first is node 0.
        command: the program and its arguments.
        counts: the processes of each host.
        options: of `jaxfabric run`, on all hosts.
        address: the coordinator's; default: a new port of the first host.
    """
    address = address or f"{hosts[0].ipv4}:{new_port()}"
    lines = []
    for rank, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        where = ("--nnodes", str(len(hosts)), "--node-rank", str(rank), "--coordinator", address)
        lines.append(host.command(*launcher(count, *command, options=(*where, *options))))
    return lines


def new_port() -> int:
    """A port, free on hosts of the tests' own, and so is the one after it."""
    return next(_ports)


def run_job(
    script: str | pathlib.Path,
    n: int,
    *arguments: str,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> JobResult:
    """Runs a Python file under `jaxfabric run -n N` until it has ended.

    Args:
        script: path of the file.
        n: number of processes.
        *arguments: the script's.
        options: the launcher's, such as ("--devices-per-process", "2").
        env: further variables.
        timeout: seconds; longer is a test failure.
    """
    return Job(launcher(n, str(script), *arguments, options=options), env).finish(timeout)


def plugin_path(directory: pathlib.Path) -> str:
    """A PYTHONPATH with which JAX finds the plugin of jaxfabric.

    It finds that of an installed jaxfabric by its entry point. A source tree has none, and gets a
    module in the directory that JAX finds by its place.
    """
    points = importlib.metadata.entry_points(group="jax_plugins")
    if not any(point.value == "jaxfabric._plugin" for point in points):
        package = directory / "jax_plugins" / "jaxfabric_tree"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from jaxfabric._plugin import initialize\n")
    return ":".join([str(directory), *sys.path])


@contextlib.contextmanager
def socket_on_free_port() -> Iterator[tuple[socket.socket, int]]:
    """A bound socket and its port; close it just before the port is needed."""
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        yield reservation, reservation.getsockname()[1]


def write_script(directory: pathlib.Path, text: str, name: str = "job.py") -> pathlib.Path:
    """Writes a dedented script and returns its path."""
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def open_descriptors() -> set[str]:
    """The numbers of this process's open file descriptors."""
    return set(os.listdir("/proc/self/fd"))


def _shm_entries() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:
        return set()


def _unused(entries: set[str]) -> list[str]:
    """Those that no living process has mapped: the others belong to jobs beside this one."""
    if not entries:
        return []
    maps = []
    for process in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            maps.append((process / "maps").read_text())
    mapped = {name for name in entries if any(f"/dev/shm/{name}" in text for text in maps)}
    return sorted((entries - mapped) & _shm_entries())
