"""`jaxfabric bench simulate`: what collectives will take on hosts that nobody has to have."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxfabric import bench

HELP = """\
Predicts start-up and collectives on hosts that talk over a network of two levels of switches, with
the patterns and the cost model of the fabric. Nothing is sent.

    jaxfabric bench simulate
    jaxfabric bench simulate --op psum,all_to_all --ranks 1024,65536 --oversubscription 4
    jaxfabric bench simulate --measured two_hosts.json --ranks-per-host 1

Figures that are not given are those of the core, for TCP over Ethernet; the output shows them all.
"""
# By the names of jax.lax, the collectives of the core.
OPS = {
    "psum": "all_reduce",
    "all_gather": "all_gather",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
    "barrier": "barrier",
}
# Options that are figures of the core's cost model, which has the defaults: what they are called
# there, in which unit the option is, and its help.
_FIGURES = (
    ("--alpha", "alpha", "US", "microseconds of a message between hosts"),
    ("--overhead", "overhead", "US", "microseconds of each further one at the same time"),
    ("--host-overhead", "host_overhead", "US", "microseconds of a message on each further lane"),
    ("--hop", "hop", "US", "microseconds of a switch, after the first"),
    ("--stream", "beta", "GB/S", "what one rank can send"),
    ("--link", "host_beta", "GB/S", "what a host can send"),
    ("--add", "gamma", "GB/S", "what one rank can add"),
    ("--inside-alpha", "inside_alpha", "US", "microseconds of a signal inside a host"),
    ("--inside", "inside_beta", "GB/S", "what one rank can copy inside a host"),
    ("--oversubscription", "oversubscription", "X", "bandwidth of a leaf's hosts over its uplinks"),
    ("--hosts-per-leaf", "hosts_per_leaf", "N", "hosts of one leaf switch"),
    ("--most-peers", "most_peers", "N", "connections beyond which a pattern is not chosen"),
)
# The rendezvous: hello set, got and deleted, roster set; every process then gets and deletes its.
_STORE_CALLS = 6
_MEMBER_BYTES = 600  # of a process in the roster
_CONNECT_ROUND_TRIPS = 3  # TCP's own, and challenge and response


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What is simulated.

    Attributes:
        figures: of the core's cost model, by its names, in seconds, seconds per byte and numbers.
        ranks_per_host: how many.
        devices: ranks of one process.
        store: seconds of one call of the key-value store.
        connect: seconds that opening a connection keeps a process busy.
        sockets: connections to one peer.
        cores: that all ranks share, where the hosts are namespaces of one machine; 0: they do not.

    Raises:
        ValueError: the core knows no such figure, or has no use for its value.

    Example:
        >>> Network(figures={"alpha": 20e-6}).collective("psum", 8, 64)[0]["pattern"]
        'direct'
    """

    figures: Mapping[str, float]
    ranks_per_host: int = 8
    devices: int = 1
    store: float = 100e-6
    connect: float = 100e-6
    sockets: int = 2
    cores: int = 0

    def hosts(self, ranks: int) -> int:
        """How many hosts so many ranks fill, the last one perhaps not quite."""
        return -(-ranks // self.ranks_per_host)

    def collective(self, op: str, size: int, ranks: int) -> list[dict[str, Any]]:
        """Returns what the core says of each pattern for an op of OPS, with `seconds` of it all."""
        from jaxfabric import _ext

        per_host = min(ranks, self.ranks_per_host)
        hosts = self.hosts(ranks)
        rows = _ext.simulate(OPS[op], size, hosts, per_host, dict(self.figures))
        if hosts == 1:  # Whatever is chosen, nothing goes between hosts.
            rows = [row | {"pattern": "none", "lanes": 0} for row in rows if row["chosen"]]
        return [row | {"seconds": self._seconds(row)} for row in rows]

    def _seconds(self, row: Mapping[str, Any]) -> float:
        alone: float = row["inside"] + row["between"]
        return max(alone, row["work"] / self.cores) if self.cores else alone

    def start_up(self, ranks: int, peers: int) -> dict[str, float]:
        """Returns seconds of the rendezvous, and of the connections to so many peers."""
        figures = {**_defaults(), **self.figures}
        processes = -(-ranks // self.devices)
        # Every process gets a roster of all of them from the one host where the store is.
        roster = processes * processes * _MEMBER_BYTES * figures["host_beta"]
        rendezvous = processes * _STORE_CALLS * self.store + roster
        waiting = _CONNECT_ROUND_TRIPS * 2 * figures["alpha"] if peers else 0.0
        # One more for messages of the control plane.
        connections = peers * (self.sockets + 1)
        return {
            "rendezvous": rendezvous,
            "connections": connections,
            "first_use": waiting + connections * self.connect,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add = parser.add_argument
    names = ", ".join(OPS)
    add(
        "--op",
        type=bench.some_of(OPS),
        default=("psum",),
        metavar="OP,...",
        help=f"some of {names} (default: psum)",
    )
    add(
        "--bytes",
        type=bench.sizes,
        default="8,64KiB,1MiB,64MiB",
        metavar="SIZE,...",
        help="the larger of a rank's input and output (default: %(default)s)",
    )
    add(
        "--ranks",
        type=_counts,
        default="16,256,4096,65536",
        metavar="N,...",
        help="how many (default: %(default)s)",
    )
    add("--ranks-per-host", type=_count, default=8, metavar="N", help="(default: %(default)s)")
    add(
        *("-d", "--devices-per-process"),
        type=_count,
        default=1,
        metavar="D",
        help="ranks of one process, for the start-up (default: %(default)s)",
    )
    for option, _, unit, text in _FIGURES:
        add(option, type=_counted if unit == "N" else _number, metavar=unit, help=text)
    add(
        "--store",
        type=_number,
        default=100.0,
        metavar="US",
        help="microseconds of a call of JAX's key-value store (default: %(default)g)",
    )
    add(
        "--connect",
        type=_number,
        default=100.0,
        metavar="US",
        help="microseconds of work to open a connection (default: %(default)g)",
    )
    add("--sockets", type=_count, default=2, metavar="K", help="per peer (default: %(default)s)")
    add(
        "--cores",
        type=_count,
        default=0,
        metavar="N",
        help="that all ranks share, where the hosts are namespaces of one machine",
    )
    add("--all", action="store_true", help="show every pattern, not only the one that is chosen")
    add(
        "--measured",
        nargs="+",
        default=(),
        metavar="FILE",
        help="documents of `jaxfabric bench --json`: show what is predicted for their cases, and "
        "what was measured; the hosts are as many as --ranks-per-host makes them",
    )
    add("--json", action="store_true", help="print one JSON document instead of the tables")


def main(options: argparse.Namespace) -> int:
    """Prints tables, or one JSON document; returns the exit status."""
    figures = {
        name: _to_model(value, unit)
        for option, name, unit, _ in _FIGURES
        if (value := getattr(options, option.strip("-").replace("-", "_"))) is not None
    }
    network = Network(
        figures=figures,
        ranks_per_host=options.ranks_per_host,
        devices=options.devices_per_process,
        store=options.store * 1e-6,
        connect=options.connect * 1e-6,
        sockets=options.sockets,
        cores=options.cores,
    )
    if options.measured:
        try:
            rows = list(_compared(network, options.measured))
        except _BadFileError as error:
            print(f"jaxfabric: bench simulate: --measured {error}", file=sys.stderr)
            return 2
        print(json.dumps({"measured": rows}) if options.json else _compared_table(rows))
        return 0
    starts, rows = _predicted(network, options)
    figures = _defaults() | figures
    if options.json:
        document = dataclasses.asdict(network) | {"figures": figures}
        print(json.dumps({"network": document, "start_up": starts, "collectives": rows}))
    else:
        print(f"network: {_network_text(figures)}")
        print(_start_up_table(starts), _collectives_table(rows), sep="\n\n")
    return 0


class _BadFileError(Exception):
    """A file is no document of `jaxfabric bench --json`; the text says which, and why."""


def _predicted(
    network: Network, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    starts, rows = [], []
    for ranks in options.ranks:
        peers = 0
        for op in options.op:
            for size in (0,) if op == "barrier" else options.bytes:
                for row in network.collective(op, size, ranks):
                    if row["chosen"]:
                        peers = max(peers, row["peers"])
                    if row["chosen"] or options.all:
                        rows.append({"op": op, "ranks": ranks, "bytes": size} | row)
        hosts = network.hosts(ranks)
        start = {"ranks": ranks, "hosts": hosts, "peers": peers}
        starts.append(start | network.start_up(ranks, peers))
    return starts, rows


def _compared(network: Network, files: Iterable[str]) -> Iterable[dict[str, Any]]:
    for name in files:
        try:
            with open(name, encoding="utf-8") as file:
                document = json.load(file)
            ranks = int(document["ranks"])
            cases = [
                (result["op"], int(result["bytes"]), float(result["us"]["jaxfabric"]))
                for result in document["results"]
                if result["op"] in OPS and "jaxfabric" in result["us"]
            ]
        except OSError as error:
            raise _BadFileError(f"{name}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _BadFileError(
                f"{name}: it is no document of `jaxfabric bench --json` ({error!r})"
            ) from error
        for op, size, us in cases:
            (row,) = (row for row in network.collective(op, size, ranks) if row["chosen"])
            predicted = row["seconds"] * 1e6
            yield {
                **{"op": op, "ranks": ranks, "hosts": network.hosts(ranks), "bytes": size},
                **{"pattern": row["pattern"], "lanes": row["lanes"]},
                **{"predicted_us": predicted, "measured_us": us, "ratio": predicted / us},
            }


def _start_up_table(starts: Iterable[Mapping[str, Any]]) -> str:
    lines: list[Sequence[str]] = [
        ("ranks", "hosts", "rendezvous", "peers", "connections", "opening them")
    ]
    lines += [
        (
            *(f"{start['ranks']:,}", f"{start['hosts']:,}", _time(start["rendezvous"])),
            *(f"{start['peers']:,}", f"{start['connections']:,}", _time(start["first_use"])),
        )
        for start in starts
    ]
    return f"""\
start-up, before and at the first use of the busiest pattern below
{_columns(lines)}"""


def _collectives_table(rows: Iterable[Mapping[str, Any]]) -> str:
    lines: list[Sequence[str]] = [
        ("op", "ranks", "bytes", "pattern", "lanes", "time", "inside", "algbw")
    ]
    for row in rows:
        inside = row["inside"] / row["seconds"] if row["seconds"] else 0.0
        algbw = row["bytes"] / row["seconds"] / 1e9 if row["seconds"] else 0.0
        lines.append(
            (
                *(row["op"], f"{row['ranks']:,}", bench.size_text(row["bytes"])),
                *(row["pattern"] + ("*" if row["chosen"] else ""), str(row["lanes"])),
                *(_time(row["seconds"]), f"{inside:.0%}", bench.number_text(algbw)),
            )
        )
    return f"""\
collectives; *: the pattern that is chosen; inside: the part within hosts; algbw: GB/s
{_columns(lines)}"""


def _compared_table(rows: Iterable[Mapping[str, Any]]) -> str:
    lines: list[Sequence[str]] = [
        ("op", "ranks", "hosts", "bytes", "pattern", "predicted", "measured", "ratio")
    ]
    lines += [
        (
            *(row["op"], str(row["ranks"]), str(row["hosts"]), bench.size_text(row["bytes"])),
            *(row["pattern"], _time(row["predicted_us"] / 1e6), _time(row["measured_us"] / 1e6)),
            bench.number_text(row["ratio"]),
        )
        for row in rows
    ]
    return _columns(lines)


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{bench.number_text(seconds / unit)} {name}"
    return f"{bench.number_text(seconds / 1e-6)} us" if seconds else "0"


def _defaults() -> dict[str, float]:
    from jaxfabric import _ext

    return _ext.cost_model()


def _to_model(value: float, unit: str) -> float:
    """Microseconds to seconds, and GB/s to seconds per byte."""
    return {"US": value * 1e-6, "GB/S": 1e-9 / value}.get(unit, value)


def _network_text(figures: Mapping[str, float]) -> str:
    """The options that lead to such figures of the model, all of them."""
    texts = []
    for option, name, unit, _ in _FIGURES:
        value = figures[name]
        shown = value * 1e6 if unit == "US" else _to_model(value, unit)
        texts.append(f"{option} {shown:g}")
    half = len(texts) // 2
    return " ".join(texts[:half]) + "\n  " + " ".join(texts[half:])


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1048576")
    return int(text)


def _counted(text: str) -> float:
    return float(_count(text))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_count, text.split(","))))
