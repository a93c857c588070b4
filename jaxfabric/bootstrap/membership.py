"""This process's place in a jax.distributed job, and how to leave one that has lost a member."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import math
import socket
import threading
import time
from typing import Any

from jaxfabric import _compat
from jaxfabric.bootstrap import clusters, identity, limits, rendezvous
from jaxfabric.config import Config, LauncherEnvironment, check_address

logger = logging.getLogger("jaxfabric")

# How long the process that hosts the coordination service stays after a failure: when it goes, JAX
# aborts the processes that are still connected to it.
_LINGER_SECONDS = 3.0
# How long a process that fails because another one has left lets that one end first: the launcher
# takes the first to end for the cause.
_LEAVER_SECONDS = 2.0
# How long processes that leave wait for the others, as JAX's shutdown does.
_LEAVING_SECONDS = 300
# How far apart processes that leave together may end.
_TOGETHER_SECONDS = 1.0

LAUNCHER = "jaxfabric run"


class _Departure:
    """Shuts JAX's distributed client down on a thread, so that exit need not wait for it for ever.

    Exit hooks may not start threads any more (Python 3.12), so this one waits for its moment.
    """

    def __init__(self) -> None:
        self._begin = threading.Event()
        self._others: list[identity.ProcessIdentity] = []
        self._finished = threading.Event()
        threading.Thread(target=self._run, name="jaxfabric-departure", daemon=True).start()

    def begin(self, others: list[identity.ProcessIdentity]) -> threading.Event:
        self._others = others
        self._begin.set()
        return self._finished

    def _run(self) -> None:
        self._begin.wait()
        state = _compat.distributed_state()
        with contextlib.suppress(Exception):  # Interests nobody any more.
            # Recoverable processes do not wait for each other in JAX's shutdown, and the end of the
            # one that hosts the service would abort the others.
            if _compat.recoverability_enabled() and state.client is not None:
                state.client.wait_at_barrier("jaxfabric/leaving", _LEAVING_SECONDS * 1000)
                if state.service is not None:
                    with identity.Watch(self._others) as watch:
                        watch.wait_until_all_gone(_LINGER_SECONDS)
        with contextlib.suppress(Exception):
            state.shutdown()
        self._finished.set()


@dataclasses.dataclass
class Membership:
    """What `join` found or made.

    Attributes:
        origin: "alone", "jaxfabric run", "jax.distributed" (the user started it), "initialize"
            (jaxfabric.initialize was given a coordinator), or a launcher's name: see ClusterJob.
        process_id: this process's number.
        num_processes: how many processes the job has.
        coordinator: host:port of the coordination service, or None.
        client: the jax.distributed client, or None in a job of one process.
        found: for people, which variables said so, or an empty string.
        left: the processes that had left of their own accord when this one failed.
    """

    origin: str
    process_id: int = 0
    num_processes: int = 1
    coordinator: str | None = None
    client: Any = None
    members: list[rendezvous.Member] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    found: str = ""
    _service: Any = None
    _departure: _Departure | None = None

    def __post_init__(self) -> None:
        if self.client is not None and self.origin != LAUNCHER:
            self._departure = _Departure()

    def exchange(self, own: rendezvous.Member, timeout: float) -> rendezvous.Roster:
        """Publishes this process's member entry and returns those of all, in process order."""
        if self.client is None:
            roster = rendezvous.Roster([own])
        else:
            roster = rendezvous.exchange(
                self.client, self.process_id, self.num_processes, own, timeout
            )
        self.members = roster.members
        return roster

    def decline(self, problem: str, timeout: float) -> None:
        """Tells the other processes, instead of `exchange`, why this one cannot take part."""
        own = rendezvous.Member(identity.ProcessIdentity.own(), b"", {}, problem=problem)
        with contextlib.suppress(rendezvous.RendezvousError):
            self.exchange(own, timeout)

    def coordinator_ip(self) -> str:
        """The coordinator as "10.0.0.1:1234" or "[fd00::1]:1234"; empty if it has no address."""
        host, _, port = (self.coordinator or "").rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError):
            return ""
        ip = str(found[0][4][0])
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def abandon(self) -> None:
        """Takes the client away from JAX, whose shutdown would block for a dead process.

        Neither the client nor a service in this process may be destroyed: the destructor of the one
        waits for all processes, that of the other aborts those that are still connected.
        """
        state = _compat.distributed_state()
        for name in ("preemption_sync_manager", "client", "service"):
            held = getattr(state, name, None)
            if held is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
                setattr(state, name, None)
                if name == "service":
                    self._service = held

    def resume(self) -> None:
        """Gives JAX back what `abandon` took: all processes are alive after all."""
        state = _compat.distributed_state()
        if self.client is not None and state.client is None:
            state.client = self.client
            state.service = self._service

    def leave(self) -> None:
        """Shuts JAX's client down at exit, unless a process that has ended would be waited for.

        The launcher's clients need no such care: they leave without waiting for each other.
        """
        if self._departure is None or _compat.distributed_state().client is None:
            return
        finished = self._departure.begin(self._others())
        with identity.Watch(self._others()) as watch:
            # All leave together: once one has ended, this process's turn is a matter of moments.
            while not finished.wait(_TOGETHER_SECONDS):
                if watch.any_gone():
                    if not finished.wait(_TOGETHER_SECONDS):
                        self.abandon()
                    return

    def linger(self) -> None:
        """Waits at exit for the processes that must end before this one.

        Those are the ones whose leaving is why this one failed, and all if the coordination service
        ends with this one.
        """
        if self.left and self.origin == LAUNCHER:
            with identity.Watch(self.members[i].identity for i in self.left) as watch:
                watch.wait_until_all_gone(_LEAVER_SECONDS)
        if self._service is not None:
            with identity.Watch(self._others()) as watch:
                watch.wait_until_all_gone(_LINGER_SECONDS)

    def _others(self) -> list[identity.ProcessIdentity]:
        return [m.identity for i, m in enumerate(self.members) if i != self.process_id]


def kept(
    found: Membership | None,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> Membership | None:
    """The membership of before, if the process goes on in that job; None if it has to join one.

    Who clears JAX's backends leaves the job for another one, such as a smaller one after a death.

    Raises:
        ValueError: the arguments describe another job, and JAX's backend is that of the first.
    """
    if found is None or found.client is None:
        return None
    given = (coordinator, num_processes, process_id)
    another = None not in given and given != (
        found.coordinator,
        found.num_processes,
        found.process_id,
    )
    if another and not _compat.backends_are_initialized():
        return None
    check_same(found, *given)
    # After a failure JAX no longer knows of the client; the membership does.
    found.resume()
    return found


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    config: Config,
    *,
    look_for_cluster: bool = True,
) -> Membership:
    """Finds the running jax.distributed job, or joins the one that arguments or launcher name.

    Arguments that are not given come from the launcher, if it is one of those in clusters.py.

    Raises:
        ValueError: arguments are incomplete or contradict the running job.
        RuntimeError: a JAX backend exists already, too early for a job of several processes.
    """
    state = _compat.distributed_state()
    if state.client is not None:
        found = Membership(
            "jax.distributed",
            state.process_id,
            state.num_processes,
            state.coordinator_address,
            state.client,
        )
        check_same(found, coordinator, num_processes, process_id)
        _say_what_survives(found)
        return found

    launcher = LauncherEnvironment.from_environment()
    given = (coordinator, num_processes, process_id)
    cluster = None
    if given == (None, None, None) and launcher is not None:
        return (
            Membership("alone") if launcher.num_processes == 1 else _join_launcher(launcher, config)
        )
    if look_for_cluster and launcher is None:
        cluster = clusters.detect_beside(*given)
    if given == (None, None, None) and cluster is None:
        return Membership("alone")
    if cluster is not None:
        coordinator = coordinator or cluster.coordinator
        num_processes = cluster.num_processes if num_processes is None else num_processes
        process_id = cluster.process_id if process_id is None else process_id
    if num_processes == 1 and process_id in (None, 0):
        return Membership("alone")
    if None in (coordinator, num_processes, process_id):
        raise ValueError(
            "coordinator_address, num_processes and process_id belong together: give all three, "
            f"or none under a launcher; got {coordinator!r}, {num_processes!r}, {process_id!r}"
        )
    check_address("coordinator_address", coordinator)
    _require_no_backend()
    assert num_processes is not None  # None of the three is.
    limits.require_files_to_join(num_processes if process_id == 0 else 0)
    import jax

    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=cluster.local_gpus() if cluster else None,
        # What it would find is known; with Open MPI 5 some versions insist on mpi4py.
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(config.connect_timeout),
    )
    state = _compat.distributed_state()
    started = Membership(
        cluster.launcher if cluster and given == (None, None, None) else "initialize",
        state.process_id,
        state.num_processes,
        coordinator,
        state.client,
        found=str(cluster or ""),
    )
    _say_what_survives(started)
    return started


def _join_launcher(launcher: LauncherEnvironment, config: Config) -> Membership:
    _require_no_backend()
    limits.require_files_to_join(0)
    assert launcher.coordinator is not None  # LauncherEnvironment checks it.
    began = time.monotonic()
    try:
        client = _compat.connect_distributed_client(
            launcher.coordinator,
            launcher.num_processes,
            launcher.process_id,
            init_timeout=math.ceil(config.connect_timeout),
            heartbeat_timeout=math.ceil(config.heartbeat),
        )
    except Exception as error:
        waited = time.monotonic() - began
        # jaxlib's error may be no more than "std::bad_cast": see connect_distributed_client().
        cause = None if "bad_cast" in str(error) else error
        raise rendezvous.RendezvousError(
            f"process {launcher.process_id} waited {waited:.0f} s at "
            f"{launcher.coordinator}, and not all {launcher.num_processes} processes came: each "
            "must call jaxfabric.initialize() (connect_timeout sets the wait)"
        ) from cause
    return Membership(
        LAUNCHER,
        launcher.process_id,
        launcher.num_processes,
        launcher.coordinator,
        client,
    )


def _require_no_backend() -> None:
    if _compat.backends_are_initialized():
        raise RuntimeError(
            "jaxfabric.initialize() comes too late: JAX has started its backend already. In a job "
            "of several processes call it before jax.devices(), jax.numpy and the like."
        )


def check_same(
    found: Membership, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raises ValueError if an argument that is given differs from the running job."""
    for name, given, have in (
        ("coordinator_address", coordinator, found.coordinator),
        ("num_processes", num_processes, found.num_processes),
        ("process_id", process_id, found.process_id),
    ):
        if given is not None and given != have:
            raise ValueError(
                f"{name}={given!r} contradicts the running jax.distributed job, where it is "
                f"{have!r}: leave it out"
            )


def _say_what_survives(membership: Membership) -> None:
    if membership.process_id != 0 or membership.num_processes == 1:
        return
    recoverable = _compat.recoverability_enabled()
    logger.warning(
        "process 0 hosts JAX's coordination service: if it dies, JAX aborts all processes. If "
        "another one dies, the others raise and can exit by themselves%s. Under `jaxfabric run` "
        "any process may die.",
        ""
        if recoverable
        else "; to go on for longer than JAX's heartbeat timeout set jax_enable_recoverability",
    )
