"""Protocol buffer bytes: just enough to put instructions into a module and leave the rest as it is.

The names of fields are not in the bytes, only their numbers, which XLA keeps for good: compiled
programs and modules outlive its releases. What is not touched is copied byte for byte, known or
not, so that constants, layouts, aliases and fields of newer versions come through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}

Value = int | bytes
Field = tuple[int, int, Value]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def varint(value: int) -> bytes:
    """Returns the encoding of a number from 0 to 2^64 - 1."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(data: bytes) -> Iterator[Field]:
    """Yields the number, wire type and value of each field, in order.

    Raises:
        ValueError: a wire type that no message of XLA uses, or the data end in a field.
    """
    at = 0
    try:
        while at < len(data):
            tag, at = read_varint(data, at)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == VARINT:
                value, at = read_varint(data, at)
                yield number, wire_type, value
                continue
            if wire_type == BYTES:
                size, at = read_varint(data, at)
            elif wire_type in _FIXED:
                size = _FIXED[wire_type]
            else:
                raise ValueError(f"wire type {wire_type} of field {number}")
            if at + size > len(data):
                raise IndexError
            yield number, wire_type, data[at : at + size]
            at += size
    except IndexError:
        raise ValueError("the message ends in the middle of a field") from None


def encode(message: Iterable[Field]) -> bytes:
    """Returns the bytes of a message; the inverse of `fields`."""
    out = bytearray()
    for number, wire_type, value in message:
        out += varint(number << 3 | wire_type)
        if isinstance(value, int):
            out += varint(value)
            continue
        if wire_type == BYTES:
            out += varint(len(value))
        out += value
    return bytes(out)


class Message:
    """A message as a list of fields that can be looked up and replaced.

    Attributes:
        content: the fields in order.
    """

    def __init__(self, data: bytes) -> None:
        self.content: list[Field] = list(fields(data))

    def __bytes__(self) -> bytes:
        return encode(self.content)

    def all(self, number: int) -> list[Value]:
        """The values of a repeated field."""
        return [value for found, _, value in self.content if found == number]

    def number(self, number: int) -> int:
        """The value of an integer field, 0 if it is not there."""
        values = self.all(number)
        return values[-1] if values and isinstance(values[-1], int) else 0

    def bytes_of(self, number: int) -> bytes:
        """The value of a message or string field, empty if it is not there."""
        values = self.all(number)
        return values[-1] if values and isinstance(values[-1], bytes) else b""

    def text(self, number: int) -> str:
        """The value of a string field, empty if it is not there."""
        return self.bytes_of(number).decode("utf-8", "replace")

    def messages(self, number: int) -> list[Message]:
        """The values of a repeated message field."""
        return [Message(value) for value in self.all(number) if isinstance(value, bytes)]

    def integers(self, number: int) -> list[int]:
        """The values of a repeated integer field, packed or not."""
        values: list[int] = []
        for value in self.all(number):
            if isinstance(value, int):
                values.append(value)
                continue
            at = 0
            while at < len(value):
                integer, at = read_varint(value, at)
                values.append(integer)
        return values

    def set(self, number: int, value: Value | None) -> None:
        """Replaces all fields `number` by one; None removes them."""
        self.content = [field for field in self.content if field[0] != number]
        if value is not None:
            self.content.append((number, VARINT if isinstance(value, int) else BYTES, value))

    def set_integers(self, number: int, values: Iterable[int]) -> None:
        """Replaces a repeated integer field."""
        self.set(number, b"".join(map(varint, values)) or None)
