"""Whether what another process has sent has the shape it should have, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A check; the keys of a dict with a shape for each value, no more and no fewer; a list with the
# shape of all its elements; or a tuple of shapes, one of which is enough.
Shape = Callable[[Any], bool] | dict[str, Any] | list[Any] | tuple[Any, ...]


def fits(value: object, shape: Shape) -> bool:
    """Whether a value that json.loads() has returned has a shape.

    Example:
        >>> fits({"name": "a", "ranks": [0, 1]}, {"name": text, "ranks": [whole]})
        True
    """
    if isinstance(shape, dict):
        return (
            isinstance(value, dict)
            and value.keys() == shape.keys()
            and all(fits(value[name], each) for name, each in shape.items())
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    return shape(value)


def holds(value: object, shape: dict[str, Any]) -> bool:
    """Whether it is a dict with values of these shapes, be there others or not."""
    return isinstance(value, dict) and fits({k: value.get(k) for k in shape}, shape)


def text(value: object) -> bool:
    """A string that can be printed: JSON may hold halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def hex_bytes(value: object) -> bool:
    """What bytes.hex() returns."""
    try:
        return isinstance(value, str) and bytes.fromhex(value).hex() == value
    except ValueError:
        return False


def whole(value: object) -> bool:
    """A number that is not negative and has at most 64 bits; True is none."""
    return type(value) is int and 0 <= value < 1 << 64


def seconds(value: object) -> bool:
    """A number that can be a time: neither infinite nor beyond what floats hold."""
    return type(value) in (int, float) and -1e18 < value < 1e18  # type: ignore[operator]


def flag(value: object) -> bool:
    """True or False."""
    return isinstance(value, bool)


def none(value: object) -> bool:
    """Nothing."""
    return value is None
