"""A program for GPUs as a whole runs on the fabric, or is XLA's."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax._src.lax import parallel
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from test_cuda_lowering import GRID, entries, lower
from test_lax_lowering import custom_calls

import jaxfabric
from jaxfabric import _program, lax, runtime

pytestmark = pytest.mark.usefixtures("gpus")
LARGE = jax.ShapeDtypeStruct((8, 4096, 4096), np.float32)  # 64 MiB of each rank.


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")


def runs(f, x=LARGE, **options):
    """Who runs each call of f, and why; checked against the program."""
    text = lower(f, x=x, **options)
    found = entries(text)
    targets = [call["target"] for call in custom_calls(text)]
    assert len([t for t in targets if not t.endswith("_done")]) == sum(
        entry.runner == "jaxfabric" for entry in found
    )
    return [(entry.runner, entry.reason) for entry in found]


def small(x):
    return lax.psum(x[:8, :8], "j")


@jax.jit
def inner(x):
    return lax.all_gather(lax.pmax(x, "j"), "j")[0]


@jax.custom_vjp
def custom(x):
    return lax.psum(x, "j")


custom.defvjp(lambda x: (custom(x), None), lambda _, ct: (ct,))

# name: a program whose last call is large.
WITH_A_LARGE_CALL = {
    "next to each other": lambda x: (small(x), lax.psum(x, "j")),
    "in an inner jit": lambda x: (small(x), inner(x)),
    "in a loop": lambda x: (
        small(x),
        jax.lax.fori_loop(0, 2, lambda _, y: lax.pmin(y, "j"), x),
    ),
    "in a branch": lambda x: (
        small(x),
        jax.lax.cond(x[0, 0] > 0, lambda y: lax.psum(y, "j"), lambda y: y, x),
    ),
    "in a custom derivative": lambda x: (small(x), custom(x)),
    "in what is done again": lambda x: (small(x), jax.checkpoint(custom)(x)),
    "of a gradient": lambda x: (
        small(x),
        jax.grad(lambda y: lax.psum(y, "j").sum())(x),
    ),
}


@pytest.mark.parametrize("name", WITH_A_LARGE_CALL)
def test_one_large_call_leaves_all_to_xla(name):
    first, *others = runs(WITH_A_LARGE_CALL[name])
    assert {runner for runner, _ in (first, *others)} == {"XLA"}
    assert re.search(
        r"the program has \w+ float32\[4096,4096\] at test_gpu_choice.py:\d+: "
        r"(64|256) MiB is not below 64 MiB, the limit for \w+ on 4 GPUs",
        first[1],
    )
    assert any(reason.startswith(("64 MiB is not", "256 MiB is not")) for _, reason in others)


def test_small_calls_run_on_the_fabric():
    found = runs(lambda x: (small(x), lax.all_gather(x[:4], "j")))
    assert found == [
        ("jaxfabric", "256 bytes is below 64 MiB, the limit for all_reduce on 4 GPUs"),
        ("jaxfabric", "256 KiB is below 64 MiB, the limit for all_gather on 4 GPUs"),
    ]


def test_limits_are_a_setting(monkeypatch):
    monkeypatch.setattr(_program, "limits", lambda: _program._parsed("*=65M"))
    ((runner, reason),) = runs(lambda x: lax.psum(x, "j"))
    assert (runner, reason[-12:]) == ("jaxfabric", "(gpu_limits)")


def test_the_environment_counts_without_initialize(monkeypatch):
    monkeypatch.setenv("JAXFABRIC_GPU_LIMITS", "all_reduce/8=0")
    monkeypatch.setattr(runtime, "_session", None)
    assert _program.limits()[0].op == "all_reduce"


def test_calls_of_jax_count_too():
    def f(x):
        return small(x), jax.lax.pmax(x[0], "j")

    ((runner, reason),) = runs(f)
    assert runner == "XLA"
    assert re.search(r"jax.lax's pmax at \S+: the switch, jaxfabric.enable\(\), is off", reason)
    with jaxfabric.enabled():
        assert [runner for runner, _ in runs(f)] == ["jaxfabric"] * 2


def test_what_the_fabric_does_not_take_leaves_the_rest_to_xla():
    def f(x):
        return small(x), jax.lax.psum(x[:, 0].astype(jnp.int4), "j")

    with jaxfabric.enabled():
        (_, first), (_, second) = found = runs(f)
    assert [runner for runner, _ in found] == ["XLA"] * 2
    assert "the fabric does not reduce int4" in first
    assert second == "the fabric does not reduce int4"


def test_collectives_of_one_rank_are_none():
    mesh = model.grid({"i": 8, "j": 1})
    found = runs(lambda x: (lax.psum(x[0], "i"), jax.lax.psum(x, "j")), mesh=mesh)
    assert [runner for runner, _ in found] == ["jaxfabric"]


def test_axes_left_to_the_compiler():
    def f(x):
        return lax.psum(x[0, 0], "j")

    mesh = model.grid(GRID)
    spec = PartitionSpec("j")

    part = jax.shard_map(
        f, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), axis_names={"j"}, check_vma=False
    )
    text = jax.jit(part).trace(LARGE).lower(lowering_platforms=("cuda",)).as_text()
    assert not custom_calls(text)
    assert "the axes ['i'] of its mesh are left to the compiler" in entries(text)[0].reason


def test_what_xla_cannot_run_takes_the_rest_along():
    """The others have 16 ranks, which the table does not know."""
    mesh = AbstractMesh((16,), ("j",), axis_types=(AxisType.Auto,))
    ones = jnp.ones(16, np.int32)

    def f(x):
        y = x[:, 0]
        return lax.psum(y, "j"), lax.ragged_all_to_all(
            y, y, ones * 0, ones, ones * 0, ones, axis_name="j"
        )

    x = jax.ShapeDtypeStruct((16, 16, 8), np.float32)
    (psum, ragged) = runs(f, x, mesh=mesh)
    assert (psum[0], ragged[0]) == ("jaxfabric", "jaxfabric")
    assert re.search("ragged_all_to_all float32.* at .*: XLA cannot run it", psum[1])


def test_a_start_left_to_xla_is_that_of_jax():
    def f(x):
        return parallel.all_gather_start(x, "j").done(), jax.lax.psum(x[0], "j")

    with jaxfabric.enabled():
        text = lower(f, x=LARGE)
        assert [entry.runner for entry in entries(text)] == ["XLA"] * 2
    assert "jaxfabric" not in re.sub("@jit.*", "", text)
    assert text == lower(f, x=LARGE)


def test_halves_of_a_program_for_several_platforms_are_left_to_xla():
    if jax.__version_info__ < (0, 11):
        pytest.skip("this JAX cannot lower them for several platforms")

    def f(x):
        return parallel.psum_scatter_start(x, "j", tiled=True).done(), small(x)

    with jaxfabric.enabled():
        text = lower(f, x=LARGE, platforms=("cpu", "cuda"))
    assert "_start(" not in text.replace("reduce-scatter-start", "")
    assert text.count("@jaxfabric_all_reduce") == 1  # On CPUs, where nothing has to agree.


def test_every_collective_of_jax_is_known():
    """One that is not would be taken for none."""
    from jaxfabric import _compat

    names = {n.removesuffix("_p") for n in dir(parallel) if n.endswith("_p")}
    exchange = re.compile("psum|pmax|pmin|gather|scatter|all_to_all|permute|broadcast|psend|precv")
    halves = re.compile("_(start|done)$")
    found = {n for n in names if exchange.search(n) and not halves.search(n)}
    assert found <= {*_compat.LAX_COLLECTIVES}


def test_what_a_program_calls_often_is_looked_at_once(monkeypatch):
    looked_at = []
    described = _program.described
    monkeypatch.setattr(_program, "described", lambda e: looked_at.append(e.source) or described(e))
    f = jax.jit(small)
    for _ in range(8):
        f = jax.jit(lambda x, f=f: f(x) + f(x))
    ((runner, _),) = runs(f)
    assert runner == "jaxfabric"
    assert len(looked_at) == 1
