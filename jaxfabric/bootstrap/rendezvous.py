"""One round of address exchange over jax.distributed's key-value store.

Every process says hello under its own number; process 0 collects the hellos and answers each under
a key made of that process's fresh uid. So what an earlier round, or a process that has died, left
in the store is never taken for an answer, and all learn together who did not come.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from typing import Any

from jaxfabric.bootstrap.identity import ProcessIdentity
from jaxfabric.bootstrap.shapes import Shape, fits, hex_bytes, holds, text, whole

_HELLO = "jaxfabric/hello/{}"
_ROSTER = "jaxfabric/roster/{}"
_SECRET_BYTES = 32
_IDENTITY = {"hostname": text, "pid": whole, "started": whole, "pid_space": text}


class RendezvousError(RuntimeError):
    """The processes of the job did not come together; the message says who was missing and why."""


@dataclasses.dataclass(frozen=True)
class Member:
    """One process as the others see it: who it is, where to reach it, what it was started with."""

    identity: ProcessIdentity
    address: bytes
    agreed: dict[str, str]  # Must be equal on all processes, such as the version.
    without_windows: str = ""  # Why it cannot have the arrays of its GPUs in windows.
    problem: str = ""  # Why it cannot take part at all.

    def _encode(self, uid: str) -> str:
        return json.dumps(
            {
                "uid": uid,
                "identity": dataclasses.asdict(self.identity),
                "address": self.address.hex(),
                "agreed": self.agreed,
                "without_windows": self.without_windows,
                "problem": self.problem,
            }
        )


@dataclasses.dataclass(frozen=True)
class Roster:
    """What a round of exchange gives every process.

    Attributes:
        members: all processes, in process order.
        secret: known to them and to nobody else who cannot read the store; made for this round.
        incarnation: a number that this round has and no other one.
    """

    members: list[Member]
    secret: bytes = b""
    incarnation: int = 0


def exchange(
    client: Any,  # noqa: ANN401
    process_id: int,
    num_processes: int,
    own: Member,
    timeout: float,
) -> Roster:
    """Publishes this process and returns all of them.

    Args:
        client: a connected jax.distributed client.
        process_id: this process's number, 0 <= process_id < num_processes.
        num_processes: how many take part; all must call.
        own: what to publish.
        timeout: seconds to wait for the others.

    Raises:
        RendezvousError: a process did not come in time, cannot take part, or differs in what must
            be agreed.
    """
    uid = secrets.token_hex(8)
    client.key_value_set(_HELLO.format(process_id), own._encode(uid), allow_overwrite=True)
    if process_id == 0:
        _answer_all(client, num_processes, timeout)
    if own.problem:  # The others learn it from process 0, when they come.
        raise RendezvousError(own.problem)
    key = _ROSTER.format(uid)
    try:
        # Process 0 gives up after `timeout` of its own and then says who is missing: wait for that.
        found = client.blocking_key_value_get(key, int((timeout + 5) * 1000))
    except Exception as error:
        # A later round must not count on this hello.
        client.key_value_delete(_HELLO.format(process_id))
        raise RendezvousError(
            f"process {process_id} of {num_processes} heard nothing from process 0 within "
            f"{timeout:g} s: every process must call jaxfabric.initialize(), process 0 included "
            f"(connect_timeout sets the wait): {_first_line(error)}"
        ) from error
    client.key_value_delete(key)
    answer = _read(found, ({"error": text}, _ANSWER))
    if answer is None or ("members" in answer and len(answer["members"]) != num_processes):
        raise RendezvousError(
            f"process 0 answered what process {process_id} does not understand: start all "
            "processes with one version of jaxfabric"
        )
    if "error" in answer:
        raise RendezvousError(answer["error"])
    return Roster(
        [_decode(member) for member in answer["members"]],
        bytes.fromhex(answer["secret"]),
        answer["incarnation"],
    )


def _answer_all(client: Any, num_processes: int, timeout: float) -> None:  # noqa: ANN401
    deadline = time.monotonic() + timeout
    hellos: dict[int, dict[str, Any]] = {}
    missing: list[int] = []
    strange: list[int] = []
    for process in range(num_processes):
        wait_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            found = client.blocking_key_value_get(_HELLO.format(process), wait_ms)
            client.key_value_delete(_HELLO.format(process))
        except Exception:
            missing.append(process)
            continue
        hello = _read(found, _is_hello)
        if hello is None:
            strange.append(process)
        else:
            hellos[process] = hello
    answer: dict[str, Any] = {
        "members": [hellos[process] for process in sorted(hellos)],
        "secret": secrets.token_hex(_SECRET_BYTES),
        "incarnation": secrets.randbits(64),  # Not the time, which may be set back.
    }
    if missing:
        names = ", ".join(map(str, missing))
        answer = {
            "error": f"only {len(hellos)} of {num_processes} processes called "
            f"jaxfabric.initialize() within {timeout:g} s; missing: process {names} "
            "(connect_timeout sets the wait)"
        }
    elif strange:
        names = ", ".join(map(str, strange))
        answer = {
            "error": f"process {names} published what process 0 does not understand: start all "
            "processes with one version of jaxfabric"
        }
    elif problem := _problem(hellos):
        answer = {"error": problem}
    elif difference := _difference(hellos):
        answer = {"error": difference}
    answer_text = json.dumps(answer)
    for hello in hellos.values():
        if not hello["problem"]:  # Else it does not listen.
            client.key_value_set(_ROSTER.format(hello["uid"]), answer_text)


def _read(found: str, shape: Shape) -> Any:  # noqa: ANN401
    """What has been published, or None if it is not of this shape."""
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        return None
    return value if fits(value, shape) else None


def _agreed(value: object) -> bool:
    return isinstance(value, dict) and all(text(k) and text(v) for k, v in value.items())


def _is_hello(value: object) -> bool:
    """Of this version, or of one that says more, whose version will be found to differ."""
    return (
        isinstance(value, dict)
        and holds(value, _MEMBER)
        and holds(value.get("identity"), _IDENTITY)
    )


_MEMBER = {
    "uid": text,
    "address": hex_bytes,
    "agreed": _agreed,
    "without_windows": text,
    "problem": text,
}
_ANSWER = {"members": [_is_hello], "secret": hex_bytes, "incarnation": whole}


def _problem(hellos: dict[int, dict[str, Any]]) -> str | None:
    for process, hello in hellos.items():
        if hello["problem"]:
            host = hello["identity"]["hostname"]
            return f"process {process} on {host} cannot take part: {hello['problem']}"
    return None


def _difference(hellos: dict[int, dict[str, Any]]) -> str | None:
    reference = hellos[0]["agreed"]
    for process, hello in hellos.items():
        for name in sorted(reference.keys() | hello["agreed"].keys()):
            ours, theirs = reference.get(name), hello["agreed"].get(name)
            if ours != theirs:
                return (
                    f"{name} differs: {ours} on process 0, {theirs} on process {process} "
                    f"({hello['identity']['hostname']}): start all processes alike"
                )
    return None


def _decode(hello: dict[str, Any]) -> Member:
    return Member(
        identity=ProcessIdentity(**{name: hello["identity"][name] for name in _IDENTITY}),
        address=bytes.fromhex(hello["address"]),
        agreed=hello["agreed"],
        without_windows=hello["without_windows"],
        problem=hello["problem"],
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
