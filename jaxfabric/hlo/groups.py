"""Who takes part in an HLO collective: the group syntaxes of HLO text, as lists of numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]
Pairs = list[tuple[int, int]]

_INT_LIST = r"\d+(?:,\d+)*"
_IOTA = re.compile(rf"\[({_INT_LIST})\]<=\[({_INT_LIST})\](?:T\(({_INT_LIST})\))?")
_EXPLICIT = re.compile(rf"\{{(?:\{{(?:{_INT_LIST})?\}}(?:,\{{(?:{_INT_LIST})?\}})*)?\}}")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^)]*(?:\([^)]*\))?[^)]*)\))?\s*\{([^}]*)\}"
)
_MESH_IOTA = re.compile(rf"\[({_INT_LIST})\](?:T\(({_INT_LIST})\))?")
_MESH_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'=(\d+)")
_AXIS_REF = re.compile(r"'((?:[^'\\]|\\.)*)'(?::\((\d+)\)(\d+))?")


class UnknownGroupsError(ValueError):
    """The groups are written in a form that is not known here."""


def _ints(text: str | None) -> list[int]:
    return [int(value) for value in text.split(",")] if text else []


def _iota(dims: Sequence[int], reshape: Sequence[int], transpose: Sequence[int]) -> np.ndarray:
    devices = np.arange(math.prod(reshape)).reshape(reshape)
    return devices.transpose(transpose or range(len(reshape))).reshape(dims)


def parse_groups(text: str) -> Groups:
    """Returns the groups of a `replica_groups=` attribute; none means all in one group.

    Args:
        text: `{{0,1},{2,3}}`, `{}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`,
            `mesh['a'=2,'b'=4] {'b'}`, with parts of axes as in `{'b':(1)2}`, and with
            `, device_ids=([4,2]T(1,0))` or `, device_ids=(1,0,2,3)` after the axes.

    Raises:
        UnknownGroupsError: another form, or one that contradicts itself.
    """
    text = text.strip()
    try:
        if match := _IOTA.fullmatch(text):
            dims, reshape, transpose = map(_ints, match.groups())
            if len(dims) != 2:
                raise UnknownGroupsError(f"groups {text} with {len(dims)} dimensions")
            return _iota(dims, reshape, transpose).tolist()
        if _EXPLICIT.fullmatch(text):
            return [_ints(group) for group in re.findall(r"\{([\d,]*)\}", text[1:-1])]
        if match := _MESH.fullmatch(text):
            return _mesh_groups(*match.groups())
    except (ValueError, IndexError, KeyError) as error:
        raise UnknownGroupsError(f"groups {text}: {error}") from error
    raise UnknownGroupsError(f"groups {text}")


def _mesh_groups(axes: str, device_ids: str | None, refs: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    if ",".join(f"'{name}'={size}" for name, size in sizes.items()) != axes:
        raise ValueError("axes that cannot be read")
    shape = list(sizes.values())
    if device_ids is None:
        devices = np.arange(math.prod(shape))
    elif match := _MESH_IOTA.fullmatch(device_ids):
        reshape = _ints(match[1])
        devices = _iota([math.prod(reshape)], reshape, _ints(match[2]))
    else:
        devices = np.array(_ints(device_ids))
    # Each axis falls into parts: those that are in the groups, and what is before, between and
    # behind them.
    wanted: list[tuple[str, int, int]] = []
    for match in _AXIS_REF.finditer(refs):
        name, before, size = match.groups()
        wanted.append((name, int(before or 1), int(size or sizes[name])))
    if ",".join(match[0] for match in _AXIS_REF.finditer(refs)) != refs:
        raise ValueError("group axes that cannot be read")
    parts: list[int] = []
    place: dict[tuple[str, int, int], int] = {}
    for name, axis_size in sizes.items():
        done = 1
        for ref in sorted((ref for ref in wanted if ref[0] == name), key=lambda ref: ref[1]):
            _, before, size = ref
            if before % done or axis_size % (before * size):
                raise ValueError(f"parts of '{name}' that overlap or do not fit")
            parts.append(before // done)
            place[ref] = len(parts)
            parts.append(size)
            done = before * size
        parts.append(axis_size // done)
    order = [place[ref] for ref in wanted]
    rest = [part for part in range(len(parts)) if part not in order]
    grid = devices.reshape(parts).transpose(rest + order)
    return grid.reshape(-1, math.prod(parts[part] for part in order)).tolist()


def parse_pairs(text: str) -> Pairs:
    """Returns the pairs of a `source_target_pairs={{0,1},{1,0}}` attribute.

    Raises:
        UnknownGroupsError: another form.
    """
    groups = parse_groups(text) if _EXPLICIT.fullmatch(text) else [[]]
    if any(len(pair) != 2 for pair in groups):
        raise UnknownGroupsError(f"pairs {text}")
    return [(source, target) for source, target in groups]


def permute_groups(pairs: Pairs, count: int) -> tuple[Groups, Pairs]:
    """Returns groups, as small as can be, that have the same pairs of positions in each of them.

    A call has one list of pairs for all its groups. Ranks without a pair go to some group: they
    wait for nobody, and get zeros.

    Args:
        pairs: source and target ranks.
        count: number of ranks.
    """
    group_of = {rank: {rank} for rank in range(count)}
    for source, target in pairs:
        if group_of[source] is not group_of[target]:
            group_of[source] |= group_of[target]
            for rank in group_of[target]:
                group_of[rank] = group_of[source]
    paired = {rank for pair in pairs for rank in pair}
    connected: list[list[int]] = []
    for rank in range(count):
        group = sorted(group_of[rank])
        if rank in paired and group[0] == rank:
            connected.append(group)

    def positions(group: list[int]) -> Pairs:
        inside = {rank: position for position, rank in enumerate(group)}
        return sorted((inside[s], inside[t]) for s, t in pairs if s in inside)

    idle = [rank for rank in range(count) if rank not in paired]
    distinct = {tuple(positions(group)) for group in connected}
    if len(distinct) != 1 or len(idle) % len(connected):
        return [list(range(count))], sorted(pairs)
    share = len(idle) // len(connected)
    groups = [[*g, *idle[i * share : (i + 1) * share]] for i, g in enumerate(connected)]
    return groups, positions(connected[0])
