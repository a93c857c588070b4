"""What the collectives become in a program, and what they refuse to become."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import lax_model as model
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxfabric import _groups, _primitive, lax

GRID = {"i": 2, "j": 4}


def lowered(f, mesh=None, x=None, **kwargs):
    mesh = model.grid(GRID) if mesh is None else mesh
    x = np.zeros((8, 4), np.float32) if x is None else x
    return jax.jit(model.per_rank(f, mesh, **kwargs)).lower(x).as_text()


def custom_calls(text):
    return [
        {
            "target": target,
            **{k: int(v) for k, v in re.findall(r"(\w+) = (-?\d+) : i64", config)},
            **{
                k: [int(i) for i in v.split(",")]
                for k, v in re.findall(r"(\w+) = array<i64: ([^>]*)>", config)
            },
            **dict(re.findall(r'(\w+) = "([^"]*)"', config)),
        }
        for target, config in re.findall(
            r"custom_call @(jaxfabric_\w+)\(.*?backend_config = \{(.*?)\}", text
        )
    ]


def test_attributes():
    (call,) = custom_calls(lowered(lambda x: lax.psum(x, "j")))
    site = call.pop("site")
    assert 0 < site < 2**63
    assert 0 < call.pop("place") < 2**63
    assert call == {
        "target": "jaxfabric_all_reduce",
        "reduction": "sum",
        "label": "psum float32[4]",
        "members": [device.id for device in jax.devices()[:8]],
        "group_sizes": [4, 4],
        "by_position": 0,
    }
    (call,) = custom_calls(lowered(lambda x: lax.ppermute(x, "i", [(0, 1)])))
    assert (call["pairs"], call["group_sizes"]) == ([0, 1], [2] * 4)
    (call,) = custom_calls(lowered(lambda x: lax.pbroadcast(x, "i", 1)))
    assert call["root"] == 1
    text = lowered(lambda x: lax.barrier("i", x))
    assert "has_side_effect = true" in text
    assert "has_side_effect = true" not in lowered(lambda x: lax.psum(x, "i"))


def test_members_are_device_ids_of_a_concrete_mesh():
    devices = [3, 0, 6, 5, 1, 7, 4, 2]
    (call,) = custom_calls(lowered(lambda x: lax.psum(x, "j"), model.grid(GRID, devices=devices)))
    assert call["members"] == [jax.devices()[i].id for i in devices]


def test_members_are_positions_of_an_abstract_mesh():
    mesh = model.grid(GRID).abstract_mesh
    text = lowered(lambda x: lax.psum(x, ("j", "i")), mesh)
    (call,) = custom_calls(text)
    assert (call["by_position"], call["members"]) == (1, [0, 4, 1, 5, 2, 6, 3, 7])
    assert "stablehlo.partition_id" in text


def test_sites_are_distinct_and_the_same_in_every_lowering():
    def f(x):
        return lax.psum(x, "j"), lax.psum(2 * x, "j"), lax.psum(x, "i")

    first = [call["site"] for call in custom_calls(lowered(f))]
    again = [call["site"] for call in custom_calls(lowered(f))]
    assert len(set(first)) == 3
    assert first == again


def test_sites_tell_programs_of_one_name_apart_by_their_parameters():
    """Threads may compile a function for several lengths in another order on each rank."""
    shapes = (8, 4), (16, 4)
    (a,), (b,) = (
        custom_calls(lowered(lambda x: lax.psum(x.sum(0), "j"), x=np.zeros(shape, np.float32)))
        for shape in shapes
    )
    assert (a["label"], a["place"]) == (b["label"], b["place"])
    assert a["site"] != b["site"]


def test_no_line_and_no_path_in_attributes():
    for call in custom_calls(lowered(lambda x: lax.all_gather(x, "j"))):
        assert not [v for v in call.values() if isinstance(v, str) and (".py" in v or "/" in v)]


def test_source_line_is_that_of_the_user(monkeypatch):
    from jaxfabric import _ext

    sources = {}
    monkeypatch.setattr(_ext, "register_site", sources.__setitem__)
    call = custom_calls(lowered(lambda x: lax.pmean(x, "j")))[0]
    file, line = sources[call["site"]].split(":")
    assert file == "test_lax_lowering.py"
    with open(__file__) as source:
        assert "lax.pmean" in source.read().splitlines()[int(line) - 1]


def test_export_needs_no_fabric_and_other_platforms_are_named(monkeypatch):
    from jaxfabric import runtime

    def refuse():
        raise AssertionError("the fabric was asked for")

    monkeypatch.setattr(runtime, "ensure_ready", refuse)
    f = jax.jit(model.per_rank(lambda x: lax.psum(x, "j"), model.grid(GRID).abstract_mesh))
    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    check = [jax.export.DisabledSafetyCheck.custom_call("jaxfabric_all_reduce")]
    exported = jax.export.export(f, platforms=["cpu"], disabled_checks=check)(x)
    assert "jaxfabric_all_reduce" in exported.mlir_module()
    with pytest.raises(
        NotImplementedError, match=r"psum runs on the platforms cpu and cuda, not on tpu"
    ):
        jax.export.export(f, platforms=["tpu"], disabled_checks=check)(x)


def test_small_types_travel_in_bytes():
    text = lowered(lambda x: lax.all_gather(x.astype(jnp.int4), "j"))
    assert "tensor<4xi8>" in text
    text = lowered(lambda x: lax.all_gather(x.astype(jnp.bfloat16), "j"))
    assert re.search(r"jaxfabric_all_gather.*tensor<4xbf16>", text)


@pytest.mark.parametrize("groups", [None, ((3, 0), (1, 2))], ids=["whole", "groups"])
@pytest.mark.parametrize("axes", [("j",), ("i", "k"), ("k", "i"), ("j", "k", "i")], ids=str)
def test_replica_groups(axes, groups):
    shape = {"i": 2, "j": 4, "k": 2}
    if len(axes) == 3:
        groups = groups and tuple(
            tuple(4 * r + g for g in group) for r in range(4) for group in groups
        )
    assert _groups.replica_groups(shape, axes, groups) == model.communicators(shape, axes, groups)


GROUPS = "axis_index_groups must"
ERRORS = {
    "unbound": (lambda x: lax.psum(x, "k"), NameError, "unbound axis name: k"),
    "missing index": (
        lambda x: lax.psum(x, "j", axis_index_groups=[[0, 1], [2]]),
        ValueError,
        GROUPS,
    ),
    "index twice": (
        lambda x: lax.pmax(x, "j", axis_index_groups=[[0, 1], [1, 2]]),
        ValueError,
        GROUPS,
    ),
    "empty group": (
        lambda x: lax.psum(x, "j", axis_index_groups=[[0, 1, 2, 3], []]),
        ValueError,
        r"empty group, got \(\(0, 1, 2, 3\), \(\)\)",
    ),
    "flat groups": (
        lambda x: lax.psum(x, "j", axis_index_groups=[0, 1, 2, 3]),
        TypeError,
        r"axis_index_groups must be lists of integers.*\[0, 1, 2, 3\]",
    ),
    "groups of floats": (
        lambda x: lax.pmax(x, "j", axis_index_groups=[[0.5, 1], [2, 3]]),
        TypeError,
        r"axis_index_groups must be lists of integers.*0\.5",
    ),
    "uneven groups": (
        lambda x: lax.all_gather(x, "j", axis_index_groups=[[0], [1, 2, 3]]),
        ValueError,
        GROUPS,
    ),
    "groups and dimensions": (
        lambda x: lax.psum(x, ("j", 0), axis_index_groups=[[0, 1], [2, 3]]),
        ValueError,
        "just named axes",
    ),
    "scatter size": (
        lambda x: lax.psum_scatter(x[:3], "j"),
        ValueError,
        "must match shard count 4",
    ),
    "scatter tile": (
        lambda x: lax.psum_scatter(x[:3], "j", tiled=True),
        ValueError,
        "divisible by shard_count 4",
    ),
    "split size": (lambda x: lax.all_to_all(x[:2], "j", 0, 0), ValueError, "are 4 and 2"),
    "split tile": (lambda x: lax.all_to_all(x[:2], "j", 0, 0, tiled=True), ValueError, "divisible"),
    "no such dimension": (lambda x: lax.all_gather(x, "j", axis=2), ValueError, "out of bounds"),
    "dimension is no number": (
        lambda x: lax.psum_scatter(x, "j", scatter_dimension="0"),
        TypeError,
        "scatter_dimension must be an integer, got '0'",
    ),
    "pair of floats": (lambda x: lax.ppermute(x, "j", [(0.7, 1.2)]), TypeError, r"perm.*0\.7"),
    "no pairs": (lambda x: lax.ppermute(x, "j", [0, 1]), TypeError, r"perm.*\[0, 1\]"),
    "not ranks": (lambda x: lax.pshuffle(x, "j", 3), TypeError, "perm.*got 3"),
    "source twice": (lambda x: lax.ppermute(x, "j", [(0, 1), (0, 2)]), ValueError, "unique"),
    "target twice": (lambda x: lax.ppermute(x, "j", [(0, 1), (2, 1)]), ValueError, "unique"),
    "rank too large": (lambda x: lax.ppermute(x, "j", [(0, 4)]), ValueError, "below 4"),
    "not a list": (lambda x: lax.ppermute(x, "j", {0: 1}), TypeError, "list or a tuple"),
    "no permutation": (lambda x: lax.pshuffle(x, "j", [0, 0, 1, 2]), ValueError, "permutation"),
    "root too large": (lambda x: lax.pbroadcast(x, "j", 4), ValueError, "source 4"),
    "negative root": (lambda x: lax.pbroadcast(x, "j", -1), ValueError, "source -1"),
    "root is no number": (lambda x: lax.pbroadcast(x, "j", "0"), TypeError, "source, got '0'"),
    "unknown type": (lambda x: lax.all_gather(x, "j", to="other"), ValueError, "`to` value"),
    "complex order": (lambda x: lax.pmax(x + 0j, "j"), TypeError, r"pmax does not take complex64"),
    "int4 sum": (
        lambda x: lax.psum(x.astype(jnp.int4), "j"),
        TypeError,
        r"psum does not take int4",
    ),
    "bool scatter": (
        lambda x: lax.psum_scatter(x > 0, "j"),
        TypeError,
        r"bool: cast it first.*int32",
    ),
    "float8 sum": (
        lambda x: lax.psum(x.astype(ml_dtypes.float8_e4m3b11fnuz), "j"),
        TypeError,
        "float8_e4m3b11",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    f, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        lowered(f)


def test_outside_of_any_axis():
    with pytest.raises(NameError, match="unbound axis name"):
        lax.psum(jnp.zeros(3), "i")
    with pytest.raises(NameError, match="unbound axis name"):
        lax.all_gather(np.zeros(3), "i")


def test_every_collective_is_registered_for_rules_to_find():
    names = {"psum", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute"}
    assert names | {"pbroadcast", "barrier"} == set(_primitive._collectives)


def test_custom_spec_is_kept_on_explicit_axes():
    mesh = model.grid(GRID, explicit=True)
    x = jax.device_put(
        np.arange(32.0).reshape(8, 4), jax.sharding.NamedSharding(mesh, PartitionSpec("i", "j"))
    )
    f = jax.jit(jax.shard_map(lambda v: lax.psum(v, "j"), out_specs=PartitionSpec("i"), mesh=mesh))
    np.testing.assert_array_equal(f(x), np.arange(32.0).reshape(8, 4).sum(1, keepdims=True))
