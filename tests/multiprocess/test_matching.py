"""Which call matches which: programs, launches and loops on ranks that do not go in step.

Every script runs on two processes with two devices each unless the test says otherwise, and ends
with one line per process that the test checks.
"""

from __future__ import annotations

import sys

import pytest
import support

pytestmark = pytest.mark.timeout(180)

HEAD = """
import os, sys, threading
import numpy as np
import jaxfabric
jaxfabric.initialize()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxfabric import lax

n = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
process = jax.process_index()

def spread(f, out_specs=P("i"), **options):
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=out_specs, check_vma=False),
        **options)

def array(block):
    "block(rank) is the part of each rank."
    blocks = [np.asarray(block(rank)) for rank in range(n)]
    whole = np.concatenate(blocks)
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, P("i")), lambda at: whole[at])

def parts(y):
    "rank -> its part, of this process."
    return {s.index[0].start // s.data.shape[0]: np.asarray(s.data) for s in y.addressable_shards}

def same(y, want):
    for rank, part in parts(y).items():
        np.testing.assert_array_equal(part, want(rank))
"""
TAIL = """
print("done", flush=True)
"""


def run(tmp_path, body, processes=2, devices=2, env=None, arguments=(), timeout=120):
    script = support.write_script(tmp_path, HEAD + body + TAIL)
    return support.run_job(
        script,
        processes,
        *arguments,
        options=("--devices-per-process", str(devices)),
        env={"PYTHONPATH": ":".join(sys.path), "JAXFABRIC_DEADLINE": "40"} | (env or {}),
        timeout=timeout,
    )


def succeeds(result, processes=2):
    assert result.returncode == 0, result.explain()
    for rank in range(processes):
        assert result.lines_of(rank)[-1] == "done", result.explain()


CACHED = """
f = spread(lambda x: lax.psum(x, "i") + lax.ppermute(lax.psum(2 * x, "i"), "i", [(0, 1)]))
from jaxfabric import runtime
runtime._session.fabric.enable_trace(1000)
x = array(lambda rank: np.full(300, rank + 1.0, np.float32))
total = n * (n + 1) / 2
for _ in range(3):
    same(f(x), lambda rank: np.full(300, total + (2 * total if rank == 1 else 0), np.float32))
print("first run id", runtime._session.fabric.trace()[0][2])
"""


def test_one_rank_cold_and_one_from_the_compilation_cache(tmp_path):
    """The ranks' run ids differ; only process 0 writes JAX's persistent cache."""
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    body = (
        """
jax.config.update("jax_compilation_cache_dir", sys.argv[1 + process])
"""
        + CACHED
    )
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    first = run(tmp_path, body, env=cache, arguments=(str(warm), str(warm)))
    succeeds(first)
    assert any(warm.iterdir())
    result = run(tmp_path, body, env=cache, arguments=(str(warm), str(cold)))
    succeeds(result)
    ids = [result.lines_of(rank)[-2] for rank in range(2)]
    assert ids[0] != ids[1], "both compiled, or both loaded: this has tested nothing"


FIRST_LAUNCHES = """
from jaxfabric import runtime
devices = np.array(jax.devices())
for order in (range(n), range(n)[::-1], range(0, n, n // 2), range(2)):
    mesh = jax.sharding.Mesh(devices[list(order)], ("i",))
    if not any(device.process_index == process for device in mesh.devices.flat):
        continue
    size = mesh.size
    whole = np.arange(1, size + 1, dtype=np.float32)
    x = jax.make_array_from_callback((size,), NamedSharding(mesh, P("i")), lambda at: whole[at])
    for shard in spread(lambda v: lax.psum(v * 1.0, "i"))(x).addressable_shards:
        assert np.asarray(shard.data).item() == whole.sum(), (shard, whole)

@jax.jit
@jax.shard_map(mesh=jax.make_mesh((n,), ("i",)), in_specs=(), out_specs=P())
def without_arguments():
    return lax.psum(jnp.float32(1) + jax.lax.axis_index("i"), "i")

assert float(without_arguments()) == n * (n + 1) / 2
print("settled by time:", runtime._session.fabric.counters()["unknown_launch_bases"])
"""


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_first_launches_are_known_without_waiting(tmp_path, processes, devices):
    """Whole, reversed and partial meshes over the processes, and one inside a process."""
    result = run(tmp_path, FIRST_LAUNCHES, processes, devices)
    succeeds(result, processes)
    for process in range(processes):
        assert "settled by time: 0" in result.lines_of(process), result.explain()


DIVIDED = """
from jaxfabric import runtime
jaxfabric.shutdown()
jaxfabric.initialize()
mesh = jax.make_mesh((2, 2), ("p", "d"))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P()), out_specs=P(("p", "d")), check_vma=False)
def f(mode, s):
    rank = jax.lax.axis_index(("p", "d")).astype(jnp.float32)
    row = jax.lax.axis_index("p")
    # mode 0: no collective. 1: the devices of process 0 only. 2: from process 1 to process 0.
    y = jax.lax.cond((mode == 1) & (row == 0), lambda x: lax.psum(x, "d"), lambda x: 0 * x, rank)
    z = jax.lax.cond(mode == 2, lambda x: lax.ppermute(x + s, "p", [(1, 0)]), lambda x: 0 * x, rank)
    return (y + z)[None]

for mode in sys.argv[1]:
    f(jnp.int32(int(mode)), jnp.float32(0)).block_until_ready()
# The sender waits for nobody: its value of another launch would be there to be taken.
results = [f(jnp.int32(2), jnp.float32(100 * k)) for k in range(4)]
for k, result in enumerate(results):
    for shard in result.addressable_shards:
        rank = shard.index[0].start
        want = rank + 2 + 100 * k if rank < 2 else 0
        assert float(np.asarray(shard.data)[0]) == want, (rank, k, shard.data, want)
"""


@pytest.mark.parametrize("before", ["1", "0010", "101"])
def test_groups_whose_first_collectives_are_in_different_launches(tmp_path, before):
    """In a fabric after the first one, where nobody knows how often a program was launched."""
    succeeds(run(tmp_path, DIVIDED, arguments=[before]))


REJITTED = """
if process == 0:
    # JAX writes its persistent cache from process 0 only: the others compile again and again.
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = array(lambda rank: np.full(3, rank + 1.0, np.float32))
for _ in range(4):
    same(spread(lambda v: lax.psum(v, "i"))(x), lambda rank: np.full(3, n * (n + 1) / 2))
"""


def test_equal_programs_of_which_one_rank_finds_the_later_ones_in_the_cache(tmp_path):
    env = {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    succeeds(run(tmp_path, REJITTED, arguments=[tmp_path / "cache"], env=env))


THREADS = """
f = spread(lambda x: lax.psum(x @ x.T, "i"))
# Whatever launch meets which: all threads of a process give the same.
x = array(lambda rank: np.full((64, 64), rank + 1.0, np.float32))
want = sum(64 * (rank + 1.0) ** 2 for rank in range(n))
start = threading.Barrier(THREADS)
failures = []

def work():
    start.wait()
    try:
        outs = [f(x) for _ in range(LAUNCHES)]
        for out in outs:
            same(out, lambda rank: np.full((64, 64), want, np.float32))
    except Exception as error:
        failures.append(error)

threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures[0]
"""


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 1)])
def test_three_threads_start_one_executable_together(tmp_path, processes, devices):
    body = THREADS.replace("THREADS", "3").replace("LAUNCHES", "10")
    # A launch keeps a thread of XLA's pool until its collectives are done, and there is one per
    # core: with three launches in flight two processes might be busy with different ones. NPROC is
    # the size of that pool.
    env = {"NPROC": "8"} if processes > 1 else {}
    succeeds(run(tmp_path, body, processes, devices, env=env), processes)


def test_threads_whose_order_differs_between_processes_get_an_error_or_the_result(tmp_path):
    """With several devices per process XLA runs one launch at a time on each, in any order."""
    body = THREADS.replace("THREADS", "3").replace("LAUNCHES", "10")
    result = run(tmp_path, body, env={"JAXFABRIC_DEADLINE": "3"})
    if result.returncode == 0:
        return
    assert "DEADLINE_EXCEEDED" in result.stderr, result.explain()
    assert "Mismatched elements" not in result.stderr, result.explain()
    assert result.seconds < 40


TWO_PROGRAMS = """
a = spread(lambda x: lax.psum(x, "i")).lower(array(lambda rank: np.zeros(50))).compile()
b = spread(lambda x: lax.psum(x, "i")).lower(array(lambda rank: np.zeros(50))).compile()
x = array(lambda rank: np.full(50, rank + 1.0, np.float32))
y = array(lambda rank: np.full(50, 10.0 * (rank + 1), np.float32))
total = n * (n + 1) / 2
for round in range(20):
    outs = [b(y), a(x), b(x), a(y)]
    for out, want in zip(outs, (10 * total, total, total, 10 * total)):
        same(out, lambda rank: np.full(50, want, np.float32))
"""


def test_two_programs_compiled_before_either_runs(tmp_path):
    succeeds(run(tmp_path, TWO_PROGRAMS))


RUN_AHEAD = """
# Equal module names, ordinals, ops, shapes: equal sites. Rank 0 only sends, so it is through both
# programs, several times, before the last rank has begun the first.
one_way = [(0, n - 1)]
first = spread(lambda x: lax.ppermute(x, "i", one_way))
second = spread(lambda x: lax.ppermute(x, "i", one_way) + 0 * x)
xs = [array(lambda rank: np.full(BLOCK, 100.0 * k + rank, np.float32)) for k in range(4)]
if process == jax.process_count() - 1:
    # A local program first: the peers are ahead.
    slow = jnp.ones((700, 700)) @ jnp.ones((700, 700))
    for _ in range(10): slow = slow @ jnp.ones((700, 700)) / 700
    jax.block_until_ready(slow)
outs = []
for k in range(4):
    outs += [(k, first(xs[k])), (k, second(xs[k]))]
for k, out in outs:
    same(out, lambda rank: np.full(BLOCK, 100.0 * k if rank == n - 1 else 0, np.float32))
"""


@pytest.mark.parametrize("block", [8, 20_000, 300_000])
def test_equal_sites_and_a_rank_that_runs_ahead(tmp_path, block):
    succeeds(run(tmp_path, RUN_AHEAD.replace("BLOCK", str(block)), devices=1))


DONATED = """
f = spread(lambda x: lax.psum(x, "i") + 1, donate_argnums=0)
for size in (5, 3000, 200_000):
    x = array(lambda rank: np.full(size, rank + 1.0, np.float32))
    want = [rank + 1.0 for rank in range(n)]
    for _ in range(6):
        x = f(x)
        want = [sum(want) + 1] * n
        want = [w % 1024 for w in want]
        x = spread(lambda v: v % 1024, donate_argnums=0)(x)
    same(x, lambda rank: np.full(size, want[rank], np.float32))
"""


def test_donated_arguments(tmp_path):
    succeeds(run(tmp_path, DONATED))


LOOPS = """
def body(x):
    def step(state):
        k, v = state
        return k + 1, lax.psum(v, "i") % 1021 + k
    k, v = jax.lax.while_loop(lambda s: s[0] < 200 + 0 * s[0], step, (0, x))
    def inner(c, _):
        def deeper(i, c):
            return lax.ppermute(c, "i", [(j, (j + 1) % n) for j in range(n)]) + i
        return jax.lax.fori_loop(0, 5, deeper, c), lax.psum(c, "i")[:3]
    v, sums = jax.lax.scan(inner, v, None, length=7)
    return v, sums.reshape(-1)

f = spread(body)
x0 = np.arange(n * 16, dtype=np.int32).reshape(n, 16)
want = x0.copy()
for k in range(200):
    want = np.broadcast_to(want.sum(0) % 1021 + k, want.shape)
sums = []
for _ in range(7):
    sums.append(want.sum(0)[:3])
    for i in range(5):
        want = np.roll(want, 1, 0) + i
for _ in range(3):
    v, s = f(array(lambda rank: x0[rank]))
    same(v, lambda rank: want[rank])
    same(s, lambda rank: np.concatenate(sums))
# A trip count that is known only at run time, and differs between launches.
g = jax.jit(jax.shard_map(
    lambda x, m: jax.lax.while_loop(
        lambda s: s[0] < m, lambda s: (s[0] + 1, lax.psum(s[1], "i") % 1021), (0, x))[1],
    mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=False))
for m in (0, 1, 7, 0, 30, 2):
    want = x0.copy()
    for _ in range(m):
        want = np.broadcast_to(want.sum(0) % 1021, want.shape)
    same(g(array(lambda rank: x0[rank]), m), lambda rank: want[rank])
"""


def test_loops(tmp_path):
    succeeds(run(tmp_path, LOOPS))


FLIGHT = """
f = spread(lambda x: lax.psum(x @ x, "i") + lax.ppermute(x, "i", [(0, n - 1)]))
xs = [array(lambda rank: np.full((SIZE, SIZE), (k + rank) % 5, np.float32)) for k in range(20)]
for _ in range(ROUNDS):
    outs = [f(x) for x in xs]
    for k, out in enumerate(outs):
        total = sum(SIZE * ((k + rank) % 5) ** 2 for rank in range(n))
        same(out, lambda rank: np.full(
            (SIZE, SIZE), total + (k % 5 if rank == n - 1 else 0), np.float32))
"""


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2), (2, 1)])
@pytest.mark.parametrize("size", [4, 128])
def test_twenty_launches_in_flight(tmp_path, processes, devices, size):
    body = FLIGHT.replace("SIZE", str(size)).replace("ROUNDS", "5")
    succeeds(run(tmp_path, body, processes, devices), processes)


RECOMPILED = """
f = spread(lambda x: lax.psum(x, "i"))
x = array(lambda rank: np.full(30, rank + 1.0, np.float32))
want = lambda rank: np.full(30, n * (n + 1) / 2, np.float32)
same(f(x), want)
if process == 1:
    jax.clear_caches()
    f = spread(lambda x: lax.psum(x, "i"))
try:
    y = f(x)
    same(y, want)
    print("matched")
except jax.errors.JaxRuntimeError as error:
    print("error", str(error).replace(chr(10), " "))
    os._exit(0)
"""


def test_a_rank_that_recompiled_gets_an_error_and_never_a_match(tmp_path):
    result = run(tmp_path, RECOMPILED, env={"JAXFABRIC_DEADLINE": "3"})
    for rank in range(2):
        last = result.lines_of(rank)[-1]
        assert last.startswith("error"), result.explain()
        assert "psum float32[30]" in last
        assert "job.py" in last
    assert result.seconds < 30


OTHER_ORDER = """
a = spread(lambda x: lax.psum(x, "i"))
def named(x): return lax.psum(x, "i")
b = spread(named)
x = array(lambda rank: np.full(30, rank + 1.0, np.float32))
try:
    for f in ((a, b) if process == 0 else (b, a)):
        jax.block_until_ready(f(x))
    print("matched")
except jax.errors.JaxRuntimeError as error:
    print("error", str(error).replace(chr(10), " "))
    os._exit(0)
"""


def test_programs_in_another_order_end_in_an_error_that_names_both_sides(tmp_path):
    result = run(tmp_path, OTHER_ORDER, env={"JAXFABRIC_DEADLINE": "3"})
    for rank in range(2):
        last = result.lines_of(rank)[-1]
        assert last.startswith("error"), result.explain()
        assert "job.py" in last
    assert result.seconds < 30
