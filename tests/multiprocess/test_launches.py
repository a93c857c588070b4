"""Which launch of a program meets which, on ranks that count on their own."""

from __future__ import annotations

import pytest
from rank_scripts import run, succeeds

pytestmark = pytest.mark.timeout(180)

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

# Nobody lowers anything for the devices that these run on.
x = jax.ShapeDtypeStruct((n,), np.float32)
on_all = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("i",)), P("i"))
exported = jax.export.export(
    jax.jit(jax.shard_map(lambda v: lax.psum(v * 2.0, "i"), mesh=on_all.mesh,
                          in_specs=P("i"), out_specs=P("i")), in_shardings=on_all),
    disabled_checks=jaxfabric.export_checks())(x)
for shift in range(n):
    mesh = jax.sharding.Mesh(np.roll(devices, shift), ("i",))
    x = jax.make_array_from_callback(
        (n,), NamedSharding(mesh, P("i")), lambda at: np.arange(n, dtype=np.float32)[at])
    for shard in jax.jit(exported.call)(x).addressable_shards:
        assert np.asarray(shard.data).item() == n * (n - 1), shard

whole_mesh = jax.make_mesh((n,), ("i",))

@jax.jit
@jax.shard_map(mesh=whole_mesh, in_specs=(), out_specs=P())
def without_arguments():
    return lax.psum(jnp.float32(1) + jax.lax.axis_index("i"), "i")

# JAX counts the launches of all programs without arguments together.
zeros = jax.jit(lambda: jnp.zeros(n), out_shardings=NamedSharding(whole_mesh, P("i")))
for _ in range(3):
    zeros()
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


IN_TURN = """
if process == 0:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def program():
    # The ranks that send wait for nobody: values of other launches are there to be taken.
    return spread(lambda v: lax.ppermute(v, "i", [(i, i + 1) for i in range(n - 1)]))

first = program()
value = 0
for turn in range(12):
    if turn == 2:
        second = program()
    for f in (first,) if turn < 2 else (first, second) if turn % 3 else (second, first, first):
        value += 100
        x = array(lambda rank: np.full(300, rank + value, np.float32))
        same(f(x), lambda rank: np.full(300, rank - 1 + value if rank else 0, np.float32))
"""


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)])
def test_equal_programs_in_turn_of_which_one_rank_found_the_second_in_the_cache(
    tmp_path, processes, devices
):
    """JAX counts the launches of equal programs together, and a cached one is not equal to it."""
    env = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAXFABRIC_DEADLINE": "10"}
    result = run(tmp_path, IN_TURN, processes, devices, arguments=[tmp_path / "cache"], env=env)
    succeeds(result)


MADE_AGAIN = """
import gc
x = array(lambda rank: np.full(3, rank + 1.0, np.float32))
total = n * (n + 1) / 2
kept, results = [], []
for turn in range(9):
    f = spread(lambda v: lax.psum(v, "i"))
    results += [f(x) for _ in range(turn % 3 + 1)]
    if (turn + process) % 3 == 0:
        kept.append(f)
    if (turn + process) % 5 == 0:
        kept.clear()
        gc.collect()
for result in results:
    same(result, lambda rank: np.full(3, total, np.float32))
"""


def test_equal_programs_that_live_longer_on_one_rank_than_on_another(tmp_path):
    """Some are let go while they run, some are kept: each rank does it at moments of its own."""
    succeeds(run(tmp_path, MADE_AGAIN))
