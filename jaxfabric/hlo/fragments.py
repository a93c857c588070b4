"""What replaces a collective: a few instructions around calls of the fabric, as HLO text.

The fabric's operations see rows in memory, one per rank, and no dimensions. So a collective along a
dimension needs that dimension to be the slowest in memory. XLA:CPU lays collectives out like
that; where it does not, a copy changes the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxfabric.hlo.groups import Groups, Pairs
from jaxfabric.hlo.reading import Shape, UnsupportedError

Attribute = int | str | Sequence[int]
# From the op's label, its number among the calls of the fragment and own attributes to all
# attributes of a call.
Describe = Callable[[str, Mapping[str, Attribute]], Mapping[str, Attribute]]


def _attribute(value: Attribute) -> str:
    if isinstance(value, int):
        return f"{value} : i64"
    if isinstance(value, str):
        return f'"{value}"'
    return f"array<i64: {', '.join(map(str, value))}>" if value else "array<i64>"


class Fragment:
    """HLO text of a module whose entry computation has the collective's operands as parameters.

    Args:
        operands: shapes of the collective's operands.
        describe: see `Describe`.
        by_position: calls are told the rank's position in an operand of their own.
    """

    def __init__(self, operands: Sequence[Shape], describe: Describe, by_position: bool) -> None:
        self._lines: list[str] = []
        self._describe = describe
        self._by_position = by_position
        self.operands = [(f"p{i}", shape) for i, shape in enumerate(operands)]
        for i, (name, shape) in enumerate(self.operands):
            self._lines.append(f"%{name} = {shape} parameter({i})")

    def add(self, text: str, *operands: str, shape: Shape | str, more: str = "") -> str:
        """Adds an instruction and returns its name."""
        name = f"i{len(self._lines)}"
        names = ", ".join(f"%{operand}" for operand in operands)
        self._lines.append(f"%{name} = {shape} {text}({names}){more}")
        return name

    def convert(self, name: str, have: Shape, want: Shape) -> str:
        """Changes the layout, with a copy where the order in memory differs."""
        if have.order() == want.order():
            return name
        return self.add("copy", name, shape=want)

    def call(
        self,
        op: str,
        target: str,
        arrays: Sequence[tuple[str, Shape]],
        result: Shape,
        **own: Attribute,
    ) -> str:
        """Calls the FFI target `target` on arrays, the first of which is the one that is named."""
        operands, shapes = [name for name, _ in arrays], [str(shape) for _, shape in arrays]
        if self._by_position:
            operands.append(self.add("partition-id", shape="u32[]"))
            shapes.append("u32[]")
        attributes = self._describe(f"{op} {arrays[0][1].label}", own)
        config = ", ".join(f"{key} = {_attribute(attributes[key])}" for key in sorted(attributes))
        more = (
            f', custom_call_target="{target}"'
            f", operand_layout_constraints={{{', '.join(shapes)}}}"
            f", api_version=API_VERSION_TYPED_FFI, backend_config={{{config}}}"
        )
        return self.add("custom-call", *operands, shape=result, more=more)

    def finish(self, results: Sequence[tuple[str, Shape]], is_tuple: bool) -> str:
        """Returns the text, with the results, or a tuple of them, as the root."""
        if is_tuple:
            shapes = ", ".join(str(shape) for _, shape in results)
            self.add("tuple", *(name for name, _ in results), shape=f"({shapes})")
        lines = [*self._lines[:-1], f"ROOT {self._lines[-1]}"]
        return "\n  ".join(["HloModule fragment\n\nENTRY %fragment {", *lines]) + "\n}\n"


def elementwise(
    op: str, target: str, fragment: Fragment, results: Sequence[Shape], **own: Attribute
) -> list[tuple[str, Shape]]:
    """One call per operand, each result like its operand: all-reduce, permute, broadcast."""
    out = []
    for (name, have), want in zip(fragment.operands, results, strict=True):
        if have.dims != want.dims or have.type != want.type:
            raise UnsupportedError(f"a result {want} for an operand {have}")
        result = have if have.order() != want.order() else want
        name = fragment.call(op, target, [(name, have)], result, **own)
        out.append((fragment.convert(name, result, want), want))
    return out


def copies(fragment: Fragment, results: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """Every collective of a rank with itself."""
    out = []
    for (name, have), want in zip(fragment.operands, results, strict=True):
        if have.dims != want.dims or have.type != want.type:
            raise UnsupportedError(f"a result {want} for an operand {have} of one rank")
        # Not the operand itself: XLA has decided already which buffers are one.
        out.append((fragment.add("copy", name, shape=want), want))
    return out


def all_gather(
    fragment: Fragment, results: Sequence[Shape], dim: int, size: int
) -> list[tuple[str, Shape]]:
    """Gathers each operand along `dim`, where the result is `size` times as long."""
    out = []
    for (name, have), want in zip(fragment.operands, results, strict=True):
        _check_split(want, have, dim, size)
        gathered = want.major_first(dim)
        row = have.with_layout(gathered.layout)
        name = fragment.convert(name, have, row)
        name = fragment.call("all-gather", "jaxfabric_all_gather", [(name, row)], gathered)
        out.append((fragment.convert(name, gathered, want), want))
    return out


def reduce_scatter(
    fragment: Fragment, results: Sequence[Shape], dim: int, size: int, reduction: str
) -> list[tuple[str, Shape]]:
    """Reduces each operand and leaves each rank its part of `dim`, `size` times shorter."""
    out = []
    for (name, have), want in zip(fragment.operands, results, strict=True):
        _check_split(have, want, dim, size)
        rows = have.major_first(dim)
        part = want.with_layout(rows.layout)
        name = fragment.convert(name, have, rows)
        op, target = f"reduce-scatter ({reduction})", "jaxfabric_reduce_scatter"
        name = fragment.call(op, target, [(name, rows)], part, reduction=reduction)
        out.append((fragment.convert(name, part, want), want))
    return out


def all_to_all(
    fragment: Fragment, results: Sequence[Shape], dim: int, size: int
) -> list[tuple[str, Shape]]:
    """Exchanges the `size` parts of `dim` of one operand."""
    (name, have), (want,) = fragment.operands[0], results
    if have.dims != want.dims or have.dims[dim] % size:
        raise UnsupportedError(f"a result {want} for an operand {have} in {size} parts")
    rows = have.major_first(dim)
    name = fragment.convert(name, have, rows)
    name = fragment.call("all-to-all", "jaxfabric_all_to_all", [(name, rows)], rows)
    return [(fragment.convert(name, rows, want), want)]


def check_parts(operands: Sequence[Shape], results: Sequence[Shape], size: int) -> None:
    """Raises UnsupportedError if the parts of an all-to-all differ, or are not one per rank."""
    shapes = {(s.type, s.dims, tuple(s.order())) for s in (*operands, *results)}
    if len(shapes) != 1 or not len(operands) == len(results) == size:
        raise UnsupportedError(f"{len(results)} parts of different shapes for {size} ranks")


def all_to_all_of_parts(
    fragment: Fragment, parts: Sequence[Shape], whole: Shape | None, copy: bool
) -> list[tuple[str, Shape]]:
    """Exchanges an operand per rank, or one that has all of them in its rows, and may be copied.

    The results are the parts, or where `whole` is given one array with the parts in its rows.
    """
    size = len(parts)
    row, rows = parts[0].flat(), parts[0].flat(size)
    names = [name for name, _ in fragment.operands]
    if len(names) == 1:
        name, shape = fragment.operands[0]
        name = fragment.add("copy", name, shape=shape) if copy else name
        name = fragment.add("bitcast", name, shape=rows)
    else:
        flat = [fragment.add("bitcast", name, shape=row) for name in names]
        name = fragment.add("concatenate", *flat, shape=rows, more=", dimensions={0}")
    name = fragment.call("all-to-all", "jaxfabric_all_to_all", [(name, rows)], rows)
    if whole is not None:
        return [(fragment.add("bitcast", name, shape=whole), whole)]
    out = []
    for i, want in enumerate(parts):
        at = i * row.dims[0]
        more = f", slice={{[{at}:{at + row.dims[0]}]}}"
        part = fragment.add("slice", name, shape=row, more=more)
        out.append((fragment.add("bitcast", part, shape=want), want))
    return out


def ragged_all_to_all(
    fragment: Fragment, results: Sequence[Shape], size: int
) -> list[tuple[str, Shape]]:
    """Sends slices of rows: of an operand, into a copy of another, as four lists of rows say."""
    operand, initial, *metadata = fragment.operands
    (want,) = results
    if any(len(shape.dims) != 1 or shape.dims[0] % size for _, shape in metadata):
        shapes = ", ".join(str(shape) for _, shape in metadata)
        raise UnsupportedError(f"offsets and sizes {shapes} for {size} ranks")
    arrays = []
    # Not major_first: a result of one row says nothing about an operand of several.
    result = want.with_layout((*(dim for dim in want.layout if dim), 0))
    for name, have in (operand, initial):
        row = have.with_layout(result.layout)
        arrays.append((fragment.convert(name, have, row), row))
    for name, have in metadata:
        wide = Shape("s64", have.dims, have.layout)
        same = have.type == wide.type
        arrays.append((name if same else fragment.add("convert", name, shape=wide), wide))
    op, target = "ragged-all-to-all", "jaxfabric_ragged_all_to_all"
    name = fragment.call(op, target, arrays, result)
    return [(fragment.convert(name, result, want), want)]


def permute_attributes(pairs: Pairs) -> dict[str, Attribute]:
    """The own attributes of a permute call."""
    return {"pairs": [rank for pair in pairs for rank in pair]}


def member_attributes(groups: Groups) -> dict[str, Attribute]:
    """The attributes that say who takes part."""
    return {
        "members": [rank for group in groups for rank in group],
        "group_sizes": [len(group) for group in groups],
    }


def _check_split(whole: Shape, part: Shape, dim: int, size: int) -> None:
    dims = list(part.dims)
    dims[dim] *= size
    if list(whole.dims) != dims or whole.type != part.type:
        raise UnsupportedError(f"{part} is not one of {size} parts of {whole}")
