"""Trains a small network on scikit-learn's handwritten digits, spread over all ranks.

    jaxfabric run -n 2 examples/digits_parallel.py

It takes 1, 2, 3, 4, 5, 6, 8 or 10 ranks, spread over processes as you like:

    jaxfabric run -n 4 examples/digits_parallel.py
    jaxfabric run -n 2 --devices-per-process 2 examples/digits_parallel.py
    python examples/digits_parallel.py

The first layer is data parallel: every rank has a copy of it, and sends its own rows of each batch
through. The second is tensor parallel: every rank has some of its units, and sends the whole batch
through them. Every collective, those that differentiation makes included, is jaxfabric's.

In the end each process trains the same network again on one device, without collectives, and
compares. The exit status is 0 only if the parameters agree and the test accuracy is above 95 %.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import jaxfabric
from jaxfabric.lax import all_gather, psum, psum_scatter

SEED = 0
EPOCHS = 25
BATCH = 120
HIDDEN = 120  # units of each of the two layers
TEST_IMAGES = 360
LEARNING_RATE = 0.1
MOMENTUM = 0.9
TARGET_ACCURACY = 0.95
# One device adds up in another order than the ranks do, and steps amplify rounding errors.
TOLERANCE = 1e-5

# A copy on every rank, or cut along one dimension.
COPY, ROWS, COLUMNS = jax.P(), jax.P("ranks"), jax.P(None, "ranks")
SPECS = {"w1": COPY, "b1": COPY, "w2": COLUMNS, "b2": ROWS, "w3": ROWS, "b3": COPY}
COPIED = [name for name, spec in SPECS.items() if spec == COPY]


@dataclasses.dataclass
class Collectives:
    """What the network needs of the other ranks; as it is, for a network on one device."""

    gather_rows: Callable = lambda x: x  # own rows of the batch to all rows
    sum_units: Callable = lambda x: x  # parts of sums of all rows to own rows of the sums
    total: Callable = lambda x: x  # the sum over all ranks
    as_own: Callable = lambda x: x  # the gradient for it will be that of this rank's loss


ON_RANKS = Collectives(
    gather_rows=partial(all_gather, axis_name="ranks", tiled=True),
    sum_units=partial(psum_scatter, axis_name="ranks", tiled=True),
    total=partial(psum, axis_name="ranks"),
    as_own=partial(jax.lax.pcast, axis_name="ranks", to="varying"),
)


def logits(params, images, ranks):
    x = jnp.tanh(images @ params["w1"] + params["b1"])
    x = ranks.gather_rows(x)
    x = jnp.tanh(x @ params["w2"] + params["b2"])
    return ranks.sum_units(x @ params["w3"]) + params["b3"]


def train_epoch(params, velocity, images, labels, ranks):
    """One step of gradient descent for each batch of images[step, row, pixel]."""

    def loss(params, images, labels):
        log_p = jax.nn.log_softmax(logits(params, images, ranks))
        return -jnp.take_along_axis(log_p, labels[:, None], axis=1).sum() / BATCH

    def step(state, batch):
        params, velocity = state
        own = params | ranks.as_own({name: params[name] for name in COPIED})
        value, grads = jax.value_and_grad(loss)(own, *batch)
        grads |= ranks.total({name: grads[name] for name in COPIED})
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, velocity, grads)
        params = jax.tree.map(jnp.add, params, velocity)
        return (params, velocity), ranks.total(value)

    (params, velocity), losses = jax.lax.scan(step, (params, velocity), (images, labels))
    return params, velocity, losses.mean()


def count_correct(params, images, labels, ranks):
    return ranks.total((logits(params, images, ranks).argmax(1) == labels).sum())


def load_data():
    """Shuffled images and labels, in one set for training and one for the test."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    cut = len(labels) - TEST_IMAGES
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def first_parameters():
    rng = np.random.default_rng(SEED)
    shapes = {"w1": (64, HIDDEN), "w2": (HIDDEN, HIDDEN), "w3": (HIDDEN, 10)}
    params = {}
    for name, (rows, columns) in shapes.items():
        params[name] = rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)
        params[name.replace("w", "b")] = np.zeros(columns, np.float32)
    return params


def train(train_set, test_set, place, train_epoch, count_correct, report):
    """Trains from the seed; `place(array, spec)` puts an array where it belongs."""
    params = {name: place(value, SPECS[name]) for name, value in first_parameters().items()}
    velocity = {
        name: place(np.zeros_like(p), SPECS[name]) for name, p in first_parameters().items()
    }
    test = [place(array, ROWS) for array in test_set]
    steps = len(train_set[1]) // BATCH
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(len(train_set[1]))
        order = order[: steps * BATCH].reshape(steps, BATCH)
        batches = [place(array[order], COLUMNS) for array in train_set]
        params, velocity, loss = train_epoch(params, velocity, *batches)
        accuracy = int(count_correct(params, *test)) / TEST_IMAGES
        report(epoch, float(loss), accuracy)
    return params, accuracy


def train_on_ranks(mesh, data, report):
    def place(array, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    on_mesh = partial(jax.shard_map, mesh=mesh)
    epoch = on_mesh(
        partial(train_epoch, ranks=ON_RANKS),
        in_specs=(SPECS, SPECS, COLUMNS, COLUMNS),
        out_specs=(SPECS, SPECS, COPY),
    )
    correct = on_mesh(
        partial(count_correct, ranks=ON_RANKS), in_specs=(SPECS, ROWS, ROWS), out_specs=COPY
    )
    return train(*data, place, jax.jit(epoch), jax.jit(correct), report)


def train_on_one_device(data):
    alone = Collectives()
    return train(
        *data,
        lambda array, spec: jax.device_put(array, jax.local_devices()[0]),
        jax.jit(partial(train_epoch, ranks=alone)),
        jax.jit(partial(count_correct, ranks=alone)),
        lambda *_: None,
    )


def largest_difference(params, reference):
    """Over all parameters that this process's ranks hold."""
    return max(
        float(np.abs(np.asarray(shard.data) - np.asarray(reference[name])[shard.index]).max())
        for name, param in params.items()
        for shard in param.addressable_shards
    )


def main():
    jaxfabric.initialize()
    n = jax.device_count()
    if any(size % n for size in (BATCH, HIDDEN, TEST_IMAGES)):
        sys.exit(f"{n} ranks cannot share {BATCH} images and {HIDDEN} units evenly")
    mesh = jax.make_mesh((n,), ("ranks",))
    data = load_data()
    first = jax.process_index() == 0
    if first:
        print(f"{n} ranks in {jax.process_count()} process(es)", flush=True)

    def report(epoch, loss, accuracy):
        if first and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.1%}", flush=True)

    start = time.perf_counter()
    params, accuracy = train_on_ranks(mesh, data, report)
    seconds = time.perf_counter() - start
    reference, _ = train_on_one_device(data)
    difference = largest_difference(params, reference)

    agrees, accurate = difference <= TOLERANCE, accuracy > TARGET_ACCURACY
    print(
        f"process {jax.process_index()}: trained in {seconds:.1f} s, test accuracy {accuracy:.1%}, "
        f"parameters {'match' if agrees else 'DIFFER FROM'} those of one device "
        f"(largest difference {difference:.1e}, tolerance {TOLERANCE:.0e})",
        flush=True,
    )
    sys.exit(0 if agrees and accurate else 1)


if __name__ == "__main__":
    main()
