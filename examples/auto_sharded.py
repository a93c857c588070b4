"""Trains an MLP on sharded arrays, and leaves the collectives to the compiler.

    JAXFABRIC_ENABLE=hlo jaxfabric run -n 2 examples/auto_sharded.py

It is plain JAX. Without jaxfabric, in one process: JAX_NUM_CPU_DEVICES=4 python FILE

There is no shard_map and no collective in this file. Rows of the batch are cut along one axis of
the mesh, hidden units along the other; jit sees that sums go over cut dimensions, and adds the
all-reduces: of the activations over "units", of the gradients over "rows".
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from common import compare_losses, place, say, train

SEED = 0
BATCH, INPUTS, HIDDEN, OUTPUTS = 64, 32, 128, 8
STEPS = 60
LEARNING_RATE = 0.1
# One device adds up in another order.
TOLERANCE = 1e-5

ROWS = jax.P("rows")
SPECS = {
    "up": jax.P(None, "units"),
    "bias": jax.P("units"),
    "down": jax.P("units"),
}


def first_parameters():
    rng = np.random.default_rng(SEED)
    return {
        "up": rng.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)).astype(np.float32),
        "bias": np.zeros(HIDDEN, np.float32),
        "down": rng.normal(0, HIDDEN**-0.5, (HIDDEN, OUTPUTS)).astype(np.float32),
    }


def batches():
    """Points and targets, [step, row, ...]."""
    rng = np.random.default_rng(SEED)
    points = rng.normal(size=(STEPS, BATCH, INPUTS))
    targets = np.sin(points @ rng.normal(0, INPUTS**-0.5, (INPUTS, OUTPUTS)))
    return points.astype(np.float32), targets.astype(np.float32)


@jax.jit
def step(parameters, points, targets):
    def loss(parameters):
        hidden = jnp.tanh(points @ parameters["up"] + parameters["bias"])
        return jnp.square(hidden @ parameters["down"] - targets).mean()

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, gradients), value


def main():
    n = jax.device_count()
    columns = 2 if n % 2 == 0 else 1
    if BATCH % (n // columns):
        sys.exit(f"{n} devices cannot share {BATCH} rows evenly")
    # Auto: the compiler decides how results are cut.
    mesh = jax.make_mesh(
        (n // columns, columns), ("rows", "units"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    say(f"{n} device(s) in {jax.process_count()} process(es): {n // columns} x {columns}")
    points, targets = batches()
    parameters = place(mesh, first_parameters(), SPECS)
    cut = [[place(mesh, batch, ROWS) for batch in array] for array in (points, targets)]
    for name, array in parameters.items():
        say(f"{name:4} {array.shape}: {array.addressable_shards[0].data.shape} on each device")
    losses = train(step, parameters, *cut)
    compare_losses(losses, train(step, first_parameters(), points, targets), TOLERANCE)


if __name__ == "__main__":
    main()
