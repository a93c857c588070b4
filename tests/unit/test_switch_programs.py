"""Whole programs of existing code: what JAX has around the collectives, with the switch on."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
import support
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfabric
from jaxfabric import _compat, dropin

LINE = {"i": 8}
CUT = P("i")
X = np.arange(8, dtype=np.float32)


def mapped(f, in_specs=CUT, out_specs=CUT):
    """On a line of eight devices."""
    mesh = model.grid(LINE)
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def calls(jitted, *args):
    return jitted.lower(*args).as_text().count("custom_call @jaxfabric_")


def on_and_off(make, *args, least=1):
    """What a program gives with the switch on, which has to be what it gives with it off."""
    want = jax.tree.map(np.asarray, make()(*args))
    with jaxfabric.enabled():
        f = make()
        got = jax.tree.map(np.asarray, f(*args))
        assert calls(f, *args) >= least
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    return got


def system():
    """A positive definite matrix, cut along its rows, and a right side."""
    a = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return a @ a.T + 8 * np.eye(8, dtype=np.float32), X - 3


def conjugate_gradients(apply, b):
    return jax.scipy.sparse.linalg.cg(apply, b)[0]


def custom_solve(apply, b):
    """Jacobi's iteration, of which JAX differentiates nothing."""

    def solve(apply, b):
        return lax.fori_loop(0, 60, lambda _, x: x + (b - apply(x)) / 24, b / 24)

    return lax.custom_linear_solve(apply, b, solve, symmetric=True)


@pytest.mark.parametrize("solve", [conjugate_gradients, custom_solve])
def test_linear_solvers_around_a_collective(solve):
    a, b = system()

    def solution(rows, b):
        # Each rank has one row, which is a column too.
        def apply(v):
            return lax.psum(rows[0] * v[lax.axis_index("i")], "i")

        return solve(apply, b)

    def make():
        f = mapped(solution, in_specs=(CUT, P()), out_specs=P())

        def loss(rows, b):
            x = f(rows, b)
            return (x**2).sum(), x

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    (of_a, of_b), x = on_and_off(make, a, b, least=2)
    inverse = np.linalg.inv(a)
    np.testing.assert_allclose(x, inverse @ b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_b, inverse @ (2 * x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_a, np.outer(x, -of_b), rtol=1e-4, atol=1e-5)


def test_pmap():
    def everything(v):
        rank = lax.axis_index("i")
        return {
            "sum": lax.psum(v, "i"),
            "groups": lax.psum(v * rank, "i", axis_index_groups=[[0, 7, 2, 4], [1, 3, 5, 6]]),
            "gathered": lax.all_gather(v, "i"),
            "in groups": lax.all_gather(v, "i", axis_index_groups=[[4, 1], [0, 2], [3, 5], [7, 6]]),
            "moved": lax.ppermute(v, "i", [(k, (k + 1) % 8) for k in range(8)]),
            "scattered": lax.psum_scatter(jnp.outer(jnp.arange(8.0), v), "i"),
            "exchanged": lax.all_to_all(jnp.outer(jnp.arange(8.0), v), "i", 0, 0),
            "mapped": jax.vmap(lambda u: lax.pmax(u, "i"))(v),
            "gradient": jax.grad(lambda u: (lax.psum(u**2, "i") * u).sum())(v),
        }

    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    got = on_and_off(lambda: jax.pmap(everything, axis_name="i"), x, least=10)
    np.testing.assert_array_equal(got["sum"][5], x.sum(0))
    np.testing.assert_array_equal(got["in groups"][2], x[[0, 2]])


def test_nans_are_found():
    def make():
        return mapped(lambda v: lax.psum(jnp.log(v), "i") + v)

    fine, wrong = X + 1, X - 3
    want = np.log(fine).sum() + fine
    with jaxfabric.enabled(), jax.debug_nans(True):
        f = make()
        for _ in range(2):
            np.testing.assert_allclose(f(fine), want, rtol=1e-6)
            with pytest.raises(FloatingPointError, match="nan"):
                f(wrong)
        assert calls(f, fine) == 1


POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("total"),
}


def test_policies_of_checkpoint():
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    def layer(w, v):
        total = checkpoint_name(lax.psum(jnp.sin(v) @ w, "i"), "total")
        return (jnp.tanh(lax.ppermute(total, "i", [(0, 1), (1, 0)]) + v) @ w).sum()

    def gradients(w, v):
        return {
            name: jax.grad(jax.checkpoint(layer, policy=policy), argnums=(0, 1))(w, v)
            for name, policy in POLICIES.items()
        }

    def make():
        return mapped(gradients, in_specs=(P(), CUT))

    x = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
    got = on_and_off(make, w, x, least=4)
    for gradient in got.values():
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), gradient, got["everything"])


def test_what_was_made_under_one_state_runs_under_the_other():
    """Compiled, differentiated, exported: what has been lowered stays, what has not follows."""
    f = mapped(lambda v: lax.psum(v**2, "i") * v)
    want = np.asarray(f(X))
    with jaxfabric.enabled():
        compiled = f.lower(X).compile()
        _, backward = jax.vjp(f, X)
        exported = jax.export.export(f, disabled_checks=jaxfabric.export_checks())(X)
        traced = f.trace(X)
    assert "jaxfabric_all_reduce" in compiled.as_text()
    np.testing.assert_array_equal(compiled(X), want)
    x = jax.device_put(X, NamedSharding(model.grid(LINE), CUT))
    np.testing.assert_array_equal(jax.jit(exported.call)(x), want)
    assert "jaxfabric" not in traced.lower().as_text()
    (gradient,) = backward(X)
    with jaxfabric.enabled():
        np.testing.assert_allclose(backward(X)[0], gradient)
        np.testing.assert_array_equal(compiled(X), want)
        with jaxfabric.enabled(None):
            assert calls(f, X) == 0
            with jaxfabric.enabled():
                assert calls(f, X) == 1
            assert calls(f, X) == 0
        assert calls(f, X) == 1


@pytest.mark.parametrize("first", [None, "lax"])
@pytest.mark.usefixtures("persistent_cache")
def test_the_persistent_cache_keeps_the_states_apart(first):
    def runs(mode):
        jax.clear_caches()
        with jaxfabric.enabled(mode):
            f = mapped(lambda v: lax.psum(v, "i") + v)
            np.testing.assert_array_equal(f(X), X.sum() + X)
            assert ("jaxfabric_all_reduce" in f.lower(X).compile().as_text()) == (mode is not None)

    other = "lax" if first is None else None
    for mode in (first, other, first, other):
        runs(mode)


@pytest.mark.parametrize("context", [contextlib.nullcontext, jax.disable_jit])
def test_without_jit(context):
    @partial(jax.shard_map, mesh=model.grid(LINE), in_specs=CUT, out_specs=CUT)
    def f(v):
        return lax.psum(v, "i") + lax.all_gather(lax.ppermute(v, "i", [(0, 1)]), "i").sum() + v

    report = jaxfabric.report
    with jaxfabric.enabled(), context():
        np.testing.assert_array_equal((jax.jit(f) if context is jax.disable_jit else f)(X), 28 + X)
    # One program each.
    assert any(e.runner == "jaxfabric" and "ppermute" in e.call for e in report().entries)


def second_thread_waits(begin, arrive):
    """Whether who calls `arrive` while `begin(during)` calls `during` comes after it."""
    order = []

    def second():
        arrive()
        order.append("second")

    def during(*_):
        if not order:
            thread.start()
            thread.join(0.2)
            order.append("first")

    thread = threading.Thread(target=second)
    begin(during)
    thread.join()
    return order == ["first", "second"]


def test_threads_that_turn_it_on_at_once_wait_for_all_of_it(monkeypatch):
    monkeypatch.setattr(dropin, "_installed", False)

    def begin(during):
        monkeypatch.setattr(dropin, "_replace_lowerings", during)
        dropin._install()

    assert second_thread_waits(begin, dropin._install)
    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)

    def compiles():
        listeners[0]("jaxpr_to_mlir_module_duration", 0.1)

    def starts(during):
        _compat.before_first_compilation(during)
        compiles()

    assert second_thread_waits(starts, compiles)


@pytest.mark.parametrize(
    ("version", "warnings"),
    [((0, 10, 1), 1), ((0, 10, 2), 0), ((0, 11, 2), 0), ((0, 12, 9), 0), ((0, 13, 0), 1)],
)
def test_a_version_of_jax_that_is_not_tested_is_said_once(monkeypatch, caplog, version, warnings):
    monkeypatch.setattr(dropin, "_installed", False)
    monkeypatch.setattr(dropin, "_replace_lowerings", lambda: None)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    for mode in ("lax", None, "hlo", "lax"):
        with jaxfabric.enabled(mode):
            pass
    said = [record.getMessage() for record in caplog.records if "tested with" in record.message]
    assert len(said) == warnings
    for text in said:
        assert f"JAX 0.10.2 to 0.12, this is {jax.__version__}" in text


def test_digits_learn_the_same(monkeypatch):
    """The example, with the collectives of jax.lax in the place of its own."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(support.ROOT / "examples")
    import digits_parallel as digits

    monkeypatch.setattr(digits, "EPOCHS", 2)
    data, mesh = digits.load_data(), jax.make_mesh((2,), ("ranks",))

    def losses(ranks):
        monkeypatch.setattr(digits, "ON_RANKS", ranks)
        found = []
        digits.train_on_ranks(mesh, data, lambda *line: found.append(line[1:]))
        return np.array(found)

    own = digits.ON_RANKS
    stock = digits.Collectives(
        **{
            name: partial(getattr(lax, f.func.__name__), **f.keywords)
            for name, f in vars(own).items()
        }
    )
    off = losses(stock)
    with jaxfabric.enabled():
        on = losses(stock)
    lines = [e for e in jaxfabric.report().entries if e.source.startswith("digits_parallel.py")]
    assert {e.call.split()[0] for e in lines} == {"all_gather", "psum_scatter", "psum"}
    assert {e.runner for e in lines} == {"jaxfabric"}
    np.testing.assert_allclose(on, off, rtol=1e-5)
    np.testing.assert_array_equal(on, losses(own))
    assert on[-1, 0] < on[0, 0]
