"""all_reduce_rms_norm against what it stands for, and what it becomes on either platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_cuda_lowering import collectives, entries, lower
from test_lax_fused import numbers, over
from test_lax_lowering import custom_calls

import jaxfabric
from jaxfabric import _program, lax, runtime

TARGET = "jaxfabric_all_reduce_rms_norm"


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")


def fused(x, residual, weight):
    return lax.all_reduce_rms_norm(x[0], residual, weight, "i", epsilon=1e-5)


def plain(x, residual, weight):
    y = x.sum(0) + residual
    return y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5) * weight, y


def close(got, want):
    for ours, own in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, own, rtol=2e-5, atol=2e-5)


X, RESIDUAL, WEIGHT = numbers(4, 6, 16), numbers(6, 16), numbers(16)
SPECS = (P("i"), P(), P())


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_derivatives(check_vma):
    arguments = X, RESIDUAL, WEIGHT
    dots, factors = tuple(numbers(*v.shape) for v in arguments), numbers(6, 16)
    f = over(fused, SPECS, P(), check_vma=check_vma)

    def loss(f, *args):
        normalised, y = f(*args)
        return (normalised * factors).sum() + (y**2).sum()

    def everything(f, arguments, dots):
        """The values, and derivatives by all arguments and by some."""
        found = [f(*arguments)]
        for wanted in ((0, 1, 2), (1,), (2,)):

            def some(*args, wanted=wanted):
                given = dict(zip(wanted, args, strict=True))
                return f(*(given.get(i, v) for i, v in enumerate(arguments)))

            args, moving = ([values[i] for i in wanted] for values in (arguments, dots))
            found.append(jax.jvp(some, args, moving))
        # Untyped, the cotangents of what all ranks have alike are not what they are here.
        for g in (f, jax.checkpoint(f)) if check_vma else ():
            found.append(jax.grad(lambda *a, g=g: loss(g, *a), (0, 1, 2))(*arguments))
        return found

    both = jax.jit(lambda *args: (everything(f, *args), everything(plain, *args)))
    got, want = both(arguments, dots)
    close(got, want)
    np.testing.assert_array_equal(got[0][1], want[0][1])


def test_batches():
    def got_and_wanted(dims):
        arrays = [
            numbers(3, *v.shape) if dim == 0 else v
            for v, dim in zip((X, RESIDUAL, WEIGHT), dims, strict=True)
        ]
        specs = (P(*[None] * (dims[0] == 0), "i"), P(), P())
        inside = over(jax.vmap(fused, dims), specs, P())
        outside = jax.vmap(over(fused, SPECS, P()), dims)
        return [f(*arrays) for f in (inside, outside)], [jax.vmap(plain, dims)(*arrays)] * 2

    dims = [(0, 0, None), (0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)]
    close(*zip(*jax.jit(lambda: [*map(got_and_wanted, dims)])(), strict=True))


def test_ranks_of_a_vmap():
    x = numbers(2, 4, 6, 16)

    def f(x):
        def rank(x, axes):
            return lax.all_reduce_rms_norm(x, RESIDUAL, WEIGHT, axes, epsilon=1e-5)

        both = jax.vmap(lambda x: rank(x[0], ("i", "j")), axis_name="j")
        over_both = over(both, P(None, "i"), P())(x)
        return jax.vmap(lambda x: rank(x, "i"), axis_name="i")(x[0]), over_both

    alone, both = jax.jit(f)(x)
    for got, want in ((alone, x[0]), (both, x.reshape(8, 6, 16))):
        close([y[0] for y in got], plain(want, RESIDUAL, WEIGHT))


def test_what_varies():
    """As with the operations one by one: the result varies where what goes into it does."""
    mesh = {"i": 4, "j": 2}
    both = P("j", None)

    def f(x, residual, weight):
        normalised, y = fused(x, residual, weight[0])
        assert jax.typeof(normalised).mat.varying == {"j"}
        assert jax.typeof(y).mat.varying == set()
        return normalised

    weights = numbers(2, 16)
    got = jax.jit(over(f, (P("i"), P(), both), both, mesh))(X, RESIDUAL, weights)
    close(got, np.concatenate([plain(X, RESIDUAL, w)[0] for w in weights]))

    def g(x, residual):
        normalised, y = fused(x, residual[0], WEIGHT)
        assert jax.typeof(normalised).mat.varying == jax.typeof(y).mat.varying == {"i"}
        return y[None]

    residuals = numbers(4, 6, 16)
    got = jax.jit(over(g, (P("i"), P("i")), P("i")))(X, residuals)
    close(got, X.sum(0) + residuals)


def test_types_without_a_kernel():
    x, residual = (numbers(4, 2, 16).astype(jnp.bfloat16) for _ in range(2))

    def f(x, residual):
        return lax.all_reduce_rms_norm(x[0], residual[0], np.ones(16), "i")

    normalised, y = jax.jit(over(f, (P("i"), P("i")), P("i")))(x, residual)
    assert (normalised.dtype, y.dtype) == (jnp.bfloat16, jnp.bfloat16)
    wide, y = jax.jit(over(f, (P("i"), P("i")), P("i")))(x, residual.astype(np.float32))
    assert (wide.dtype, y.dtype) == (np.float32, np.float32)


def norm(x, axes="j"):
    return lax.all_reduce_rms_norm(x, 2 * x, x[0], axes)


def on_gpus(f, *shape, dtype=jnp.bfloat16, **options):
    text = lower(f, x=jax.ShapeDtypeStruct((8, *shape), dtype), **options)
    return text, custom_calls(text), entries(text)


@pytest.mark.usefixtures("gpus")
def test_on_gpus_it_is_one_call():
    text, (call,), (entry,) = on_gpus(norm, 4, 64)
    assert (call["target"], call["label"]) == (TARGET, "all_reduce_rms_norm bfloat16[4,64]")
    assert "epsilon = 9.99999997E-7 : f32" in text
    assert "stablehlo.rsqrt" not in text
    assert (entry.runner, entry.source.split(":")[0]) == ("jaxfabric", "test_lax_rms_norm.py")
    assert entry.reason == "512 bytes is below 2 MiB, the limit for all_reduce_rms_norm on 4 GPUs"
    _, (same,), _ = on_gpus(norm, 4, 64)
    assert call == same
    _, (other,), _ = on_gpus(
        lambda x: lax.all_reduce_rms_norm(x, 2 * x, x[0], "j", epsilon=0.0), 4, 64
    )
    assert other["site"] != call["site"]
    _, (call,), _ = on_gpus(norm, 4, 64, mesh=model.grid({"i": 2, "j": 4}).abstract_mesh)
    assert call["by_position"] == 1


@pytest.mark.usefixtures("gpus")
def test_several_platforms():
    text, calls, _ = on_gpus(norm, 4, 64, platforms=("cpu", "cuda"))
    assert [call["target"] for call in calls] == ["jaxfabric_all_reduce", TARGET]
    assert text.count("stablehlo.rsqrt") == 1
    # Nor does jax.lax have it.
    with pytest.raises(NotImplementedError, match=r"rms_norm runs on .* not on tpu$"):
        on_gpus(norm, 4, 64, platforms=("tpu",))


def test_export():
    f = jax.jit(over(fused, SPECS, P()))
    options = {"platforms": ("cpu", "cuda"), "disabled_checks": jaxfabric.export_checks()}
    exported = jax.export.export(f, **options)(X, RESIDUAL, WEIGHT)
    assert exported.mlir_module().count(f"@{TARGET}(") == 1
    mesh = model.grid({"i": 4})
    arguments = (
        jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))
        for value, spec in zip((X, RESIDUAL, WEIGHT), SPECS, strict=True)
    )
    close(jax.jit(exported.call)(*arguments), plain(X, RESIDUAL, WEIGHT))


@pytest.mark.usefixtures("gpus")
def test_derivatives_and_batches_have_the_kernel_too():
    def targets(f):
        return [call["target"] for call in on_gpus(f, 4, 64)[1]]

    total = lambda x: sum(y.astype(np.float32).sum() for y in norm(x))  # noqa: E731
    assert targets(jax.value_and_grad(total)) == [TARGET, "jaxfabric_all_reduce"]
    batch = lambda x: jax.vmap(norm)(x)  # noqa: E731
    assert targets(lambda x: batch(jnp.stack([x, x], 1))) == ["jaxfabric_all_reduce"]
    rows = lambda x: jax.vmap(lambda v: lax.all_reduce_rms_norm(v, v, x[0], "j"))(x)  # noqa: E731
    assert targets(rows) == [TARGET]


MIB = 1 << 20
# name: the program, the shape and type, and why not.
ONE_BY_ONE = {
    "long": (
        norm,
        (1024, 1024),
        np.float32,
        "4 MiB is not below 2 MiB, the limit for all_reduce_r",
    ),
    "odd rows": (norm, (4, 63), jnp.bfloat16, "no kernel for 252 elements in rows of 126 bytes"),
    "type": (norm, (4, 64), np.float64, "all_reduce_rms_norm of float64 has no kernel"),
    "two types": (
        lambda x: lax.all_reduce_rms_norm(x, x.astype(np.float32), x[0], "j"),
        *((4, 64), jnp.bfloat16, "bfloat16 with a residual of float32 has no kernel"),
    ),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.usefixtures("gpus")
def test_without_a_kernel_it_is_a_sum_of_the_fabric(name):
    f, shape, dtype, reason = ONE_BY_ONE[name]
    with jax.enable_x64(dtype == np.float64):
        text, (call,), (entry,) = on_gpus(f, *shape, dtype=dtype)
    assert call["target"] == "jaxfabric_all_reduce"
    assert text.count("stablehlo.rsqrt") == 1
    assert entry.runner == "jaxfabric"
    assert "the limit for all_reduce on 4 GPUs; " in entry.reason or "types other" in entry.reason
    assert reason in entry.reason


@pytest.mark.usefixtures("gpus")
def test_with_the_program_it_is_left_to_xla(monkeypatch):
    def both(x):
        return norm(x), jax.lax.psum(x, "j")  # The switch is off.

    text, calls, found = on_gpus(both, 4, 64)
    assert not calls
    assert len(collectives(text)) == 2
    assert [entry.runner for entry in found] == ["XLA"]
    assert "the switch" in found[0].reason
    with jaxfabric.enabled():
        _, calls, _ = on_gpus(both, 4, 64)
    assert sorted(call["target"] for call in calls) == ["jaxfabric_all_reduce", TARGET]
    monkeypatch.setattr(_program, "limits", lambda: _program._parsed("all_reduce_rms_norm=0"))
    _, (call,), _ = on_gpus(norm, 4, 64)
    assert call["target"] == "jaxfabric_all_reduce"
    monkeypatch.setattr(_program, "limits", lambda: _program._parsed("all_reduce=0"))
    assert not on_gpus(norm, 4, 64)[1]


def test_one_rank():
    f = over(fused, SPECS, P(), {"i": 1})
    close(jax.jit(f)(X[:1], RESIDUAL, WEIGHT), plain(X[:1], RESIDUAL, WEIGHT))
