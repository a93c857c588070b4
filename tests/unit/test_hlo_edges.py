"""Whole-program mode: what is left to XLA and why, and forms that XLA:CPU rarely makes."""

from __future__ import annotations

import re

import hlo_programs as programs
import jax
import numpy as np
import pytest
from hlo_programs import ALL, grid, on_fabric, put, transformed
from jax.sharding import PartitionSpec as P

from jaxfabric import _compat, hlo
from jaxfabric.hlo import module

pytestmark = pytest.mark.timeout(300)


def numbers(*shape):
    return (np.arange(np.prod(shape)) % 13 - 6).reshape(shape).astype(np.float32)


def mapped(f, mesh, out=("i",)):
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P(*out), check_vma=False)


# --- what is left to XLA ---


@pytest.mark.usefixtures("whole_program")
def test_a_product_is_left_to_xla():
    mesh = grid(i=8)
    x = numbers(16, 4) % 3 + 1
    program, fabric, xla = programs.compiled(lambda x: x.prod(0), put(mesh, x, "i"))
    assert (fabric, xla) == ([], ["all-reduce"])
    (record,) = hlo.records()
    assert (record.taken, record.reason) == (False, "the reduction multiply")
    assert (record.op, record.bytes) == ("all-reduce", 16)
    np.testing.assert_array_equal(program(put(mesh, x, "i")), x.prod(0))


@pytest.mark.usefixtures("whole_program")
def test_a_program_that_is_half_xlas():
    mesh = grid(i=8)
    x = numbers(16, 4) % 3 + 1
    program, fabric, xla = programs.compiled(lambda x: (x.prod(0), x.sum(0)), put(mesh, x, "i"))
    assert (fabric, xla) == (["all_reduce"], ["all-reduce"])
    product, total = program(put(mesh, x, "i"))
    np.testing.assert_array_equal(product, x.prod(0))
    np.testing.assert_array_equal(total, x.sum(0))


@pytest.mark.usefixtures("whole_program")
def test_truth_values():
    mesh = grid(i=8)
    x = np.arange(64).reshape(16, 4) % 5
    some, every = on_fabric(
        lambda x: ((x == 0).any(0), (x < 4).all(0)), put(mesh, x, "i"), ops={"all_reduce"}
    )
    np.testing.assert_array_equal(some, (x == 0).any(0))
    np.testing.assert_array_equal(every, (x < 4).all(0))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add", "replicas"),
        ("f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%add", "replicas"),
        (f"f32[4]{{0}} all-reduce(%p), {ALL}, to_apply=%two", "several operations"),
        (f"f32[4]{{0}} all-reduce(%p), {ALL}, to_apply=%product", "the reduction multiply"),
        (
            "f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2}}, "
            "use_global_device_ids=true, to_apply=%add",
            "do not cover",
        ),
        ("f32[4]{0} collective-permute(%p), channel_id=1, source_target_pairs={}", "without pairs"),
        ("f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}", "replicas"),
        ("f32[4]{0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1}}", "not cover"),
        (
            "f32[4]{0} all-to-all(%p), channel_id=1, replica_groups={{0},{1,2,3}}, dimensions={0}",
            "groups of different sizes",
        ),
        ("f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%add", "replicas"),
    ],
)
def test_forms_that_are_left_to_xla(line, reason):
    result = transformed(["%p = f32[4]{0} parameter(0)", f"ROOT %r = {line}"])
    assert result.data is None
    (record,) = result.records
    assert reason in record.reason
    assert not record.taken


def test_types_and_asynchronous_forms_are_left_to_xla():
    result = transformed(
        [
            "%p = s4[4]{0} parameter(0)",
            f"ROOT %r = s4[16]{{0}} all-gather(%p), {ALL}, dimensions={{0}}",
        ]
    )
    assert result.records[0].reason == "the element type s4"
    result = transformed(
        [
            "%p = f32[4]{0} parameter(0)",
            "%s = ((f32[4]{0}), f32[16]{0}) async-start(%p), calls=%wrapped",
            "ROOT %r = f32[16]{0} async-done(%s)",
        ],
        computations=(
            "%wrapped (p: f32[4]) -> f32[16] {\n  %q = f32[4]{0} parameter(0)\n"
            f"  ROOT %g = f32[16]{{0}} all-gather(%q), {ALL}, dimensions={{0}}\n}}\n"
        ),
    )
    assert result.data is None
    assert [r.reason for r in result.records] == ["an asynchronous form"]
    result = transformed(
        [
            "%p = f32[4]{0} parameter(0)",
            f"%s = f32[4]{{0}} all-reduce-start(%p), {ALL}, to_apply=%add",
            "ROOT %r = f32[4]{0} all-reduce-done(%s)",
        ]
    )
    assert [r.reason for r in result.records] == ["an asynchronous form"]


def test_replicas_are_left_to_xla():
    line = f"ROOT %r = f32[4]{{0}} all-reduce(%p), {ALL}, to_apply=%add"
    result = transformed(["%p = f32[4]{0} parameter(0)", line], replicas=2)
    assert result.records[0].reason == "a program with 2 replicas"


# --- what is put in ---


def test_what_is_around_a_collective_stays():
    """Order, control dependencies, metadata, attributes of the frontend; devices by their ids."""
    result = transformed(
        [
            "%p = f32[4]{0} parameter(0)",
            "%before = f32[4]{0} copy(%p)",
            f"%r = f32[4]{{0}} all-reduce(%p), {ALL}, to_apply=%add, "
            'frontend_attributes={k="v"}, control-predecessors={%before}, '
            'metadata={op_name="f/psum" source_file="/a/b.py" source_line=7}',
            "%after = f32[4]{0} copy(%before), control-predecessors={%r}",
            "ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%r, %after)",
        ]
    )
    assert [(r.source, r.bytes, r.taken) for r in result.records] == [("b.py:7", 16, True)]
    assert set(result.sites.values()) == {"b.py:7"}
    text = _compat.parse_hlo(result.data).to_string()
    (call,) = re.findall(r"%r = .*", text)
    assert 'custom_call_target="jaxfabric_all_reduce"' in call
    assert "members = array<i64: 4, 5, 6, 7>" in call
    assert "control-predecessors={%before}" in call
    assert 'frontend_attributes={k="v"}' in call
    assert 'op_name="f/psum"' in call
    assert "control-predecessors={%r}" in re.search(r"%after = .*", text)[0]
    assert "all-reduce(" not in text


def test_sites_are_those_of_the_program_alone():
    line = "%p = f32[4]{0} parameter(0)"
    reduce = "= f32[4]{0} all-reduce(%p), " + ALL + ", to_apply=%add"
    body = [line, f"%a {reduce}", f"%b {reduce}", "ROOT %r = f32[4]{0} add(%a, %b)"]
    first, second = transformed(body), transformed(body)
    texts = [_compat.parse_hlo(result.data).to_string() for result in (first, second)]
    assert texts[0] == texts[1]
    assert first.sites == second.sites
    assert len(first.sites) == 2
    assert transformed(body, devices=(0, 1)).sites.keys().isdisjoint(first.sites)
    # Threads may compile a function for several lengths in another order on each rank.
    longer = transformed(["%q = f32[9]{0} parameter(1)", *body])
    assert longer.sites.keys().isdisjoint(first.sites)


def test_collective_broadcast():
    """JAX lowers it for GPUs only, so no program for CPU devices has one yet."""
    line = "collective-broadcast(%p), channel_id=1, replica_groups={{1,0},{2,3}}"
    result = transformed(["%p = f32[4]{0} parameter(0)", f"ROOT %r = f32[4]{{0}} {line}"])
    text = _compat.parse_hlo(result.data).to_string()
    assert 'custom_call_target="jaxfabric_broadcast"' in text
    assert "members = array<i64: 5, 4, 6, 7>" in text
    assert "root = 0 : i64" in text


def relaid(text):
    """Gives the collectives along the second dimension operands and results in row-major order."""
    collective = (
        r"(ROOT )?(%[\w.-]+) = f32\[([\d,]+)\]\{0,1\} (all-gather|reduce-scatter)\((%[\w.]+)\)(.*)"
    )
    shapes = dict(re.findall(r"(%[\w.]+) = (f32\[[\d,]+\])", text))

    def replace(match):
        root, name, dims, op, operand, rest = match.groups()
        return (
            f"{name}.in = {shapes[operand]}{{1,0}} copy({operand})\n"
            f"{name}.out = f32[{dims}]{{1,0}} {op}({name}.in){rest}\n"
            f"{root or ''}{name} = f32[{dims}]{{0,1}} copy({name}.out)"
        )

    return re.sub(collective, replace, text)


@pytest.mark.usefixtures("whole_program")
def test_dimensions_that_are_not_the_slowest_in_memory():
    mesh = grid(i=8)
    x = numbers(64, 16)
    blocks = x.reshape(8, 8, 16)
    with programs.edited(relaid):
        rows = on_fabric(
            mapped(lambda x: jax.lax.all_gather(x, "i", axis=1, tiled=True) * 2, mesh, ()),
            *(x,),
            ops={"all_gather"},
        )
    np.testing.assert_array_equal(rows, np.concatenate(blocks, 1) * 2)
    with programs.edited(relaid):
        scattered = on_fabric(
            mapped(
                lambda x: jax.lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True) * 2,
                *(mesh, (None, "i")),
            ),
            *(x,),
            ops={"reduce_scatter"},
        )
    np.testing.assert_array_equal(scattered, blocks.sum(0) * 2)


WAYS = {
    "{{3,1,2,0},{4,7,6,5}}": [[3, 1, 2, 0], [4, 7, 6, 5]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[2,4]<=[4,2]T(1,0)": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "[2,4]<=[2,2,2]T(1,0,2)": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "mesh['a'=2,'b'=2,'c'=2] {'c','a'}": [[0, 4, 1, 5], [2, 6, 3, 7]],
    "mesh['a'=2,'b'=4] {'b':(2)2,'a'}": [[0, 4, 1, 5], [2, 6, 3, 7]],
    "mesh['a'=2,'b'=4] {'a','b':(1)2}": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "mesh['a'=2,'b'=4], device_ids=(3,1,2,0,4,7,6,5) {'b'}": [[3, 1, 2, 0], [4, 7, 6, 5]],
}
GROUPS = r"replica_groups=.*?(?=, (?:dimensions|use_global_device_ids)=)"


@pytest.mark.usefixtures("whole_program")
@pytest.mark.parametrize("fabric", [True, False])
def test_every_way_to_write_groups(fabric):
    """One all-gather with each, told apart by its width; XLA runs them the same."""

    def edit(text):
        def groups(match):
            way = list(WAYS)[int(match[1]) - 1]
            return re.sub(GROUPS, lambda _: f"replica_groups={way}", match[0])

        return re.sub(r"= f32\[8,(\d)\]\S* all-gather\(.*", groups, text)

    def f(x):
        return [jax.lax.all_gather(x[:, : k + 1], "b", tiled=True) for k in range(len(WAYS))]

    x = numbers(16, len(WAYS))
    spec = P(("a", "b"))
    gathers = jax.shard_map(f, mesh=grid(a=2, b=4), in_specs=spec, out_specs=spec, check_vma=False)
    with programs.edited(edit, fabric):
        program, *found = programs.compiled(gathers, x)
    assert [len(ops) for ops in found] == ([len(WAYS), 0] if fabric else [0, len(WAYS)])
    blocks = x.reshape(8, 2, -1)
    for k, (y, groups) in enumerate(zip(program(x), WAYS.values(), strict=True)):
        want = np.empty((8, 8, k + 1))
        for group in groups:
            want[group] = np.concatenate(blocks[group])[:, : k + 1]
        np.testing.assert_array_equal(y, want.reshape(y.shape), list(WAYS)[k])


@pytest.mark.usefixtures("whole_program")
def test_groups_of_different_sizes():
    def edit(text):
        uneven = "replica_groups={{6},{5,0,3},{7,2,1,4}}"
        return re.sub(GROUPS, uneven, text)

    x = numbers(16, 4)
    with programs.edited(edit):
        y = on_fabric(mapped(lambda x: jax.lax.psum(x, "i"), grid(i=8)), x, ops={"all_reduce"})
    blocks = x.reshape(8, 2, 4)
    want = np.empty_like(blocks)
    for group in ([6], [5, 0, 3], [7, 2, 1, 4]):
        want[group] = blocks[group].sum(0)
    np.testing.assert_array_equal(y, want.reshape(x.shape))


@pytest.mark.usefixtures("whole_program")
@pytest.mark.parametrize(("dim", "layout"), [(0, "{1,0}"), (1, "{1,0}"), (1, "{0,1}")])
def test_all_to_all_of_one_array(dim, layout):
    """XLA:CPU makes a tuple of it, so it is put where a sum was."""

    def edit(text):
        return re.sub(
            r"= f32\[8,16\]\{1,0\} all-reduce\((%[\w.]+)\).*to_apply=%[\w.]+",
            rf"= f32[8,16]{layout} all-to-all(\1), channel_id=1, replica_groups=[1,8]<=[8], "
            rf"dimensions={{{dim}}}",
            text,
        )

    mesh = grid(i=8)
    x = numbers(64, 16)
    with programs.edited(edit):
        y = on_fabric(mapped(lambda x: jax.lax.psum(x, "i"), mesh), x, ops={"all_to_all"})
    blocks = x.reshape(8, 8, 16)
    parts = [np.concatenate([np.split(b, 8, dim)[r] for b in blocks], dim) for r in range(8)]
    want = np.concatenate(parts)
    if layout == "{0,1}":  # The result's memory is the array's in the other order.
        assert y.shape == want.shape
    else:
        np.testing.assert_array_equal(y, want)


@pytest.mark.usefixtures("whole_program")
def test_by_position(monkeypatch):
    """A module that does not name its devices: the fabric finds out who is where."""
    monkeypatch.setattr(module.Module, "device_ids", lambda self: None)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices())[[3, 0, 6, 5, 1, 7, 4, 2]].reshape(2, 4), ("i", "j")
    )
    x = numbers(64, 16)
    f = jax.shard_map(
        lambda x: jax.lax.all_gather(jax.lax.psum(x, "i"), "j"),
        **{"mesh": mesh, "in_specs": P(("i", "j")), "out_specs": P("j"), "check_vma": False},
    )
    program, fabric, xla = programs.compiled(f, x)
    assert (fabric, xla) == (["all_gather", "all_reduce"], [])
    assert program.as_text().count("by_position = 1") == 2
    y = np.asarray(program(x)).reshape(4, 4, 8, 16)
    np.testing.assert_array_equal(y, np.stack([x.reshape(2, 4, 8, 16).sum(0)] * 4))
    jax.clear_caches()
    f = mapped(lambda x: jax.lax.ppermute(x, "i", [(0, 1)]), grid(i=8))
    assert programs.compiled(f, x)[2] == ["collective-permute"]
    assert hlo.records()[-1].reason == "the number of partitions is not known"
