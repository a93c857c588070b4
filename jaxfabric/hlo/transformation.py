"""The transformation of a module: finds its collectives and replaces those that the fabric has."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxfabric import _compat
from jaxfabric._emit import site_hash
from jaxfabric.gpu_table import Override, decide
from jaxfabric.hlo import fragments
from jaxfabric.hlo.fragments import Attribute, Describe, Fragment
from jaxfabric.hlo.groups import (
    Groups,
    UnknownGroupsError,
    parse_groups,
    parse_pairs,
    permute_groups,
)
from jaxfabric.hlo.module import NAME, OPCODE, Module, Replacement, text_of
from jaxfabric.hlo.reading import (
    Instruction,
    Shape,
    UnsupportedError,
    parse_instruction,
    parse_shape,
    shape_text,
)
from jaxfabric.hlo.seams import find_seams
from jaxfabric.hlo.wire import Message

logger = logging.getLogger("jaxfabric")

COLLECTIVES = frozenset(
    {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast", "send", "recv"),
        *("all-reduce-start", "all-gather-start", "collective-permute-start"),
    }
)
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min"}
_BOOL_REDUCTIONS = {"or": "max", "and": "min", "maximum": "max", "minimum": "min"}


@dataclasses.dataclass(frozen=True)
class Record:
    """What became of one collective of a compiled program.

    Attributes:
        module: the program's name, such as "jit_step".
        op: the HLO operation, such as "all-reduce".
        source: "train.py:42", the name of the JAX operation or argument, or "unknown source".
        bytes: size of the operands on one rank; 0 where it is not known.
        taken: whether it runs on the fabric.
        reason: why not, otherwise empty.
    """

    module: str
    op: str
    source: str
    bytes: int
    taken: bool
    reason: str = ""


@dataclasses.dataclass
class Result:
    """What `transform` returns.

    Attributes:
        data: the new module, or None if nothing was replaced.
        records: one per collective, in the order of the module.
        sites: the source line of each call's site.
        device_ids: the devices of the program, if the module names them.
        donates: whether a result may use the memory of an argument.
    """

    data: bytes | None
    records: list[Record]
    sites: dict[int, str]
    device_ids: list[int] | None = None
    donates: bool = False


def has_collectives(data: bytes) -> bool:
    """Whether an encoded module may have a collective in it."""
    return any(name.encode() in data for name in COLLECTIVES)


def transform(data: bytes, limits: Sequence[Override] | None = None) -> Result:
    """Replaces the collectives of a serialized HloModuleProto.

    Args:
        data: the module.
        limits: for a program for GPUs, what overrules gpu_table. There the fabric takes all of the
            program's collectives or none: see `_program`.

    Raises:
        Exception: the module cannot be read, or not be put together again; it is unchanged.
    """
    return _Transformation(data, limits).run()


@dataclasses.dataclass(frozen=True)
class _Call:
    message: Message
    hlo: _compat.Hlo
    instruction: Instruction
    operands: list[Shape]
    ordinal: int
    sites: list[int]


class _Transformation:
    def __init__(self, data: bytes, limits: Sequence[Override] | None) -> None:
        self._limits = limits
        self._module = Module(data)
        self._parsed = {c.name: c for c in _compat.parse_hlo(data).computations()}
        self._result = Result(None, [], {}, donates=self._module.donates())
        self._ordinal = 0

    def run(self) -> Result:
        result = self._result
        replicas = ""
        try:
            result.device_ids = self._module.device_ids()
        except ValueError as error:
            replicas = str(error)
        asynchronous = self._module.asynchronous()
        changed = False
        for computation in self._module.computations:
            found = [
                Message(raw)
                for raw in computation.instructions()
                if text_of(raw, OPCODE) in COLLECTIVES
            ]
            if not found:
                continue
            reason = "an asynchronous form" if computation.id in asynchronous else replicas
            pinned = computation.pinned()
            texts = {i.name: i for i in self._parsed[computation.name].instructions()}
            new = [
                replacement
                for message in found
                if (
                    replacement := self._replacement(
                        message, texts[message.text(NAME)], reason, pinned
                    )
                )
            ]
            if new:
                computation.replace(new, self._module)
                changed = True
        left = [record for record in result.records if not record.taken]
        if left and self._limits is not None:
            reason = f"the program has {left[0].op} at {left[0].source}: {left[0].reason}"
            result.records = [
                dataclasses.replace(r, taken=False, reason=reason) if r.taken else r
                for r in result.records
            ]
        elif changed:
            result.data = bytes(self._module)
            _compat.parse_hlo(result.data)  # Raises if it does not hold together.
        return result

    def _replacement(
        self, message: Message, hlo: _compat.Hlo, reason: str, pinned: set[str]
    ) -> Replacement | None:
        """Returns what replaces one collective, or None if nothing does, and records it."""
        opcode = message.text(OPCODE)
        source = self._source(message, hlo)
        ordinal = self._ordinal
        self._ordinal += 1
        size = 0
        sites: list[int] = []
        replacement = None
        try:
            operands = [parse_shape(shape_text(o.to_string())) for o in hlo.operands()]
            size = sum(shape.bytes for shape in operands)
            if reason:
                raise UnsupportedError(reason)
            instruction = parse_instruction(hlo.to_string())
            call = _Call(message, hlo, instruction, operands, ordinal, sites)
            replacement = self._fragment(call, pinned)
        except (UnsupportedError, UnknownGroupsError) as error:
            reason = str(error)
            logger.info("%s at %s is left to XLA: %s", opcode, source, reason)
        else:
            self._result.sites |= dict.fromkeys(sites, source)
        record = Record(self._module.name, opcode, source, size, replacement is not None, reason)
        self._result.records.append(record)
        return replacement

    def _source(self, message: Message, hlo: _compat.Hlo) -> str:
        if line := self._module.source(message):
            return line
        # What the partitioner inserts may carry the name of an argument only: its use has a line.
        for user in hlo.users():
            frame = re.search(r"stack_frame_id=(\d+)", user.to_string())
            if frame and (line := self._module.source_of_frame(int(frame[1]))):
                return line
        return self._module.operation(message) or "unknown source"

    def _fragment(self, call: _Call, pinned: set[str]) -> Replacement:
        opcode, own = call.instruction.opcode, call.instruction.attributes
        if opcode.endswith("-start"):
            raise UnsupportedError("an asynchronous form")
        if opcode not in _EMITTERS:
            raise UnsupportedError(f"{opcode} has no counterpart")
        if "channel_id" not in own:
            raise UnsupportedError("its groups are replicas, not partitions")
        pairs: fragments.Pairs = []
        if opcode == "collective-permute":
            groups, pairs = self._permute_groups(call)
        else:
            groups = self._groups(opcode, own)
        reduction = self._reduction(call.message, opcode, call.operands)
        results = call.instruction.results
        self._require_worth(call, groups)
        names = tuple(operand.name for operand in call.hlo.operands())
        # GPUs know their positions.
        asks_position = self._result.device_ids is None and self._limits is None
        describe = self._describer(call, groups, pairs)
        if opcode != "ragged-all-to-all" and all(len(group) == 1 for group in groups):
            fragment = Fragment(call.operands, describe, asks_position)
            emitted = fragments.copies(fragment, results)
        elif opcode == "all-to-all" and call.instruction.is_tuple:
            fragments.check_parts(call.operands, results, len(groups[0]))
            seams = find_seams(call.hlo, results, self._parsed, pinned)
            whole = seams.whole[1] if seams.whole else None
            shapes = [seams.source[1]] if seams.source else call.operands
            fragment = Fragment(shapes, describe, asks_position)
            emitted = fragments.all_to_all_of_parts(fragment, results, whole, seams.shared)
            return Replacement(
                call.message,
                _compat.hlo_from_text(fragment.finish(emitted, whole is None)),
                (seams.source[0].name,) if seams.source else names,
                seams.whole[0].name if seams.whole else call.hlo.name,
                seams.dropped,
            )
        else:
            fragment = Fragment(call.operands, describe, asks_position)
            emitted = _EMITTERS[opcode](fragment, call.instruction, groups, reduction)
        text = fragment.finish(emitted, call.instruction.is_tuple)
        return Replacement(call.message, _compat.hlo_from_text(text), names, call.hlo.name)

    def _require_worth(self, call: _Call, groups: Groups) -> None:
        ranks = max(map(len, groups))
        if self._limits is None or ranks == 1:
            return
        op = call.instruction.opcode.removeprefix("collective-").replace("-", "_")
        size = max(sum(s.bytes for s in side) for side in (call.operands, call.instruction.results))
        kind = _FLOATS.get(call.operands[0].type, call.operands[0].type)
        who = decide(op, kind, size, ranks, self._limits)
        if not who.fabric:
            raise UnsupportedError(who.reason)

    def _describer(self, call: _Call, groups: Groups, pairs: fragments.Pairs) -> Describe:
        ids = self._result.device_ids
        members = groups if ids is None else [[ids[i] for i in group] for group in groups]
        what = fragments.member_attributes(members)
        if pairs:
            what |= fragments.permute_attributes(pairs)

        def describe(label: str, more: Mapping[str, Attribute]) -> Mapping[str, Attribute]:
            # Not the numbers of the calls that jaxfabric.lax lowers, in a module with both.
            place = "hlo", self._module.name, call.ordinal, len(call.sites)
            attributes = {**what, **more, "by_position": int(ids is None)}
            attributes |= {"label": label, "place": site_hash(*place)}
            site = site_hash(*place, self._module.parameters, sorted(attributes.items()))
            call.sites.append(site)
            return {**attributes, "site": site}

        return describe

    def _permute_groups(self, call: _Call) -> tuple[Groups, fragments.Pairs]:
        own, ids = call.instruction.attributes, self._result.device_ids
        if len(call.operands) != len(call.instruction.results) or "slice_sizes" in own:
            raise UnsupportedError("a permute into a part of a buffer")
        pairs = parse_pairs(own.get("source_target_pairs", ""))
        if not pairs:
            raise UnsupportedError("a permute without pairs")
        if ids is None:
            raise UnsupportedError("the number of partitions is not known")
        return permute_groups(pairs, len(ids))

    def _groups(self, opcode: str, own: Mapping[str, str]) -> Groups:
        takes_flag = opcode in {"all-reduce", "all-gather", "reduce-scatter"}
        if takes_flag and own.get("use_global_device_ids") != "true":
            raise UnsupportedError("its groups are replicas, not partitions")
        groups = parse_groups(own.get("replica_groups", "{}"))
        ids = self._result.device_ids
        if not groups:
            if ids is None:
                raise UnsupportedError("the number of partitions is not known")
            groups = [list(range(len(ids)))]
        members = sorted(rank for group in groups for rank in group)
        if members != list(range(len(members) if ids is None else len(ids))):
            raise UnsupportedError("its groups do not cover all partitions once")
        sizes = set(map(len, groups))
        if len(sizes) > 1 and opcode != "all-reduce":
            raise UnsupportedError("groups of different sizes")
        return groups

    def _reduction(self, message: Message, opcode: str, operands: list[Shape]) -> str:
        if opcode not in {"all-reduce", "reduce-scatter"}:
            return ""
        applied = self._module.reduction(message)
        kinds = {shape.type for shape in operands}
        known = _BOOL_REDUCTIONS if kinds == {"pred"} else _REDUCTIONS
        if applied not in known or ("pred" in kinds and kinds != {"pred"}):
            raise UnsupportedError(f"the reduction {applied or 'of several operations'}")
        reduction = known[applied]
        if reduction != "sum" and kinds & {"c64", "c128"}:
            raise UnsupportedError("complex numbers have no order")
        return reduction


def _dimension(instruction: Instruction) -> int:
    text = instruction.attributes.get("dimensions", "").strip("{}")
    if not text.isdigit():
        raise UnsupportedError(f"dimensions {text}" if text else "no dimension")
    return int(text)


Emitted = list[tuple[str, Shape]]
Emitter = Callable[[Fragment, Instruction, Groups, str], Emitted]


def _all_reduce(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del groups
    call = partial(fragments.elementwise, f"all-reduce ({reduction})", "jaxfabric_all_reduce")
    return call(fragment, instruction.results, reduction=reduction)


def _all_gather(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del reduction
    dim = _dimension(instruction)
    return fragments.all_gather(fragment, instruction.results, dim, len(groups[0]))


def _reduce_scatter(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    dim = _dimension(instruction)
    return fragments.reduce_scatter(fragment, instruction.results, dim, len(groups[0]), reduction)


def _all_to_all(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del reduction
    dim = _dimension(instruction)
    return fragments.all_to_all(fragment, instruction.results, dim, len(groups[0]))


def _ragged_all_to_all(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del reduction
    return fragments.ragged_all_to_all(fragment, instruction.results, len(groups[0]))


def _permute(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del groups, reduction
    call = partial(fragments.elementwise, "collective-permute", "jaxfabric_permute")
    return call(fragment, instruction.results)


def _broadcast(
    fragment: Fragment, instruction: Instruction, groups: Groups, reduction: str
) -> Emitted:
    del groups, reduction
    call = partial(fragments.elementwise, "collective-broadcast", "jaxfabric_broadcast")
    return call(fragment, instruction.results, root=0)


_EMITTERS: dict[str, Emitter] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "ragged-all-to-all": _ragged_all_to_all,
    "collective-permute": _permute,
    "collective-broadcast": _broadcast,
}
