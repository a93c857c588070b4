"""The fused forms against what they stand for."""

from __future__ import annotations

import jax
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_lax_lowering import custom_calls

import jaxfabric
from jaxfabric import lax

ROWS, COLUMNS = P("i"), P(None, "i")
RANDOM = np.random.default_rng(7)


def numbers(*shape):
    # Sums of products of these are exact.
    return RANDOM.integers(-4, 5, shape).astype(np.float32)


X, W = numbers(32, 16), numbers(16, 8)


def over(f, in_specs, out_specs, shape=None, check_vma=True):
    mesh = model.grid(shape or {"i": 4})
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.shard_map(f, mesh=mesh, **options)


def gather_matmul(pieces=None, axes="i"):
    return lambda x, w: lax.all_gather_matmul(x, w, axes, pieces=pieces)


def matmul_scatter(pieces=None, axes="i"):
    return lambda x, w: lax.matmul_reduce_scatter(x, w, axes, pieces=pieces)


FORMS = {
    "all_gather_matmul": (gather_matmul, (ROWS, COLUMNS), COLUMNS),
    "matmul_reduce_scatter": (matmul_scatter, (COLUMNS, ROWS), ROWS),
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("pieces", [1, 2])
def test_its_collectives_have_the_line_of_the_call(form, pieces):
    make, *specs = FORMS[form]
    before = {*jaxfabric.report().entries}
    jax.jit(over(make(pieces), *specs)).lower(numbers(16, 8), numbers(8, 8))
    new = {*jaxfabric.report().entries} - before
    assert {entry.source.partition(":")[0] for entry in new} == {"test_lax_fused.py"}


@forms
@pytest.mark.parametrize(
    ("pieces", "check_vma"), [(None, True), (4, True), (2, False)], ids=["whole", "4", "untyped"]
)
def test_values_and_gradients(form, pieces, check_vma):
    make, *specs = FORMS[form]
    f = over(make(pieces), *specs, check_vma=check_vma)
    np.testing.assert_array_equal((f if check_vma else jax.jit(f))(X, W), X @ W)
    ct = numbers(32, 8)
    for wrapped in (f, jax.checkpoint(f))[: 1 + (pieces == 4)]:
        gradients = jax.jit(jax.grad(lambda x, w: (wrapped(x, w) * ct).sum(), (0, 1)))(X, W)  # noqa: B023
        np.testing.assert_array_equal(gradients[0], ct @ W.T)
        np.testing.assert_array_equal(gradients[1], X.T @ ct)


@forms
def test_halves_are_under_way_beside_the_products(form):
    make, *specs = FORMS[form]
    text = jax.jit(over(make(2), *specs)).lower(X, W).as_text()
    targets = [call["target"] for call in custom_calls(text)]
    assert sum(target.endswith("_start") for target in targets) == 2
    assert text.count("@jaxfabric_done") == 2
    starts = text.index("_start("), text.rindex("_start(")
    if form == "all_gather_matmul":
        assert starts[1] < text.index("dot_general")
        assert text.index("_done(") < text.index("dot_general") < text.rindex("_done(")
    else:
        assert starts[0] < text.rindex("dot_general") < starts[1] < text.index("_done(")
    text = jax.jit(over(make(1), *specs)).lower(X, W).as_text()
    assert "_start(" not in text


def test_pieces_by_default_are_not_small():
    def pieces(rows, width):
        shapes = [
            jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4 * rows, width), (width, 8))
        ]
        f = jax.jit(over(gather_matmul(), (ROWS, COLUMNS), COLUMNS))
        return f.lower(*shapes).as_text().count("@jaxfabric_done") or 1

    assert pieces(64, 1024) == 4
    assert pieces(63, 1040) == 1
    assert pieces(66, 1024) == 2
    assert pieces(32, 1024) == 2
    assert pieces(16, 1024) == 1


@forms
def test_weights_that_are_the_same_on_all_ranks(form):
    """Their gradient is the sum over the ranks."""
    make, (x_spec, _), _ = FORMS[form]
    w = numbers(16, 8) if form == "all_gather_matmul" else numbers(4, 8)
    f = over(make(2), (x_spec, P()), P("i"))
    n = 4 if form == "all_gather_matmul" else 1
    got = jax.grad(lambda w: f(X, w).sum())(w)
    want = sum(
        (X if n == 4 else X[:, 4 * r : 4 * r + 4]).T @ np.ones((32, 8), np.float32)
        for r in range(4)
    )
    np.testing.assert_array_equal(got, want)


@forms
def test_batches(form):
    make, specs, out = FORMS[form]
    batch = numbers(3, 32, 16)
    wide = tuple(P(None, *spec) for spec in (*specs, out))
    f = over(jax.vmap(make(2)), wide[:2], wide[2])
    ws = numbers(3, 16, 8)
    np.testing.assert_array_equal(jax.jit(f)(batch, ws), batch @ ws)
    f = over(jax.vmap(make(2), (0, None)), (wide[0], specs[1]), wide[2])
    np.testing.assert_array_equal(jax.jit(f)(batch, W), batch @ W)
    got = jax.jit(jax.grad(lambda w: f(batch, w).sum()))(W)
    np.testing.assert_array_equal(got, batch.sum((0, 1))[:, None] * np.ones(8, np.float32))


def test_ranks_of_a_vmap():
    x, w = X.reshape(4, 8, 16), numbers(4, 16, 8)
    got = jax.vmap(gather_matmul(2), axis_name="i")(x, w)
    np.testing.assert_array_equal(got, X @ w)
    x, w = numbers(4, 8, 4), numbers(4, 4, 8)
    got = jax.vmap(matmul_scatter(2), axis_name="i")(x, w)
    np.testing.assert_array_equal(got.reshape(8, 8), (x @ w).sum(0))


def test_two_axes():
    shape, both = {"i": 2, "j": 4}, ("j", "i")
    f = over(gather_matmul(2, both), (P(both), P(None, both)), P(None, both), shape)
    np.testing.assert_array_equal(jax.jit(f)(X, W), X @ W)
    f = over(matmul_scatter(2, both), (P(None, both), P(both)), P(both), shape)
    np.testing.assert_array_equal(jax.jit(f)(X, W), X @ W)
    # Another axis goes along.
    f = over(gather_matmul(2, "j"), (P(("i", "j")), P(None, "j")), P("i", "j"), shape)
    np.testing.assert_array_equal(jax.jit(f)(X, W), X @ W)


ERRORS = {
    "vector": (lambda x: lax.all_gather_matmul(x[0], x, "i"), r"\(16,\) and \(8, 16\)"),
    "inner size": (lambda x: lax.matmul_reduce_scatter(x, x, "i"), r"needs x \[m, k\] and w"),
    "rows": (lambda x: lax.matmul_reduce_scatter(x[:6], x.T, "i"), "6 rows of x cannot be dealt"),
    "pieces": (lambda x: lax.all_gather_matmul(x, x.T, "i", pieces=3), "pieces=3.*the 8 rows"),
    "no pieces": (lambda x: lax.matmul_reduce_scatter(x, x.T, "i", pieces=0), "pieces=0"),
    "norm": (
        lambda x: lax.all_reduce_rms_norm(x, x, x[:, 0], "i"),
        r"\(8, 16\), \(8, 16\) and \(8,\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    f, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        over(f, ROWS, P("i"))(X)


def test_integers_are_not_normalised():
    with pytest.raises(TypeError, match="int32: use a float type"):
        over(lambda x: lax.all_reduce_rms_norm(x, x, x[0], "i"), ROWS, P())(X.astype(np.int32))
