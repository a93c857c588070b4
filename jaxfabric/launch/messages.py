"""What launchers tell each other. A message that is none of these ends the connection it came on.

Every message is a dict with one key, which says what it is.
"""

from __future__ import annotations

import signal
from typing import Any

from jaxfabric.bootstrap.shapes import Shape, fits, flag, holds, none, seconds, text, whole

Message = dict[str, Any]

STRANGE = "it does not speak as a launcher does"
# Processes of one host, and nodes: more than there will be.
_MOST = 1 << 20
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _few(value: object) -> bool:
    return whole(value) and value < _MOST  # type: ignore[operator]


def _status(value: object) -> bool:
    return whole(value) and value < 256  # type: ignore[operator]


def _ends(value: object) -> bool:
    return whole(value) and value in _ENDING


def _port(value: object) -> bool:
    return whole(value) and value < 1 << 16  # type: ignore[operator]


_FAILURE = {"process": (whole, none), "exit_code": _status, "text": text}
_RESULT = {
    "process": whole,
    "pid": whole,
    "exit_code": _status,
    "signal": (text, none),
    "seconds": seconds,
    "ended_by_launcher": flag,
    "last_lines": [text],
    "node": _few,
    "host": text,
}
_FAILED = {"failed": (_FAILURE, _FAILURE | {"seconds": seconds})}
_SIGNAL = {"signal": _ends, "kill": flag}
_FIRST = {"node": _few, "nodes": _few, "processes": _few, "host": text, "version": text}
_OUTCOME = {
    "exit_code": _status,
    "first_failure": (whole, none),
    "seconds": seconds,
    "processes": [_RESULT],
    "failure": (text, none),
    "restarts": whole,
}
_START = {
    "first": whole,
    "total": whole,
    "host": text,
    "port": (_port, none),
    "job": text,
    "restarts": whole,
}
_OF_A_NODE: Shape = (_FAILED, _SIGNAL, {"ended": [_RESULT]})
_OF_NODE_0: Shape = (
    {"start": _START},
    _FAILED,
    _SIGNAL,
    {"again": {"number": whole, "of": whole}},
    {"outcome": _OUTCOME},
    {"refused": text},
)


def is_hello(message: Message) -> bool:
    """Whether it is what a node says first, in this version or in one with more to say."""
    return holds(message.get("hello"), _FIRST)


def is_of_a_node(message: Message) -> bool:
    """Whether it is what a node may say to node 0 later."""
    return fits(message, _OF_A_NODE)


def is_of_node_0(message: Message) -> bool:
    """Whether it is what node 0 may say."""
    return fits(message, _OF_NODE_0)
