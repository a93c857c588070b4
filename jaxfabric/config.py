"""Settings: one frozen dataclass, and the only place where JAXFABRIC_* variables are read."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxfabric import _network_settings, gpu_table

_PREFIX = "JAXFABRIC_"
_LOG_LEVELS = {"error": 0, "warning": 1, "info": 2}
_CHOICES = {"gpu_windows": ("on", "off"), "log_level": tuple(_LOG_LEVELS)}
# These decide what is lowered, and the core need not know of them.
_OF_LOWERING = ("gpu_limits", "gpu_windows")
_BYTES = re.compile(r"(\d+)\s*(|[KMG])(|i?B)", re.IGNORECASE)

logger = logging.getLogger("jaxfabric")


class ConfigError(ValueError):
    """A setting has a value it cannot have; the message names it, the value and the remedy."""


def _field(
    default: float | int | str, help_text: str, minimum: float = 0.0, maximum: float = 1e9
) -> Any:  # noqa: ANN401
    # The core counts times in 64 bits of nanoseconds: the largest is 31 years.
    return dataclasses.field(
        default=default,
        metadata={"help": help_text, "minimum": minimum, "maximum": maximum},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the fabric of this process behaves. Times are in seconds unless the name says otherwise.

    Every field is set by an argument of `jaxfabric.initialize` or by the environment variable
    `JAXFABRIC_<NAME>`; the argument wins.

    Example:
        >>> Config.from_environment({"JAXFABRIC_DEADLINE": "30"}).deadline
        30.0
    """

    deadline: float = _field(300.0, "longest wait for other ranks in one collective", 0.001)
    warn_after: float = _field(10.0, "a wait this long is logged, with the ranks that are late")
    mismatch_after: float = _field(1.0, "a wait this long makes ranks compare what they wait for")
    connect_timeout: float = _field(60.0, "longest wait for the other processes at start", 0.001)
    segment_bytes: int = _field(
        16 << 20, "shared memory per rank, in bytes (or 16M, 1GiB)", 64 << 10, 1 << 40
    )
    heartbeat: float = _field(100.0, "JAX takes a process silent for so long for dead", 1)
    in_step_microseconds: float = _field(
        20000.0,
        "wait for a rank that is on its way, on the caller's thread, before others take over",
    )
    out_of_step_microseconds: float = _field(
        200.0, "the same for a rank whose last collective was another one"
    )
    gpu_pool_bytes: int = _field(
        48 << 20, "memory of every GPU that its peers address, in bytes (or 48M)", 4 << 20, 1 << 40
    )
    gpu_multicast: int = _field(
        1, "0: switches between GPUs do not add, so that sums have the bits of CPUs", 0, 1
    )
    gpu_limits: str = _field("", "calls on GPUs that XLA is to run, over the table's own limits")
    gpu_windows: str = _field("off", "on: peers read and write XLA's own arrays on GPUs; or off")
    net_interface: str = _field("", "names or subnets of the interface that other hosts reach")
    net_port_range: str = _field("", "ports that other hosts reach, such as 40000-40100")
    pattern: str = _field("", "patterns between hosts, whatever they cost; none: no pattern")
    network_cost: str = _field("measured", "measured, default, or microseconds and GB/s: 30,1.2")
    tcp_sockets: int = _field(2, "connections for data between two processes", 1, 16)
    tcp_congestion_control: str = _field("auto", "auto, system, or one of the kernel: cubic")
    unreachable_after: float = _field(10.0, "a host that has not answered for so long is gone", 2)
    log_level: str = _field("warning", "error, warning or info")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field, getattr(self, field.name), f"{field.name}=")

    @staticmethod
    def _check(field: dataclasses.Field[Any], value: object, source: str) -> None:
        if field.type == "str":
            if check := _TEXT_CHECKS.get(field.name):
                try:
                    check(source, value)
                except ValueError as error:
                    raise ConfigError(str(error)) from None
            elif value not in _CHOICES[field.name]:
                choices = ", ".join(_CHOICES[field.name])
                raise ConfigError(f"{source}{value}: use one of {choices}")
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{source}{value!r}: a number is needed ({field.metadata['help']})")
        if field.type == "int" and not isinstance(value, int):
            raise ConfigError(f"{source}{value!r}: use a whole number ({field.metadata['help']})")
        minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
        if not minimum <= value <= maximum:
            raise ConfigError(
                f"{source}{value}: use a finite number of at least {minimum:g}, at most "
                f"{maximum:.16g} ({field.metadata['help']})"
            )

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        **overrides: float | int | str | None,
    ) -> Config:
        """Reads JAXFABRIC_* variables; overrides that are not None win.

        Args:
            environ: the variables; default: those of this process.
            **overrides: values by field name.

        Raises:
            ConfigError: a value cannot be used; the message names the variable and the remedy.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := values.keys() - fields.keys():
            raise ConfigError(
                f"unknown setting {sorted(unknown)[0]!r}: the settings are {', '.join(fields)}"
            )
        for name, field in fields.items():
            variable = _PREFIX + name.upper()
            if name not in values and (text := environ.get(variable, "").strip()):
                values[name] = _parse(field, variable, text)
                cls._check(field, values[name], f"{variable}=")
        return cls(**values)

    def options(self) -> dict[str, float | int | str]:
        """Returns the settings as the compiled core takes them; log_level becomes 0, 1 or 2.

        Without those that only decide what is lowered.
        """
        options = {
            field.name: float(value) if field.type == "float" else value
            for field in dataclasses.fields(self)
            if field.name not in _OF_LOWERING
            for value in (getattr(self, field.name),)
        }
        if self.network_cost == "default":
            options["network_cost"] = ""
        options["log_level"] = _LOG_LEVELS[self.log_level]
        return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherEnvironment:
    """What `jaxfabric run` tells each process it starts."""

    coordinator: str | None
    process_id: int
    num_processes: int
    job: str
    restart_count: int = 0
    local_id: int = 0

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None
    ) -> LauncherEnvironment | None:
        """Returns None outside of `jaxfabric run`.

        Raises:
            ConfigError: some of the launcher's variables are missing or malformed.
        """
        environ = os.environ if environ is None else environ
        count = environ.get("JAXFABRIC_NUM_PROCESSES")
        if count is None:
            return None
        coordinator = environ.get("JAXFABRIC_COORDINATOR")
        num_processes = _whole_number("JAXFABRIC_NUM_PROCESSES", count, 1)
        process_id = _whole_number(
            "JAXFABRIC_PROCESS_ID", environ.get("JAXFABRIC_PROCESS_ID", ""), 0
        )
        if process_id >= num_processes:
            raise ConfigError(
                f"JAXFABRIC_PROCESS_ID={process_id} is not below "
                f"JAXFABRIC_NUM_PROCESSES={num_processes}: start with `jaxfabric run`"
            )
        if num_processes > 1 and not coordinator:
            raise ConfigError(
                "JAXFABRIC_COORDINATOR is not set, and JAXFABRIC_NUM_PROCESSES is "
                f"{num_processes}: set it to host:port, or start with `jaxfabric run`"
            )
        if coordinator:
            check_address("JAXFABRIC_COORDINATOR", coordinator)
        return cls(
            coordinator=coordinator,
            process_id=process_id,
            num_processes=num_processes,
            job=environ.get("JAXFABRIC_JOB", ""),
            restart_count=_whole_number(
                "JAXFABRIC_RESTART_COUNT", environ.get("JAXFABRIC_RESTART_COUNT", "0"), 0
            ),
            local_id=_whole_number(
                "JAXFABRIC_LOCAL_PROCESS_ID", environ.get("JAXFABRIC_LOCAL_PROCESS_ID", "0"), 0
            ),
        )

    def variables(self) -> dict[str, str]:
        """Returns what `from_environment` reads."""
        variables = {
            "JAXFABRIC_PROCESS_ID": str(self.process_id),
            "JAXFABRIC_NUM_PROCESSES": str(self.num_processes),
            "JAXFABRIC_JOB": self.job,
            "JAXFABRIC_RESTART_COUNT": str(self.restart_count),
            "JAXFABRIC_LOCAL_PROCESS_ID": str(self.local_id),
        }
        if self.coordinator:
            variables["JAXFABRIC_COORDINATOR"] = self.coordinator
        return variables


def parse_bytes(name: str, text: str) -> int:
    """Returns how many bytes a text such as 4096, 16K, 16M or 1GiB means.

    Raises:
        ConfigError: it is no such text; the message names `name`, the text and the remedy.
    """
    match = _BYTES.fullmatch(text)
    if not match:
        raise ConfigError(f"{name}={text}: use a number of bytes, such as 16777216 or 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def parse_gpu_limits(source: str, text: object) -> tuple[gpu_table.Override, ...]:
    """Reads limits such as "all_reduce/8/float=32M, all_to_all=0, */16=1M".

    Each is an op or *, if need be with a number of ranks or * and one of gpu_table.KINDS or *, and
    the bytes from which on XLA runs it: 0 leaves all to XLA.

    Raises:
        ConfigError: it is no such text; the message begins with `source`.
    """
    overrides = []
    for entry in filter(None, map(str.strip, str(text).split(","))):
        key, equals, size = map(str.strip, entry.partition("="))
        op, ranks, kind, *more = [*map(str.strip, key.split("/")), gpu_table.ANY, gpu_table.ANY]
        wanted = (*gpu_table.OPS, gpu_table.ANY)
        if not equals or len(more) > 2 or op not in wanted:
            raise ConfigError(
                f"{source}{text}: {entry!r} is not OP[/RANKS[/KIND]]=BYTES, such as "
                f"all_reduce/8=32M, with one of {', '.join(wanted)}"
            )
        if ranks != gpu_table.ANY and not (ranks.isdecimal() and int(ranks)):
            raise ConfigError(f"{source}{text}: {ranks!r} in {entry!r} is no number of ranks, or *")
        if kind not in (*gpu_table.KINDS, gpu_table.ANY):
            raise ConfigError(
                f"{source}{text}: {kind!r} in {entry!r} is not {', '.join(gpu_table.KINDS)} or *"
            )
        count = 0 if ranks == gpu_table.ANY else int(ranks)
        overrides.append(gpu_table.Override(op, count, kind, parse_bytes(f"{source}{key}", size)))
    return tuple(overrides)


_TEXT_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "gpu_limits": parse_gpu_limits,
    "net_interface": _network_settings.check_interface,
    "net_port_range": _network_settings.check_port_range,
    "network_cost": _network_settings.check_network_cost,
    "pattern": _network_settings.check_pattern,
    "tcp_congestion_control": _network_settings.check_congestion_control,
}


def check_address(name: str, address: object) -> None:
    """Raises ConfigError unless `address` is host:port; JAX would abort, or wait for nobody."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{name}={address}: use host:port, with a port from 1 to 65535")


SWITCH_VARIABLE = "JAXFABRIC_ENABLE"
SWITCH_MODES = ("lax", "hlo")


def switch_is_in_environment() -> bool:
    """Whether JAXFABRIC_ENABLE says anything."""
    return bool(os.environ.get(SWITCH_VARIABLE))


def switch_from_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the mode that JAXFABRIC_ENABLE asks for; None where it is unset, empty or 0.

    Raises:
        ConfigError: it has another value than 0, 1 or one of SWITCH_MODES.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(SWITCH_VARIABLE, "").strip().lower()
    if text in ("", "0", "false", "off"):
        return None
    if text in ("1", "true", "on"):
        return SWITCH_MODES[0]
    if text not in SWITCH_MODES:
        raise ConfigError(f"{SWITCH_VARIABLE}={text}: use 0, 1 or {', '.join(SWITCH_MODES)}")
    return text


LAUNCHER_VARIABLES = (
    "JAXFABRIC_COORDINATOR",
    "JAXFABRIC_PROCESS_ID",
    "JAXFABRIC_NUM_PROCESSES",
    "JAXFABRIC_JOB",
    "JAXFABRIC_RESTART_COUNT",
    "JAXFABRIC_LOCAL_PROCESS_ID",
)
# For `jaxfabric run` itself, where its options are not given. Not passed on.
RUN_VARIABLES = ("JAXFABRIC_RUN_NNODES", "JAXFABRIC_RUN_NODE_RANK", "JAXFABRIC_RUN_COORDINATOR")


def run_variable(option: str) -> tuple[str, str | None]:
    """The name of the one of RUN_VARIABLES that stands in for an option, and its value."""
    variable = f"{_PREFIX}RUN_{option.upper().replace('-', '_')}"
    return variable, os.environ.get(variable)


# Of pyproject.toml; may stay set.
_BUILD_VARIABLES = ("JAXFABRIC_CUDA", "JAXFABRIC_WINDOWS_HEADERS")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns one line for each JAXFABRIC_* variable that nothing reads, with a likely meaning."""
    environ = os.environ if environ is None else environ
    known = [_PREFIX + field.name.upper() for field in dataclasses.fields(Config)]
    known += [SWITCH_VARIABLE, *LAUNCHER_VARIABLES, *RUN_VARIABLES]
    lines = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in (*known, *_BUILD_VARIABLES):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            lines.append(f"{name} is not a setting: {hint}")
    return lines


@functools.cache
def warn_of_unknown_variables() -> None:
    """Logs what `unknown_variables` returns: once, and in one process of `jaxfabric run`."""
    if os.environ.get("JAXFABRIC_PROCESS_ID", "0") == "0":
        for line in unknown_variables():
            logger.warning("%s", line)


def _whole_number(variable: str, text: str, minimum: int) -> int:
    if not text.strip().isdecimal() or int(text) < minimum:
        raise ConfigError(f"{variable}={text}: use a whole number of at least {minimum}")
    return int(text)


def _parse(field: dataclasses.Field[Any], variable: str, text: str) -> float | int | str:
    if field.type == "str":
        return text if field.name == "net_interface" else text.lower()
    if field.type == "int":
        return parse_bytes(variable, text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}: use a number ({field.metadata['help']})") from None
