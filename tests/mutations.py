"""What a stranger, or an earlier version, might send in place of a message in JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_VALUES = [
    None, True, False, 0, 1, -1, 255, 1 << 20, 1 << 40, 1 << 64, -(1 << 63), 10**4000, 0.5, 1e300,
    "", "0", "00", "x" * 3000, "\ud800", "\0\x1b[2J", [], [[]], [None], {}, {"": {}}, {"hello": {}},
]  # fmt: skip
_RAW = [b"NaN", b"Infinity", b"1e999", b"1" * 5000, b"[" * 3000, b"{", b'"\xff"', b"\xef\xbb\xbf{}"]


def mutations(valid: list[dict[str, Any]], count: int, seed: int) -> Iterator[bytes]:
    """So many lines, the same for the same seed, without their ends.

    One in four is a valid message with bytes changed, cut out or doubled; the others are JSON in
    which up to three parts are something else, or missing.
    """
    chance = random.Random(seed)
    for _ in range(count):
        message = copy.deepcopy(chance.choice(valid))
        if chance.random() < 0.25:
            yield _bytes_changed(bytearray(json.dumps(message).encode()), chance)
            continue
        for _ in range(chance.randint(1, 3)):
            message = _part_changed(message, chance)
        text = json.dumps(message).encode()
        if chance.random() < 0.2:
            at = text.find(b": ", chance.randrange(len(text)))
            if at >= 0:
                text = text[: at + 2] + chance.choice(_RAW) + b"}"
        yield text


def _bytes_changed(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        what = chance.randrange(4)
        if what == 0:
            del data[at : at + chance.randint(1, 20)]
        elif what == 1:
            data[at:at] = chance.randbytes(chance.randint(1, 20))
        elif what == 2:
            data[at:at] = data[at : at + 50]
        else:
            data[at : at + 1] = bytes([chance.randrange(256)])
    return bytes(data).replace(b"\n", b" ")


def _part_changed(value: Any, chance: random.Random) -> Any:
    """The value, with one of its parts, or all of it, changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        what = chance.random()
        if what < 0.15:
            del value[name]
        elif what < 0.25:
            value[chance.choice(["", "host", "started", "x" * 100])] = value[name]
        else:
            value[name] = _part_changed(value[name], chance)
        return value
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        value[at] = _part_changed(value[at], chance)
        return value
    return copy.deepcopy(chance.choice(_VALUES))
