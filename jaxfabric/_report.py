"""Which collectives the programs compiled so far contain, and who runs each: `jaxfabric.report`."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Callable

from jaxfabric import config

# Lowered programs that are remembered; older ones are forgotten first.
_MOST = 100_000

FABRIC = "jaxfabric"
XLA = "XLA"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One collective of one program.

    Attributes:
        program: name of the jitted function.
        number: the collective's number in the program, in the order of lowering.
        call: op, dtype and shape of the operand: "psum float32[4096]".
        source: "train.py:42".
        size_bytes: bytes of one rank's operand.
        runner: "jaxfabric" or "XLA".
        reason: why XLA runs it, or on GPUs why jaxfabric does; empty otherwise.
    """

    program: str
    number: int
    call: str
    source: str
    size_bytes: int
    runner: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `jaxfabric.report` returns: print it, or go through `entries`.

    Attributes:
        entries: one for each collective.
        advice: what to do if there are none, or if none runs on the fabric; empty otherwise.
    """

    entries: tuple[Entry, ...]
    advice: str = ""

    def counts(self) -> dict[str, int]:
        """How many collectives each runner has: {"jaxfabric": 12, "XLA": 1}."""
        return dict(collections.Counter(entry.runner for entry in self.entries))

    def to_json(self) -> str:
        """The entries as a JSON list of objects."""
        return json.dumps([dataclasses.asdict(entry) for entry in self.entries])

    def __str__(self) -> str:
        if not self.entries:
            return self.advice
        rows = [("program", "collective", "bytes", "line", "run by")]
        rows += [
            (
                entry.program,
                entry.call,
                f"{entry.size_bytes:,}",
                entry.source,
                entry.runner + (f": {entry.reason}" if entry.reason else ""),
            )
            for entry in self.entries
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join(
                cell.rjust(width) if i == 2 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row[:4], widths, strict=True))
            )
            + f"  {row[4]}"
            for row in rows
        ]
        total = ", ".join(f"{n} run by {runner}" for runner, n in sorted(self.counts().items()))
        below = [total, self.advice] if self.advice else [total]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *below])


_lock = threading.Lock()
_entries: collections.OrderedDict[tuple[str, int, str, str], Entry] = collections.OrderedDict()


def _off() -> str | None:
    return None


# The mode of the switch on this thread; `dropin`, which has the switch, puts its own here.
mode: Callable[[], str | None] = _off


def _advice(entries: tuple[Entry, ...]) -> str:
    if entries:
        if any(entry.runner == FABRIC for entry in entries):
            return ""
        return "jaxfabric runs none of them, for the reasons above"
    current = mode()
    if current == "hlo":
        return (
            'no collectives: the switch is on, mode "hlo", and no program compiled since has one; '
            "shard its arrays over several devices (what JAX's persistent cache gives is not seen)"
        )
    if current is not None:
        return (
            f'no collectives: the switch is on, mode "{current}", and no program compiled since '
            'calls one; for those that jax.jit inserts itself call jaxfabric.enable("hlo")'
        )
    try:
        wanted = config.switch_from_environment()
    except config.ConfigError as error:
        return f"no collectives: the switch is off, for {error}"
    if wanted is not None:
        return (
            f"no collectives: {config.SWITCH_VARIABLE} is set, but the switch is off: it comes on "
            "when JAX starts its backend, unless jaxfabric.disable() was called"
        )
    return (
        "no collectives: no program compiled so far calls jaxfabric.lax, and the switch that runs "
        f"those of jax.lax is off: set {config.SWITCH_VARIABLE}=1, or call jaxfabric.enable() "
        "before the program"
    )


def record(entry: Entry) -> None:
    """Remembers a collective; the same one of a program that is lowered again counts once."""
    key = (entry.program, entry.number, entry.call, entry.source)
    with _lock:
        _entries.pop(key, None)
        _entries[key] = entry
        if len(_entries) > _MOST:
            _entries.popitem(last=False)


def report() -> Report:
    """Lists the collectives of the programs lowered so far, and who runs each.

    A collective that the switch (`jaxfabric.enable`) leaves to XLA is there with the reason. One
    that was lowered while the switch was off is not. If there are none, it says why and what to do.

    Returns:
        A `Report`: `print` shows a table, `entries` and `to_json` are for programs.

    Example:
        >>> import jaxfabric
        >>> jaxfabric.report().counts().get("XLA", 0)
        0
    """
    with _lock:
        entries = tuple(_entries.values())
    return Report(entries, _advice(entries))
