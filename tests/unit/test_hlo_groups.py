"""How HLO says who takes part in a collective, and how its instructions are read and encoded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfabric import _compat
from jaxfabric.hlo import groups, reading, wire

pytestmark = pytest.mark.timeout(120)

GROUPS = {
    "{}": [],
    "{{0,1},{2,3}}": [[0, 1], [2, 3]],
    "{{3},{2,0,1}}": [[3], [2, 0, 1]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[1,4]<=[4]": [[0, 1, 2, 3]],
    "[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "[2,4]<=[2,2,2]T(1,0,2)": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "mesh['a'=2,'b'=4] {'b'}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh['a'=2,'b'=4] {'a'}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=2,'b'=4] {'b','a'}": [[0, 4, 1, 5, 2, 6, 3, 7]],
    "mesh['a'=2,'b'=4] {'a','b'}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "mesh['a'=2,'b'=4] {'b':(1)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=2,'b'=4] {'b':(2)2}": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "mesh['a'=2,'b'=4] {'b':(2)2,'a'}": [[0, 4, 1, 5], [2, 6, 3, 7]],
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'a'}": [[3, 2], [1, 0]],
}


@pytest.mark.parametrize("text", GROUPS)
def test_groups(text):
    assert sorted(groups.parse_groups(text)) == sorted(GROUPS[text])


ALL_REDUCE = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
ENTRY %e (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups},
    use_global_device_ids=true, to_apply=%add
}}
"""


@pytest.mark.parametrize("text", GROUPS)
def test_xla_writes_them_like_that(text):
    module = _compat.parse_hlo(_compat.hlo_from_text(ALL_REDUCE.format(groups=text)))
    (line,) = (
        instruction.to_string()
        for computation in module.computations()
        for instruction in computation.instructions()
        if instruction.name == "r"
    )
    instruction = reading.parse_instruction(line)
    assert instruction.opcode == "all-reduce"
    assert instruction.attributes["use_global_device_ids"] == "true"
    written = instruction.attributes["replica_groups"]
    assert sorted(groups.parse_groups(written)) == sorted(GROUPS[text])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{{0,1},{2,3}", "[8]<=[8]", "[2,3]<=[8]", "[2,4]<=[8]T(1,0)", "{{0,-1}}"),
        *("mesh['a'=2] {'b'}", "mesh['a'=4] {'a':(1)3}", "mesh['a'=2 {'a'}", "@mesh {'a'}"),
        *("mesh['a'=4] {'a':(1)2,'a':(1)4}", "mesh['a'=2], device_ids=(0,1,2) {'a'}"),
    ],
)
def test_unknown_groups(text):
    with pytest.raises(groups.UnknownGroupsError):
        groups.parse_groups(text)


@given(st.data())
def test_groups_of_a_mesh_are_those_of_its_coordinates(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = data.draw(st.permutations(range(len(sizes))))
    axes = axes[: data.draw(st.integers(1, len(sizes)))]
    names = ",".join(f"'x{i}'={size}" for i, size in enumerate(sizes))
    refs = ",".join(f"'x{i}'" for i in axes)
    found = {}
    for position, at in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(value for i, value in enumerate(at) if i not in axes)
        found.setdefault(rest, []).append((tuple(at[i] for i in axes), position))
    want = [[position for _, position in sorted(members)] for members in found.values()]
    assert sorted(groups.parse_groups(f"mesh[{names}] {{{refs}}}")) == sorted(want)


def test_pairs():
    assert groups.parse_pairs("{{0,1},{1,0}}") == [(0, 1), (1, 0)]
    assert groups.parse_pairs("{}") == []
    for text in ("{{0,1,2}}", "[2,2]<=[4]", ""):
        with pytest.raises(groups.UnknownGroupsError):
            groups.parse_pairs(text)


@pytest.mark.parametrize(
    ("pairs", "count", "want"),
    [
        ([(0, 1), (1, 0)], 2, ([[0, 1]], [(0, 1), (1, 0)])),
        ([(0, 4), (4, 0), (1, 5), (5, 1)], 6, ([[0, 4, 2], [1, 5, 3]], [(0, 1), (1, 0)])),
        ([(0, 1), (1, 2), (4, 5), (5, 6)], 8, ([[0, 1, 2, 3], [4, 5, 6, 7]], [(0, 1), (1, 2)])),
        ([(1, 0)], 3, ([[0, 1, 2]], [(1, 0)])),
        ([(0, 1), (3, 2)], 4, ([[0, 1, 2, 3]], [(0, 1), (3, 2)])),
    ],
)
def test_groups_of_a_permute(pairs, count, want):
    if count == 6:  # Two idle ranks, one for each group.
        want = ([[0, 4, 2], [1, 5, 3]], want[1])
    assert groups.permute_groups(pairs, count) == want


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_a_permute_in_groups_is_the_same_permute(drawn):
    count, order = drawn
    pairs = [(source, target) for target, source in enumerate(order) if (source + target) % 3]
    found, relative = groups.permute_groups(pairs, count)
    assert sorted(rank for group in found for rank in group) == list(range(count))
    assert sorted((g[s], g[t]) for g in found for s, t in relative) == sorted(pairs)


def test_instruction_with_a_tuple():
    instruction = reading.parse_instruction(
        "  ROOT %all-reduce.3 = (f32[2,16]{0,1}, /*index=1*/pred[]) all-reduce(%a, %b), "
        "channel_id=1, replica_groups=mesh['a, b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'a, b'}, "
        'to_apply=%r, metadata={op_name="f(\\"x, y\\")" stack_frame_id=9}'
    )
    assert instruction.name == "all-reduce.3"
    assert instruction.is_tuple
    assert list(map(str, instruction.results)) == ["f32[2,16]{0,1}", "pred[]"]
    assert instruction.attributes["replica_groups"] == (
        "mesh['a, b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'a, b'}"
    )
    assert instruction.attributes["to_apply"] == "%r"
    assert groups.parse_groups(instruction.attributes["replica_groups"])[0] == [0, 1]


@pytest.mark.parametrize(
    "text", ["s4[8]{0:E(4)}", "s4[8]{0}", "f32[<=8]{0}", "f32[8]{0:T(128)}", "token[]", "opaque[]"]
)
def test_shapes_that_are_left_to_xla(text):
    with pytest.raises(reading.UnsupportedError):
        reading.parse_shape(text)


def test_order_in_memory():
    shape = reading.parse_shape("f32[8,1,4]{2,0,1}")
    assert shape.order() == [2, 0]
    assert shape.order() == reading.parse_shape("f32[8,1,4]{2,1,0}").order()
    assert shape.major_first(2).layout == (0, 1, 2)
    assert shape.major_first(0) == shape
    assert (shape.bytes, shape.label) == (128, "float32[8,1,4]")


def test_encoded_messages_come_through():
    data = wire.encode([(1, 2, b"name"), (35, 0, 5 << 32 | 2), (9, 1, bytes(8)), (7, 5, b"abcd")])
    assert bytes(wire.Message(data)) == data
    message = wire.Message(data)
    assert message.number(35) == 5 << 32 | 2
    message.set_integers(36, [1, 2**40, 2**64 - 1])
    assert wire.Message(bytes(message)).integers(36) == [1, 2**40, 2**64 - 1]
    for broken in (data[:-1], b"\x0b", b"\xff"):
        with pytest.raises(ValueError, match=r"middle of a field|wire type"):
            wire.Message(broken)


def test_a_module_comes_through():
    data = _compat.hlo_from_text(ALL_REDUCE.format(groups="{}"))
    assert bytes(wire.Message(data)) == data
    array = np.arange(100000, dtype=np.float32)
    text = "HloModule c\nENTRY %e {\n  ROOT %c = f32[100000]{0} constant({" + ", ".join(
        map(str, array)
    )
    data = _compat.hlo_from_text(text + "})\n}\n")
    assert array.tobytes() in bytes(wire.Message(data))
