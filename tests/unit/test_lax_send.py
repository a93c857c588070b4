"""psend and precv: a ppermute in two parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_cuda_lowering import collectives, entries, lower
from test_lax_fused import numbers, over
from test_lax_lowering import custom_calls

from jaxfabric import lax, runtime

PAIRS = [(0, 1), (3, 0)]
X = numbers(4, 6)
RECEIVED = np.stack([X[3], X[0], 0 * X[0], 0 * X[0]])


def exchange(x, axes="i", pairs=PAIRS):
    token = lax.psend(x, axes, pairs)
    y = jnp.sin(x)  # Meanwhile.
    return lax.precv(token, jax.typeof(x), axes, pairs) + 0 * y


def test_values():
    def f(x):
        trees = lax.psend({"a": x, "b": x[:, :2].astype(jnp.int8)}, "i", PAIRS)
        small = jax.ShapeDtypeStruct((1, 2), np.int8)
        nothing = lax.precv(lax.psend(x, "i", []), x, "i", [])
        keys = jax.random.split(jax.random.key(3), 4)[jax.lax.axis_index("i")]
        key = lax.precv(lax.psend(keys, "i", PAIRS), keys, "i", PAIRS)
        moved = lax.ppermute(keys, "i", PAIRS)
        return (
            exchange(x),
            lax.precv(trees["a"], x, "i", [(0, 1), (-1, 0)]),
            lax.precv(trees["b"], small, "i", PAIRS),
            nothing,
            (jax.random.key_data(key) == jax.random.key_data(moved)).all()[None],
        )

    both = [jax.jit(over(f, P("i"), P("i"), check_vma=check)) for check in (True, False)]
    for program in both:
        whole, again, small, nothing, same = program(X)
        np.testing.assert_array_equal(whole, RECEIVED)
        np.testing.assert_array_equal(again, RECEIVED)
        np.testing.assert_array_equal(small, RECEIVED[:, :2])
        assert not nothing.any()
        assert same.all()
    calls = custom_calls(both[0].lower(X).as_text())
    assert sum(call["target"] == "jaxfabric_permute_start" for call in calls) == 4


def test_transforms():
    batch = numbers(3, 4, 6)

    def f(x):
        rows = jax.vmap(exchange)(x)
        own_axis = jax.vmap(lambda v: exchange(v, "k"), axis_name="k")(X)
        steps = jax.lax.fori_loop(0, 3, lambda _, v: exchange(v), x[0])
        return rows, own_axis[None], jax.checkpoint(exchange)(x[0]), steps

    specs = P(None, "i"), P("i"), P("i"), P("i")
    rows, own_axis, remade, steps = jax.jit(over(f, P(None, "i"), specs))(batch)
    for got, x in [*zip(rows, batch, strict=True), (remade, batch[0])]:
        np.testing.assert_array_equal(got, np.stack([x[3], x[0], 0 * x[0], 0 * x[0]]))
    for got in own_axis:
        np.testing.assert_array_equal(got, RECEIVED)
    assert not steps.any()  # 3 to 0 to 1, and on to nobody.


def test_one_rank_and_several_axes():
    f = over(lambda x: exchange(x, "i", [(0, 0)]), P("i"), P("i"), {"i": 1})
    np.testing.assert_array_equal(jax.jit(f)(X[:1]), X[:1])
    axes = ("j", "i")
    f = over(lambda x: exchange(x, axes, PAIRS), P(axes), P(axes), {"i": 2, "j": 2})
    np.testing.assert_array_equal(jax.jit(f)(X), RECEIVED)
    np.testing.assert_array_equal(over(exchange, P("i"), P("i"))(X), RECEIVED)  # Without jit.


ERRORS = {
    "another permutation": (
        lambda x: lax.precv(lax.psend(x, "i", PAIRS), x, "i", [(0, 1)]),
        (ValueError, r"precv over i with perm=\[\(0, 1\)\] gets the token of another psend"),
    ),
    "another shape": (
        lambda x: lax.precv(lax.psend(x, "i", PAIRS), x[0], "i", PAIRS),
        (ValueError, "gets the token of a psend of float32"),
    ),
    "another token": (
        lambda x: lax.precv(jax.lax.create_token(), x, "i", PAIRS),
        (TypeError, "precv needs what psend returned as `token`, got"),
    ),
    "twice": (
        lambda x: lax.precv(lax.psend(x, "i", [(0, 1), (0, 2)]), x, "i", [(0, 1), (0, 2)]),
        (ValueError, "must be unique"),
    ),
    "no axis": (lambda x: lax.psend(x, "k", PAIRS), (NameError, "k")),
    "derivative": (
        lambda x: jax.grad(lambda v: exchange(v).sum())(x),
        (NotImplementedError, "ifferentiation rule"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    f, (kind, message) = ERRORS[name]
    with pytest.raises(kind, match=message):
        jax.jit(over(f, P("i"), P("i"))).lower(X)


def test_on_gpus(monkeypatch):
    def text(platforms=("cuda",)):
        return lower(
            lambda x: exchange(x, "j"),
            model.grid({"i": 2, "j": 4}),
            jax.ShapeDtypeStruct((8, 6), np.float32),
            platforms,
        )

    assert len(collectives(text())) == 1
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")
    halves = text()
    start, done = custom_calls(halves)
    assert (start["target"], done["target"]) == ("jaxfabric_permute_start", "jaxfabric_done")
    (entry,) = entries(halves)
    assert (entry.runner, entry.call) == ("jaxfabric", "ppermute float32[6]")
    # For several platforms a call is whole.
    assert [c["target"] for c in custom_calls(text(("cpu", "cuda")))] == ["jaxfabric_permute"] * 2
