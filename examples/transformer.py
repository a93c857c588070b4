"""A small decoder-only transformer, for one device or for many: the caller says how it is cut.

    transformer_tensor_parallel.py  cuts the heads, the hidden units and the sequence
    transformer_fully_sharded.py    cuts the batch, and everything that is stored

What it learns: sequences that go up by the same number (modulo VOCABULARY) at each place.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

SEED = 0
LAYERS, WIDTH, HEADS, HEAD, HIDDEN = 2, 64, 8, 8, 256
VOCABULARY, LENGTH, BATCH = 32, 32, 16
STEPS = 60
LEARNING_RATE, DECAY, DECAY_SQUARES, EPSILON = 3e-3, 0.9, 0.98, 1e-6  # of Adam


@dataclasses.dataclass(frozen=True)
class Cut:
    """What the model needs of the other devices; as it is, for one device."""

    whole: Callable = lambda parameters: parameters  # own parts of parameters to whole ones
    all_positions: Callable = lambda x: x  # [batch, own positions, ...] to all positions
    sum_to_own: Callable = lambda x: x  # sums over the devices, and keeps own positions
    first_position: Callable = lambda: 0  # of the own positions
    block: Callable = lambda block: block  # wraps the function of one layer


def first_parameters():
    rng = np.random.default_rng(SEED)

    def normal(*shape, fan_in):
        return rng.normal(0, fan_in**-0.5, shape).astype(np.float32)

    return {
        "embedding": normal(VOCABULARY, WIDTH, fan_in=1),
        "positions": normal(LENGTH, WIDTH, fan_in=1),
        "layers": [
            {
                "qkv": normal(WIDTH, 3, HEADS, HEAD, fan_in=WIDTH),
                "out": normal(HEADS, HEAD, WIDTH, fan_in=HEADS * HEAD),
                "up": normal(WIDTH, HIDDEN, fan_in=WIDTH),
                "down": normal(HIDDEN, WIDTH, fan_in=HIDDEN),
                "scale": np.ones((2, WIDTH), np.float32),
            }
            for _ in range(LAYERS)
        ],
        "unembedding": normal(WIDTH, VOCABULARY, fan_in=WIDTH),
    }


def batch(step):
    """Tokens [BATCH, LENGTH] and those that follow them."""
    rng = np.random.default_rng((SEED, step))
    start, increment = rng.integers(VOCABULARY, size=(2, BATCH, 1))
    sequence = (start + increment * np.arange(LENGTH + 1)) % VOCABULARY
    return sequence[:, :-1].astype(np.int32), sequence[:, 1:].astype(np.int32)


def normalize(x, scale=1.0):
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def attention(x, qkv, out):
    """x [batch, position, WIDTH]; the sum is over the heads that are in qkv and out."""
    q, k, v = jnp.einsum("bpw,wchd->cbhpd", x, qkv)
    scores = jnp.einsum("bhpd,bhqd->bhpq", q, k) * HEAD**-0.5
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9))
    return jnp.einsum("bhpq,bhqd,hdw->bpw", weights, v, out)


def loss(parameters, tokens, targets, cut):
    """The sum over the own tokens of -log p(target), by the tokens of the whole batch."""

    @cut.block
    def block(x, layer):
        layer = cut.whole(layer)
        y = cut.all_positions(normalize(x, layer["scale"][0]))
        x = x + cut.sum_to_own(attention(y, layer["qkv"], layer["out"]))
        y = cut.all_positions(normalize(x, layer["scale"][1]))
        return x + cut.sum_to_own(jax.nn.gelu(y @ layer["up"]) @ layer["down"])

    ends = cut.whole({name: p for name, p in parameters.items() if name != "layers"})
    x = ends["embedding"][tokens] + jax.lax.dynamic_slice_in_dim(
        ends["positions"], cut.first_position(), tokens.shape[1]
    )
    for layer in parameters["layers"]:
        x = block(x, layer)
    log_p = jax.nn.log_softmax(normalize(x) @ ends["unembedding"])
    return -jnp.take_along_axis(log_p, targets[..., None], -1).sum() / (BATCH * LENGTH)


def first_state(parameters):
    """Of Adam: parameters, means of the gradients and of their squares, number of steps."""
    zeros = jax.tree.map(np.zeros_like, parameters)
    return {"parameters": parameters, "mean": zeros, "squares": zeros, "step": np.zeros((), int)}


def update(state, gradients):
    """One step of Adam, element by element: it does not matter how the arrays are cut."""
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: DECAY * m + (1 - DECAY) * g, state["mean"], gradients)
    squares = jax.tree.map(
        lambda s, g: DECAY_SQUARES * s + (1 - DECAY_SQUARES) * g * g, state["squares"], gradients
    )
    parameters = jax.tree.map(
        lambda p, m, s: (
            p
            - LEARNING_RATE
            * (m / (1 - DECAY**step))
            / (jnp.sqrt(s / (1 - DECAY_SQUARES**step)) + EPSILON)
        ),
        state["parameters"],
        mean,
        squares,
    )
    return {"parameters": parameters, "mean": mean, "squares": squares, "step": step}


def train(step, state, place_batch):
    """The losses of all steps; `step` is jitted."""
    losses = []
    for i in range(STEPS):
        state, value = step(state, *place_batch(batch(i)))
        losses.append(float(value))
    return losses


def train_on_one_device():
    @jax.jit
    def step(state, tokens, targets):
        value, gradients = jax.value_and_grad(loss)(state["parameters"], tokens, targets, Cut())
        return update(state, gradients), value

    return train(step, first_state(first_parameters()), lambda arrays: arrays)
