"""A program whose collectives XLA runs in another order on every device, checked to the last bit.

Small programs run their thunks one after the other. This one has several dozen collectives on
equal shapes that do not depend on each other, large enough for XLA's concurrent executor, with
matrix products between them; inner jits that are called twice; and collectives in a scan and in a
cond whose branch differs between the groups of a launch. All values are small integers, so every
order of additions gives the same float32.

Usage, under `jaxfabric run` or alone: reorder_job.py RUNS [--block ROWS COLUMNS] [--seed N]
Process 0 prints one line of JSON: what ran, and how many launches were reordered.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import time
import types

import numpy as np

import jaxfabric

INPUTS = 3  # distinct inputs, in turn: a result of the launch before is not the expected one


def collectives(whole_program):
    """jaxfabric.lax; or that of JAX, whose collectives the pass over the program replaces."""
    import jax

    from jaxfabric import hlo, lax

    if not whole_program:
        return lax
    hlo.install()
    names = ("psum", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute")
    # JAX has no pbroadcast on CPU devices.
    theirs = {name: getattr(jax.lax, name) for name in names}
    return types.SimpleNamespace(**theirs, pbroadcast=lax.pbroadcast)


def operations(n, lax=None):
    """(name, function, numpy model of all ranks at once) for n ranks."""
    import jax.numpy as jnp

    ring = [(i, (i + 1) % n) for i in range(n)]
    half = [[i, i ^ 1] for i in range(0, n, 2)]

    def tiles(x):
        return x.reshape(n, n, x.shape[1] // n, *x.shape[2:])

    return [
        ("psum", lambda x: lax.psum(x, "i"), lambda x: np.broadcast_to(x.sum(0), x.shape)),
        (
            "all_gather",
            lambda x: lax.all_gather(x[: x.shape[0] // 2], "i"),
            lambda x: np.broadcast_to(x[:, : x.shape[1] // 2], (n, n, x.shape[1] // 2, x.shape[2])),
        ),
        (
            "psum_scatter",
            lambda x: lax.psum_scatter(x, "i", tiled=True),
            lambda x: tiles(x).sum(0),
        ),
        (
            "all_to_all",
            lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
            lambda x: tiles(x).swapaxes(0, 1).reshape(x.shape),
        ),
        ("ppermute", lambda x: lax.ppermute(x, "i", ring), lambda x: np.roll(x, 1, 0)),
        (
            "one way",
            lambda x: lax.ppermute(x, "i", [(0, n - 1)]),
            lambda x: np.concatenate([np.zeros_like(x[1:]), x[:1]]),
        ),
        (
            "pmax",
            lambda x: lax.pmax(x, "i", axis_index_groups=half),
            lambda x: np.maximum(x, x[[i ^ 1 for i in range(n)]]),
        ),
        (
            "pbroadcast",
            lambda x: lax.pbroadcast(jnp.flip(x, 0), "i", n - 1),
            lambda x: np.broadcast_to(x[-1, ::-1], x.shape),
        ),
    ]


def build(n, rows, columns, rounds, lax):
    """The jitted function, and its model: both take (n * rows, columns) and return lists."""
    import jax
    import jax.numpy as jnp
    from jax import lax as jlax

    ops = operations(n, lax)
    random = np.random.default_rng(7)
    # Small, and different for every collective: a crossed match shows in the values.
    weights = random.integers(0, 3, (len(ops) * rounds, columns, columns)).astype(np.float32)
    half = [[i, i ^ 1] for i in range(0, n, 2)]

    @jax.jit
    def inner(x, scale):
        y = lax.psum(x * scale, "i")
        return y + lax.ppermute(x + scale, "i", [(i, (i + 1) % n) for i in range(n)])

    def model_inner(x, scale):
        return np.broadcast_to((x * scale).sum(0), x.shape) + np.roll(x + scale, 1, 0)

    def program(x, w, turn):
        x = x[0]
        outs = []
        for k in range(len(ops) * rounds):
            outs.append(ops[k % len(ops)][1](x @ w[k]))
        for scale in (2.0, 3.0, 2.0):
            outs.append(inner(x, scale))

        def step(carry, k):
            total = lax.psum(carry + k, "i")
            return jnp.where(total > 4096, 0, carry) + 1, total[:8]

        outs.extend(jlax.scan(step, x, jnp.arange(3.0)))

        # Whole groups take the same branch, different groups different ones.
        def reduce_twice(v):
            once = lax.psum(v, "i", axis_index_groups=half)
            return lax.psum(once + 1, "i", axis_index_groups=half)

        def exchange(v):
            return lax.ppermute(v, "i", [pair for i, j in half for pair in ((i, j), (j, i))])

        odd = (jlax.axis_index("i") // 2 + turn) % 2
        # A permute has one communicator over the axis, so it cannot be in a branch.
        outs.append(
            jlax.cond(odd == 1, reduce_twice, lambda v: lax.pmin(v, "i", axis_index_groups=half), x)
        )
        outs.append(exchange(x))
        return [out[None] for out in outs]

    def model(x, turn):
        pair = [i ^ 1 for i in range(n)]
        outs = [
            ops[k % len(ops)][2](np.einsum("nij,jk->nik", x, weights[k]))
            for k in range(len(weights))
        ]
        outs += [model_inner(x, scale) for scale in (2.0, 3.0, 2.0)]
        carry, totals = x, []
        for k in range(3):
            total = np.broadcast_to((carry + k).sum(0), x.shape)
            carry = np.where(total > 4096, 0, carry) + 1
            totals.append(total[:, :8])
        outs += [carry, np.stack(totals, 1)]
        twice = x + x[pair] + 1
        odd = (np.arange(n) // 2 + turn) % 2
        least = np.minimum(x, x[pair])
        outs.append(np.where((odd == 1)[:, None, None], twice * 2, least))
        outs.append(x[pair])
        return outs

    return program, model, weights


def check(outs, expected, run, names):
    for index, (out, want) in enumerate(zip(outs, expected, strict=True)):
        for shard in out.addressable_shards:
            rank = shard.index[0].start or 0
            got = np.asarray(shard.data)[0]
            if not np.array_equal(got, want[rank]):
                wrong = np.argwhere(got != want[rank])
                raise AssertionError(
                    f"run {run}, output {index} ({names[index]}), rank {rank}: {len(wrong)} of "
                    f"{got.size} values differ, first at {wrong[0]}: {got[tuple(wrong[0])]} "
                    f"instead of {want[rank][tuple(wrong[0])]}"
                )


def entry_orders(entries):
    """By rank: one list of call instances, in the order of entry, for each launch."""
    ranks = collections.defaultdict(lambda: collections.defaultdict(list))
    for rank, key, run_id in entries:
        ranks[rank][run_id].append(key)
    return {rank: list(launches.values()) for rank, launches in ranks.items()}


def reordered(orders):
    """(launches, those in which two ranks entered their common calls in different orders)."""
    launches = list(zip(*orders.values(), strict=True))
    different = 0
    for ranks in launches:
        # Only what every rank runs once: no loops, no branches.
        once = [
            {key for key, count in collections.Counter(keys).items() if count == 1}
            for keys in ranks
        ]
        common = set.intersection(*once)
        different += len({tuple(key for key in keys if key in common) for keys in ranks}) > 1
    return len(launches), different


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--block", type=int, nargs=2, default=(256, 256))
    parser.add_argument("--rounds", type=int, default=3, help="collectives of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--in-flight", type=int, default=1, help="launches before the first check")
    parser.add_argument("--orders", help="directory for the orders of entry, a file per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole-program", action="store_true", help="of jax.lax, by the pass")
    arguments = parser.parse_args()

    jaxfabric.initialize()
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxfabric import hlo, runtime

    n = jax.device_count()
    rows, columns = arguments.block
    lax = collectives(arguments.whole_program)
    program, model, weights = build(n, rows, columns, arguments.rounds, lax)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    everywhere = NamedSharding(mesh, P())
    w = jax.make_array_from_callback(weights.shape, everywhere, lambda at: weights[at])
    f = jax.jit(
        jax.shard_map(
            program, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i"), check_vma=False
        )
    )
    random = np.random.default_rng(arguments.seed)
    inputs, expected = [], []
    for turn in range(INPUTS):
        x = random.integers(0, 8, (n, rows, columns)).astype(np.float32)
        inputs.append(
            jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, P("i")), lambda at, x=x: x[at]
            )
        )
        expected.append(model(x, turn))
    names = [name for name, *_ in operations(n)] * arguments.rounds
    names += [*["inner jit"] * 3, "scan carry", "scan", "cond", "exchange"]

    runtime._session.fabric.enable_trace(1 << 18)
    start = time.monotonic()
    runs = 0
    pending = collections.deque()
    # Every process must stop after the same run, so time is looked at by process 0 alone.
    for run in range(arguments.runs):
        pending.append((run, f(inputs[run % INPUTS], w, run % INPUTS)))
        if len(pending) >= arguments.in_flight:
            done, outs = pending.popleft()
            check(outs, expected[done % INPUTS], done, names)
        runs += 1
        if jax.process_count() == 1 and time.monotonic() - start > arguments.seconds:
            break
    for done, outs in pending:
        check(outs, expected[done % INPUTS], done, names)
    orders = entry_orders(runtime._session.fabric.trace())
    if arguments.orders:
        path = pathlib.Path(arguments.orders, f"{jax.process_index()}.json")
        path.write_text(json.dumps(orders))
    launches, different = reordered(orders)
    counters = jaxfabric.status().counters
    assert all(record.taken for record in hlo.records()), hlo.records()
    print(
        json.dumps(
            {
                "runs": runs,
                "ranks": n,
                "collectives": len(names) + 3,
                "launches traced": launches,
                "launches reordered": different,
                "seconds": round(time.monotonic() - start, 1),
                "handed off": counters["handed_off"],
                "replaced": len(hlo.records()),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
