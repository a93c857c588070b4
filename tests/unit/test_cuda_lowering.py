"""What the collectives become in programs for GPUs: plain lowering, on every version of JAX."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax._src.lax import parallel
from test_lax_lowering import custom_calls

import jaxfabric
from jaxfabric import _ext, lax, runtime

GRID = {"i": 2, "j": 4}
X = jax.ShapeDtypeStruct((8, 16, 8), np.float32)
RAGGED = jnp.ones(4, np.int32)


def ragged(lax, x):
    more = {"axis_name": "j"}
    return lax.ragged_all_to_all(x[0], x[0] * 0, RAGGED * 4, RAGGED, RAGGED, RAGGED, **more)


# name: the call, and the target of the FFI.
CALLS = {
    "psum": (lambda lax, x: lax.psum(x, "j"), "all_reduce"),
    "pmax": (lambda lax, x: lax.pmax(x, ("i", "j")), "all_reduce"),
    "pmin": (lambda lax, x: lax.pmin(x, "i"), "all_reduce"),
    "all_gather": (lambda lax, x: lax.all_gather(x, "j"), "all_gather"),
    "psum_scatter": (
        lambda lax, x: lax.psum_scatter(x, "j", scatter_dimension=1, tiled=True),
        "reduce_scatter",
    ),
    "all_to_all": (lambda lax, x: lax.all_to_all(x, "j", 1, 1, tiled=True), "all_to_all"),
    "ragged_all_to_all": (ragged, "ragged_all_to_all"),
    "ppermute": (lambda lax, x: lax.ppermute(x, "j", [(0, 1), (2, 0)]), "permute"),
    "pbroadcast": (lambda lax, x: lax.pbroadcast(x, "j", 2), "broadcast"),
}


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")


def lower(f, mesh=None, x=X, platforms=("cuda",), **options):
    per_rank = model.per_rank(f, mesh or model.grid(GRID), **{"check_vma": False, **options})
    return jax.jit(per_rank).trace(x).lower(lowering_platforms=platforms).as_text()


def entries(text):
    """The report on the calls of the program that was lowered last."""
    del text
    last = jaxfabric.report().entries
    return last[max(i for i, entry in enumerate(last) if entry.number == 0) :]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("gpus")
def test_calls_are_those_of_cpus_without_a_position(name):
    call, target = CALLS[name]
    text = lower(lambda x: call(lax, x))
    (found,) = custom_calls(text)
    (same,) = custom_calls(lower(lambda x: call(lax, x), platforms=("cpu",)))
    assert found == same
    assert found["target"] == f"jaxfabric_{target}"
    abstract = lower(lambda x: call(lax, x), model.grid(GRID).abstract_mesh)
    (found,) = custom_calls(abstract)
    assert found["by_position"] == 1
    assert "partition_id" not in abstract
    (entry,) = entries(text)
    assert (entry.runner, entry.source.split(":")[0]) == ("jaxfabric", "test_cuda_lowering.py")
    assert re.search(r"below \d+ MiB, the limit for", entry.reason)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("gpus")
def test_the_switch_takes_the_calls_of_jax(name):
    call, target = CALLS[name]
    with jaxfabric.enabled():
        text = lower(lambda x: call(jax.lax, x))
    assert [c["target"] for c in custom_calls(text)] == [f"jaxfabric_{target}"]
    assert "jaxfabric" not in lower(lambda x: call(jax.lax, x))
    # In whole-program mode the pass over the compiled program decides.
    with jaxfabric.enabled("hlo"):
        assert "jaxfabric" not in lower(lambda x: call(jax.lax, x))


@pytest.mark.parametrize("name", CALLS)
def test_left_to_xla_it_is_the_call_of_jax(name):
    """Up to the transposes and reshapes around it, which are free or the same."""
    call, _ = CALLS[name]
    ours, own = (collectives(lower(lambda x, m=m: call(m, x))) for m in (lax, jax.lax))
    assert len(ours) == 1
    assert ours == own
    (entry,) = entries(ours)
    assert (entry.runner, entry.reason) == ("XLA", _ext.cuda_status())
    with jaxfabric.enabled():
        assert collectives(lower(lambda x: call(jax.lax, x))) == own


def collectives(text):
    """The collectives of a program with their groups: (op, groups)."""
    found = re.findall(
        r"(all_reduce|all_gather|reduce_scatter|ragged_all_to_all|all_to_all|collective_permute"
        r'|collective_broadcast)"?[(%].*?'
        r"(?:replica_groups|source_target_pairs) = (dense<.*?>|#.*?\]>)",
        text,
    )
    assert "jaxfabric" not in re.sub(r"loc\(.*|@jit.*", "", text)
    return found


def test_permute_with_axes_in_another_order_left_to_xla():
    pairs = [(k, (k + 1) % 8) for k in range(8)]
    (got,) = collectives(lower(lambda x: lax.ppermute(x, ("j", "i"), pairs)))
    rank = {4 * i + j: 2 * j + i for i in range(2) for j in range(4)}  # Of each position.
    position = {r: p for p, r in rank.items()}
    sent = {tuple(map(int, pair)) for pair in re.findall(r"\[(\d), (\d)\]", got[1])}
    assert sent == {(position[a], position[b]) for a, b in pairs}


def test_barrier_left_to_xla_waits_for_a_sum():
    text = lower(lambda x: jnp.cos(lax.barrier("j", jnp.sin(x))))
    order = ["stablehlo.sine", "optimization_barrier", "all_reduce", "stablehlo.cosine"]
    assert [text.index(op) for op in order] == sorted(text.index(op) for op in order)


@pytest.mark.usefixtures("gpus")
def test_barrier():
    text = lower(lambda x: lax.barrier("j", x))
    assert [c["target"] for c in custom_calls(text)] == ["jaxfabric_barrier"]
    assert "has_side_effect = true" in text


HALVES = {
    "psum": lambda x: parallel.psum_start(x, "j"),
    "all_gather": lambda x: parallel.all_gather_start(x, "j", axis=1),
    "psum_scatter": lambda x: parallel.psum_scatter_start(x, "j", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: parallel.all_to_all_start(x, "j", 1, 1, tiled=True),
    "ppermute": lambda x: parallel.ppermute_start(x, "j", [(0, 1), (2, 0)]),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.usefixtures("gpus")
def test_halves(name):
    def f(x):
        started = HALVES[name](x)
        y = jnp.tanh(x) @ jnp.ones((8, 8))
        return started.done().sum() + y

    with jaxfabric.enabled():
        text = lower(f, check_vma=name == "psum", x=X)
    start, done = custom_calls(text)
    assert start["target"].endswith("_start")
    assert done["target"] == "jaxfabric_done"
    assert done["site"] == start["site"]
    assert text.count("xui32>)") == 2  # The token: a result, and an operand.
    assert re.search(r"@jaxfabric_done\(%\w+(#0)?, %\w+#0, %\w+#0\)", text)
    assert "operand_index = 1" in text
    # The product is between them: it takes what a barrier after the start gives, and the token that
    # done takes is from a barrier after the product. Neither shares memory with a larger array.
    barrier = "optimization_barrier"
    order = [barrier, r"_start\(", barrier, "dot_general", barrier, "_done", barrier]
    assert re.search("(?s)" + ".*".join(order), text)


@pytest.mark.usefixtures("gpus")
def test_several_platforms():
    def calls(text):
        found = [(c["target"], c["label"]) for c in custom_calls(text)]
        assert text.count("stablehlo.case") >= 2
        return found

    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    both = ("cpu", "cuda")
    text = lower(lambda x: lax.psum(x, "j"), x=x, platforms=both)
    assert calls(text) == [("jaxfabric_all_reduce", "psum float32[4]")] * 2
    text = lower(lambda x: lax.psum(x, "j"), model.grid(GRID).abstract_mesh, x, both)
    assert text.count("partition_id") == 1
    with jaxfabric.enabled():
        text = lower(lambda x: jax.lax.all_gather(x, "j"), x=x, platforms=both)
        assert calls(text) == [("jaxfabric_all_gather", "all_gather float32[4]")] * 2


def test_without_cuda_a_program_for_several_platforms_runs_on_cpus():
    text = lower(lambda x: lax.psum(x, "j"), platforms=("cpu", "cuda"))
    assert len(custom_calls(text)) == 1
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.usefixtures("gpus")
def test_offsets_are_not_converted():
    for dtype, want in ((np.int32, "i32"), (np.int8, "i32"), (np.uint32, "i64")):
        index = RAGGED.astype(dtype)
        text = lower(
            lambda x, index=index: lax.ragged_all_to_all(
                x[0], x[0] * 0, index, index, index, index, axis_name="j"
            )
        )
        (types,) = re.findall(r"@jaxfabric_ragged.*: \((.*)\) ->", text)
        assert types.count(f"tensor<4x{want}>") == 4
        assert len(re.findall(r"stablehlo.convert.*tensor<4x", text)) == 4 * (dtype != np.int32)
