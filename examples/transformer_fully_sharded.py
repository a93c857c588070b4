"""Trains a transformer of which each device stores a part, and sends a part of the batch through.

    JAXFABRIC_ENABLE=1 jaxfabric run -n 2 examples/transformer_fully_sharded.py

It is plain JAX. Without jaxfabric, in one process: JAX_NUM_CPU_DEVICES=4 python FILE

Parameters, gradients and the state of the optimizer are cut over the devices (fully sharded data
parallelism, ZeRO stage 3). A layer's parameters are whole only while the layer is run:

    forward   own parts --all_gather--> layer --> forgotten
    backward  own parts --all_gather--> layer again, its gradients --psum_scatter--> own parts

Nobody writes the psum_scatter: it is what all_gather becomes when JAX differentiates it.
"""

import jax
import transformer
from common import compare_losses, line_of_devices, place, say

# One device adds up in another order, and Adam divides by the size of the gradients.
TOLERANCE = 1e-5

AXIS = "data"
COPY, ROWS = jax.P(), jax.P(AXIS)


def last_dimension(parameter):
    """The one that is cut, whatever the parameter."""
    return jax.P(*[None] * (parameter.ndim - 1), AXIS)


def whole(parts):
    return jax.tree.map(lambda p: jax.lax.all_gather(p, AXIS, axis=p.ndim - 1, tiled=True), parts)


# checkpoint: the backward pass runs a layer again instead of keeping what it needs, the gathered
# parameters among it.
CUT = transformer.Cut(whole=whole, block=jax.checkpoint)


def step(state, tokens, targets):
    # This device's rows only: psum_scatter adds up the gradients of all.
    value, gradients = jax.value_and_grad(transformer.loss)(
        state["parameters"], tokens, targets, CUT
    )
    return transformer.update(state, gradients), jax.lax.psum(value, AXIS)


def main():
    mesh = line_of_devices(AXIS, sequences=transformer.BATCH, heads=transformer.HEADS)
    parameters = transformer.first_parameters()
    specs = jax.tree.map(last_dimension, parameters)
    specs = {"parameters": specs, "mean": specs, "squares": specs, "step": COPY}
    on_devices = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, ROWS, ROWS), out_specs=(specs, COPY))
    )
    state = place(mesh, transformer.first_state(parameters), specs)
    stored = sum(part.addressable_shards[0].data.nbytes for part in jax.tree.leaves(state))
    total = sum(array.nbytes for array in jax.tree.leaves(state))
    say(f"a device stores {stored:,} of the {total:,} bytes of parameters and optimizer state")
    losses = transformer.train(on_devices, state, lambda arrays: place(mesh, arrays, ROWS))
    compare_losses(losses, transformer.train_on_one_device(), TOLERANCE)


if __name__ == "__main__":
    main()
