"""The switch: jax.lax collectives on the fabric, with the results that XLA gives."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.sharding import PartitionSpec as P

import jaxfabric
from jaxfabric import _report, config, hlo

GRID = {"i": 2, "j": 4}
RING = [(k, (k + 1) % 4) for k in range(4)]


def program(f, mesh=None, **kwargs):
    return jax.jit(model.per_rank(f, mesh or model.grid(GRID), **kwargs))


def calls(jitted, *args):
    return jitted.lower(*args).as_text().count("custom_call @jaxfabric_")


def whole(shape=(8, 8, 3), dtype=np.float32):
    """One block for each rank."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype) % 23 + 1


# Whatever XLA's order of summation, small whole numbers have one sum.
PROGRAMS = {
    "psum": lambda x: lax.psum(x, "j"),
    "psum of two axes": lambda x: lax.psum(x, ("j", "i")),
    "psum of groups": lambda x: lax.psum(x, "j", axis_index_groups=[[0, 3], [1, 2]]),
    "psum of uneven groups": lambda x: lax.psum(x, "j", axis_index_groups=[[0, 3, 1], [2]]),
    "psum of a dimension too": lambda x: lax.psum(x, ("j", 0)) + 0 * x,
    "psum of booleans": lambda x: lax.psum(x > 9, "j"),
    "psum of bfloat16": lambda x: lax.psum(x.astype(jnp.bfloat16), "j"),
    "psum of float8": lambda x: lax.psum(x.astype(jnp.float8_e5m2) * 0, "j"),
    "psum of two arrays": lambda x: lax.psum((x, 2 * x), "j")[1],
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "j"),
    "pmin": lambda x: lax.pmin(x, ("i", "j")),
    "all_gather": lambda x: lax.all_gather(x, "j", axis=1),
    "all_gather, tiled": lambda x: lax.all_gather(x, ("i", "j"), axis=1, tiled=True),
    "all_gather of groups": lambda x: lax.all_gather(x, "j", axis_index_groups=[[1, 0], [2, 3]]),
    "psum_scatter": lambda x: lax.psum_scatter(x[:4], "j"),
    "psum_scatter, tiled": lambda x: lax.psum_scatter(x, "j", tiled=True),
    "psum_scatter of another dimension": lambda x: lax.psum_scatter(
        x.T, "j", scatter_dimension=1, tiled=True
    ),
    "all_to_all": lambda x: lax.all_to_all(x[:4], "j", 0, 1),
    "all_to_all in place": lambda x: lax.all_to_all(x[:4], "j", 0, 0),
    "all_to_all, tiled": lambda x: lax.all_to_all(x, "j", 0, 1, tiled=True),
    "all_to_all, tiled the other way": lambda x: lax.all_to_all(x.T, "j", 1, 0, tiled=True),
    "all_to_all of groups": lambda x: lax.all_to_all(
        x, "j", 0, 1, tiled=True, axis_index_groups=[[0, 2], [3, 1]]
    ),
    "ppermute": lambda x: lax.ppermute(x, "j", RING),
    "ppermute, partly": lambda x: lax.ppermute(x, "j", [(3, 1)]),
    "pshuffle": lambda x: lax.pshuffle(x, "j", [3, 1, 0, 2]),
    "pswapaxes": lambda x: lax.pswapaxes(x[:4], "j", 0),
    "grad": lambda x: jax.grad(lambda v: (lax.psum(v**2, "j") * v).sum())(x),
    "vmap": lambda x: jax.vmap(lambda v: lax.all_gather(v, "j", tiled=True))(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (lax.ppermute(c, "j", RING), 0), x, None, 3)[0],
    "cond": lambda x: jax.lax.cond(
        lax.axis_index("i") == 0, lambda v: lax.psum(v, "j"), lambda v: v + 0, x
    ),
    "remat": lambda x: jax.grad(jax.checkpoint(lambda v: jnp.sin(lax.all_gather(v, "j")).sum()))(x),
}


UNTYPED = {"psum of a dimension too", "cond"}
TYPED_ONLY_HERE = {"psum of groups", "psum of uneven groups"}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("typed", [False, True], ids=["", "vma"])
def test_equals_xla(name, typed):
    f, x = PROGRAMS[name], whole()
    if typed and name in UNTYPED:
        pytest.skip("jax.lax refuses it under check_vma")

    def make():
        return program(f if not typed else lambda v: varying(f(v)), check_vma=typed)

    if typed and name in TYPED_ONLY_HERE:
        with pytest.raises(NotImplementedError):
            make()(x)
        want = np.asarray(program(f, check_vma=False)(x))
    else:
        want = np.asarray(make()(x))
    with jaxfabric.enabled():
        jitted = make()
        got = np.asarray(jitted(x))
        assert calls(jitted, x) >= 1
    assert got.dtype == want.dtype
    tolerance = 1e-6 if name == "remat" else 0
    np.testing.assert_allclose(got, want, rtol=tolerance)


def varying(x):
    missing = {"i", "j"} - jax.typeof(x).mat.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def test_what_jax_cannot_do_on_cpu():
    x = whole()
    with jaxfabric.enabled():
        y = program(lambda v: lax.pbroadcast(v, "j", 2))(x)
    np.testing.assert_array_equal(y, x[[2] * 4 + [6] * 4])
    with pytest.raises(NotImplementedError, match=r"jaxfabric.enable\(\) runs it"):
        program(lambda v: lax.pbroadcast(v, "j", 2))(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda v: lax.pbroadcast(v, "j", 1),
        lambda v: parallel.precv(parallel.psend(v, "j", RING), jax.typeof(v), "j", RING),
        lambda v: lax.ragged_all_to_all(v, v, *jnp.ones((4, 4), int), axis_name="j"),
    ],
    ids=["pbroadcast", "psend", "ragged_all_to_all"],
)
def test_what_neither_can_do_has_a_reason(call):
    f = jax.shard_map(
        call,
        mesh=model.grid(GRID),
        axis_names={"j"},
        in_specs=P("j"),
        out_specs=P("j"),
        check_vma=False,
    )
    with jaxfabric.enabled(), pytest.raises(NotImplementedError, match=r"either: the axes \['i'\]"):
        jax.jit(f).lower(whole())


def test_keys_are_not_said_to_be_reduced():
    def f(v):
        key = jax.random.key(0)
        key = parallel.precv(parallel.psend(key, "j", RING), jax.typeof(key), "j", RING)
        return v + jax.random.key_data(key).sum()

    with jaxfabric.enabled(), pytest.raises(NotImplementedError, match="does not move key"):
        program(f, check_vma=False).lower(whole())


def test_ragged_all_to_all():
    """Rank i sends i + 1 rows to the next rank of its row of the mesh; JAX cannot on a CPU."""

    def f(x):
        me = lax.axis_index("j")
        sizes = jnp.where(jnp.arange(4) == (me + 1) % 4, me + 1, 0)
        got = jnp.where(jnp.arange(4) == (me - 1) % 4, (me - 1) % 4 + 1, 0)
        zeros = jnp.zeros(4, np.int32)
        output = jnp.full((5, 3), -1.0, x.dtype)
        return lax.ragged_all_to_all(x, output, zeros, sizes, zeros, got, axis_name="j")

    x = whole()
    with jaxfabric.enabled():
        f_jitted = program(f, check_vma=False)
        y = np.asarray(f_jitted(x))
        assert calls(f_jitted, x) == 1
        g = program(lambda v: jax.grad(lambda v: f(v).sum())(v), check_vma=False)(x)
    for rank in range(8):
        row, me = divmod(rank, 4)
        sender = (me - 1) % 4
        want = np.full((5, 3), -1.0)
        want[: sender + 1] = x[row * 4 + sender, : sender + 1]
        np.testing.assert_array_equal(y[rank], want)
        np.testing.assert_array_equal(g[rank], np.repeat(np.arange(8)[:, None] <= me, 3, 1))


def test_pbroadcast_from_a_traced_source():
    if not hasattr(jax._src.lax.parallel, "pbroadcast_dynamic_p"):
        pytest.skip("this JAX takes no traced source")
    x = whole()
    with jaxfabric.enabled():
        f = program(lambda v: lax.pbroadcast(v, "j", v[0, 0].astype(np.int32) * 0 + 3))
        y = f(x)
        assert calls(f, x) == 1
    np.testing.assert_array_equal(y, x[[3] * 4 + [7] * 4])


def test_complex_numbers_have_no_order():
    with jaxfabric.enabled(), pytest.raises(TypeError, match="complex numbers have no order"):
        program(lambda v: lax.pmax(v + 1j, "j"))(whole())


def test_the_switch_compiles_again_and_leaves_nothing_behind():
    f = program(lambda v: lax.psum(v, "j"))
    x = whole()
    want = np.asarray(f(x))
    assert calls(f, x) == 0
    try:
        jaxfabric.enable()
        np.testing.assert_array_equal(f(x), want)
        assert calls(f, x) == 1
        with jaxfabric.enabled(None):
            assert calls(f, x) == 0
        # For all threads; what a thread chooses inside `with` is its own.
        seen = []
        with jaxfabric.enabled(None):
            thread = threading.Thread(target=lambda: seen.append(calls(f, x)))
            thread.start()
            thread.join()
        assert seen == [1]
    finally:
        jaxfabric.disable()
    np.testing.assert_array_equal(f(x), want)
    assert calls(f, x) == 0


def test_one_program_on_two_meshes_of_one_shape():
    """The devices are in the calls, so JAX must not reuse the lowering for others."""
    f = jax.jit(
        lambda v: jax.shard_map(lambda b: lax.psum(b, "i"), in_specs=P("i"), out_specs=P())(v)
    )
    x = np.arange(4, dtype=np.float32)
    with jaxfabric.enabled():
        for devices in (jax.devices()[:4], jax.devices()[4:], jax.devices()[3::-1]):
            auto = (jax.sharding.AxisType.Auto,)
            with jax.set_mesh(jax.sharding.Mesh(np.array(devices), ("i",), axis_types=auto)):
                assert float(f(x)[0]) == 6


def test_what_is_left_to_xla_is_on_the_report():
    @jax.jit
    @jax.shard_map(mesh=model.grid(GRID), in_specs=P(("i", "j")), out_specs=P(("i", "j")))
    def left_over(v):
        y = lax.psum(v.astype(jnp.int4), "j").astype(np.int32) + lax.psum(v, "j")
        return varying(y)

    with jaxfabric.enabled():
        left_over(whole())
    entries = [e for e in jaxfabric.report().entries if e.program == "left_over"]
    assert [(e.call, e.runner, e.reason) for e in entries] == [
        ("psum_invariant int4[1,8,3]", _report.XLA, "the fabric does not reduce int4"),
        ("psum float32[1,8,3]", _report.FABRIC, ""),
    ]
    assert all(entry.source.startswith("test_dropin.py:") for entry in entries)
    assert [entry.size_bytes for entry in entries] == [24, 96]
    text = str(jaxfabric.report())
    assert "XLA: the fabric does not reduce int4" in text
    assert '"runner": "XLA"' in jaxfabric.report().to_json()


def test_axes_left_to_the_compiler_are_left_to_xla():
    mesh = model.grid(GRID)

    def partly(v):
        return lax.psum(v, "j")

    x = whole((8, 4))
    with jaxfabric.enabled():
        f = jax.jit(
            jax.shard_map(
                partly, mesh=mesh, axis_names={"j"}, in_specs=P("j"), out_specs=P(), check_vma=False
            )
        )
        np.testing.assert_array_equal(f(x), x.reshape(4, 2, 4).sum(0))
        assert calls(f, x) == 0
    entry = [e for e in jaxfabric.report().entries if e.program == "partly"][-1]
    assert entry.runner == _report.XLA
    assert entry.reason == (
        "the axes ['i'] of its mesh are left to the compiler; try jaxfabric.enable(\"hlo\")"
    )


@pytest.mark.parametrize("knows_devices", [False, True])
def test_export_to_any_devices(knows_devices):
    """A permutation of its own devices included: ranks count as in the mesh that runs it."""
    auto = (jax.sharding.AxisType.Auto,)

    def line(devices):
        return jax.sharding.Mesh(np.array(devices), ("i",), axis_types=auto)

    mesh = line(jax.devices()[:4])
    mesh = mesh if knows_devices else mesh.abstract_mesh

    def f(v):
        return lax.psum(v, "i"), lax.all_gather(v, "i", tiled=True)

    specs = {"in_specs": P("i"), "out_specs": (P(), P()), "check_vma": False}
    spec = jax.sharding.NamedSharding(mesh, P("i"))
    argument = jax.ShapeDtypeStruct((8,), np.float32, sharding=spec)
    with jaxfabric.enabled():
        exported = jax.export.export(
            jax.jit(jax.shard_map(f, mesh=mesh, **specs)),
            platforms=["cpu"],
            disabled_checks=jaxfabric.export_checks(),
        )(argument)
    assert exported.mlir_module().count("custom_call @jaxfabric_") == 2
    whole = np.arange(8, dtype=np.float32)
    for devices in (jax.devices()[:4], jax.devices()[3::-1], jax.devices()[7:3:-1]):
        x = jax.device_put(whole, jax.sharding.NamedSharding(line(devices), P("i")))
        total, gathered = jax.jit(exported.call)(x)
        np.testing.assert_array_equal(total, [12, 16])
        np.testing.assert_array_equal(gathered, whole)


def test_modes_and_the_variable():
    with pytest.raises(ValueError, match=r"mode='gpu': use one of 'lax', 'hlo'"):
        jaxfabric.enable("gpu")

    def read(text):
        return config.switch_from_environment({"JAXFABRIC_ENABLE": text})

    assert [read(text) for text in ("", "0", "off", "1", "ON", "lax", "HLO")] == [
        *[None] * 3,
        *["lax"] * 3,
        "hlo",
    ]
    assert config.switch_from_environment({}) is None
    with pytest.raises(config.ConfigError, match="JAXFABRIC_ENABLE=maybe: use 0, 1 or lax, hlo"):
        read("maybe")


def test_whole_program_mode_comes_and_goes_with_the_switch():
    mesh = model.grid(GRID)

    def sharded(*spec):
        return jax.sharding.NamedSharding(mesh, P(*spec))

    a = jax.device_put(np.ones((8, 16), np.float32), sharded(None, "j"))
    b = jax.device_put(np.ones((16, 4), np.float32), sharded("j", None))

    @jax.jit
    def auto_sharded(a, b):
        return jax.lax.with_sharding_constraint(a @ b, sharded())

    def ours():
        np.testing.assert_array_equal(auto_sharded(a, b), np.full((8, 4), 16))
        return auto_sharded.lower(a, b).compile().as_text().count("jaxfabric_all_reduce")

    assert ours() == 0
    with jaxfabric.enabled("hlo"):
        assert hlo.installed()
        assert ours() == 1
        entry = jaxfabric.report().entries[-1]
        assert (entry.program, entry.runner) == ("auto_sharded", _report.FABRIC)
        with jaxfabric.enabled():
            assert ours() == 1  # The pass is the process's: see docs/whole_program.md.
    assert not hlo.installed()
    assert ours() == 0
    try:
        jaxfabric.enable("hlo")
        assert ours() == 1
        # With it the collectives that the program calls run as in mode "lax".
        f = program(lambda v: lax.psum(v.astype(jnp.bfloat16), "j"))
        assert calls(f, whole()) == 1
    finally:
        jaxfabric.disable()
    assert not hlo.installed()
    assert ours() == 0


def test_what_jax_lax_refuses_in_a_permutation_is_refused():
    too_large = program(lambda x: lax.ppermute(x, "j", [(0, 4)]))
    with jaxfabric.enabled(), pytest.raises(IndexError, match="below 4"):
        too_large.lower(whole())
    swapped = program(lambda x: lax.ppermute(x, ("j", "i"), [(0, 1)]))
    if not hasattr(jax.config, "jax_raise_on_ppermute_sort_diff"):
        return  # JAX 0.10 counts in the order of the mesh, and so do we.
    with jaxfabric.enabled(), pytest.raises(RuntimeError, match="order of the mesh"):
        swapped.lower(whole())


def test_dimensions_counted_from_the_end():
    def scattered(x):
        return lax.psum_scatter(x, "j", scatter_dimension=-2, tiled=True)

    with jaxfabric.enabled():
        y = program(scattered)(whole((8, 8, 3)))
    want = whole((8, 8, 3)).reshape(2, 4, 4, 2, 3).sum(1)
    np.testing.assert_array_equal(y, want.reshape(8, 2, 3))
