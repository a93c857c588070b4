"""Collectives in two halves: start returns at once, done waits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel

import jaxfabric

GRID = {"i": 2, "j": 4}
X = np.arange(8 * 8 * 3, dtype=np.float32).reshape(8, 8, 3) % 17

# name: start, and the same in one.
CASES = {
    "psum_scatter": (
        lambda x: parallel.psum_scatter_start(x, "j", tiled=True),
        lambda x: lax.psum_scatter(x, "j", tiled=True),
    ),
    "psum": (lambda x: parallel.psum_start(x, "j"), lambda x: lax.psum(x, "j")),
    "all_gather": (
        lambda x: parallel.all_gather_start(x, "j", axis=1),
        lambda x: lax.all_gather(x, "j", axis=1),
    ),
    "all_to_all": (
        lambda x: parallel.all_to_all_start(x, "j", 0, 1, tiled=True),
        lambda x: lax.all_to_all(x, "j", 0, 1, tiled=True),
    ),
    "ppermute": (
        lambda x: parallel.ppermute_start(x, "j", [(0, 1), (2, 0)]),
        lambda x: lax.ppermute(x, "j", [(0, 1), (2, 0)]),
    ),
    "int4": (
        lambda x: parallel.all_gather_start(x.astype(jnp.int4), "j"),
        lambda x: lax.all_gather(x.astype(jnp.int4), "j"),
    ),
}


def varying(x):
    missing = {"i", "j"} - jax.typeof(x).mat.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def run(f, x=X, check_vma=True):
    jitted = jax.jit(model.per_rank(lambda v: varying(f(v)), model.grid(GRID), check_vma=check_vma))
    return np.asarray(jitted(x)), jitted.lower(x).as_text()


@pytest.mark.parametrize("name", CASES)
def test_halves_give_what_the_whole_gives(name):
    start, whole = CASES[name]
    want, _ = run(whole)

    def halves(x):
        started = start(x)
        y = jnp.tanh(x) @ jnp.ones((3, 2))  # Meanwhile.
        return started.done() + (0 * y.sum()).astype(want.dtype)

    with jaxfabric.enabled():
        got, text = run(halves)
    np.testing.assert_array_equal(got, want)
    assert text.count("custom_call @jaxfabric_done") == 1
    assert text.count("_start(") == 1


def test_several_under_way_in_any_order_and_in_a_loop():
    def body(carry, _):
        first = parallel.all_gather_start(carry, "j")
        second = parallel.ppermute_start(carry, "j", [(k, (k + 1) % 4) for k in range(4)])
        third = parallel.all_gather_start(carry, "j")  # Equal to the first, and not the same.
        y = second.done() + third.done().sum(0) - first.done().sum(0)
        return y, None

    def f(x):
        return lax.scan(body, x, None, length=5)[0]

    with jaxfabric.enabled():
        got, text = run(f)
    assert text.count("_start(") == 3
    want = X.reshape(2, 4, 8, 3)[:, [3, 0, 1, 2]].reshape(X.shape)
    np.testing.assert_array_equal(got, want)


def test_without_the_switch_xla_has_both_halves():
    _, text = run(lambda x: parallel.all_gather_start(x, "j").done())
    assert "jaxfabric" not in text


def test_a_start_left_to_xla_is_waited_for_by_xla():
    def f(x):
        return parallel.psum_scatter_start(x.astype(jnp.int4), "j", tiled=True).done()

    with jaxfabric.enabled():
        jitted = jax.jit(model.per_rank(lambda v: varying(f(v)), model.grid(GRID)))
        text = jitted.lower(X).as_text()
    assert "jaxfabric" not in text
    entry = jaxfabric.report().entries[-1]
    assert (entry.runner, entry.reason) == ("XLA", "the fabric does not reduce int4")


def test_send_and_receive():
    """On a CPU only here: JAX has them for GPUs."""
    pairs = [(0, 1), (1, 3)]
    like = jax.ShapeDtypeStruct((8, 3), np.float32)

    def f(x):
        token = parallel.psend(x, "j", pairs)
        y = jnp.sin(x)  # Meanwhile.
        return parallel.precv(token, like, "j", pairs) + 0 * y

    with jaxfabric.enabled():
        got, text = run(f, check_vma=False)
    want, _ = run(lambda x: lax.ppermute(x, "j", pairs))
    np.testing.assert_array_equal(got, want)
    assert text.count("custom_call @jaxfabric_permute_start") == 1
    with pytest.raises(NotImplementedError, match="psend"):
        run(f, check_vma=False)

    def other(x):
        return parallel.precv(parallel.psend(x, "j", pairs), like, "j", [(0, 2)])

    with jaxfabric.enabled(), pytest.raises(ValueError, match="the token of another psend"):
        run(other, check_vma=False)
    with jaxfabric.enabled(), pytest.raises(ValueError, match="gets the token of a psend of"):
        run(
            lambda x: parallel.precv(
                parallel.psend(x, "j", pairs), jax.ShapeDtypeStruct((2,), np.float32), "j", pairs
            ),
            check_vma=False,
        )
