"""Which call matches which: programs, launches and loops on ranks that do not go in step.

Every script runs on two processes with two devices each unless the test says otherwise, and ends
with one line per process that the test checks.
"""

from __future__ import annotations

import pytest
from rank_scripts import run, succeeds

pytestmark = pytest.mark.timeout(180)

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
