"""Trains a transformer whose heads, hidden units and sequence are cut over the devices.

    JAXFABRIC_ENABLE=1 jaxfabric run -n 2 examples/transformer_tensor_parallel.py

It is plain JAX. Without jaxfabric, in one process: JAX_NUM_CPU_DEVICES=4 python FILE

Each device has some heads of every attention and some hidden units of every MLP (tensor
parallelism), and between these some positions of every sequence (sequence parallelism):

    own positions --all_gather--> all positions: own heads or units --psum_scatter--> own positions

What all devices have a copy of (embeddings, scales) gets the sum of the gradients: a psum, which
JAX adds because the parameters are the same on all devices, but what is done with them is not.
"""

from functools import partial

import jax
import transformer
from common import compare_losses, line_of_devices, place

# One device adds up in another order, and Adam divides by the size of the gradients.
TOLERANCE = 1e-5

AXIS = "model"
COPY = jax.P()
SPECS = {
    "embedding": COPY,
    "positions": COPY,
    "layers": [
        {
            "qkv": jax.P(None, None, AXIS),  # [width, query key value, head, ...]
            "out": jax.P(AXIS),  # [head, ...]
            "up": jax.P(None, AXIS),  # [width, hidden unit]
            "down": jax.P(AXIS),  # [hidden unit, width]
            "scale": COPY,
        }
    ]
    * transformer.LAYERS,
    "unembedding": COPY,
}
STATE = {"parameters": SPECS, "mean": SPECS, "squares": SPECS, "step": COPY}
POSITIONS = jax.P(None, AXIS)  # of tokens[sequence, position]


def first_position():
    return jax.lax.axis_index(AXIS) * (transformer.LENGTH // jax.lax.axis_size(AXIS))


CUT = transformer.Cut(
    all_positions=partial(jax.lax.all_gather, axis_name=AXIS, axis=1, tiled=True),
    sum_to_own=partial(jax.lax.psum_scatter, axis_name=AXIS, scatter_dimension=1, tiled=True),
    first_position=first_position,
)


def step(state, tokens, targets):
    def loss(parameters):
        return jax.lax.psum(transformer.loss(parameters, tokens, targets, CUT), AXIS)

    value, gradients = jax.value_and_grad(loss)(state["parameters"])
    return transformer.update(state, gradients), value


def main():
    mesh = line_of_devices(AXIS, heads=transformer.HEADS, positions=transformer.LENGTH)
    on_devices = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(STATE, POSITIONS, POSITIONS), out_specs=(STATE, COPY)
        )
    )
    state = place(mesh, transformer.first_state(transformer.first_parameters()), STATE)
    losses = transformer.train(on_devices, state, lambda arrays: place(mesh, arrays, POSITIONS))
    compare_losses(losses, transformer.train_on_one_device(), TOLERANCE)


if __name__ == "__main__":
    main()
