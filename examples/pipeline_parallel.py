"""Trains a deep network of which each device has some layers: the stages of a pipeline.

    JAXFABRIC_ENABLE=1 jaxfabric run -n 2 examples/pipeline_parallel.py

It is plain JAX. Without jaxfabric, in one process: JAX_NUM_CPU_DEVICES=4 python FILE

A batch is cut into microbatches. In each tick a stage takes one through its layers and hands it on
with ppermute, so that in the middle of a batch all stages are at work (GPipe):

    tick      0  1  2  3  4  5
    stage 0   a  b  c  d
    stage 1      a  b  c  d
    stage 2         a  b  c  d

The backward pass is what JAX makes of it: the same scan backwards, with a ppermute the other way.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import compare_losses, line_of_devices, place, say, train

SEED = 0
LAYERS, WIDTH = 8, 32
MICROBATCHES, ROWS = 8, 16
STEPS = 60
LEARNING_RATE = 0.3
# One device multiplies other shapes, so adds up in another order.
TOLERANCE = 1e-5

AXIS = "stage"
COPY, CUT = jax.P(), jax.P(AXIS)


def first_parameters():
    weights = np.random.default_rng(SEED).normal(0, 0.5 * WIDTH**-0.5, (LAYERS, WIDTH, WIDTH))
    return {"weights": weights.astype(np.float32), "bias": np.zeros((LAYERS, WIDTH), np.float32)}


def batches():
    """Points [step, microbatch, row, WIDTH], and targets that one layer could not learn."""
    rng = np.random.default_rng(SEED)
    points = rng.normal(size=(STEPS, MICROBATCHES, ROWS, WIDTH))
    targets = np.sin(2 * points @ rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)))
    return points.astype(np.float32), targets.astype(np.float32)


def run_layers(parameters, x):
    """Through all layers in `parameters`, one after the other."""

    def layer(x, own):
        return x + jnp.tanh(x @ own["weights"] + own["bias"]), None

    return jax.lax.scan(layer, x, parameters)[0]


def loss_on_one_device(parameters, points, targets):
    return jnp.square(run_layers(parameters, points) - targets).mean()


def loss_on_pipeline(parameters, points, targets):
    """As `loss_on_one_device`, for the stage that has the layers in `parameters`."""
    stage, stages = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
    ticks = MICROBATCHES + stages - 1

    def tick(received, point):
        x = jnp.where(stage == 0, point, received)
        y = run_layers(parameters, x)
        # No pair has the first stage as its destination: ppermute gives it zeros.
        return jax.lax.ppermute(y, AXIS, [(i, i + 1) for i in range(stages - 1)]), y

    # While the pipeline runs empty the first stage works on zeros, and nobody looks at it.
    points = jnp.pad(points, ((0, stages - 1), (0, 0), (0, 0)))
    nothing = jax.lax.pcast(jnp.zeros_like(points[0]), AXIS, to="varying")
    _, outputs = jax.lax.scan(tick, nothing, points, length=ticks)
    # The last stage's outputs of its first ticks belong to no microbatch.
    loss = jnp.square(outputs[stages - 1 :] - targets).mean()
    return jax.lax.psum(jnp.where(stage == stages - 1, loss, 0.0), AXIS)


def step(parameters, points, targets, loss):
    value, gradients = jax.value_and_grad(loss)(parameters, points, targets)
    parameters = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradients)
    return parameters, value


def main():
    mesh = line_of_devices(AXIS, layers=LAYERS)
    stages = jax.device_count()
    busy = MICROBATCHES / (MICROBATCHES + stages - 1)
    say(f"{LAYERS // stages} layer(s) a stage, which is at work {busy:.0%} of the time")
    on_pipeline = jax.jit(
        jax.shard_map(
            partial(step, loss=loss_on_pipeline),
            mesh=mesh,
            in_specs=(CUT, COPY, COPY),  # all stages see the batch, only the ends look at it
            out_specs=(CUT, COPY),
        )
    )
    on_one_device = jax.jit(partial(step, loss=loss_on_one_device))
    points, targets = batches()
    losses = train(
        on_pipeline,
        place(mesh, first_parameters(), CUT),
        *([place(mesh, batch, COPY) for batch in array] for array in (points, targets)),
    )
    compare_losses(losses, train(on_one_device, first_parameters(), points, targets), TOLERANCE)


if __name__ == "__main__":
    main()
