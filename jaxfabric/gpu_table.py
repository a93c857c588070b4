"""Which calls on GPUs run on the fabric, and which are left to XLA's own collectives (NCCL).

A pure function of what every rank knows alike when it lowers a program, so that all ranks decide
the same: the number of ranks, the op, the kind of type and the bytes. `jaxfabric gpu-table` prints
it, the setting gpu_limits changes it.

The limits are where published figures for H100 and H200 behind NVSwitch have NCCL draw level with
the best of kernels like ours (vLLM, MSCCL++, FlashInfer): not measured with this fabric yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

ANY = "*"
OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all"),
    *("permute", "broadcast", "all_reduce_rms_norm", "barrier"),
)
# What NVSwitch adds up itself, and what it does not.
KINDS = ("float", "other")
_FLOATS = frozenset({"float32", "float16", "bfloat16"})

_KIB, _MIB = 1 << 10, 1 << 20
_EVEN = {2: 64 * _MIB, 4: 64 * _MIB, 8: 64 * _MIB}
# By op: by number of ranks, the bytes from which on XLA is to run it. A number of ranks that is not
# here is one without figures: XLA runs it.
_LIMITS: dict[str, dict[int, int]] = {
    # vLLM has no more than 512 KiB for 6.
    "all_reduce": {**_EVEN, 6: 1 * _MIB},
    # Both halves of an all_reduce; each rank's traffic is the least there can be at any size.
    "all_gather": _EVEN,
    "reduce_scatter": _EVEN,
    "all_to_all": _EVEN,
    "ragged_all_to_all": _EVEN,
    "permute": _EVEN,
    # The root alone sends all of it.
    "broadcast": {2: 64 * _MIB, 4: 4 * _MIB, 8: 4 * _MIB},
    # From here on it is an all_reduce, and XLA does the rest.
    "all_reduce_rms_norm": {2: 64 * _MIB, 4: 2 * _MIB, 8: 512 * _KIB},
}
# Where the kind makes a difference: two passes over all the data instead of the switch's one.
_OTHER_LIMITS: dict[str, dict[int, int]] = {
    "all_reduce": {2: 64 * _MIB, 4: 2 * _MIB, 6: 1 * _MIB, 8: 512 * _KIB},
}


@dataclasses.dataclass(frozen=True)
class Override:
    """One entry of the setting gpu_limits: "all_reduce/8/float=32M"; `ranks` 0 is any number."""

    op: str
    ranks: int
    kind: str
    limit: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """Who runs a call.

    Attributes:
        fabric: the fabric does; otherwise XLA.
        reason: why, in words.
    """

    fabric: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: calls of fewer than `limit` bytes run on the fabric."""

    ranks: int
    op: str
    kind: str
    limit: int
    source: str


def kind_of(op: str, dtype: str) -> str:
    """The kind of type that a call of `op` on arrays of `dtype` counts as."""
    return "float" if op != "all_reduce" or dtype in _FLOATS else "other"


def decide(
    op: str, dtype: str, size_bytes: int, ranks: int, overrides: Sequence[Override] = ()
) -> Decision:
    """Says who runs a call.

    Args:
        op: one of OPS.
        dtype: name of the operand's type.
        size_bytes: the larger of one rank's operand and result.
        ranks: how many ranks the call has.
        overrides: from the setting gpu_limits, the last that fits wins.

    Example:
        >>> from jaxfabric import gpu_table
        >>> gpu_table.decide("all_reduce", "bfloat16", 4096, 8)
        Decision(fabric=True, reason='4 KiB is below 64 MiB, the limit for all_reduce on 8 GPUs')
    """
    kind = kind_of(op, dtype)
    limit, source = _limit(op, ranks, kind, overrides)
    if op == "barrier" and limit != 0:
        return Decision(True, "a barrier moves no data")
    types = " of types other than float32, float16 and bfloat16" if kind == "other" else ""
    call = f"{op}{types} on {ranks} GPUs"
    if limit is None:
        return Decision(False, f"no limit is known for {call}")
    below = size_bytes < limit
    return Decision(
        below,
        f"{bytes_text(size_bytes)} is {'' if below else 'not '}below {bytes_text(limit)}, "
        f"the limit for {call}{f' ({source})' if source else ''}",
    )


# From here on it is worth that peers address XLA's own arrays, where they may. Below, calls whose
# data travels with its flags need no copy. Not measured.
WINDOWS_FROM = 1 * _MIB
_WITHOUT_WINDOWS = ("barrier", "ragged_all_to_all", "all_reduce_rms_norm")


def takes_windows(op: str, dtype: str, size_bytes: int, reduction: str | None = None) -> bool:
    """Whether a call of the fabric has its arrays in windows, where there are windows.

    Args:
        op: one of OPS.
        dtype: name of the operand's type.
        size_bytes: the larger of one rank's operand and result.
        reduction: "sum", "max" or "min", if the call combines elements.

    Example:
        >>> from jaxfabric import gpu_table
        >>> gpu_table.takes_windows("all_reduce", "bfloat16", 1 << 24, "sum")
        True
    """
    if op in _WITHOUT_WINDOWS or size_bytes < WINDOWS_FROM:
        return False
    return reduction is None or (reduction == "sum" and dtype in _FLOATS)


def rows(overrides: Sequence[Override] = ()) -> Iterator[Row]:
    """The whole table, by number of ranks first."""
    named = {override.ranks for override in overrides if override.ranks}
    for ranks in sorted(named.union(*_LIMITS.values())):
        for op in OPS[:-1]:
            for kind in KINDS if op == "all_reduce" else KINDS[:1]:
                limit, source = _limit(op, ranks, kind, overrides)
                yield Row(ranks, op, kind if op == "all_reduce" else "any", limit or 0, source)


def bytes_text(size: int) -> str:
    """How messages write a number of bytes: "64 MiB", "100 bytes"."""
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size:,} bytes"


def _limit(op: str, ranks: int, kind: str, overrides: Sequence[Override]) -> tuple[int | None, str]:
    """The limit and, where it is not the table's, where it comes from."""
    for override in reversed(overrides):
        if (
            override.op in (op, ANY)
            and override.ranks in (ranks, 0)
            and (override.kind in (kind, ANY) or op != "all_reduce")
        ):
            return override.limit, "gpu_limits"
    table = _OTHER_LIMITS if kind == "other" else _LIMITS
    return table.get(op, {}).get(ranks), ""
