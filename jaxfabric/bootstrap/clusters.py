"""Finds the job that a launcher other than `jaxfabric run` has started this process in.

By environment variables only. The first of these that is there counts, inner before outer, since
launchers are started by each other and variables are inherited:

1. torchrun and what sets its variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT);
2. mpirun of Open MPI;
3. srun of Slurm;
4. an indexed Job of Kubernetes, alone or in a JobSet, and Kubeflow's JAXJob.

JAX finds the second by itself up to Open MPI 4, the third, and the fourth by Kubernetes' API. These
functions do without API and MPI, know all of the third's node lists, and check what they find.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping

from jaxfabric import _compat
from jaxfabric.config import ConfigError, LauncherEnvironment, check_address

# Where JAX has its coordination service under Slurm and Open MPI: above the ephemeral ports.
_FIRST_PORT = 61440
_PORTS = 4096
_KUBERNETES_PORT = 55527  # JAX's choice too.
_NODE_NAMES = re.compile(r"([^,\[\]]*)(?:\[([^\[\]]+)\])?")
_MOST_NODES = 1 << 20

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job and this process's place in it.

    Attributes:
        launcher: "torchrun", "Open MPI", "Slurm" or "Kubernetes".
        coordinator: host:port at which process 0 starts JAX's coordination service.
        num_processes: how many processes the job has.
        process_id: this one's number.
        local_id: its number among those of its host; None if that is not known.
        local_count: how many its host has; None if that is not known.
        found: which variables said so, for people.
    """

    launcher: str
    coordinator: str
    num_processes: int
    process_id: int
    local_id: int | None = None
    local_count: int | None = None
    found: str = ""

    def __str__(self) -> str:
        return (
            f"{self.launcher}: process {self.process_id} of {self.num_processes} at "
            f"{self.coordinator} ({self.found})"
        )

    def local_gpus(self, environ: Environment | None = None) -> list[int] | None:
        """The GPU of this process where a host has several processes; None: all it can see.

        As JAX has it for Slurm and Open MPI, unless each sees GPUs of its own already.
        """
        environ = os.environ if environ is None else environ
        if self.local_id is None or self.local_count == 1 or environ.get("JAX_LOCAL_DEVICE_IDS"):
            return None
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and len(visible.split(",")) <= self.local_id:
            return None
        return [self.local_id]


def detect(environ: Environment | None = None) -> ClusterJob | None:
    """Returns the job that the environment describes, or None.

    Raises:
        ConfigError: variables are missing, malformed or contradict each other.
    """
    environ = os.environ if environ is None else environ
    for find in _FINDERS:
        job = find(environ)
        if job is not None:
            return _checked(job)
    return None


def detect_beside(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> ClusterJob | None:
    """The same where some of a job's description has been given, which comes first.

    Raises:
        ConfigError: as `detect`, if what it would say is needed.
    """
    environ = dict(os.environ)
    if coordinator is not None:
        check_address("coordinator_address", coordinator)
        environ["JAX_COORDINATOR_ADDRESS"] = coordinator
    try:
        return detect(environ)
    except ConfigError:
        if None in (coordinator, num_processes, process_id):
            raise
        return None


def tell_jax() -> None:
    """Lets plain `jax.distributed.initialize()` find what `detect` finds and JAX does not."""
    _compat.register_cluster(_detect_for_jax)


def _detect_for_jax() -> ClusterJob | None:
    if LauncherEnvironment.from_environment() is not None:
        raise ConfigError(
            "`jaxfabric run` hosts JAX's coordination service itself: call jaxfabric.initialize() "
            "instead of jax.distributed.initialize()"
        )
    return detect()


def place_in_job(*, others: bool) -> tuple[int, int]:
    """This process's number and how many there are, as `jaxfabric run` says, or other launchers."""
    job = LauncherEnvironment.from_environment() or (detect() if others else None)
    return (job.process_id, job.num_processes) if job else (0, 1)


def _torchrun(environ: Environment) -> ClusterJob | None:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in needed if name in environ]
    # Scripts for Slurm often set the last two alone.
    if not {"RANK", "WORLD_SIZE"} & {*present} or len(present) < 2:
        return None
    _require(environ, "torchrun", needed)
    port = _number(environ, "MASTER_PORT")
    source = "MASTER_ADDR and MASTER_PORT"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at MASTER_PORT.
        source += " plus 1, since torchrun listens at that"
    return _job(
        environ,
        launcher="torchrun",
        host=(lambda: (environ["MASTER_ADDR"], source)),
        port=port,
        names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )


def _open_mpi(environ: Environment) -> ClusterJob | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    _require(environ, "mpirun", names)
    job = (
        environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "").partition(";")[0]
    )

    def host() -> tuple[str, str]:
        if environ.get(local[1]) == environ[names[1]]:
            return "127.0.0.1", "one host"
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        if match := re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri):
            return match[1] or match[2], "OMPI_MCA_orte_hnp_uri"
        raise ConfigError(
            "mpirun has started this job on several hosts, and does not tell where process 0 is: "
            "add -x JAX_COORDINATOR_ADDRESS=HOST:PORT, with the first host and a free port of it"
        )

    return _job(environ, launcher="Open MPI", host=host, port=_port_of(job), names=(*names, *local))


def _slurm(environ: Environment) -> ClusterJob | None:
    # Without a step (a batch script, salloc's shell) no tasks have been started.
    needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")
    if not all(name in environ for name in needed):
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _require(environ, "srun", (count,))
    text = environ["SLURM_STEP_NODELIST"]

    def host() -> tuple[str, str]:
        nodes = [*expand_node_list(text, "SLURM_STEP_NODELIST")]
        if "SLURM_STEP_NUM_NODES" in environ:
            wanted = _number(environ, "SLURM_STEP_NUM_NODES")
            if wanted != len(nodes):
                raise ConfigError(
                    f"SLURM_STEP_NODELIST={text} names {len(nodes)} node(s), "
                    f"SLURM_STEP_NUM_NODES is {wanted}: start with srun"
                )
        return nodes[0], "SLURM_STEP_NODELIST"

    step = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return _job(
        environ,
        launcher="Slurm",
        host=host,
        port=_port_of(step),
        names=("SLURM_PROCID", count, "SLURM_LOCALID", None),
        local_count=_slurm_tasks_here(environ),
    )


def _slurm_tasks_here(environ: Environment) -> int | None:
    """SLURM_STEP_TASKS_PER_NODE is like 4(x2),1: it tells only if it is the same on all nodes."""
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(match[1]) if match else None


def _kubernetes(environ: Environment) -> ClusterJob | None:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    # Kubeflow, or a manifest, may set the first; the other is always there in an indexed Job.
    index = next((n for n in ("PROCESS_ID", "JOB_COMPLETION_INDEX") if n in environ), None)
    if index is None:
        return None
    if "NUM_PROCESSES" not in environ:
        raise ConfigError(
            f"Kubernetes has started this process with {index}={environ[index]}, and NUM_PROCESSES "
            "is not set: set it in the manifest to the number of pods (1 if each is a job of its "
            "own), or call jax.distributed.initialize() first, which asks Kubernetes' API (pip "
            "install jax[k8s])"
        )
    port_name = next(
        (n for n in ("COORDINATOR_PORT", "JAX_COORDINATOR_PORT") if n in environ), None
    )

    def host() -> tuple[str, str]:
        if "COORDINATOR_ADDRESS" in environ:
            return environ["COORDINATOR_ADDRESS"], "COORDINATOR_ADDRESS"
        name, _, domain = socket.getfqdn().partition(".")
        job, dash, number = name.rpartition("-")
        if not dash or number != environ.get("JOB_COMPLETION_INDEX") or not domain:
            raise ConfigError(
                f"this pod is {socket.getfqdn()}, which does not tell the address of pod 0: give "
                "the Job a headless service and its name as `subdomain`, or set "
                "COORDINATOR_ADDRESS in the manifest"
            )
        return f"{job}-0.{domain}", "the pod's name"

    return _job(
        environ,
        launcher="Kubernetes",
        host=host,
        port=_number(environ, port_name) if port_name else _KUBERNETES_PORT,
        names=(index, "NUM_PROCESSES", None, None),
    )


_FINDERS: tuple[Callable[[Environment], ClusterJob | None], ...] = (
    _torchrun,
    _open_mpi,
    _slurm,
    _kubernetes,
)


def _job(
    environ: Environment,
    *,
    launcher: str,
    host: Callable[[], tuple[str, str]],
    port: int,
    names: tuple[str, str, str | None, str | None],
    local_count: int | None = None,
) -> ClusterJob:
    rank_name, count_name, local_name, local_count_name = names
    found = [rank_name, count_name]
    if address := environ.get("JAX_COORDINATOR_ADDRESS"):
        check_address("JAX_COORDINATOR_ADDRESS", address)
        found.append("JAX_COORDINATOR_ADDRESS")
    elif _number(environ, count_name) == 1:
        address = f"127.0.0.1:{port}"  # Nobody comes.
    else:
        name, source = host()
        if environ.get("JAX_COORDINATOR_PORT"):
            port = _number(environ, "JAX_COORDINATOR_PORT")
        address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        check_address(source, address)
        found.append(source)
    local_id = None
    if local_name is not None and local_name in environ:
        found.append(local_name)
        local_id = _number(environ, local_name)
    if local_count_name is not None and local_count_name in environ:
        local_count = _number(environ, local_count_name)
    return ClusterJob(
        launcher=launcher,
        coordinator=address,
        num_processes=_number(environ, count_name),
        process_id=_number(environ, rank_name),
        local_id=local_id,
        local_count=local_count,
        found=", ".join(found),
    )


def _checked(job: ClusterJob) -> ClusterJob:
    if job.num_processes < 1 or job.process_id >= job.num_processes:
        raise ConfigError(
            f"{job.launcher} says that this is process {job.process_id} of {job.num_processes}, "
            f"numbered from 0 ({job.found}): start all processes with one launcher"
        )
    if job.local_id is not None and job.local_id >= (job.local_count or job.num_processes):
        raise ConfigError(
            f"{job.launcher} says that this is process {job.local_id} of "
            f"{job.local_count or job.num_processes} on its host, numbered from 0 ({job.found}): "
            "start all processes with one launcher"
        )
    return job


def expand_node_list(text: str, name: str = "node list") -> Iterator[str]:
    """The names in Slurm's way to write several, in their order.

    Raises:
        ConfigError: it is no such text; the message begins with `name`.

    Example:
        >>> list(expand_node_list("login,n[08-10,12]-ib"))
        ['login', 'n08-ib', 'n09-ib', 'n10-ib', 'n12-ib']
    """
    bad = ConfigError(f"{name}={text}: use names such as node1,node[08-10,12]")
    expanded = 0
    # Commas between brackets do not end a name.
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        if not word or re.sub(r"\[[^\[\]]+\]|[^\[\]]", "", word):
            raise bad
        names = [""]
        for fixed, ranges in _NODE_NAMES.findall(word):
            names = [name + fixed for name in names]
            if ranges:
                numbers = [number for part in ranges.split(",") for number in _range(part, bad)]
                if len(names) * len(numbers) + expanded > _MOST_NODES:
                    raise bad
                names = [name + number for name in names for number in numbers]
        expanded += len(names)
        yield from names


def _range(text: str, bad: ConfigError) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise bad
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < first + _MOST_NODES:
        raise bad
    return [str(number).zfill(len(match[1])) for number in range(first, last + 1)]


def _port_of(job: str) -> int:
    """A port that all processes of a job agree on, and other jobs hardly have."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _require(environ: Environment, launcher: str, names: tuple[str, ...]) -> None:
    there = [name for name in names if environ.get(name)]
    if missing := [name for name in names if not environ.get(name)]:
        with_these = f", where {', '.join(there)} is" if there else ""
        raise ConfigError(
            f"{', '.join(missing)} is not set{with_these}: start with {launcher}, which sets all "
            f"of {', '.join(names)}, or unset them"
        )


def _number(environ: Environment, name: str) -> int:
    text = environ.get(name, "").strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: use a whole number")
    return int(text)
