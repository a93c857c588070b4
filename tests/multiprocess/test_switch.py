"""Programs written for jax.lax only, in several processes, with the switch on."""

from __future__ import annotations

import sys

import pytest
import support
from rank_scripts import run, succeeds

pytestmark = pytest.mark.timeout(180)

# Not a word of jaxfabric.
STOCK = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

n = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i"), P("i")))
def f(x):
    return lax.psum(x, "i"), lax.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]), 2 * x

whole = np.arange(4 * n, dtype=np.float32)
x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("i")), lambda at: whole[at])
total, shifted, _ = f(x)
np.testing.assert_array_equal(total.addressable_data(0), whole.reshape(n, 4).sum(0))
for shard in shifted.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.roll(whole, 4)[shard.index])
print("processes", jax.process_count(), "devices", n,
      "calls", f.lower(x).as_text().count("custom_call @jaxfabric_"))
print("done")
"""


@pytest.mark.parametrize(
    ("enable", "processes", "devices"), [("1", 2, 2), ("1", 1, 8), ("0", 1, 2), ("lax", 4, 1)]
)
def test_a_program_without_a_word_of_jaxfabric(tmp_path, enable, processes, devices):
    script = support.write_script(tmp_path, STOCK)
    env = {"JAXFABRIC_ENABLE": enable, "PYTHONPATH": support.plugin_path(tmp_path)}
    options = ("--devices-per-process", str(devices))
    result = support.run_job(script, processes, options=options, env=env, timeout=120)
    succeeds(result, processes)
    want = 0 if enable == "0" else 2
    line = f"processes {processes} devices {processes * devices} calls {want}"
    for rank in range(processes):
        assert result.lines_of(rank)[-2] == line, result.explain()
    assert not result.leftovers


def test_a_wrong_value_of_the_variable_is_said(tmp_path):
    script = support.write_script(tmp_path, "import jax\njax.devices()\nprint('done')")
    env = {"JAXFABRIC_ENABLE": "maybe", "PYTHONPATH": support.plugin_path(tmp_path)}
    result = support.run_job(script, 1, env=env, timeout=60)
    assert "JAXFABRIC_ENABLE=maybe: use 0, 1 or " in result.stderr, result.explain()


ONCE = """
import sys
first, second = sys.argv[1].split()
for name in (first, second):
    exec(f"import {name}")
if len(sys.argv) > 2:
    jaxfabric.initialize()
import numpy as np
compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: event.endswith("compile_duration") and compilations.append(event))

@jax.jit
@jax.shard_map(mesh=jax.make_mesh((2,), ("i",)), in_specs=jax.P(), out_specs=jax.P())
def f(x):
    return jaxfabric.lax.psum(x, "i")  # The module's first use.

x = np.ones(3, np.float32)
f(x)
count = len(compilations)
for _ in range(3):
    f(x)
assert count > 0 and len(compilations) == count, compilations
print("done")
"""


@pytest.mark.parametrize(
    "arguments", [("jax jaxfabric",), ("jax jaxfabric", "start"), ("jaxfabric jax", "start")]
)
def test_programs_are_compiled_once(tmp_path, arguments):
    """JAX's caches know of the contexts of the switch before the first program is traced."""
    script = support.write_script(tmp_path, ONCE)
    env = {"PYTHONPATH": ":".join(sys.path)}
    options = ("--devices-per-process", "2")
    succeeds(support.run_job(script, 1, *arguments, options=options, env=env), 1)


# Each half of the job has a mesh of its own, and runs the same program on it at the same time.
DISJOINT = """
half = jax.devices()[: n // 2] if 2 * process < jax.process_count() else jax.devices()[n // 2 :]
mesh = jax.sharding.Mesh(np.array(half), ("i",))

@jax.jit
@jax.shard_map(in_specs=P("i"), out_specs=P("i"))
def f(x):
    return lax.psum(x, "i") + 0 * x

value = 1.0 + half[0].id
x = jax.make_array_from_callback(
    (2 * len(half),), NamedSharding(mesh, P("i")), lambda at: np.full(2, value, np.float32))
with jax.set_mesh(mesh), jaxfabric.portable():
    for _ in range(5):
        for shard in f(x).addressable_shards:
            np.testing.assert_array_equal(shard.data, np.full(2, value * len(half)))
    assert "by_position = 1" in f.lower(x).as_text()
"""


@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2), (4, 2)])
def test_portable_programs_on_disjoint_meshes(tmp_path, processes, devices):
    succeeds(run(tmp_path, DISJOINT, processes, devices), processes)


HALVES = """
from jax._src.lax import parallel
from jaxfabric import runtime

with jaxfabric.enabled():
    ring = [(k, (k + 1) % n) for k in range(n)]

    def body(carry, _):
        started = parallel.ppermute_start(carry, "i", ring)
        gathered = parallel.all_gather_start(carry, "i")
        return started.done() + 0 * gathered.done().sum(0), None

    f = spread(lambda x: jax.lax.scan(body, x, None, length=4)[0])
    for size in (1, 5000, 1 << 20):
        x = array(lambda rank: np.full(size, rank + 1.0, np.float32))
        for _ in range(3):
            same(f(x), lambda rank: np.full(size, (rank - 4) % n + 1.0, np.float32))
    assert f.lower(x).as_text().count("custom_call @jaxfabric_done") == 2
    # A rank that never starts: the one that waits is told, as for a collective in one.
    if process == 0:
        y = f(x)
        try:
            y.block_until_ready()
        except Exception as error:
            waits = "has left and rank 0 (process 0) waits for it in ppermute float32[1048576] at"
            assert waits in str(error)
            print("told")
    print("done", flush=True)
"""


def test_halves(tmp_path):
    result = run(tmp_path, HALVES, 2, 1)
    assert "told" in result.lines_of(0), result.explain()
    assert "done" in result.lines_of(1), result.explain()
    assert not result.leftovers


AUTO_SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
def put(whole, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])

a = put(np.arange(128, dtype=np.float32).reshape(8, 16), None, "i")
b = put(np.ones((16, 4), np.float32), "i", None)
f = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P()))
want = np.arange(128).reshape(8, 16).sum(1, keepdims=True) * np.ones(4)
np.testing.assert_array_equal(f(a, b).addressable_data(0), want)
print("calls", f.lower(a, b).compile().as_text().count("jaxfabric_all_reduce"))
print("done")
"""


@pytest.mark.parametrize(("enable", "calls"), [("hlo", 1), ("1", 0)])
def test_an_auto_sharded_program_without_a_word_of_jaxfabric(tmp_path, enable, calls):
    script = support.write_script(tmp_path, AUTO_SHARDED)
    env = {"JAXFABRIC_ENABLE": enable, "PYTHONPATH": support.plugin_path(tmp_path)}
    options = ("--devices-per-process", "2")
    result = support.run_job(script, 2, options=options, env=env, timeout=120)
    succeeds(result)
    for rank in range(2):
        assert f"calls {calls}" in result.lines_of(rank), result.explain()
