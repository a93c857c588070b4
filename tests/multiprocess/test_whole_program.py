"""Programs without a collective in them, over the devices of several processes."""

from __future__ import annotations

import re

import pytest
from rank_scripts import run, succeeds

pytestmark = pytest.mark.timeout(180)

HEAD = """
from jax.experimental import multihost_utils
from jaxfabric import hlo
hlo.install()

def put(x, *spec, mesh=mesh):
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P(*spec)), lambda at: x[at])

def constrain(x, *spec, mesh=mesh):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

def equal(y, want):
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])

numbers = lambda *shape: (np.arange(np.prod(shape)) % 13 - 6).reshape(shape).astype(np.float32)
"""

PROGRAMS = """
x, w = numbers(16, 32), numbers(32, 8)
f = jax.jit(lambda x, w: (x @ w, (x @ w).max()), out_shardings=NamedSharding(mesh, P()))
for _ in range(5):
    y, top = f(put(x, None, "i"), put(w, "i", None))
    equal(y, x @ w)
    equal(top, (x @ w).max())

for before, after in ((("i",), ()), (("i", None), (None, "i")), ((None, "i"), ())):
    equal(jax.jit(lambda x: constrain(x * 1, *after))(put(x, *before)), x)
equal(jax.jit(lambda x: constrain(jnp.roll(x, 1, 0), "i"))(put(x, "i")), np.roll(x, 1, 0))

# Devices in another order, and half of them: ranks are devices, not positions.
devices = np.array(jax.devices())
for order in ([2, 0, 3, 1], [3, 0]):
    other = jax.sharding.Mesh(devices[order], ("j",))
    z = jax.jit(
        lambda x: constrain(jnp.flip(x, 0), "j", mesh=other) + x.sum(0)
    )(put(x, "j", mesh=other))
    equal(z, np.flip(x, 0) + x.sum(0))

# Each process on its own, in a program of the same name.
mine = jax.sharding.Mesh(np.array(jax.local_devices()), ("k",))
equal(jax.jit(lambda x: x.sum(0))(put(x + process, "k", mesh=mine)), (x + process).sum(0))

# A training step.
def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)
ws = put(w, None, None)
plain = w
for _ in range(3):
    ws = step(ws, put(x, "i"))
    plain = plain - 0.1 * np.asarray(jax.grad(loss)(plain, x))
for shard in ws.addressable_shards:
    np.testing.assert_allclose(np.asarray(shard.data), plain, rtol=1e-5, atol=1e-6)

# What JAX runs itself.
np.testing.assert_array_equal(
    multihost_utils.process_allgather(np.float32([process])), [[0], [1]])
multihost_utils.sync_global_devices("here")

records = hlo.records()
assert all(r.taken for r in records), records
print("ops", *sorted({r.op for r in records}))
assert jaxfabric.status().counters
"""


def test_programs_of_several_processes(tmp_path):
    result = run(tmp_path, HEAD + PROGRAMS)
    succeeds(result)
    for rank in range(2):
        assert result.lines_of(rank)[-2] == (
            "ops all-gather all-reduce all-to-all collective-permute"
        )


CACHED = """
jax.config.update("jax_compilation_cache_dir", sys.argv[1 + process])
f = jax.jit(lambda x: constrain(jnp.roll(x, 1, 0), "i") + x.sum(0))
x = numbers(16, 32)
for k in range(3):
    equal(f(put(x + k, "i")), np.roll(x + k, 1, 0) + (x + k).sum(0))
print("compiled", len(hlo.records()) > 0)
"""


def test_one_process_compiles_and_one_has_the_program_in_its_cache(tmp_path):
    """The pass does not run on the process that finds it, and they meet all the same."""
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    warm, cold = str(tmp_path / "warm"), str(tmp_path / "cold")
    first = run(tmp_path, HEAD + CACHED, env=cache, arguments=(warm, warm))
    succeeds(first)
    result = run(tmp_path, HEAD + CACHED, env=cache, arguments=(warm, cold))
    succeeds(result)
    assert [result.lines_of(rank)[-2] for rank in range(2)] == ["compiled False", "compiled True"]


DIFFERENT = """
f = jax.jit(lambda x: x.sum(0) if process == 0 else x.max(0))
try:
    jax.block_until_ready(f(put(numbers(16, 32), "i")))
except jax.errors.JaxRuntimeError as error:
    print("error", str(error).replace(chr(10), " "))
"""


def test_an_error_names_the_line_of_the_program(tmp_path):
    result = run(tmp_path, HEAD + DIFFERENT)
    for rank in range(2):
        (line,) = (line for line in result.lines_of(rank) if line.startswith("error"))
        calls = re.findall(r"all-reduce \((sum|max)\) float32\[32\] at \w+\.py:\d+", line)
        assert set(calls) == {"sum", "max"}, result.explain()
        assert "ranks disagree" in line, result.explain()
