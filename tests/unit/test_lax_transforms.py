"""Derivatives, vmap and control flow around the collectives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxfabric import lax

SHAPE = {"i": 4}
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])

# Linear calls that jax.lax on CPU has too: (module, x[4, 4], axes) to something.
LINEAR = {
    "psum": lambda m, x, a: m.psum(x, a),
    "pmean": lambda m, x, a: m.pmean(x, a),
    "all_gather": lambda m, x, a: m.all_gather(x, a, axis=1),
    "all_gather tiled": lambda m, x, a: m.all_gather(x, a, axis=-1, tiled=True),
    "all_gather in groups": lambda m, x, a: m.all_gather(x, a, axis_index_groups=[[3, 0], [1, 2]]),
    "all_gather invarying": lambda m, x, a: m.all_gather(x, a, to="invarying"),
    "psum_scatter": lambda m, x, a: m.psum_scatter(x, a, scatter_dimension=1),
    "psum_scatter tiled": lambda m, x, a: m.psum_scatter(x, a, tiled=True),
    "all_to_all tiled": lambda m, x, a: m.all_to_all(x, a, 1, 0, tiled=True),
    "pswapaxes": lambda m, x, a: m.pswapaxes(x, a, 1),
    "ppermute": lambda m, x, a: m.ppermute(x, a, [(0, 2), (2, 1), (3, 3)]),
    "pshuffle": lambda m, x, a: m.pshuffle(x, a, [2, 3, 0, 1]),
}


def sharded(f, mesh, check_vma):
    spec = PartitionSpec("i")
    return jax.shard_map(
        lambda *args: jax.tree.map(lambda y: y[None], f(*(a[0] for a in args))),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )


def values(seed, shape=(4, 4, 4)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@VMA
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_equal_those_of_jax_lax(name, check_vma):
    if name == "all_gather invarying" and not check_vma and jax.__version_info__ < (0, 12):
        pytest.skip("means something else there: newer versions ignore `to` without types")
    mesh = model.grid(SHAPE)
    x, t = values(0), values(1)

    def all_of(module):
        call = functools.partial(LINEAR[name], module, a="i")

        def inside(x, t):
            def loss(x):
                return (jnp.sin(call(x * x)) * 2.0).sum()

            y, dy = jax.jvp(lambda v: call(jnp.sin(v)), (x,), (t,))
            _, pull = jax.vjp(call, x)
            (back,) = jax.linear_transpose(call, x)(y)
            return {
                "jvp": (y, dy),
                "grad": jax.grad(loss)(x),
                "vjp": pull(jnp.cos(y))[0],
                "transpose": back,
                "second": jax.jvp(jax.grad(loss), (x,), (t,))[1],
                "remat": jax.grad(jax.checkpoint(loss))(x),
            }

        def outside(x):
            y = sharded(call, mesh, check_vma)(jnp.sin(x))
            return (y * y).sum()

        return jax.jit(lambda x, t: (sharded(inside, mesh, check_vma)(x, t), jax.grad(outside)(x)))(
            x, t
        )

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        all_of(lax),
        all_of(jax.lax),
    )


@VMA
@pytest.mark.parametrize(
    "name", ["psum in groups", "pbroadcast", "barrier", "pmax", "pmin", "all_to_all"]
)
def test_derivatives_that_jax_lax_has_not(name, check_vma):
    mesh = model.grid(SHAPE)
    x, t = values(0), values(1)
    groups = [[0, 3], [1], [2]]
    call = {
        "psum in groups": lambda v: lax.psum(v, "i", axis_index_groups=groups),
        "pbroadcast": lambda v: lax.pbroadcast(v, "i", 2),
        "barrier": lambda v: lax.barrier("i", v),
        "pmax": lambda v: lax.pmax(v, "i"),
        "pmin": lambda v: lax.pmin(v, "i"),
        "all_to_all": lambda v: lax.all_to_all(v, "i", 0, 1),  # jax.lax fails to transpose it.
    }[name]
    picked = {"pmax": x == x.max(0), "pmin": x == x.min(0)}.get(name)

    def forward(v):
        if name == "psum in groups":
            return np.stack([v[[0, 3]].sum(0), v[1], v[2], v[[0, 3]].sum(0)])
        if name == "pbroadcast":
            return np.stack([v[2]] * 4)
        if name == "all_to_all":
            return v.transpose(1, 2, 0)
        return v if picked is None else np.stack([(v * picked).sum(0)] * 4)

    def backward(ct):
        if name == "pbroadcast":
            return np.stack([ct.sum(0) * (r == 2) for r in range(4)])
        if name == "all_to_all":
            return ct.transpose(2, 0, 1)
        return forward(ct) if picked is None else ct.sum(0) * picked

    f = sharded(call, mesh, check_vma)
    y, dy = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(x, t)
    np.testing.assert_allclose(y, forward(x), rtol=1e-6)
    np.testing.assert_allclose(dy, forward(t), rtol=1e-6)
    (ct,) = jax.jit(lambda x, c: jax.vjp(f, x)[1](c))(x, t)
    np.testing.assert_allclose(ct, backward(t), rtol=1e-5, atol=1e-6)


def test_reduced_and_unreduced_are_transposes():
    mesh = model.grid(SHAPE)
    x = values(0)

    def f(v):
        gathered = lax.all_gather(v, "i", to="reduced")
        return (jax.lax.pcast(gathered, "i", to="varying") ** 2).sum()

    def g(v):
        return lax.psum(jax.lax.pcast(v**2, "i", to="unreduced"), "i").sum()

    a, b = jax.jit(sharded(lambda v: (jax.grad(f)(v), jax.grad(g)(v)), mesh, True))(x)
    np.testing.assert_allclose(a, 4 * 2 * x, rtol=1e-5)
    np.testing.assert_allclose(b, 2 * x, rtol=1e-5)


@VMA
@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("op", model.OPS)
def test_vmap_over_another_axis(op, in_axis, check_vma):
    table = [c for c in model.calls(op, 4) if op in ("psum", "pmean") or "groups" not in c.name]
    blocks = model.blocks_for(SHAPE, 4, block=(3, 4, 8, 4))
    mesh = model.grid(SHAPE)

    def f(x):
        x = jnp.moveaxis(x, 0, in_axis)
        return {
            c.name: jax.vmap(lambda v: c.run(lax, v, ("i",)), in_axes=in_axis)(x)  # noqa: B023
            for c in table[:3]
        }

    results = jax.jit(sharded(f, mesh, check_vma))(blocks)
    for c in table[:3]:
        got = np.asarray(results[c.name])
        for b in range(3):
            want = np.stack(model.expected(c, list(blocks[:, b]), SHAPE, ("i",)))
            np.testing.assert_allclose(got[:, b], want, rtol=1e-6, err_msg=c.name)


@pytest.mark.parametrize("out", ["jit", "eager"])
@pytest.mark.parametrize("op", model.OPS)
def test_vmap_over_the_collective_axis(op, out):
    shape = {"v": 4}
    table = [c for c in model.calls(op, 4) if c.groups is None]
    table = table[:3] if out == "eager" else table  # Every step is a program there.
    blocks = model.blocks_for(shape, 4)

    def f(x):
        return {c.name: c.run(lax, x, ("v",)) for c in table}

    g = jax.vmap(f, axis_name="v")
    results = (jax.jit(g) if out == "jit" else g)(blocks)
    for c in table:
        want = np.stack(model.expected(c, list(blocks), shape, ("v",)))
        np.testing.assert_allclose(np.asarray(results[c.name]), want, rtol=1e-6, err_msg=c.name)


@VMA
@pytest.mark.parametrize("axes", [("v", "i"), ("i", "v", "k")], ids=str)
@pytest.mark.parametrize("op", model.OPS)
def test_vmap_over_one_of_the_collectives_axes(op, axes, check_vma):
    sizes = {"i": 2, "v": 2, "k": 2}
    shape = {a: sizes[a] for a in ("i", "k") if a in axes}
    whole = {**shape, "v": 2}  # The vmapped axis lies inside each device's block.
    n = 2 ** len(axes)
    table = [c for c in model.calls(op, n) if c.groups is None]
    blocks = model.blocks_for(whole, n)
    mesh = model.grid(shape)
    spec = PartitionSpec(tuple(shape))

    def body(x):
        run = jax.vmap(lambda v: {c.name: c.run(lax, v, axes) for c in table}, axis_name="v")
        return jax.tree.map(lambda y: y[None], run(x[0]))

    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    results = jax.jit(f)(blocks.reshape(-1, 2, *blocks.shape[1:]))
    for c in table:
        got = np.asarray(results[c.name])
        want = np.stack(model.expected(c, list(blocks), whole, axes))
        np.testing.assert_allclose(
            got.reshape(want.shape), want, rtol=1e-6, err_msg=f"{c.name} {axes}"
        )


def test_derivative_of_a_vmap_over_the_axis():
    x = values(0)

    def f(module):
        def one(v):
            g = module.all_gather(v, "v", tiled=True)
            return (jnp.sin(g) * module.psum(v, "v").sum()).sum()

        return jax.vmap(jax.grad(one), axis_name="v")(x)

    np.testing.assert_allclose(f(lax), f(jax.lax), rtol=1e-5)


def test_unmapped_operands_under_vmap():
    def f(x, c):
        return lax.psum(c, "v"), lax.pmax(c, "v"), lax.all_gather(c, "v"), lax.psum(x, "v")

    a, b, g, s = jax.vmap(f, in_axes=(0, None), axis_name="v")(jnp.arange(4.0), jnp.float32(3.0))
    assert (a.tolist(), b.tolist(), s.tolist()) == ([12.0] * 4, [3.0] * 4, [6.0] * 4)
    assert g.tolist() == [[3.0] * 4] * 4


@pytest.mark.parametrize("op", ["psum", "pmax", "all_gather", "psum_scatter", "all_to_all"])
def test_groups_under_vmap_over_the_axis(op):
    call = {
        "psum_scatter": lambda x, **k: lax.psum_scatter(x, "v", **k),
        "all_to_all": lambda x, **k: lax.all_to_all(x, "v", 0, 0, **k),
    }.get(op, lambda x, **k: getattr(lax, op)(x, "v", **k))
    f = jax.vmap(lambda x: call(x, axis_index_groups=[[0, 1], [2, 3]]), axis_name="v")
    with pytest.raises(NotImplementedError, match="axis_index_groups"):
        f(jnp.zeros((4, 2)))


@VMA
def test_control_flow(check_vma):
    mesh = model.grid(SHAPE)
    x = model.blocks_for(SHAPE, 4, block=(4,))

    def f(v):
        step = functools.partial(
            lax.ppermute, axis_name="i", perm=[(i, (i + 1) % 4) for i in range(4)]
        )
        scanned, history = jax.lax.scan(lambda c, _: (step(c), lax.psum(c, "i")), v, length=5)
        looped = jax.lax.fori_loop(0, 3, lambda _, c: step(c), v)
        count, _ = jax.lax.while_loop(
            lambda s: s[0] < 100,
            lambda s: (lax.psum(s[1], "i").sum() + s[0], s[1]),
            (jnp.float32(0), jnp.ones_like(v)),
        )
        # The predicate differs between the two groups, and is equal within each.
        mine = jax.lax.axis_index("i") < 2
        branched = jax.lax.cond(
            mine,
            lambda u: lax.psum(u, "i", axis_index_groups=[[0, 1], [2, 3]]),
            lambda u: u,
            v,
        )
        return scanned, history, looped, count, branched

    scanned, history, looped, count, branched = jax.jit(sharded(f, mesh, check_vma))(x)
    np.testing.assert_array_equal(scanned, np.roll(x, 5, 0))
    np.testing.assert_array_equal(history[0], np.stack([x.sum(0)] * 5))
    np.testing.assert_array_equal(looped, np.roll(x, 3, 0))
    np.testing.assert_array_equal(count, [112] * 4)
    np.testing.assert_array_equal(branched, np.stack([x[0] + x[1]] * 2 + [x[2], x[3]]))


@VMA
def test_barrier_without_a_value_runs_everywhere(check_vma):
    mesh = model.grid(SHAPE)

    def f(v):
        assert lax.barrier("i") is None
        assert lax.barrier("i", ()) == ()
        jax.lax.cond(lax.psum(v, "i")[0] > 0, lambda: lax.barrier("i"), lambda: None)

        def body(c, _):
            lax.barrier("i")
            return c + 1, None

        out, _ = jax.lax.scan(body, v, length=3)
        return out + jax.grad(jax.checkpoint(lambda u: (lax.barrier("i"), (u * u).sum())[1]))(v)

    g = sharded(f, mesh, check_vma)
    x = np.ones((4, 3), np.float32)
    assert jax.jit(g).lower(x).as_text().count("jaxfabric_barrier") >= 4
    np.testing.assert_array_equal(jax.jit(g)(x), np.full((4, 3), 6))
    jax.jit(jax.vmap(lambda v: (lax.barrier("v"), v)[1], axis_name="v"))(x)


def test_custom_vjp_and_donation():
    mesh = model.grid(SHAPE)

    @jax.custom_vjp
    def tie(v):
        return v

    tie.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, "i"),))
    f = jax.jit(sharded(jax.grad(lambda v: (tie(v) * 2).sum()), mesh, False))
    np.testing.assert_array_equal(f(values(0)), np.full((4, 4, 4), 8))

    x = model.put(np.arange(4.0 * 8).reshape(4, 8), mesh)
    donated = jax.jit(
        sharded(
            lambda v: lax.ppermute(v + lax.pmax(v, "i"), "i", [(0, 1), (1, 0), (2, 2), (3, 3)]),
            mesh,
            True,
        ),
        donate_argnums=0,
    )
    x0 = np.arange(4.0 * 8).reshape(4, 8)
    np.testing.assert_array_equal(donated(x), (x0 + x0[3])[[1, 0, 2, 3]])


def test_linear_solve_around_a_psum():
    mesh = model.grid(SHAPE)
    a = values(0, (4, 6, 6))
    matrix = np.einsum("rij,rkj->ik", a, a) + 3 * np.eye(6, dtype=np.float32)
    b = values(1, (6,))

    def f(a, b):
        def matvec(x):
            return lax.psum(a[0] @ (a[0].T @ x), "i") + 3 * x

        def solve(b):
            return jax.scipy.sparse.linalg.cg(matvec, b, maxiter=60)[0]

        return solve(b), jax.grad(lambda b: solve(b).sum())(b)

    x, g = jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(PartitionSpec("i"), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,  # jax.scipy's cg has no manual axis types.
        )
    )(a, b)
    np.testing.assert_allclose(x, np.linalg.solve(matrix, b), rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(g, np.linalg.solve(matrix, np.ones(6)), rtol=2e-3, atol=1e-4)


def test_many_equal_collectives_in_one_program():
    mesh = model.grid({"i": 8})
    x = np.random.default_rng(0).integers(0, 9, (8, 128, 128)).astype(np.float32)
    again = jax.jit(lambda v: lax.psum(v, "i") + lax.psum(v * 2, "i"))

    def f(v):
        parts = [lax.psum(v * k, "i") for k in range(24)]
        return jnp.stack([p.sum() for p in parts]), again(v)[0, 0], again(v + 1)[0, 0]

    sums, one, two = jax.jit(model.per_rank(f, mesh))(x)
    total = x.sum()
    np.testing.assert_allclose(sums[0], [total * k for k in range(24)], rtol=1e-5)
    assert (one[3], two[5]) == (3 * x[:, 0, 0].sum(), 3 * (x[:, 0, 0] + 1).sum())
