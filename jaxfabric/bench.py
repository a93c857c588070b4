"""`jaxfabric bench`: times collectives on this machine, beside those of others, in turns."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxfabric import launch
from jaxfabric.config import ConfigError, parse_bytes

# By op, what busbw is of algbw between n ranks, as nccl-tests define it.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "psum_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1.0,
}
PEERS = ("xla", "mpi4jax")
_ITEM = 4  # float32
# What a rank holds at once: the input, the result, the right result, and copies XLA may make.
_BUFFERS = 5
_LAST_LINES = 20
_NOISY = 1.5  # Times whose rounds differ by more than this factor are marked in the table.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        ops: names out of BUS_FACTORS.
        sizes: bytes per rank, each rounded up to what all ranks can share evenly.
        processes: how many on each host, per implementation.
        devices: how many of each process; every device is a rank.
        nodes: which of several hosts this one is; all have the same number of processes.
        peers: names out of PEERS, measured beside jaxfabric.
        rounds: how often each implementation has its turn.
        timeout: seconds for one op at one size.

    Raises:
        ValueError: the machine or the collectives cannot do that.

    Example:
        >>> Plan(ops=("psum",), sizes=(10,), processes=2, devices=1).cases
        (('psum', 16),)
    """

    ops: Sequence[str]
    sizes: Sequence[int]
    processes: int
    devices: int
    nodes: launch.Nodes = dataclasses.field(default_factory=launch.Nodes)
    peers: Sequence[str] = PEERS[:1]
    rounds: int = 3
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.ranks == 1:
            raise ValueError(
                "--num-processes 1 with --devices-per-process 1: one rank has nobody to talk to; "
                "raise one of them"
            )
        if "mpi4jax" in self.peers:
            if self.devices > 1:
                raise ValueError(
                    f"--against mpi4jax with --devices-per-process {self.devices}: each of its "
                    "processes is one rank; use one device, and more processes"
                )
            if not importlib.util.find_spec("mpi4jax") or not _mpirun():
                raise ValueError(
                    "--against mpi4jax: it needs mpi4jax in this Python and Open MPI's mpirun on "
                    "the PATH; install them, or leave it out"
                )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        largest = max(self.sizes)
        here = self.processes * self.devices
        needed = largest * here * _BUFFERS
        if needed > memory:
            raise ValueError(
                f"--bytes {largest}: {here} ranks would need {needed >> 20} MiB, of "
                f"{memory >> 20} MiB that this machine has; ask for less"
            )

    @property
    def ranks(self) -> int:
        """How many take part in a collective."""
        return self.nodes.count * self.processes * self.devices

    @property
    def cases(self) -> tuple[tuple[str, int], ...]:
        """The ops with their bytes, in the order in which they are measured."""
        unit = _ITEM * self.ranks
        sizes = dict.fromkeys(-(-size // unit) * unit for size in self.sizes)
        return tuple((op, size) for op in self.ops for size in sizes)


class _Failure(Exception):
    """A job ended without all its results; the text says which, how, and its last lines."""


def some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns what parses a list of such names for argparse."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: use some of {', '.join(known)}, separated by commas"
                )
        return names

    return parse


def sizes(text: str) -> tuple[int, ...]:
    """Parses --bytes for argparse."""
    try:
        found = tuple(parse_bytes("", part) for part in text.split(","))
    except ConfigError:
        found = (0,)
    if 0 in found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: use sizes of at least a byte, separated by commas, such as 8,16KiB,1MiB"
        )
    return found


def main(plan: Plan, *, as_json: bool) -> int:
    """Measures, and prints a table or one JSON document; returns the exit status.

    Raises:
        ConfigError: a JAXFABRIC_* variable has a value it cannot have.
    """
    machine = _machine(plan)
    first = plan.nodes.rank == 0
    if first and not as_json:
        print(_describe(machine), flush=True)
    rounds: dict[str, list[list[dict[str, Any]]]] = collections.defaultdict(list)
    try:
        for number in range(plan.rounds):
            for name in ("jaxfabric", *plan.peers):
                if name == "mpi4jax" and not first:
                    continue  # Node 0's mpirun starts all its processes.
                rounds[name].append(_Job(plan, name, f"round {number + 1} of {plan.rounds}").run())
    except KeyboardInterrupt:
        return 130
    except _Failure as failure:
        print(f"jaxfabric: bench: {failure}", file=sys.stderr)
        return 1
    finally:
        _progress("")
    results = [_result(plan, number, rounds) for number in range(len(plan.cases))]
    if first:
        print(json.dumps(machine | {"results": results}) if as_json else _table(plan, results))
    wrong = [
        f"jaxfabric: bench: {name}: {result['op']} of {size_text(result['bytes'])}: {text}"
        for result in results
        for name, text in result["wrong"].items()
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


class _Job:
    """The processes of one implementation, from their start to their end."""

    def __init__(self, plan: Plan, name: str, turn: str) -> None:
        self.plan = plan
        self.name = name
        self.turn = turn
        self.rows: list[list[dict[str, Any]]] = [[] for _ in plan.cases]
        self.ended: dict[str, Any] | None = None
        self.log: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)

    def run(self) -> list[dict[str, Any]]:
        """Returns one row for each case: `us` of the slowest process, and what was `wrong`."""
        self._show(0)
        # A launcher of its own for each job: JAX's coordination service leaves threads behind, in
        # a process that has to fork again for the next one.
        summary = launch.run(
            self._command(),
            1,
            devices_per_process=self.plan.devices,
            stdout=_Lines(self._read),
            stderr=_Lines(self._note),
        )
        if summary.exit_code or self._done() < len(self.plan.cases):
            raise self._failure(summary)
        return [
            {
                "us": max(row["us"] for row in rows),
                "wrong": next((row["wrong"] for row in rows if row["wrong"]), None),
            }
            for rows in self.rows
        ]

    def _command(self) -> list[str]:
        job = {
            "implementation": self.name,
            "ranks": self.plan.ranks,
            "cases": self.plan.cases,
            "timeout": self.plan.timeout,
        }
        worker = [*_python("jaxfabric._bench_worker"), json.dumps(job)]
        if self.name == "mpi4jax":
            options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(self._count())]
            options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [_mpirun() or "mpirun", *options, *worker]
        options = ["-n", str(self.plan.processes), "--json", *self.plan.nodes.options()]
        return [*_python("jaxfabric.cli"), "run", *options, "--", *worker]

    def _count(self) -> int:
        """How many processes report here."""
        everywhere = self.plan.nodes.count if self.name == "mpi4jax" else 1
        return self.plan.processes * everywhere

    def _read(self, line: str) -> None:
        """Takes a line of a process's stdout, or what the launcher says at the end."""
        try:
            row = json.loads(line[line.index("{") :])
        except ValueError:
            self._note(line)
            return
        if "case" in row:
            self.rows[row["case"]].append(row)
            self._show(self._done())
        else:
            self.ended = row

    def _note(self, line: str) -> None:
        self.log.append(line)

    def _done(self) -> int:
        return sum(len(rows) == self._count() for rows in self.rows)

    def _show(self, done: int) -> None:
        if done < len(self.plan.cases):
            op, size = self.plan.cases[done]
            _progress(f"{self.turn}, {self.name}: {op} of {size_text(size)}")

    def _failure(self, summary: launch.Summary) -> BaseException:
        if summary.exit_code == 128 + signal.SIGINT:
            return KeyboardInterrupt()
        how, lines = f"exited with status {summary.exit_code}", list(self.log)
        if self.ended is not None and self.ended["first_failure"] is not None:
            process = self.ended["processes"][self.ended["first_failure"]]
            how = f"process {process['process']} "
            how += launch.how_it_ended(process["exit_code"], process["signal"])
            if process["signal"] == "SIGALRM":
                how += f", after {self.plan.timeout:g} s without a result (--timeout)"
            lines = [line for line in process["last_lines"] if not line.startswith("{")]
        op, size = self.plan.cases[min(self._done(), len(self.plan.cases) - 1)]
        text = "".join(f"\n    {line}" for line in lines) or " none"
        return _Failure(f"{self.name}: {how}, at {op} of {size_text(size)}. Its last lines:{text}")


class _Lines(io.BytesIO):
    """A sink for the launcher: hands on what its one process says, line by line."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self.take = take

    def write(self, data: Any) -> int:  # noqa: ANN401
        for line in data.decode(errors="replace").split("\n")[:-1]:
            if line.startswith("[0] "):
                self.take(line.removeprefix("[0] "))
        return len(data)


def _python(module: str) -> list[str]:
    """The start of a module's main() in this Python, with this jaxfabric wherever it came from."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]


def _mpirun() -> str | None:
    """Open MPI comes from PyPI too: then mpirun is where this Python is."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return shutil.which("mpirun", path=path)


def _machine(plan: Plan) -> dict[str, Any]:
    from jaxfabric import __version__

    return {
        "jaxfabric": __version__,
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),  # A busy machine explains odd times.
        "hosts": plan.nodes.count,
        "processes": plan.nodes.count * plan.processes,
        "devices_per_process": plan.devices,
        "ranks": plan.ranks,
        "dtype": "float32",
        "rounds": plan.rounds,
    }


def _describe(machine: dict[str, Any]) -> str:
    return """\
cores: {cores} (load: {load}); jaxfabric {jaxfabric}, JAX {jax}, Python {python}
ranks: {ranks} (hosts: {hosts}, processes: {processes}, \
CPU devices of each: {devices_per_process}); {dtype}, best of {rounds} round(s)
""".format(**machine)


def _result(
    plan: Plan, number: int, rounds: dict[str, list[list[dict[str, Any]]]]
) -> dict[str, Any]:
    """One case of the document: every implementation's time, and how they compare."""
    op, size = plan.cases[number]
    rows = {name: [turn[number] for turn in turns] for name, turns in rounds.items()}
    wrong = {name: row["wrong"] for name, turns in rows.items() for row in turns if row["wrong"]}
    every = {name: [round(row["us"], 3) for row in turns] for name, turns in rows.items()}
    us = {name: min(times) for name, times in every.items() if name not in wrong}
    own = us.get("jaxfabric")
    peers = [us[name] for name in plan.peers if name in us]
    algbw = size / own / 1e3 if own else None
    busbw = algbw * BUS_FACTORS[op](plan.ranks) if algbw else None
    return {
        "op": op,
        "bytes": size,
        "us": us,
        "us_of_rounds": every,
        "times_faster": round(min(peers) / own, 3) if own and peers else None,
        "algbw": algbw,
        "busbw": busbw,
        "wrong": wrong,
    }


def _table(plan: Plan, results: list[dict[str, Any]]) -> str:
    names = ("jaxfabric", *plan.peers)
    lines = [("op", "bytes", *(f"us {name}" for name in names), "times faster", "algbw", "busbw")]
    for result in results:
        us = (_time(result, name) for name in names)
        rest = (number_text(result[key]) for key in ("times_faster", "algbw", "busbw"))
        lines.append((result["op"], size_text(result["bytes"]), *us, *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for op, *cells in lines:
        text += op.ljust(widths[0])
        text += "".join(f"  {c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)) + "\n"
    return f"""\
{text}us: microseconds per call; ~: the slowest round took more than {_NOISY:g} times as long
algbw, busbw: GB/s of jaxfabric, as nccl-tests define them; times faster: than the fastest other"""


def _time(result: dict[str, Any], name: str) -> str:
    if name in result["wrong"]:
        return "wrong"
    times = result["us_of_rounds"][name]
    return number_text(min(times)) + ("~" if max(times) > _NOISY * min(times) else " ")


def number_text(value: float | None) -> str:
    """Two digits, or all of those before the point; - for None."""
    if value is None:
        return "-"
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def size_text(size: int) -> str:
    """A size as --bytes takes it, with a unit where that is exact."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


def _progress(text: str) -> None:
    """Replaces the line that says what goes on, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":  # python -m jaxfabric.bench
    sys.argv[1:1] = ["bench"]
    runpy.run_module("jaxfabric", run_name="__main__")
