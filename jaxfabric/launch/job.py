"""What every launcher does: starts, watches and ends the processes of its own host."""

from __future__ import annotations

import dataclasses
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from jaxfabric.config import Config, LauncherEnvironment, switch_from_environment
from jaxfabric.launch.hub import Hub
from jaxfabric.launch.links import (
    Connection,
    JoinError,
    Nodes,
    deadline_after,
    joined,
    try_to_connect,
)
from jaxfabric.launch.messages import STRANGE, is_of_node_0
from jaxfabric.launch.processes import Process, Stream, environment_of, full_argv, gpus_of
from jaxfabric.launch.results import Summary, how_it_ended

TERM_SECONDS = 5.0  # From SIGTERM to SIGKILL.
_DRAIN_SECONDS = 1.0  # For output still in the pipes when all processes have ended.
_RETRY_SECONDS = 0.2  # Between attempts to reach node 0.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)


class Job:
    """One launcher's part of a job. `run` may be called once."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        nodes: Nodes,
        max_restarts: int,
        grace: float,
        sinks: tuple[IO[bytes], IO[bytes]],
        devices: int | None = None,
        gpus: int | None = None,
    ) -> None:
        self.config = Config.from_environment()
        # JAX only logs what a plugin raises: with a misspelt switch the program would go on.
        switch_from_environment()
        gpus_of(count - 1, gpus)
        self.devices, self.gpus = devices, gpus
        self.argv = full_argv(command)
        self.count = count
        self.nodes = nodes
        self.max_restarts = max_restarts
        self.grace = grace
        self.sinks = sinks
        self.host = socket.gethostname()
        # Each entry's data is what to call when it is ready.
        self.selector = selectors.DefaultSelector()
        self.processes: list[Process] = []
        self.streams: set[int] = set()
        self.hub: Hub | None = None
        self.link: Connection | None = None
        self.outcome: Summary | None = None
        self.lost: str | None = None  # Why there is no node 0 any more.
        self.ended: list[Process] = []  # That the last look has found.
        self.total = count
        self.failed = False
        self.interrupts = 0  # That were sent to this launcher itself.
        self.interrupted: signal.Signals | None = None
        self.started = time.monotonic()
        # What is done to the processes when `escalate_at` has come; empty once all was done.
        self.escalations: list[tuple[signal.Signals, float]] = []
        self.escalate_at: float | None = None
        self.drained_at: float | None = None

    def run(self) -> Summary:
        """Takes part in the job until it has ended on all nodes."""
        restore = self._catch_signals()
        try:
            self._join()
            while self.outcome is None:
                self._dispatch()
        finally:
            self._end_everything()
            restore()
            if self.hub is not None:
                self.hub.close()
            if self.link is not None:
                self.link.close()
            self.selector.close()
        return self.outcome

    def _join(self) -> None:
        from jaxfabric import __version__

        hello = {
            "node": self.nodes.rank,
            "nodes": self.nodes.count,
            "processes": self.count,
            "host": self.host,
            "version": __version__,
        }
        if self.nodes.rank == 0:
            heartbeat = max(1, int(self.config.heartbeat))
            self.hub = Hub(
                self.nodes, self.max_restarts, heartbeat, self.selector, self._handle, self._say
            )
        else:
            self._connect()
        self._tell({"hello": hello})

    def _connect(self) -> None:
        deadline = deadline_after(self.nodes.join_timeout)
        while self.link is None and self.outcome is None:
            self.link, why = try_to_connect(self.nodes)
            if self.link is None and time.monotonic() > deadline:
                raise JoinError(
                    f"node {self.nodes.rank} did not reach node 0 at {self.nodes.coordinator} "
                    f"within {self.nodes.join_timeout:g} s: {why}"
                )
            if self.link is None:
                self._dispatch(deadline_after(_RETRY_SECONDS))
        if self.link is not None:
            self.selector.register(self.link.socket, selectors.EVENT_READ, self._read_link)

    def _tell(self, message: dict[str, Any]) -> None:
        if self.hub is not None:
            self.hub.receive(0, message)
        elif self.link is not None:
            try:
                self.link.send(message)
            except OSError as error:
                self._lose_link(error.strerror or str(error))

    def _read_link(self) -> None:
        assert self.link is not None
        messages, end = self.link.receive()
        for message in messages:
            if not is_of_node_0(message):
                end = STRANGE
                break
            self._handle(message)
        if end is not None and self.outcome is None:
            self._lose_link(end)

    def _lose_link(self, why: str) -> None:
        """Without node 0 there is neither a coordination service nor an outcome."""
        if self.link is None:
            return
        self.selector.unregister(self.link.socket)
        self.link.close()
        self.link = None
        text = f"the launcher of node 0 at {self.nodes.coordinator} has gone ({why})"
        self.lost = text
        self._note_failure({"text": text})
        if any(p.code is None for p in self.processes):
            self._plan((signal.SIGTERM, 0.0), (signal.SIGKILL, TERM_SECONDS))
        elif self.drained_at is None:
            self._report_end()

    def _handle(self, message: dict[str, Any]) -> None:
        """Does what node 0 says."""
        if "start" in message:
            self._start(message["start"])
        elif "failed" in message:
            self._note_failure(message["failed"])
        elif "signal" in message:
            self._interrupt(signal.Signals(message["signal"]), kill=message["kill"])
        elif "again" in message:
            self._forget_processes()
            self._say("starting the job again, restart {number} of {of}".format(**message["again"]))
        elif "outcome" in message:
            self._finish(Summary.from_json(message["outcome"]))
        elif "refused" in message:
            raise JoinError(message["refused"])

    def _start(self, start: dict[str, Any]) -> None:
        self._forget_processes()
        self.failed, self.total = False, start["total"]
        self.escalate_at = self.drained_at = None
        address = None
        if start["port"] is not None:
            # By the address that has reached node 0.
            reached = self.link.peer_host if self.link else start["host"]
            address = joined(reached, start["port"])
        try:
            for local in range(self.count):
                self._start_process(local, address, start)
        except OSError as error:
            text = (
                f"node {self.nodes.rank} on {self.host} cannot run {self.argv[0]}: {error.strerror}"
            )
            self._tell({"failed": {"process": None, "exit_code": 127, "text": text}})
            raise

    def _start_process(self, local: int, coordinator: str | None, start: dict[str, Any]) -> None:
        number = start["first"] + local
        launcher = LauncherEnvironment(
            coordinator=coordinator,
            process_id=number,
            num_processes=start["total"],
            job=start["job"],
            restart_count=start["restarts"],
            local_id=local,
        )
        environ = environment_of(launcher, self.devices, self.gpus)
        process = Process.start(number, self.argv, environ, self.sinks)
        self.processes.append(process)
        self.selector.register(
            process.pidfd, selectors.EVENT_READ, lambda: self.ended.append(process)
        )
        for stream in process.streams:
            self.streams.add(stream.source.fileno())
            self.selector.register(
                stream.source, selectors.EVENT_READ, lambda stream=stream: self._read(stream)
            )

    def _dispatch(self, until: float | None = None) -> None:
        join_by = self.hub.join_by if self.hub else None
        times = [t for t in (until, join_by, self.escalate_at, self.drained_at) if t is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        self.ended = []
        for key, _ in self.selector.select(timeout):
            # What an earlier one of them did may have closed it.
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        for process in self.ended:
            process.collect()
            process.ended = time.monotonic()
            self.selector.unregister(process.pidfd)
        # Of several that ended at once, one killed by a signal is the cause and not the effect.
        for process in sorted(self.ended, key=lambda p: p.signal is None):
            if process.code != 0:
                self._report_failure(process)
        if self.ended and all(p.code is not None for p in self.processes):
            # Something a process started may hold its pipes open: it is ended with its session.
            self.drained_at = deadline_after(_DRAIN_SECONDS)
            self.escalate_at = None
            self._signal_all(signal.SIGKILL)
        now = time.monotonic()
        if self.drained_at is not None and (not self.streams or now >= self.drained_at):
            self.drained_at = None
            self._report_end()
        if self.escalate_at is not None and now >= self.escalate_at:
            self._escalate()
        if self.hub and self.hub.join_by is not None and now >= self.hub.join_by:
            self.hub.check_join()

    def _read(self, stream: Stream) -> None:
        text, ended = stream.read()
        if ended:
            self.selector.unregister(stream.source)
            self.streams.discard(stream.source.fileno())
            stream.source.close()
        if text:
            self._write(stream.sink, text)

    def _write(self, sink: IO[bytes], data: bytes) -> None:
        try:
            sink.write(data)
            sink.flush()
        except (BrokenPipeError, ValueError):
            # Nobody reads any more: end as a program does on SIGPIPE, but with the processes.
            if self.interrupted is None:
                self.interrupted = signal.SIGTERM
                self._signal_all(signal.SIGTERM)
                self._plan((signal.SIGKILL, TERM_SECONDS))
                self._tell({"signal": signal.SIGTERM, "kill": False})

    def _say(self, text: str) -> None:
        self._write(self.sinks[1], f"jaxfabric: {text}\n".encode())

    def _report_failure(self, process: Process) -> None:
        how = how_it_ended(process.code, process.signal)
        where = f" on {self.host}" if self.nodes.count > 1 else ""
        text = f"process {process.number} (pid {process.popen.pid}{where}) {how}"
        seconds = process.ended - self.started
        failure = {"process": process.number, "exit_code": process.code, "text": text}
        self._tell({"failed": failure | {"seconds": round(seconds, 1)}})

    def _report_end(self) -> None:
        results = [p.result(self.started, self.nodes.rank, self.host) for p in self.processes]
        if self.lost is not None:
            seconds = round(time.monotonic() - self.started, 3)
            self.outcome = Summary(1, None, seconds, tuple(results), self.lost)
            return
        self._tell({"ended": [dataclasses.asdict(result) for result in results]})

    def _note_failure(self, failure: dict[str, Any]) -> None:
        """The first failure of the job, on whatever node."""
        if self.failed:
            return
        self.failed = True
        text = failure["text"]
        if "seconds" in failure:
            text += f" after {failure['seconds']:.1f} s"
        waiting = sum(p.code is None for p in self.processes)
        if waiting and self.lost is None:
            here = " on this node" if self.nodes.count > 1 else ""
            text += f"; {waiting} other(s){here} have {self.grace:g} s to report"
        self._say(text)
        if self.escalate_at is None:
            self._plan((signal.SIGTERM, self.grace), (signal.SIGKILL, TERM_SECONDS))

    def _plan(self, *escalations: tuple[signal.Signals, float]) -> None:
        self.escalations = list(escalations)
        self.escalate_at = deadline_after(escalations[0][1]) if escalations else None

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
        """Signals that were sent to this launcher."""
        for number in map(signal.Signals, numbers):
            if number not in _ENDING:
                self._signal_all(number)
                continue
            self.interrupts += 1
            kill = self.interrupts > 1
            if kill or self.interrupted != number:
                self._interrupt(number, kill=kill)
            self._tell({"signal": number, "kill": kill})

    def _interrupt(self, number: signal.Signals, *, kill: bool) -> None:
        """Somebody ends the job: here, or on another node.

        A terminal, or srun, may send a signal to all launchers, which then hear of it twice.
        """
        if kill:
            self._signal_all(number)
            self._plan((signal.SIGKILL, 0.0))
        elif self.interrupted is None:
            self._signal_all(number)
            if self.escalate_at is None:
                self._plan((signal.SIGTERM, self.grace), (signal.SIGKILL, TERM_SECONDS))
        self.interrupted = self.interrupted or number
        if not self.processes:
            # Nothing has been started yet, or the next start is waited for.
            code = 128 + number
            self.outcome = Summary(code, None, 0.0, (), f"ended by {number.name}")

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send(number)

    def _forget_processes(self) -> None:
        for process in self.processes:
            for stream in process.streams:
                if not stream.source.closed:
                    self.selector.unregister(stream.source)
            process.close()
        self.processes = []
        self.streams = set()

    def _end_everything(self) -> None:
        """Leaves no process, zombie or descriptor, also after an error in the launcher."""
        self._signal_all(signal.SIGKILL)
        self._forget_processes()

    def _catch_signals(self) -> Callable[[], None]:
        """Has signals arrive at the selector; returns what undoes that."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        old_fd = signal.set_wakeup_fd(writer.fileno())
        old = {number: signal.signal(number, lambda *_: None) for number in _FORWARDED}
        self.selector.register(reader, selectors.EVENT_READ, lambda: self._forward(reader.recv(64)))

        def restore() -> None:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

        return restore

    def _finish(self, summary: Summary) -> None:
        self.outcome = summary
        if summary.failure is None or self.total < 2:
            return
        failed = next((p for p in summary.processes if p.process == summary.first_failure), None)
        if failed is None:  # It was no process, or one of a launcher that has gone since.
            self._say(f"the job failed: {summary.failure}")
            return
        lines = "".join(f"\n    {line}" for line in failed.last_lines) or " none"
        how = how_it_ended(failed.exit_code, failed.signal)
        where = f" on {failed.host}" if self.nodes.count > 1 else ""
        self._say(f"process {failed.process}{where} failed first: it {how}. Its last lines:{lines}")
