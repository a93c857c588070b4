"""Trains with checkpoints, and goes on after a failure.

    jaxfabric run -n 3 --max-restarts 2 examples/checkpointed.py DIR

ends all processes after the death of one, and starts them again from the last checkpoint: no step
before it is done again. Kill one and see.

Something else than the launcher, such as Kubernetes or systemd, may start and restart each process
on its own:

    python examples/checkpointed.py DIR --coordinator host0:4800 --processes 3 --process 0

(and 1, and 2). Then only the one that died starts again. The others, which keep their compiled
programs, meet it in `jaxfabric.initialize()`, and all go on from the last checkpoint. Where process
0 dies, JAX ends the others, since it hosts JAX's coordination service: all are started again.

DIR has to be there on the host of process 0 only, the same after a restart.
"""

import argparse
import hashlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxfabric
from jaxfabric.lax import pbroadcast, pmean

FEATURES, ROWS, RATE = 256, 64, 0.005


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="steps from checkpoint to checkpoint")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def save(folder, step, weights):
    """A checkpoint is there whole or not at all."""
    with open(folder / "new", "wb") as file:
        np.savez(file, step=step, weights=weights)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "checkpoint.npz")


def load(folder):
    """The step to go on with, and the weights before it."""
    path = folder / "checkpoint.npz"
    if not path.exists():
        return 0, np.zeros(FEATURES, np.float32)
    with np.load(path) as saved:
        return int(saved["step"]), saved["weights"]


class Training:
    """What outlives a failure: the devices, and programs that are compiled once."""

    def __init__(self, options):
        self.options = options
        self.first = jax.process_index() == 0
        self.mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
        self.truth = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32)
        self.step = self.compile(self.update, (jax.P(), jax.P("ranks")), jax.P())
        self.from_first = self.compile(
            lambda x: pbroadcast(x, "ranks", 0)[0], jax.P("ranks"), jax.P()
        )

    def compile(self, function, in_specs, out_specs):
        return jax.jit(
            jax.shard_map(
                function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )

    def update(self, weights, batch):
        def loss(weights):
            return jnp.mean((batch[0] @ weights - batch[0] @ self.truth) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - RATE * pmean(gradient, "ranks"), pmean(value, "ranks")

    def place(self, block, *shape):
        """An array with `block(rank)` on each rank."""
        return jax.make_array_from_callback(
            (self.mesh.size, *shape),
            jax.NamedSharding(self.mesh, jax.P("ranks")),
            lambda index: block(index[0].start or 0)[None],
        )

    def batch(self, step):
        """The same rows for a step, whenever and however often it is done."""

        def rows(rank):
            return (
                np.random.default_rng((step, rank)).normal(size=(ROWS, FEATURES)).astype("float32")
            )

        return self.place(rows, ROWS, FEATURES)

    def run(self):
        """From the last checkpoint, which process 0 has, to the end."""
        begin, weights = load(self.options.folder) if self.first else (0, np.zeros(FEATURES))
        state = np.append(weights, begin).astype(np.float32)
        state = self.from_first(self.place(lambda _: state, FEATURES + 1))
        weights, begin = state[:-1], int(state[-1])
        self.say(f"begins with step {begin}")
        for step in range(begin, self.options.steps):
            weights, loss = self.step(weights, self.batch(step))
            done = step + 1
            if done % self.options.every == 0 or done == self.options.steps:
                loss = float(loss)  # Waits: all steps so far are done.
                if self.first:
                    save(self.options.folder, done, np.asarray(weights))
                self.say(f"step {done}: loss {loss:.6f}")
        digest = hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()[:16]
        self.say(f"done: weights {digest}")

    def say(self, line):
        if self.first:
            print(line, flush=True)


def main():
    options = arguments()
    # Without it the processes could not go on after a death for long: see docs/errors.md.
    jax.config.update("jax_enable_recoverability", True)
    jaxfabric.initialize(options.coordinator, options.processes, options.process)
    training = Training(options)
    while True:
        try:
            return training.run()
        except (jax.errors.JaxRuntimeError, ValueError):
            failure = jaxfabric.status().failure
            if failure is None or options.coordinator is None:
                raise  # No process has failed, or the launcher starts this one again.
            print(f"process {jax.process_index()} goes on after: {failure}", flush=True)
        jaxfabric.shutdown()
        jaxfabric.initialize(connect_timeout=300)  # For as long as the other one takes.


if __name__ == "__main__":
    main()
