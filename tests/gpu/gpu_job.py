"""Every collective in programs of jax.jit and jax.shard_map, on whatever platform JAX has.

    jaxfabric run -n 2 -- python tests/gpu/gpu_job.py PLATFORM GPUS [EACH]

Compares what jaxfabric.lax gives, and jax.lax with the switch on, with numpy, and insists that the
fabric ran all of it. Processes take GPUs in turn, EACH of them (1): with too few these share them.
"""

from __future__ import annotations

import contextlib
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax import parallel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfabric
import jaxfabric.lax

PLATFORM, GPUS, EACH = sys.argv[1], int(sys.argv[2]), int([*sys.argv, "1"][3])
if PLATFORM == "gpu":
    # Read when JAX starts its backend.
    first = int(os.environ["JAXFABRIC_PROCESS_ID"]) * EACH
    own = [str((first + k) % GPUS) for k in range(EACH)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
jaxfabric.initialize()
assert jax.default_backend() == PLATFORM, jax.default_backend()
assert jax.local_device_count() == EACH, jax.local_devices()
# Of 1 MiB and more, whose arrays may be in windows.
WINDOWS = jaxfabric.status().config.gpu_windows == "on"
LARGE = (400_000,) if WINDOWS else ()
TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"),
    *("complex64", "complex128"),
)
n, process = jax.device_count(), jax.process_index()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
ring = [(k, (k + 1) % n) for k in range(n)]


def spread(f, **options):
    """The function of a rank's part as a program."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return jax.jit(mapped, **options)


def parts(count, seed):
    """Integers as floats, so that sums have one result: a row for each rank."""
    rows = np.random.default_rng(seed).integers(-99, 99, (n, count))
    return rows.astype(np.float32)


def array(rows):
    """One global array of what each rank has; the first dimension is that of the ranks."""
    whole = rows.reshape(-1, *rows.shape[2:])
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, P("i")), lambda at: whole[at]
    )


def check(name, y, want, tolerance=0.0):
    """`want`: of every rank."""
    for shard in y.addressable_shards:
        rank = (shard.index[0].start or 0) // shard.data.shape[0]
        got, what = np.asarray(shard.data), f"{name}, rank {rank}"
        if tolerance:
            got, exact = (np.asarray(v).astype(np.float32) for v in (got, want[rank]))
            np.testing.assert_allclose(got, exact, tolerance, tolerance, err_msg=what)
        else:
            np.testing.assert_array_equal(got, want[rank], what)


def dense(lax, count):
    """Calls of `count` elements from each rank to each, several launches with other values."""
    programs = {
        "psum": (lambda x: lax.psum(x, "i"), lambda x: [x.sum(0)] * n),
        "pmax": (lambda x: lax.pmax(x, "i"), lambda x: [x.max(0)] * n),
        "all_gather": (
            lambda x: lax.all_gather(x, "i", tiled=True),
            lambda x: [x.reshape(-1)] * n,
        ),
        "psum_scatter": (
            lambda x: lax.psum_scatter(x, "i", tiled=True),
            lambda x: x.sum(0).reshape(n, -1),
        ),
        "all_to_all": (
            lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
            lambda x: x.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1),
        ),
        "ppermute": (lambda x: lax.ppermute(x, "i", ring), lambda x: np.roll(x, 1, 0)),
        "pbroadcast": (lambda x: lax.pbroadcast(x, "i", n - 1), lambda x: [x[n - 1]] * n),
    }
    for name, (rank_program, numpy_program) in programs.items():
        program = spread(rank_program)
        for seed in range(3):
            rows = parts(count * n, seed)
            check(name, program(array(rows)), numpy_program(rows))


def types(lax):
    """Every type, in one program each; numbers so small that all types have the sums."""
    for name in TYPES:
        dtype = jnp.dtype(name)
        numbers = name.startswith(("int", "float", "bfloat"))
        values = np.random.default_rng(3).integers(-numbers, 2, (2, n, 3 * n))
        rows = (values[0] + 1j * values[1] if "complex" in name else values[0]).astype(dtype)
        wide = rows.astype(np.complex128 if "complex" in name else np.float64)
        programs = {
            "all_gather": (lambda x: lax.all_gather(x, "i"), [rows] * n),
            "all_to_all": (
                lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
                rows.reshape(n, n, 3).swapaxes(0, 1).reshape(n, -1),
            ),
            "ppermute": (lambda x: lax.ppermute(x, "i", ring), np.roll(rows, 1, 0)),
            "pbroadcast": (lambda x: lax.pbroadcast(x, "i", n - 1), [rows[n - 1]] * n),
        }
        if name != "bool":
            total = wide.sum(0).astype(dtype)
            programs |= {
                "psum": (lambda x: lax.psum(x, "i"), [total] * n),
                "psum_scatter": (
                    lambda x: lax.psum_scatter(x, "i", tiled=True),
                    total.reshape(n, 3),
                ),
            }
        if "complex" not in name:
            programs |= {
                "pmax": (lambda x: lax.pmax(x, "i"), [wide.max(0).astype(dtype)] * n),
                "pmin": (lambda x: lax.pmin(x, "i"), [wide.min(0).astype(dtype)] * n),
            }
        program = spread(lambda x, run=programs: {key: f(x) for key, (f, _) in run.items()})
        with jax.enable_x64(True):
            got = program(array(rows))
        for key, (_, want) in programs.items():
            assert got[key].dtype == dtype, f"{key} of {name} is {got[key].dtype}"
            check(f"{key} of {name}", got[key], want)


def ragged(lax):
    """Rank r sends r + k + 1 rows to rank k, which has room for 2 n of each."""
    room, width = 2 * n, 3
    sizes = np.add.outer(np.arange(n), np.arange(n)).astype(np.int32) + 1
    starts = np.cumsum(sizes, 1, dtype=np.int32) - sizes
    place = np.repeat(np.arange(n, dtype=np.int32)[:, None] * room, n, 1)
    rows = parts(int(sizes.sum(1).max()) * width, 5).reshape(n, -1, width)
    program = spread(
        lambda x, *metadata: lax.ragged_all_to_all(
            x, jnp.zeros((n * room, width), x.dtype), *metadata, axis_name="i"
        )
    )
    y = program(*map(array, (rows, starts, sizes, place, sizes.T.copy())))
    want = np.zeros((n, n * room, width), np.float32)
    for source in range(n):
        for to in range(n):
            begin, size = starts[source, to], sizes[source, to]
            want[to, source * room : source * room + size] = rows[source, begin : begin + size]
    check("ragged_all_to_all", y, want)


def transforms(lax):
    """A gradient, a loop, and an operand whose memory the result may have."""
    rows = parts(6, 7)

    def loss(x):
        return (lax.psum(x, "i") ** 2).sum() / 2

    check("gradient", spread(jax.grad(loss))(array(rows)), [n * rows.sum(0)] * n)

    def body(carry, _):
        return lax.ppermute(carry, "i", ring) + lax.psum(carry, "i"), None

    y = spread(lambda x: jax.lax.scan(body, x, None, length=6)[0])(array(rows))
    want = rows
    for _ in range(6):
        want = np.roll(want, 1, 0) + want.sum(0)
    check("loop", y, want)

    program = spread(lambda x: lax.psum(x, "i"), donate_argnums=0)
    for seed in range(4):
        x = array(parts(40000, seed))
        check("donated", program(x), [parts(40000, seed).sum(0)] * n)
        assert x.is_deleted()


def norms():
    """In rows that fit a kernel and others; new values, the same buffers."""
    for dtype, tolerance in ((np.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        for count, width in ((3, 64), (700, 1024), (2, 30)):
            weight = np.linspace(-1, 1, width).astype(dtype)
            program = spread(
                lambda x, residual, weight=weight: jaxfabric.lax.all_reduce_rms_norm(
                    x, residual, weight, "i"
                )
            )
            for seed in range(3):
                x, residual = (
                    (parts(count * width, seed + k) // 9).astype(dtype).reshape(n, count, width)
                    for k in (0, 7)
                )
                normalised, y = program(array(x), array(residual))
                new = x.astype(np.float32).sum(0).astype(dtype) + residual
                check("the new residual", y, new)
                wide = new.astype(np.float32)
                scale = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
                norm = wide * scale * weight.astype(np.float32)
                check("the norm", normalised, norm, tolerance)


def sends():
    """From one rank to one, with work meanwhile."""
    pair = [(n - 1, 0)]

    def f(x):
        sent = jaxfabric.lax.psend(x, "i", pair)
        return 2 * x + jaxfabric.lax.precv(sent, jax.typeof(x), "i", pair)

    rows = parts(1000, 11)
    want = 2 * rows
    want[0] += rows[n - 1]
    check("psend", spread(f)(array(rows)), want)


def halves():
    """Starts with work before their ends."""

    def f(x):
        moved = parallel.ppermute_start(x, "i", ring)
        gathered = parallel.all_gather_start(x, "i", tiled=True)
        return x * 2 + moved.done(), gathered.done()

    program = spread(f)
    for seed in range(3):
        rows = parts(1000, seed)
        moved, gathered = program(array(rows))
        check("ppermute_start", moved, rows * 2 + np.roll(rows, 1, 0))
        check("all_gather_start", gathered, [rows.reshape(-1)] * n)


for library, switch in ((jaxfabric.lax, contextlib.nullcontext()), (jax.lax, jaxfabric.enabled())):
    with switch:
        for size in (1, 5, 30001, *LARGE):
            dense(library, size)
        ragged(library)
        transforms(library)
        if library is jax.lax:
            halves()
        else:
            types(library)
            norms()
            sends()
        print(library.__name__, flush=True)

ran = jaxfabric.report()
assert ran.counts().keys() == {"jaxfabric"}, str(ran)
assert bool(jaxfabric.status().gpus) == (PLATFORM == "gpu"), jaxfabric.status()
if WINDOWS:
    assert not jaxfabric.status().windows_problem, jaxfabric.status()
    assert "peers address its arrays" in str(ran)
    counters = jaxfabric.status().counters
    assert counters["gpu_windows_found"] > 0, counters
    assert counters["gpu_windows_missing"] == 0, counters
print("done", flush=True)
