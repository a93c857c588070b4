"""ragged_all_to_all between processes: tokens to their experts and back, and mistakes."""

from __future__ import annotations

import pytest
from rank_scripts import run, succeeds

pytestmark = pytest.mark.timeout(180)

DISPATCH = """
WIDTH = 24

def dispatch(x, expert):
    "Sends each token to the rank of its expert, doubles it there, and brings it back."
    tokens = x.shape[0]
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=n)
    start = jnp.cumsum(sizes) - sizes
    exchange = lambda v: lax.all_to_all(v, "i", 0, 0, tiled=True)
    received = exchange(sizes)
    there = jnp.cumsum(received) - received
    inbox = lax.ragged_all_to_all(
        x[order], jnp.zeros((n * tokens, WIDTH)), start, sizes, exchange(there), received,
        axis_name="i")
    outbox = lax.ragged_all_to_all(
        2 * inbox, jnp.zeros_like(x), there, received, exchange(start), sizes, axis_name="i")
    return jnp.zeros_like(x).at[order].set(outbox), received

f = spread(dispatch)
loss = spread(lambda x, e: jax.grad(lambda x: (dispatch(x, e)[0] ** 2).sum() / 2)(x))
"""

VALUES = """
for tokens in (1, 30, 20000):
    for seed in range(3):
        rng = [np.random.default_rng((seed, rank)) for rank in range(n)]
        # All tokens of a launch to one expert, then to any.
        experts = [np.full(tokens, 1 + seed) if seed < 2 else r.integers(0, n, tokens) for r in rng]
        experts = [e.astype(np.int32) % n for e in experts]
        tokens_of = [r.integers(-9, 9, (tokens, WIDTH)).astype(np.float32) for r in rng]
        x, e = array(lambda rank: tokens_of[rank]), array(lambda rank: experts[rank])
        y, received = f(x, e)
        same(y, lambda rank: 2 * tokens_of[rank])
        same(received, lambda rank: [np.sum(other == rank) for other in experts])
        same(loss(x, e), lambda rank: 4 * tokens_of[rank])
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_tokens_go_to_their_experts_and_back(tmp_path, devices):
    succeeds(run(tmp_path, DISPATCH + VALUES, devices=devices))


MISTAKE = """
x = array(lambda rank: np.ones((100, 3), np.float32))
sizes = lambda rank: np.full(n, 7 if rank == n - 1 else 5, np.int32)
zeros = array(lambda rank: np.zeros(n, np.int32))
f = spread(lambda x, *m: lax.ragged_all_to_all(x, x, *m, axis_name="i"))
try:
    jax.block_until_ready(f(x, zeros, array(sizes), zeros, array(lambda rank: np.full(n, 5))))
except Exception as error:
    text = str(error)
    assert "ranks disagree: ragged_all_to_all float32[100,3] at " in text, text
    assert "recv_sizes[" in text and "is 5, on rank" in text, text
    assert text.count("is 7") == 1, text
else:
    raise AssertionError("no error")
"""


def test_sizes_that_differ_are_an_error_in_every_process(tmp_path):
    succeeds(run(tmp_path, MISTAKE))
