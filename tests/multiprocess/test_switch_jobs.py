"""What programs of existing code do in two processes: pmap, threads, a search for NaNs."""

from __future__ import annotations

import pytest
import support
from rank_scripts import succeeds

pytestmark = pytest.mark.timeout(180)

# Not a word of jaxfabric.
HEAD = """
import os, sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

n, process = jax.device_count(), jax.process_index()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))

def spread(f):
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))

def array(block):
    whole = np.concatenate([np.asarray(block(rank)) for rank in range(n)])
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, P("i")), lambda at: whole[at])

def own(y):
    return np.asarray(y.addressable_data(0))
"""


def run(tmp_path, body, *arguments, devices=1, env=None):
    script = support.write_script(tmp_path, HEAD + body)
    env = {
        "JAXFABRIC_ENABLE": "1",
        "JAXFABRIC_DEADLINE": "3",
        "PYTHONPATH": support.plugin_path(tmp_path),
        **(env or {}),
    }
    options = ("--devices-per-process", str(devices))
    return support.run_job(script, 2, *arguments, options=options, env=env)


MAPPED = """
groups = [[0, 3], [1, 2]]
ring = [(k, (k + 1) % n) for k in range(n)]

f = jax.pmap(lambda v: {
    "sum": lax.psum(v, "i"),
    "in groups": lax.psum(v, "i", axis_index_groups=groups),
    "gathered": lax.all_gather(v[0], "i"),
    "moved": lax.ppermute(v, "i", ring),
}, axis_name="i")
whole = np.arange(3.0 * n, dtype=np.float32).reshape(n, 3)
x = whole[2 * process : 2 * process + 2]
for name, y in f(x).items():
    for local, shard in enumerate(y.addressable_shards):
        rank = 2 * process + local
        group = groups[rank in groups[1]]
        want = {"sum": whole.sum(0), "in groups": whole[group].sum(0), "gathered": whole[:, 0],
                "moved": whole[rank - 1]}[name]
        np.testing.assert_array_equal(np.asarray(shard.data).reshape(-1), want, name)
assert f.lower(x).as_text().count("custom_call @jaxfabric_") == 4
"""

SWITCHED = """
import jaxfabric
g = spread(lambda v: lax.all_gather(v, "i").reshape(-1) + 0 * lax.psum(v, "i")[0])
x = array(lambda rank: [rank])
for turn in range(4):
    with jaxfabric.enabled("lax" if turn % 2 else None):
        np.testing.assert_array_equal(own(g(x)), range(n))
exported = jax.export.export(g, disabled_checks=jaxfabric.export_checks())(x)
for devices in (jax.devices(), jax.devices()[::-1]):
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices), ("i",)), P("i"))
    y = jax.make_array_from_callback((n,), sharding, lambda at: np.arange(n)[at])
    for shard in jax.jit(exported.call)(y).addressable_shards:
        np.testing.assert_array_equal(shard.data, range(n))
print("done", flush=True)
"""


def test_pmap_the_switch_between_calls_and_export(tmp_path):
    succeeds(run(tmp_path, MAPPED + SWITCHED, devices=2, env={"JAXFABRIC_DEADLINE": "40"}))


THREADS = """
programs = [spread(f) for f in (
    lambda x: lax.psum(x, "i"),
    lambda x: lax.ppermute(x @ x.T, "i", [(k, (k + 1) % n) for k in range(n)])[:, :32],
    lambda x: lax.all_gather(x, "i").sum(0),
    lambda x: lax.pmax(lax.psum_scatter(jnp.concatenate([x] * n), "i", tiled=True), "i"),
)]
x = array(lambda rank: np.full((32, 32), rank + 1.0, np.float32))
# rank + 1 is 1 and 2: sums are 3, and of the products each rank gets the other's.
wants = [3, 32 * (2 - process) ** 2, 3, 3]
wait = sys.argv[1] == "other"
if process == 0 or not wait:
    order = [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 2, 1, 3, 1, 2] * 4
else:
    order = [1, 0, 2, 3]
turn, changed, failures = 0, threading.Condition(), []

def work(me):
    global turn
    results = []
    try:
        for at, who in enumerate(order):
            if who != me:
                continue
            with changed:
                changed.wait_for(lambda: turn >= at or failures)
                results.append(programs[me](x))
                if wait:
                    results[-1].block_until_ready()
                turn += 1
                changed.notify_all()
        for y in results:
            np.testing.assert_array_equal(own(y), np.full((32, 32), wants[me]))
    except Exception as error:
        with changed:
            failures.append(error)
            changed.notify_all()

threads = [threading.Thread(target=work, args=(k,)) for k in range(len(programs))]
for thread in threads: thread.start()
for thread in threads: thread.join()
if failures:
    assert not any(isinstance(error, AssertionError) for error in failures), failures
    print("error", str(failures[0]).replace(chr(10), " "), flush=True)
    os._exit(0)
print("done", flush=True)
"""


def test_programs_of_several_threads_in_the_same_order(tmp_path):
    # A launch may keep a thread of XLA's pool, which has one per core: see docs/matching.md.
    env = {"NPROC": "8", "JAXFABRIC_DEADLINE": "40"}
    succeeds(run(tmp_path, THREADS, "same", env=env))


def test_programs_of_several_threads_in_another_order_on_each_rank(tmp_path):
    result = run(tmp_path, THREADS, "other", env={"NPROC": "8"})
    for rank in range(2):
        last = result.lines_of(rank)[-1]
        assert last.startswith("error"), result.explain()
        assert "psum float32[32,32] at job.py" in last, result.explain()
        assert "ppermute float32[32,32] at job.py" in last, result.explain()


NANS = """
everywhere = spread(lambda v: lax.psum(jnp.log(v), "i") + v)
first_only = spread(lambda v: jnp.log(lax.psum(v, "i") * (2 * lax.axis_index("i") - 1)))
fine = array(lambda rank: np.full(3, rank + 1, np.float32))
for _ in range(2):
    np.testing.assert_allclose(own(everywhere(fine)), np.log(2) + process + 1, rtol=1e-6)
    with jax.debug_nans(True):
        try:
            everywhere(-fine)
        except FloatingPointError:
            print("found", flush=True)
# JAX looks for a NaN by running the program again, step by step, on the ranks that got one.
try:
    with jax.debug_nans(True):
        first_only(fine).block_until_ready()
    own(everywhere(fine))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print("error", str(error).replace(chr(10), " "), flush=True)
    os._exit(0)
print("done", flush=True)
"""


def test_nans_are_found_and_nobody_waits_for_ever(tmp_path):
    result = run(tmp_path, NANS)
    for rank in range(2):
        *found, last = [x for x in result.lines_of(rank) if not x.startswith("Invalid nan")]
        assert found == ["found"] * 2, result.explain()
        assert last.startswith("error"), result.explain()
        for part in ("DEADLINE_EXCEEDED", "rank 0", "rank 2048", "psum float32[3] at job.py"):
            assert part in last, result.explain()
