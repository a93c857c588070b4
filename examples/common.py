"""What the examples in plain JAX share: data on the devices of all processes, and the verdict."""

import sys

import jax
import numpy as np


def line_of_devices(axis, **sizes):
    """A mesh with all devices of all processes in a line; each size must divide evenly by it."""
    n = jax.device_count()
    for name, size in sizes.items():
        if size % n:
            sys.exit(f"{n} devices cannot share {size} {name} evenly")
    say(f"{n} device(s) in {jax.process_count()} process(es)")
    return jax.sharding.Mesh(np.array(jax.devices()), (axis,))


def place(mesh, arrays, specs):
    """Cuts arrays, the same on all processes, over the devices: each process fills its own parts.

    `specs` is one PartitionSpec for all, or a pytree of them like that of the arrays.
    """

    def one(spec, array):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(specs, jax.P):
        return jax.tree.map(lambda array: one(specs, array), arrays)
    return jax.tree.map(one, specs, arrays, is_leaf=lambda x: isinstance(x, jax.P))


def train(step, parameters, *batches):
    """Calls step(parameters, *batch) for each batch; returns the losses."""
    losses = []
    for batch in zip(*batches, strict=True):
        parameters, value = step(parameters, *batch)
        losses.append(float(value))
    return losses


def say(line):
    """Prints on the first process only."""
    if jax.process_index() == 0:
        print(line, flush=True)


def compare_losses(losses, reference, tolerance, every=10):
    """Prints the losses of every few steps beside those of one device, and judges."""
    losses, reference = np.array(losses, np.float32), np.array(reference, np.float32)
    differences = np.abs(losses - reference) / np.abs(reference)
    for step in sorted({*range(0, len(losses), every), len(losses) - 1}):
        # Nine digits tell any two float32 apart.
        say(f"step {step:3}  loss {losses[step]:.9g}  on one device {reference[step]:.9g}")
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss has not fallen: {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    judge(differences.max(), tolerance)


def judge(difference, tolerance, reference="one device"):
    """Says how far results are from the reference, and ends the process if that is too far."""
    if not difference <= tolerance:  # A NaN is too far.
        sys.exit(f"{difference:.1e} from {reference}: more than the tolerance {tolerance:.0e}")
    say(f"within {difference:.1e} of {reference} (tolerance {tolerance:.0e})")
