"""One HLO instruction read from its text: shapes, and attributes as they are printed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

# By the name of an element type in HLO: its size in bytes, and its name in numpy ("" for integers:
# it follows from HLO's). The fabric moves and reduces these: NATIVE_DTYPES of _primitive.py.
NATIVE_TYPES = {
    "pred": (1, "bool"),
    **{f"{kind}{bits}": (bits // 8, "") for kind in "su" for bits in (8, 16, 32, 64)},
    "f16": (2, "float16"),
    "bf16": (2, "bfloat16"),
    "f32": (4, "float32"),
    "f64": (8, "float64"),
    "c64": (8, "complex64"),
    "c128": (16, "complex128"),
    "f8e4m3fn": (1, "float8_e4m3fn"),
    "f8e5m2": (1, "float8_e5m2"),
}

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)\})?")
_HEAD = re.compile(r"\s*(?:ROOT )?%?([^\s=]+) = ")
_OPENING, _CLOSING = "([{", ")]}"


class UnsupportedError(Exception):
    """The instruction is left to XLA; the message says why."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's shape with its layout.

    Attributes:
        type: HLO's name of the element type, such as "f32".
        dims: sizes of the dimensions.
        layout: dimensions from minor (fastest) to major.
    """

    type: str
    dims: tuple[int, ...]
    layout: tuple[int, ...]

    def __str__(self) -> str:
        layout = f"{{{_join(self.layout)}}}" if self.dims else ""
        return f"{self.type}[{_join(self.dims)}]{layout}"

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.dims) * NATIVE_TYPES[self.type][0]

    @property
    def label(self) -> str:
        """As in messages: "float32[4,8]"."""
        name = NATIVE_TYPES[self.type][1] or _integer_name(self.type)
        return f"{name}[{_join(self.dims)}]"

    def order(self) -> list[int]:
        """The layout without the dimensions of size one, which have no place in memory."""
        return [dim for dim in self.layout if self.dims[dim] != 1]

    def major_first(self, dim: int) -> Shape:
        """This shape with `dim` as the slowest dimension in memory."""
        if [dim] == self.order()[-1:] or self.dims[dim] == 1:
            return self
        return dataclasses.replace(self, layout=(*(d for d in self.layout if d != dim), dim))

    def with_layout(self, layout: Sequence[int]) -> Shape:
        """This shape with another layout."""
        return dataclasses.replace(self, layout=tuple(layout))

    def flat(self, times: int = 1) -> Shape:
        """One dimension with `times` as many elements."""
        return Shape(self.type, (math.prod(self.dims) * times,), (0,))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What an instruction's line says.

    Attributes:
        name: its name.
        opcode: as in HLO text: "all-reduce".
        results: shapes of the array, or of the elements of the tuple, that it returns.
        is_tuple: whether it returns a tuple.
        attributes: what is behind the operands, by name, as text.
    """

    name: str
    opcode: str
    results: tuple[Shape, ...]
    is_tuple: bool
    attributes: dict[str, str]


def parse_instruction(line: str) -> Instruction:
    """Reads `%name = shape opcode(operands), attribute=value, ...`.

    Raises:
        UnsupportedError: a shape is not one of arrays of static size in plain layouts.
    """
    line = re.sub(r"/\*[^*]*\*/", "", line)
    head = _HEAD.match(line)
    if head is None:
        raise UnsupportedError(f"cannot be read: {line[:80]}")
    rest = line[head.end() :]
    is_tuple = rest.startswith("(")
    if is_tuple:
        end = _end_of_bracket(rest, 0)
        shapes = [part.strip() for part in _split(rest[1 : end - 1])]
    else:
        end = rest.find(" ")
        shapes = [rest[:end]]
    call = rest[end:].lstrip()
    opening = call.find("(")
    closing = _end_of_bracket(call, opening)
    attributes: dict[str, str] = {}
    last = ""
    for part in _split(call[closing:]):
        key, _, value = part.strip().partition("=")
        if key == "device_ids" and last == "replica_groups":  # Part of the groups of a mesh.
            attributes[last] += f", {part.strip()}"
        elif key:
            last = key
            attributes[key] = value
    return Instruction(
        head[1], call[:opening], tuple(map(parse_shape, shapes)), is_tuple, attributes
    )


def parse_shape(text: str) -> Shape:
    """Reads "f32[4,8]{1,0}"; a shape without layout is row-major.

    Raises:
        UnsupportedError: an unknown or too small element type, a dynamic size, a tiled layout.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UnsupportedError(f"the shape {text}")
    dims = tuple(int(dim) for dim in match[2].split(",") if dim)
    layout = tuple(int(dim) for dim in (match[3] or "").split(",") if dim)
    if match[1] not in NATIVE_TYPES:
        raise UnsupportedError(f"the element type {match[1]}")
    return Shape(match[1], dims, layout or tuple(reversed(range(len(dims)))))


def shape_text(line: str) -> str:
    """Returns the text of the shape that an instruction's line gives."""
    head = _HEAD.match(line)
    rest = line[head.end() :] if head else line
    return rest[: _end_of_bracket(rest, 0) if rest.startswith("(") else rest.find(" ")]


def _split(text: str) -> Iterator[str]:
    """Splits at commas outside of brackets and quotes."""
    depth = start = 0
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        at += 1
    if text[start:].strip():
        yield text[start:]


def _end_of_bracket(text: str, at: int) -> int:
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] in _OPENING) - (text[end] in _CLOSING)
        if depth == 0:
            return end + 1
    raise UnsupportedError(f"cannot be read: {text[:80]}")


def _integer_name(kind: str) -> str:
    return ("int" if kind[0] == "s" else "uint") + kind[1:]


def _join(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
