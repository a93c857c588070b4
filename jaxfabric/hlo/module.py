"""An HLO module that is edited in place: bytes in, bytes out, and only what changes is decoded."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator

from jaxfabric.hlo.wire import BYTES, Field, Message, fields

# Field numbers of xla/service/hlo.proto and xla/xla_data.proto.
MODULE_NAME, MODULE_COMPUTATIONS, MODULE_SHAPE = 1, 3, 4
SHAPE_PARAMETERS = 1
MODULE_ALIASES, MODULE_DEVICE_ASSIGNMENT, MODULE_STACK_FRAMES = 8, 15, 17
COMPUTATION_NAME, COMPUTATION_INSTRUCTIONS, COMPUTATION_ID, COMPUTATION_ROOT = 1, 2, 5, 6
NAME, OPCODE, METADATA, ID = 1, 2, 7, 35
OPERANDS, CONTROL_PREDECESSORS, CALLED, FRONTEND_ATTRIBUTES = 36, 37, 38, 68
METADATA_OP_NAME, METADATA_FILE, METADATA_LINE, METADATA_FRAME = 2, 3, 4, 15
FRAMES_FILES, FRAMES_LOCATIONS, FRAMES_FRAMES = 1, 3, 4
LOCATION_FILE, LOCATION_LINE, FRAME_LOCATION = 1, 3, 1
ASSIGNMENT_REPLICAS, ASSIGNMENT_COMPUTATIONS = 1, 3


def field_of(instruction: bytes, number: int) -> int | bytes:
    """One field of an encoded instruction, without keeping the others; 0 if it is not there."""
    return next((value for found, _, value in fields(instruction) if found == number), 0)


def text_of(instruction: bytes, number: int) -> str:
    """A string field of an encoded instruction."""
    value = field_of(instruction, number)
    return value.decode() if isinstance(value, bytes) else ""


class Module:
    """A serialized HloModuleProto.

    Attributes:
        name: the module's name.
        parameters: the types of its parameters, encoded.
        computations: its computations, each with its instructions still encoded.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._message = Message(data)
        self.name = self._message.text(MODULE_NAME)
        self.parameters = Message(self._message.bytes_of(MODULE_SHAPE)).all(SHAPE_PARAMETERS)
        self.computations = [Computation(c) for c in self._message.messages(MODULE_COMPUTATIONS)]
        self._by_id = {c.id: c for c in self.computations}

    def __bytes__(self) -> bytes:
        encoded = iter(self.computations)
        self._message.content = [
            (number, kind, bytes(next(encoded)) if number == MODULE_COMPUTATIONS else value)
            for number, kind, value in self._message.content
        ]
        return bytes(self._message)

    def donates(self) -> bool:
        """Whether a result may use the memory of an argument."""
        return bool(self._message.bytes_of(MODULE_ALIASES))

    def device_ids(self) -> list[int] | None:
        """The devices in the order of partitions; None if the module does not say.

        Raises:
            ValueError: the program has replicas, which are not partitions.
        """
        assignment = Message(self._message.bytes_of(MODULE_DEVICE_ASSIGNMENT))
        if not assignment.content:
            return None
        if (replicas := assignment.number(ASSIGNMENT_REPLICAS)) != 1:
            raise ValueError(f"a program with {replicas} replicas")
        partitions = assignment.messages(ASSIGNMENT_COMPUTATIONS)
        return [partition.integers(ASSIGNMENT_REPLICAS)[0] for partition in partitions]

    def reduction(self, instruction: Message) -> str:
        """The opcode that the computation of an all-reduce or reduce-scatter applies.

        Returns "" unless it is one operation on the computation's two parameters.
        """
        called = instruction.integers(CALLED)
        if len(called) != 1 or called[0] not in self._by_id:
            return ""
        computation = self._by_id[called[0]]
        body = [Message(raw) for raw in computation.instructions()]
        if len(body) != 3:
            return ""
        (root,) = (m for m in body if m.number(ID) == computation.root)
        parameters = {m.number(ID) for m in body if m.text(OPCODE) == "parameter"}
        if len(parameters) != 2 or set(root.integers(OPERANDS)) != parameters:
            return ""
        return root.text(OPCODE)

    def asynchronous(self) -> set[int]:
        """The computations that run beside others, wrapped in asynchronous instructions."""
        if b"async-start" not in self._data:
            return set()
        return {
            called
            for computation in self.computations
            for raw in computation.instructions()
            if text_of(raw, OPCODE).startswith("async-")
            for called in Message(raw).integers(CALLED)
        }

    def source(self, instruction: Message) -> str:
        """The line of the program that an instruction comes from: "train.py:42", or ""."""
        metadata = Message(instruction.bytes_of(METADATA))
        file, line = metadata.text(METADATA_FILE), metadata.number(METADATA_LINE)
        if file:
            return f"{os.path.basename(file)}:{line}"
        return self.source_of_frame(metadata.number(METADATA_FRAME))

    def source_of_frame(self, frame: int) -> str:
        """The line of a stack frame; "" for one that is not there."""
        if not frame:
            return ""
        frames, locations, files = self._frames
        try:
            # They count from one.
            location = locations[frames[frame - 1].number(FRAME_LOCATION) - 1]
            file = files[location.number(LOCATION_FILE) - 1]
        except IndexError:
            return ""
        name = file.decode("utf-8", "replace") if isinstance(file, bytes) else ""
        return f"{os.path.basename(name)}:{location.number(LOCATION_LINE)}"

    @functools.cached_property
    def _frames(self) -> tuple[list[Message], list[Message], list[int | bytes]]:
        index = Message(self._message.bytes_of(MODULE_STACK_FRAMES))
        frames, locations = index.messages(FRAMES_FRAMES), index.messages(FRAMES_LOCATIONS)
        return frames, locations, index.all(FRAMES_FILES)

    def operation(self, instruction: Message) -> str:
        """JAX's name of the operation or argument that an instruction comes from, or ""."""
        return Message(instruction.bytes_of(METADATA)).text(METADATA_OP_NAME)

    @functools.cached_property
    def mark(self) -> str:
        """A word that is in no name, so that a name and this and a number are a new name."""
        number = 0
        while f".fabric{number or ''}.".encode() in self._data:
            number += 1
        return f".fabric{number or ''}."


class Computation:
    """A computation of a module.

    Attributes:
        message: its fields.
        id: its number in the module.
        name: its name.
        root: the number of the instruction whose result it returns.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.id = message.number(COMPUTATION_ID)
        self.name = message.text(COMPUTATION_NAME)
        self.root = message.number(COMPUTATION_ROOT)

    def __bytes__(self) -> bytes:
        return bytes(self.message)

    def instructions(self) -> Iterator[bytes]:
        """The encoded instructions in order."""
        for value in self.message.all(COMPUTATION_INSTRUCTIONS):
            if isinstance(value, bytes):
                yield value

    def next_id(self) -> int:
        """A number that no instruction has, nor the ones behind it."""
        ids = [field_of(raw, ID) for raw in self.instructions()]
        return max(i for i in ids if isinstance(i, int)) + 1

    def pinned(self) -> set[str]:
        """Names of the root and of the instructions that have to do with control dependencies."""
        names: dict[int, str] = {}
        pinned = {self.root}
        for raw in self.instructions():
            message = Message(raw)
            names[message.number(ID)] = message.text(NAME)
            if predecessors := message.integers(CONTROL_PREDECESSORS):
                pinned |= {message.number(ID), *predecessors}
        return {names[number] for number in pinned}

    def replace(self, replacements: Iterable[Replacement], module: Module) -> None:
        """Puts fragments in the place of instructions.

        Args:
            replacements: what to put in, and where.
            module: the module that this computation is part of.
        """
        by_place = {replacement.place: replacement for replacement in replacements}
        dropped = {name for replacement in by_place.values() for name in replacement.dropped}
        numbers: dict[str, int] = {}
        next_id = self.next_id()
        content: list[Field] = []
        for number, kind, value in self.message.content:
            if number != COMPUTATION_INSTRUCTIONS or not isinstance(value, bytes):
                content.append((number, kind, value))
                continue
            name, own = text_of(value, NAME), field_of(value, ID)
            assert isinstance(own, int)
            numbers[name] = own
            if name in by_place:
                replacement, place = by_place[name], Message(value)
                prefix = name + module.mark
                new = _renumbered(replacement, place, numbers, next_id, prefix)
                next_id += len(new)
                content += [(number, BYTES, bytes(instruction)) for instruction in new]
                continue
            if name not in dropped:
                content.append((number, kind, value))
        self.message.content = content


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What replaces a collective.

    Attributes:
        collective: the instruction.
        fragment: a serialized module; its entry computation is put in.
        operands: names of the instructions that its parameters stand for.
        place: name of the instruction whose number and name its root takes.
        dropped: names of instructions that are taken out.
    """

    collective: Message
    fragment: bytes
    operands: tuple[str, ...]
    place: str
    dropped: frozenset[str] = frozenset()


def _renumbered(
    replacement: Replacement, place: Message, outside: dict[str, int], first_id: int, prefix: str
) -> list[Message]:
    (computation,) = Module(replacement.fragment).computations
    collective = replacement.collective
    instructions = [Message(raw) for raw in computation.instructions()]
    # Whatever had to come before the collective comes before all that replaces it. Of several
    # results, operands of the others too: a result may lie where they were made from. What had to
    # come after it depends on the root.
    before = collective.integers(CONTROL_PREDECESSORS)
    several = any(instruction.text(OPCODE) == "tuple" for instruction in instructions)
    if several and len(replacement.operands) > 1:
        before += [outside[name] for name in replacement.operands]
    before = list(dict.fromkeys(before))
    metadata = collective.bytes_of(METADATA) or None
    numbers: dict[int, int] = {}
    out: list[Message] = []
    for instruction in instructions:
        old = instruction.number(ID)
        if instruction.text(OPCODE) == "parameter":
            operand = replacement.operands[int(instruction.text(NAME)[1:])]
            numbers[old] = outside[operand]
            continue
        root = old == computation.root
        numbers[old] = place.number(ID) if root else first_id + len(out)
        name = place.text(NAME) if root else f"{prefix}{len(out)}"
        instruction.set(NAME, name.encode())
        instruction.set(ID, numbers[old])
        instruction.set_integers(OPERANDS, (numbers[i] for i in instruction.integers(OPERANDS)))
        instruction.set_integers(CONTROL_PREDECESSORS, before)
        instruction.set(METADATA, metadata)
        if instruction.text(OPCODE) == "custom-call":
            attributes = collective.bytes_of(FRONTEND_ATTRIBUTES)
            instruction.set(FRONTEND_ATTRIBUTES, attributes or None)
        out.append(instruction)
    return out
