"""Trains a mixture of experts: each device has some experts, tokens travel to theirs and back.

    JAXFABRIC_ENABLE=1 jaxfabric run -n 2 examples/expert_parallel.py

It is plain JAX, but JAX alone cannot run ragged_all_to_all on CPU devices.

    own tokens, sorted by expert --ragged_all_to_all--> tokens of all devices for the own experts
    own tokens, in their order  <--ragged_all_to_all--  what the experts make of them

How many tokens go where is known only when they are there: slices have any length, none included,
and no token is dropped. The layer is checked against numpy, its training against one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import compare_losses, judge, line_of_devices, place, say

SEED = 0
EXPERTS, WIDTH, HIDDEN = 8, 16, 32
TOKENS = 256
STEPS = 40
LEARNING_RATE = 0.5
TOLERANCE = 1e-5

AXIS = "experts"
COPY, CUT = jax.P(), jax.P(AXIS)
SPECS = {"gate": COPY, "up": CUT, "down": CUT}


def first_parameters_and_data():
    """Tokens come in clusters of very different sizes, each with a map of its own to learn."""
    rng = np.random.default_rng(SEED)
    centers = 2 * rng.choice([-1.0, 1.0], (EXPERTS, WIDTH))
    cluster = np.minimum(rng.geometric(0.35, TOKENS) - 1, EXPERTS - 1)
    tokens = centers[cluster] + rng.normal(0, 0.5, (TOKENS, WIDTH))
    maps = rng.normal(0, WIDTH**-0.5, (EXPERTS, WIDTH, WIDTH))
    targets = np.sin(np.einsum("tw,twv->tv", tokens, maps[cluster]))
    parameters = {
        "gate": 0.1 * centers.T,
        "up": rng.normal(0, WIDTH**-0.5, (EXPERTS, WIDTH, HIDDEN)),
        "down": rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN, WIDTH)),
    }
    return jax.tree.map(np.float32, (parameters, tokens, targets))


def in_numpy(parameters, tokens):
    """Outputs of the layer, and how many tokens each expert has."""
    scores = np.exp(tokens @ parameters["gate"])
    expert = scores.argmax(-1)
    weight = scores.max(-1) / scores.sum(-1)
    hidden = np.tanh(np.einsum("tw,twh->th", tokens, parameters["up"][expert]))
    outputs = np.einsum("th,thw->tw", hidden, parameters["down"][expert])
    return weight[:, None] * outputs, np.bincount(expert, minlength=EXPERTS)


def run_experts(parameters, x, which):
    """x[token], each through the expert `which[token]` of those in `parameters`."""
    hidden = jnp.tanh(jnp.einsum("tw,ewh->teh", x, parameters["up"]))
    chosen = jax.nn.one_hot(which, len(parameters["up"]))
    return jnp.einsum("teh,ehw,te->tw", hidden, parameters["down"], chosen)


def run_experts_anywhere(parameters, x, expert):
    """As `run_experts`, with tokens of this device and experts of all."""
    me, devices = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
    own = EXPERTS // devices

    def before(sizes, axis):
        return jnp.cumsum(sizes, axis) - sizes

    # All devices learn who has how many tokens for whom, and so where each slice begins.
    counts = jax.lax.all_gather(jnp.bincount(expert, length=EXPERTS), AXIS)  # [device, expert]
    sizes = counts.reshape(devices, devices, own).sum(-1)  # [from, to]
    leaves, lands = before(sizes, 1), before(sizes, 0)  # in the array of `from`, and of `to`

    order = jnp.argsort(expert)
    room = jax.lax.pcast(jnp.zeros((TOKENS, WIDTH)), AXIS, to="varying")  # all may come here
    arrived = jax.lax.ragged_all_to_all(
        x[order], room, leaves[me], sizes[me], lands[me], sizes[:, me], axis_name=AXIS
    )
    # They lie by device, and within that by expert; what follows them are zeros.
    here = jax.lax.dynamic_slice_in_dim(counts, me * own, own, axis=1)
    which = jnp.repeat(jnp.tile(jnp.arange(own), devices), here.ravel(), total_repeat_length=TOKENS)
    done = run_experts(parameters, arrived, which)
    back = jax.lax.ragged_all_to_all(
        done, room[: len(x)], lands[:, me], sizes[:, me], leaves[:, me], sizes[me], axis_name=AXIS
    )
    return back[jnp.argsort(order)]


def layer(parameters, x, run_experts):
    scores = jax.nn.softmax(x @ parameters["gate"])
    return scores.max(-1, keepdims=True) * run_experts(parameters, x, scores.argmax(-1))


def step(parameters, x, targets, run_experts, total):
    def loss(parameters):
        difference = layer(parameters, x, run_experts) - targets
        return total(jnp.square(difference).sum()) / (TOKENS * WIDTH)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradients), value


def train(step, parameters, tokens, targets):
    losses = []
    for _ in range(STEPS):
        parameters, value = step(parameters, tokens, targets)
        losses.append(float(value))
    return losses


def main():
    mesh = line_of_devices(AXIS, experts=EXPERTS, tokens=TOKENS)
    on_mesh = partial(jax.shard_map, mesh=mesh)
    parameters, tokens, targets = first_parameters_and_data()
    cut = place(mesh, parameters, SPECS), *place(mesh, (tokens, targets), CUT)

    expected, counts = in_numpy(parameters, tokens)
    for device, own in enumerate(counts.reshape(jax.device_count(), -1)):
        say(f"device {device} gets {own.sum():3} of {TOKENS} tokens; its experts {own.tolist()}")
    run_layer = partial(layer, run_experts=run_experts_anywhere)
    outputs = jax.jit(on_mesh(run_layer, in_specs=(SPECS, CUT), out_specs=CUT))(*cut[:2])
    differences = [
        np.abs(np.asarray(part.data) - expected[part.index]).max() / np.abs(expected).max()
        for part in outputs.addressable_shards
    ]
    judge(max(differences), TOLERANCE, "numpy")

    total = partial(jax.lax.psum, axis_name=AXIS)
    step_on_mesh = on_mesh(
        partial(step, run_experts=run_experts_anywhere, total=total),
        in_specs=(SPECS, CUT, CUT),
        out_specs=(SPECS, COPY),
    )
    step_alone = partial(step, run_experts=run_experts, total=lambda x: x)
    losses = train(jax.jit(step_on_mesh), *cut)
    reference = train(jax.jit(step_alone), parameters, tokens, targets)
    compare_losses(losses, reference, TOLERANCE)


if __name__ == "__main__":
    main()
