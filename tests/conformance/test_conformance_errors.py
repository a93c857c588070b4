"""Calls that are wrong: the faces raise what jax.lax raises, or the difference is documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faces
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

pytestmark = pytest.mark.timeout(60)

AXES = {"i": 2, "j": 4}

# Each is traced on blocks of float32[8, 4] with 4 ranks along j.
WRONG: dict[str, Callable[[Any, jax.Array], Any]] = {
    "psum over an unknown axis": lambda m, x: m.psum(x, "k"),
    "pmax over an unknown axis": lambda m, x: m.pmax(x, ("j", "k")),
    "all_gather over an unknown axis": lambda m, x: m.all_gather(x, "k"),
    "psum_scatter over an unknown axis": lambda m, x: m.psum_scatter(x, "k"),
    "all_to_all over an unknown axis": lambda m, x: m.all_to_all(x, "k", 0, 0),
    "ppermute over an unknown axis": lambda m, x: m.ppermute(x, "k", [(0, 1)]),
    "pbroadcast over an unknown axis": lambda m, x: m.pbroadcast(x, "k", 0),
    "psum: an axis twice": lambda m, x: m.psum(x, ("j", "j")),
    "psum: groups leave one out": lambda m, x: m.psum(x, "j", axis_index_groups=[[0, 1], [2]]),
    "psum: groups with one twice": lambda m, x: m.psum(x, "j", axis_index_groups=[[0, 1], [1, 2]]),
    "pmax: groups with one twice": lambda m, x: m.pmax(x, "j", axis_index_groups=[[0, 1], [1, 2]]),
    "psum: groups and a dimension": lambda m, x: m.psum(
        x, ("j", 0), axis_index_groups=[[0, 1], [2, 3]]
    ),
    "psum: no such dimension": lambda m, x: m.psum(x, ("j", 5)),
    "psum: a string": lambda m, x: m.psum("text", "j"),
    "all_gather: no such dimension": lambda m, x: m.all_gather(x, "j", axis=3),
    "all_gather: no such dimension, tiled": lambda m, x: m.all_gather(x, "j", axis=2, tiled=True),
    "all_gather: unknown `to`": lambda m, x: m.all_gather(x, "j", to="other"),
    "all_gather: groups and `to`": lambda m, x: m.all_gather(
        x, "j", axis_index_groups=[[0, 1], [2, 3]], to="invarying"
    ),
    "all_gather: a scalar, tiled": lambda m, x: m.all_gather(x[0, 0], "j", tiled=True),
    "psum_scatter: size": lambda m, x: m.psum_scatter(x[:3], "j"),
    "psum_scatter: size, tiled": lambda m, x: m.psum_scatter(x[:3], "j", tiled=True),
    "psum_scatter: no such dimension": lambda m, x: m.psum_scatter(
        x, "j", scatter_dimension=2, tiled=True
    ),
    "psum_scatter: groups of other size": lambda m, x: m.psum_scatter(
        x[:4], "j", axis_index_groups=[[0, 1], [2, 3]]
    ),
    "psum_scatter: booleans": lambda m, x: m.psum_scatter(x > 0, "j", tiled=True),
    "all_to_all: size": lambda m, x: m.all_to_all(x[:2], "j", 0, 0),
    "all_to_all: size, tiled": lambda m, x: m.all_to_all(x[:2], "j", 0, 0, tiled=True),
    "all_to_all: no such dimension": lambda m, x: m.all_to_all(x, "j", 2, 0),
    "pswapaxes: size": lambda m, x: m.pswapaxes(x[:3], "j", 0),
    "ppermute: a source twice": lambda m, x: m.ppermute(x, "j", [(0, 1), (0, 2)]),
    "ppermute: a destination twice": lambda m, x: m.ppermute(x, "j", [(0, 1), (2, 1)]),
    "ppermute: an index too large": lambda m, x: m.ppermute(x, "j", [(0, 4)]),
    "ppermute: not a list": lambda m, x: m.ppermute(x, "j", {0: 1}),
    "pshuffle: not a permutation": lambda m, x: m.pshuffle(x, "j", [0, 0, 1, 2]),
    "pshuffle: too short": lambda m, x: m.pshuffle(x, "j", [1, 0]),
    "pbroadcast: a source too large": lambda m, x: m.pbroadcast(x, "j", 4),
    "pbroadcast: a source that is no integer": lambda m, x: m.pbroadcast(x, "j", 1.5),
    "psum: unreduced over one axis of two": lambda m, x: m.psum(
        jax.lax.pcast(x, "j", to="unreduced"), ("i", "j")
    ),
    "ppermute: unreduced": lambda m, x: m.ppermute(
        jax.lax.pcast(x, "j", to="unreduced"), "j", [(0, 1)]
    ),
    "all_gather: unreduced": lambda m, x: m.all_gather(jax.lax.pcast(x, "j", to="unreduced"), "j"),
    "all_to_all: unreduced": lambda m, x: m.all_to_all(
        jax.lax.pcast(x[:4], "j", to="unreduced"), "j", 0, 0
    ),
    "pmean: keys": lambda m, x: m.pmean(jax.random.key(0), "j"),
    "psum: no axis name": lambda m, x: m.psum(x),
    "psum: groups by position": lambda m, x: m.psum(x, "j", [[0, 1], [2, 3]]),
}


def outcome(name: str, face: faces.Face, check_vma: bool) -> type[BaseException] | None:
    """The type of what is raised while tracing and lowering."""
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("i", "j"))

    def block(x: jax.Array) -> Any:
        return jax.tree.map(lambda y: jnp.asarray(y)[None], WRONG[name](face.module, x[0]))

    f = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    with face.context():
        try:
            jax.jit(f).lower(jax.ShapeDtypeStruct((8, 8, 4), np.float32))
        except Exception as error:
            return type(error)
    return None


# Where the faces differ: by purpose, and with what they raise instead.
UNKNOWN = "jax.lax has an assertion, or another axis in the message"
DIFFERENT: dict[str, tuple[str, type[BaseException] | None]] = {
    "psum over an unknown axis": (UNKNOWN, NameError),
    "pmax over an unknown axis": (UNKNOWN, NameError),
    "ppermute over an unknown axis": (UNKNOWN, NameError),
    "psum: groups leave one out": ("jax.lax refuses groups under check_vma", ValueError),
    "psum: an axis twice": ("JAX 0.12 reduces over it twice", ValueError),
    "all_gather: groups and `to`": ("JAX before 0.12 also without check_vma", None),
    "psum_scatter: no such dimension": ("JAX before 0.12: IndexError", ValueError),
    "all_to_all: no such dimension": ("JAX before 0.12: IndexError", ValueError),
    "ppermute: an index too large": ("jax.lax: IndexError", ValueError),
    "pbroadcast: a source too large": ("jax.lax has no pbroadcast on CPU", ValueError),
    "pbroadcast: a source that is no integer": ("jax.lax has no pbroadcast on CPU", TypeError),
}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name, check_vma, tally):
    ours, stock = (outcome(name, face, check_vma) for face in (faces.FABRIC, faces.STOCK))
    if ours is not stock:
        assert name in DIFFERENT, f"{ours} instead of jax.lax's {stock}"
        assert ours is DIFFERENT[name][1]
    tally["jaxfabric.lax with jax.lax, wrong calls"] += 1


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_with_the_switch_on(name, tally):
    ours, stock = outcome(name, faces.DROPIN, True), outcome(name, faces.STOCK, True)
    if ours is not stock:
        assert name in DIFFERENT, f"{ours} instead of jax.lax's {stock}"
        assert ours is DIFFERENT[name][1]
    tally["jax.lax, switched on with jax.lax, wrong calls"] += 1
