"""What XLA puts around an all-to-all of parts: slices before it, and a concatenation behind it.

XLA:CPU exchanges a tuple of parts, which it takes out of one array and puts into another. The
fabric exchanges the rows of one array. Where the parts are rows, these steps fall away, and with
them the copies.

XLA has decided already which values share a buffer, for example those that a loop carries. So what
replaces instructions must not read later, or write earlier, than they did with respect to others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from jaxfabric import _compat
from jaxfabric.hlo.reading import Instruction, Shape, UnsupportedError, parse_instruction

_IN_PLACE = frozenset({"dynamic-update-slice", "scatter", "sort", "while", "conditional", "call"})


@dataclasses.dataclass(frozen=True)
class Seams:
    """What an all-to-all can do without.

    Attributes:
        source: the instruction whose rows are the operands, with its shape; or None.
        whole: the instruction that makes one array of the results, with its shape; or None.
        shared: source and whole may be one buffer, so that a copy has to lie between them.
        dropped: names of the instructions that nothing needs any more.
    """

    source: tuple[_compat.Hlo, Shape] | None = None
    whole: tuple[_compat.Hlo, Shape] | None = None
    shared: bool = False
    dropped: frozenset[str] = frozenset()


def find_seams(
    hlo: _compat.Hlo,
    parts: Sequence[Shape],
    computations: Mapping[str, _compat.Hlo],
    pinned: Collection[str],
) -> Seams:
    """Looks for them.

    Args:
        hlo: an all-to-all of a tuple.
        parts: the shapes of its results, all equal, as are those of its operands.
        computations: of the module, by name.
        pinned: names of instructions that must stay: the root, and those in control dependencies.
    """
    source = _source(hlo, parts, computations)
    whole = _whole(hlo, parts)
    slices = {operand.name for operand in hlo.operands()}
    # What follows a slice that has one use follows the all-to-all, so that nothing can change the
    # source before the fabric reads it.
    if source is not None and (
        slices & set(pinned) or any(len(operand.users()) > 1 for operand in hlo.operands())
    ):
        source = None
    behind = {hlo.name, *(element.name for element in hlo.users())}
    # The concatenation stays, as the last instruction of what replaces all.
    if whole is not None and (behind | {whole[0].name}) & set(pinned):
        whole = None
    # Both together, and the fabric reads the one while it writes the other. Before, the parts lay
    # between them, and they may be one buffer.
    shared = (
        source is not None
        and whole is not None
        and not _has_own_buffer(source[0], slices, computations)
    )
    dropped = (slices if source else set()) | (behind if whole else set())
    return Seams(source, whole, shared, frozenset(dropped))


def _has_own_buffer(
    hlo: _compat.Hlo, slices: Collection[str], computations: Mapping[str, _compat.Hlo]
) -> bool:
    """Whether an array is made by its instruction, out of place, and only the slices use it."""
    read = _read(hlo)
    if read is None or {user.name for user in hlo.users()} != slices:
        return False
    if read.opcode == "fusion":
        called = computations.get(read.attributes.get("calls", "").lstrip("%"))
        body = [_read(i) for i in called.instructions()] if called is not None else [None]
        return all(i is not None and i.opcode not in _IN_PLACE for i in body)
    return read.opcode in {"copy", "dot"}


def _read(hlo: _compat.Hlo) -> Instruction | None:
    try:
        return parse_instruction(hlo.to_string())
    except UnsupportedError:
        return None


def _rows_of(whole: Shape, part: Shape, dim: int, count: int) -> bool:
    """Whether arrays of shape `part`, one behind the other in memory, are `whole`."""
    dims = list(part.dims)
    dims[dim] *= count
    order = whole.order()
    return (
        (whole.type, list(whole.dims)) == (part.type, dims)
        and order[-1:] == [dim]
        and [d for d in order if part.dims[d] != 1] == part.order()
    )


def _source(
    hlo: _compat.Hlo, parts: Sequence[Shape], computations: Mapping[str, _compat.Hlo]
) -> tuple[_compat.Hlo, Shape] | None:
    sources = []
    slices = []
    for operand in hlo.operands():
        instruction = _read(operand)
        if instruction is None or len(operand.operands()) != 1:
            return None
        sources.append(operand.operands()[0])
        if instruction.opcode == "fusion":
            called = computations.get(instruction.attributes.get("calls", "").lstrip("%"))
            body = [_read(i) for i in called.instructions()] if called is not None else []
            inner = next((i for i in body if i is not None and i.opcode == "slice"), None)
            if len(body) != 2 or inner is None or inner.results != instruction.results:
                return None
            instruction = inner
        if instruction.opcode != "slice":
            return None
        slices.append(instruction.attributes.get("slice", ""))
    read = _read(sources[0])
    if len({source.name for source in sources}) != 1 or read is None or read.is_tuple:
        return None
    shape, part = read.results[0], parts[0]
    for dim in range(len(shape.dims)):
        if _rows_of(shape, part, dim, len(parts)):
            wanted = [_slice(shape, part, dim, i) for i in range(len(parts))]
            found = [re.sub(r"\s", "", text) for text in slices]
            return (sources[0], shape) if found == wanted else None
    return None


def _slice(whole: Shape, part: Shape, dim: int, index: int) -> str:
    """The `slice=` attribute of a part."""
    ranges = [(0, size) for size in whole.dims]
    ranges[dim] = index * part.dims[dim], (index + 1) * part.dims[dim]
    return "{" + ",".join(f"[{start}:{end}]" for start, end in ranges) + "}"


def _whole(hlo: _compat.Hlo, parts: Sequence[Shape]) -> tuple[_compat.Hlo, Shape] | None:
    elements: dict[str, int] = {}
    users: dict[str, _compat.Hlo] = {}
    for element in hlo.users():
        read = _read(element)
        if read is None or read.opcode != "get-tuple-element" or len(element.users()) != 1:
            return None
        elements[element.name] = int(read.attributes.get("index", "-1"))
        users[element.users()[0].name] = element.users()[0]
    if len(users) != 1:
        return None
    (user,) = users.values()
    read = _read(user)
    if read is None or read.opcode != "concatenate":
        return None
    order = [elements.get(operand.name) for operand in user.operands()]
    dim = read.attributes.get("dimensions", "").strip("{}")
    if order != list(range(len(parts))) or not dim.isdigit():
        return None
    if not _rows_of(read.results[0], parts[0], int(dim), len(parts)):
        return None
    return user, read.results[0]
