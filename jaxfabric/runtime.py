"""The fabric of this process: started once, shared by every collective, ended at exit."""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from jaxfabric import _windowed
from jaxfabric._devices import NO_GPUS, core, cuda_problem, local_devices, usable_gpus
from jaxfabric._status import Status
from jaxfabric.bootstrap.clusters import place_in_job
from jaxfabric.config import Config, LauncherEnvironment, logger, warn_of_unknown_variables

if TYPE_CHECKING:
    from jaxfabric import _ext
    from jaxfabric.bootstrap.membership import Membership


@dataclasses.dataclass
class _Session:
    membership: Membership
    config: Config
    ranks: tuple[int, ...]
    # By the number that CUDA has for it in this process; empty where CUDA cannot be used.
    gpus: dict[int, int]
    without_gpus: str
    without_windows: str
    fabric: _ext.Fabric


# Held while the fabric starts or ends, which waits for other processes and for kernels.
_lock = threading.RLock()
# Held while a session is read that must not end meanwhile; never while anything is waited for.
_reading = threading.RLock()
_session: _Session | None = None
# The membership outlives shutdown(): JAX's backend keeps the job it was started in.
_membership: Membership | None = None
_registered = False
_exit_hook = False
_on_demand = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    deadline: float | None = None,
    warn_after: float | None = None,
    mismatch_after: float | None = None,
    connect_timeout: float | None = None,
    segment_bytes: int | None = None,
    heartbeat: float | None = None,
    in_step_microseconds: float | None = None,
    out_of_step_microseconds: float | None = None,
    gpu_pool_bytes: int | None = None,
    gpu_multicast: int | None = None,
    gpu_limits: str | None = None,
    gpu_windows: str | None = None,
    net_interface: str | None = None,
    net_port_range: str | None = None,
    pattern: str | None = None,
    network_cost: str | None = None,
    tcp_sockets: int | None = None,
    tcp_congestion_control: str | None = None,
    unreachable_after: float | None = None,
    log_level: str | None = None,
) -> None:
    """Connects this process's devices with those of all other processes of the job.

    In one process, under `jaxfabric run`, torchrun, Open MPI's mpirun, srun, and in Kubernetes'
    indexed Jobs, and after `jax.distributed.initialize`, no argument is needed. In a job of several
    processes all must call, before JAX starts its backend (unless jax.distributed runs already). A
    second call is a no-op, unless it asks for something different.

    Args:
        coordinator_address: host:port at which process 0 starts jax.distributed's service.
        num_processes: how many processes the job has.
        process_id: this process's number.
        deadline: longest wait for other ranks in one collective, in seconds (300).
        warn_after: a wait this long is logged, in seconds (10).
        mismatch_after: after which two ranks compare what they wait for, in seconds (1).
        connect_timeout: longest wait for the other processes at start, in seconds (60).
        segment_bytes: shared memory per rank, in bytes (16 MiB).
        heartbeat: under `jaxfabric run` JAX takes a process silent for so long for dead, in seconds
            (100); the launcher, which hosts JAX's service, reads the variable only.
        in_step_microseconds: how long a collective keeps the caller's thread while it waits for a
            rank that is on its way (20000).
        out_of_step_microseconds: the same for a rank whose last collective was another one (200).
        gpu_pool_bytes: memory of every GPU that its peers address, in bytes (48 MiB).
        gpu_multicast: 0 keeps the switches between GPUs from adding: sums of floats then have the
            bits that they have on CPUs, at any size (1).
        gpu_limits: from how many bytes on XLA runs calls on GPUs, where the table is to be
            overruled: "all_reduce/8=32M, all_to_all=0" ("").
        gpu_windows: "on": large calls on GPUs read and write peers' arrays where they are, where
            XLA can have them so; "off": all are copied ("off").
        net_interface: the interface that processes of other hosts reach, by names or subnets:
            "eth0", "10.0.0.0/8" (""; one in the coordinator's subnet, or the first that is up).
        net_port_range: the ports that they reach, such as "40000-40100" (""; any).
        pattern: patterns between hosts that are taken whatever they cost, or "none" (""; by cost).
        network_cost: "measured", "default", or microseconds and GB/s: "30,1.2" ("measured").
        tcp_sockets: connections for data between two processes of different hosts (2).
        tcp_congestion_control: theirs: "cubic", "system", or "auto": that but for BBR ("auto").
        unreachable_after: a host that has not answered for so long is gone, in seconds (10).
        log_level: "error", "warning" or "info" ("warning").

    Each setting can also come from the environment variable JAXFABRIC_<NAME>.

    Raises:
        ConfigError: a setting has a value it cannot have.
        ValueError: the job's description is incomplete or contradicts the running job.
        RuntimeError: already initialized differently; the backend was started too early; a process
            did not come.
        FabricError: the processes came together but could not connect.

    Example:
        >>> import jaxfabric
        >>> jaxfabric.initialize(deadline=30)
        >>> jaxfabric.is_initialized()
        True
    """
    settings = dict(locals())
    job = {
        name: settings.pop(name) for name in ("coordinator_address", "num_processes", "process_id")
    }
    global _session
    with _lock:
        if _session is not None:
            _require_same(_session, job | settings)
            return
        config = Config.from_environment(None, **settings)
        warn_of_unknown_variables()
        _session = _start(config, coordinator_address, num_processes, process_id)


def shutdown() -> None:
    """Disconnects from the other processes and frees everything the fabric holds. Idempotent.

    Collectives in flight fail; those on GPUs have 30 seconds to end. After a failure JAX's client,
    whose shutdown would wait for dead processes, is dropped.
    """
    global _session
    with _lock:
        with _reading:
            session, _session = _session, None
        if session is None:
            return
        failure = session.fabric.failure()
        session.fabric.shutdown()
        if failure is not None:
            session.membership.abandon()
            session.membership.left = session.fabric.left()


def is_initialized() -> bool:
    """Whether `initialize` has been called, and `shutdown` has not."""
    return _session is not None


def ensure_ready() -> None:
    """Makes collectives usable: in one process initializes, in several insists that it was done.

    Raises:
        RuntimeError: the job has several processes and none may start the fabric on its own.
    """
    global _session
    if _session is not None:
        return
    import jax

    index, count = jax.process_index(), jax.process_count()
    if count == 1:  # Without initialize() JAX has heard nothing of a launcher.
        index, count = place_in_job(others=not _on_demand)
    if count > 1 and not _on_demand:
        raise RuntimeError(
            f"process {index} of {count} runs a jaxfabric collective before "
            "jaxfabric.initialize(): call it in every process, before JAX is used"
        )
    with _lock:
        if _session is None:
            _session = _start(Config.from_environment(), None, None, None, look_for_cluster=False)


def start_on_demand() -> None:
    """Lets the first program with a collective start the fabric, in jobs of several processes too.

    Joins the job under `jaxfabric run`, as JAX's backend does not exist yet. All processes have to
    run such a program: they wait for each other.
    """
    global _on_demand, _membership
    with _lock:
        _on_demand = True
        launched = LauncherEnvironment.from_environment()
        if launched is None or launched.num_processes == 1 or _membership is not None:
            return
        from jaxfabric import _compat
        from jaxfabric.bootstrap import membership as memberships

        if _compat.distributed_state().client is None:
            _membership = memberships.join(None, None, None, Config.from_environment())
            _hook_exit()


def settings() -> Config:
    """The settings in force, or those that `initialize` would take from the environment."""
    session = _session
    return Config.from_environment() if session is None else session.config


def platforms() -> tuple[str, ...]:
    """The platforms whose devices this process brings into the fabric."""
    session = _session
    return ("cpu", "cuda") if session is not None and session.gpus else ("cpu",)


def gpu_problem() -> str:
    """Why the collectives of GPUs are left to XLA, or an empty string."""
    session = _session
    if session is None or session.gpus or session.without_gpus == NO_GPUS:
        return cuda_problem()
    return session.without_gpus


def windows_problem() -> str:
    """Why the calls of GPUs copy their arrays, or an empty string; the same on all processes."""
    session = _session
    return "jaxfabric is not initialized" if session is None else session.without_windows


def status() -> Status:
    """Returns how this process is connected, what it has counted, and the first failure."""
    with _reading:
        if _session is None:
            return Status(initialized=False)
        membership = _session.membership
        return Status(
            initialized=True,
            origin=membership.origin,
            launcher=membership.found,
            process_id=membership.process_id,
            num_processes=membership.num_processes,
            ranks=_session.ranks,
            gpus=tuple(_session.gpus.values()),
            gpu_problem=gpu_problem() or ("" if _session.gpus else "JAX has no GPU here"),
            gpu_memory=_session.fabric.gpu_memory() if _session.gpus else "",
            windows_problem=windows_problem(),
            reads_problem=_session.fabric.reads_problem(),
            peers=tuple(f"{m.identity.hostname}:{m.identity.pid}" for m in membership.members),
            failure=_session.fabric.failure(),
            counters=_session.fabric.counters(),
            config=_session.config,
        )


def _start(
    config: Config,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    look_for_cluster: bool = True,
) -> _Session:
    import jax

    importlib.import_module("jaxfabric._portable")  # Before the first program is traced.
    from jaxfabric.bootstrap import limits
    from jaxfabric.bootstrap import membership as memberships
    from jaxfabric.bootstrap.identity import ProcessIdentity
    from jaxfabric.bootstrap.rendezvous import Member

    _ext = core()
    global _membership
    _membership = memberships.kept(_membership, coordinator, num_processes, process_id)
    if _membership is None:
        _membership = memberships.join(
            coordinator, num_processes, process_id, config, look_for_cluster=look_for_cluster
        )
    membership = _membership
    _hook_exit()
    devices = local_devices("cpu")
    ranks = tuple(device.id for device in devices)
    process_count = jax.process_count("cpu" if devices else None)
    if process_count != membership.num_processes:
        raise RuntimeError(
            f"JAX sees {process_count} process(es), the job has {membership.num_processes}: its "
            "backend was started before the job was joined; call jaxfabric.initialize() first"
        )
    gpus, without_gpus = usable_gpus()
    if gpus and _registered:  # What JAX keeps has CUDA graphs in the memory of an earlier fabric.
        jax.clear_caches()
    _register(_ext, bool(gpus))
    # A core without CUDA takes no GPUs.
    more = {"gpu_ordinals": [*gpus.items()]} if gpus else {}
    options = config.options() | {"coordinator": membership.coordinator_ip()}
    try:
        limits.require_files(membership.num_processes, config.tcp_sockets)
        fabric = _ext.Fabric(
            membership.process_id, membership.num_processes, list(ranks), options, **more
        )
    except Exception as error:
        membership.decline(str(error), config.connect_timeout)
        raise
    without_windows = _windowed.problem_here(config, with_gpus=bool(gpus))
    try:
        own = Member(
            ProcessIdentity.own(), fabric.address(), _must_agree(config, _ext), without_windows
        )
        roster = membership.exchange(own, config.connect_timeout)
        for process, member in enumerate(roster.members):
            if not without_windows and member.without_windows:
                without_windows = f"process {process}: {member.without_windows}"
        fabric.connect([m.address for m in roster.members], roster.secret, roster.incarnation)
        if gpus and (problem := fabric.gpu_problem()):
            # Of this process or of another; all have heard of it.
            logger.warning("collectives on GPUs are left to XLA: %s", problem)
            gpus, without_gpus = {}, problem
    except BaseException:
        fabric.shutdown()
        raise
    return _Session(membership, config, ranks, gpus, without_gpus, without_windows, fabric)


def _must_agree(config: Config, ext: Any) -> dict[str, str]:  # noqa: ANN401
    from jaxfabric import __version__

    agreed = "segment_bytes gpu_limits gpu_windows pattern network_cost tcp_sockets"
    return {
        "the version of jaxfabric": __version__,
        "the compiled FFI version": ".".join(map(str, ext.ffi_version())),
        **{name: str(getattr(config, name)) for name in agreed.split()},
    }


def _register(ext: Any, with_gpus: bool) -> None:  # noqa: ANN401
    """Registers types, then targets: only once the backend exists, or it would not start."""
    global _registered
    if _registered:
        return
    import jax

    from jaxfabric import _compat

    handlers = {"cpu": (ext.type_registrations(), ext.registrations())}
    if with_gpus:
        handlers["CUDA"] = (ext.cuda_type_registrations(), ext.cuda_registrations())
    for platform, (types, targets) in handlers.items():
        for name, registration in types.items():
            jax.ffi.register_ffi_type(name, registration, platform=platform)
        if platform == "CUDA":
            targets = targets | _windowed.registrations()
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform, api_version=1)

    # Tells the executables apart whose call instances the core numbers, see docs/matching.md.
    _compat.watch_compilations(
        ext.begin_compilation,
        ext.end_compilation,
        (ext.begin_gpu_compilation, ext.end_gpu_compilation) if with_gpus else None,
    )
    _registered = True


def _require_same(session: _Session, asked: dict[str, Any]) -> None:
    have = dataclasses.asdict(session.config) | {
        "coordinator_address": session.membership.coordinator,
        "num_processes": session.membership.num_processes,
        "process_id": session.membership.process_id,
    }
    for name, value in asked.items():
        if value is not None and value != have[name]:
            raise RuntimeError(
                f"jaxfabric is initialized with {name}={have[name]!r}, not {value!r}: call "
                "jaxfabric.shutdown() first"
            )


def _hook_exit() -> None:
    global _exit_hook
    if not _exit_hook:
        # Runs before JAX's own exit hook, which was registered when JAX was imported.
        atexit.register(_at_exit)
        _exit_hook = True


def _at_exit() -> None:
    membership = _membership
    uncaught = getattr(sys, "last_value", None) is not None
    shutdown()
    if membership is None or membership.client is None:
        return
    if uncaught:
        # The others may be waiting for this process in a collective: they fail and leave, and a
        # shutdown of the client here would wait for them until JAX's heartbeat timeout.
        membership.abandon()
    membership.leave()
    membership.linger()
