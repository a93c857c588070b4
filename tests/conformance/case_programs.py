"""The program of a case: a collective under a transformation, on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import case_model
import jax
import jax.numpy as jnp
import numpy as np
from cases import HALVES, RAGGED, Case, Layout, dtype_of
from jax._src.lax import parallel
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# jaxfabric.lax, or jax.lax.
Module = Any
Function = Callable[..., Any]

# Devices by place in jax.devices(): out of order, and half of them, with some in every process.
PERMUTED = (3, 0, 6, 5, 1, 7, 4, 2)
SUBSET = (6, 1, 3, 4)


def mesh_of(case: Case) -> Mesh:
    """The devices of a case (of an abstract mesh, those it runs on)."""
    devices = jax.devices("cpu")
    chosen = {"permuted": PERMUTED, "subset": SUBSET}.get(case.mesh, range(8))
    types = AxisType.Explicit if case.mesh == "explicit" else AxisType.Auto
    lay = case.layout
    grid = np.array([devices[i] for i in chosen]).reshape(list(lay.mesh.values()))
    return Mesh(grid, tuple(lay.mesh), axis_types=(types,) * len(lay.mesh))


def put(case: Case, values: np.ndarray) -> jax.Array:
    """`[position, ...]` on the devices of the case, also where they are of several processes."""
    lay = case.layout
    values = values.reshape(-1, *[lay.vmapped] * bool(lay.vmapped), *lay.block)
    sharding = NamedSharding(mesh_of(case), PartitionSpec(lay.manual))
    return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])


def cast(values: jax.Array, dtype: str) -> jax.Array:
    """`case_model.cast` in JAX."""
    if dtype == "key":
        words = values.astype(jnp.uint32)
        return jax.random.wrap_key_data(jnp.stack([words, words], -1))
    if dtype == "weak float32":  # A choice between Python numbers is weakly typed.
        return jnp.where(values < 1, -1.0, jnp.where(values < 2, 0.0, values_from_2(values, 1.0)))
    if dtype == "weak int32":
        return jnp.where(values < 1, -1, jnp.where(values < 2, 0, values_from_2(values, 1)))
    if dtype == "bool":
        return values % 2 == 1
    kind = dtype_of(dtype)
    if dtype.startswith("uint"):
        return values.astype(kind)
    if dtype.startswith("complex"):
        return jax.lax.complex(values - 1, 2 - values).astype(kind)
    return (values - (2 if dtype == "int2" else 1)).astype(kind)


def values_from_2(values: jax.Array, one: float) -> jax.Array:
    return jnp.where(values < 3, one, 2 * one)


class Halves:
    """Has collectives in one call, made of the two of `jax.lax`, private ones included."""

    def __init__(self, lax: Module) -> None:
        self._lax = parallel if lax is jax.lax else lax

    def __getattr__(self, name: str) -> Function:
        start = getattr(self._lax, f"{name}_start")
        return lambda *args, **keywords: start(*args, **keywords).done()


def call(case: Case, lax: Module, x: jax.Array) -> jax.Array:
    """The collective itself."""
    lay, op, form, tiled = case.layout, case.op, case.form, case.tiled
    if op in HALVES:
        op, lax = case.base, Halves(lax)
    axes: Any = lay.axes if len(lay.axes) > 1 else lay.axes[0]
    keywords: dict[str, Any] = {} if lay.groups is None else {"axis_index_groups": lay.groups}
    size = int(np.prod([lay.shape[axis] for axis in lay.axes]))
    dimension = case_model.DIMENSIONS[form]
    if op.endswith("_unreduced"):
        x = jax.lax.pcast(x, axes, to="unreduced")
        op = op.removesuffix("_unreduced")
    if op in ("psum", "pmean", "pmax", "pmin"):
        return getattr(lax, op)(x, axes, **keywords)
    if op.startswith("all_gather"):
        if op != "all_gather":
            keywords["to"] = op.removeprefix("all_gather_")
        y = lax.all_gather(x, axes, axis=dimension, tiled=tiled, **keywords)
        typed = tuple(axis for axis in lay.axes if axis != "v")
        if op == "all_gather_reduced" and case.check_vma and typed:
            y = jax.lax.pcast(y, typed, to="varying")
        return y
    if op == "psum_scatter":
        x = case_model.operand(case, x)
        return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=tiled, **keywords)
    if op == "all_to_all":
        split, concat = case_model.SPLITS[form]
        return lax.all_to_all(
            case_model.operand(case, x), axes, split, concat, tiled=tiled, **keywords
        )
    if op == "pswapaxes":
        return lax.pswapaxes(case_model.operand(case, x), axes, dimension, **keywords)
    if op == "psend_precv":
        pairs = case_model.permutation(form, size)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return lax.precv(lax.psend(x, axes, pairs), like, axes, pairs)
    if op == RAGGED:
        communicators = case_model.communicators(case)
        metadata = case_model.slices(form, len(communicators[0]))
        table = np.empty((math.prod(lay.shape.values()), 4, metadata.shape[-1]), np.int32)
        for ranks in communicators:
            table[ranks] = metadata.transpose(1, 0, 2)
        mine = jnp.asarray(table)[jax.lax.axis_index(lay.manual)]
        return lax.ragged_all_to_all(x, x, *mine, axis_name=axes, **keywords)
    if op == "ppermute":
        return lax.ppermute(x, axes, case_model.permutation(form, size))
    if op == "pshuffle":
        return lax.pshuffle(x, axes, case_model.order(form, size))
    root: Any = case_model.root(form, size)
    if op == "pbroadcast_traced":
        # Known at run time only, and the same on all ranks.
        root = jnp.int32(root) + jax.lax.axis_index(axes) * 0
    return lax.pbroadcast(x, axes, root)


def _loss(f: Function, power: int) -> Function:
    def loss(x: jax.Array) -> jax.Array:
        y = f(x)
        return (case_model.weights(y.shape).astype(y.dtype) * y**power).sum()

    return loss


def _differentiated(case: Case, lax: Module) -> Function:
    def f(x: jax.Array) -> jax.Array:
        return call(case, lax, x)

    def weights_of(y: jax.Array) -> jax.Array:
        return y * 0 + case_model.weights(y.shape).astype(y.dtype)

    def jvp(x: jax.Array, t: jax.Array) -> Any:
        return dict(zip(("y", "dy"), jax.jvp(f, (x,), (t,)), strict=True))

    def vjp(x: jax.Array, t: jax.Array) -> Any:
        y, pull = jax.vjp(f, x)
        return {"x": pull(weights_of(y))[0]}

    def linear_transpose(x: jax.Array, t: jax.Array) -> Any:
        return {"x": jax.linear_transpose(f, x)(weights_of(f(x)))[0]}

    def second_derivative(x: jax.Array, t: jax.Array) -> Any:
        gradient, hessian = jax.jvp(jax.grad(_loss(f, 3)), (x,), (t,))
        return {"gradient": gradient, "hessian": hessian}

    @jax.custom_vjp
    def custom(x: jax.Array) -> jax.Array:
        return f(x)

    custom.defvjp(lambda x: (f(x), x), lambda x, ct: jax.vjp(f, x)[1](ct))

    def gradient_of(loss: Function) -> Function:
        return lambda x, t: {"gradient": jax.grad(loss)(x)}

    def named(x: jax.Array) -> jax.Array:
        return checkpoint_name(f(x), "result")

    policies = jax.checkpoint_policies
    return {
        "jvp": jvp,
        "vjp": vjp,
        "linear_transpose": linear_transpose,
        "second_derivative": second_derivative,
        "grad": gradient_of(_loss(f, 2)),
        "custom_vjp": gradient_of(_loss(custom, 2)),
        "remat": gradient_of(jax.checkpoint(_loss(f, 2))),
        "remat_everything_saved": gradient_of(
            jax.checkpoint(_loss(f, 2), policy=policies.everything_saveable)
        ),
        "remat_named": gradient_of(
            jax.checkpoint(_loss(named, 2), policy=policies.save_only_these_names("result"))
        ),
    }[case.transform]


def _local(case: Case, lax: Module) -> Function:
    """A function of one rank's `source` and `tangent`."""
    lay, transform = case.layout, case.transform
    steps = case_model.STEPS

    def f(s: jax.Array) -> jax.Array:
        return call(case, lax, cast(s, case.dtype))

    def at(s: jax.Array, step: Any) -> jax.Array:
        return (s + step) % 4

    def vmap(s: jax.Array, t: jax.Array) -> Any:
        dimension = case_model.DIMENSIONS[case.form]
        x = cast(jnp.stack([at(s, step) for step in range(steps)], dimension), case.dtype)
        return {"y": jax.vmap(lambda v: call(case, lax, v), in_axes=dimension)(x)}

    def scan(s: jax.Array, t: jax.Array) -> Any:
        def body(step: jax.Array, _: None) -> Any:
            return step + 1, f(at(s, step))

        return {"y": jax.lax.scan(body, jnp.float32(0), length=steps)[1]}

    def while_(s: jax.Array, t: jax.Array) -> Any:
        def body(state: Any) -> Any:
            step, _ = state
            return step + 1, f(at(s, step))

        start = (jnp.float32(1), f(s))
        return {"y": jax.lax.while_loop(lambda state: state[0] < steps, body, start)[1]}

    def cond(s: jax.Array, t: jax.Array) -> Any:
        # Whole communicators take the same branch, neighbours different ones.
        second = np.zeros(int(np.prod(list(lay.shape.values()))), np.bool_)
        for number, ranks in enumerate(case_model.communicators(case)):
            second[ranks] = number % 2
        mine = jnp.asarray(second)[jax.lax.axis_index(lay.manual)]
        return {"y": jax.lax.cond(mine, lambda s: f(at(s, 1)), f, s)}

    def twice(s: jax.Array, t: jax.Array) -> Any:
        inner = jax.jit(f)
        return {"first": inner(s), "second": inner(at(s, 1))}

    def own_axis(s: jax.Array, t: jax.Array) -> Any:
        return {"y": jax.vmap(f, axis_name="v")(s)}

    plain = {
        "vmap": vmap,
        "scan": scan,
        "while": while_,
        "cond_between_groups": cond,
        "inner_jit_twice": twice,
        "vmap_own_axis": own_axis,
    }
    if transform in ("jit", "eager", "donated"):
        return lambda s, t: {"y": f(s)}
    if transform in plain:
        return plain[transform]
    inside = _differentiated(case, lax)
    return lambda s, t: inside(cast(s, case.dtype), cast(t, case.dtype))


def _finished(case: Case, y: jax.Array) -> jax.Array:
    if case.dtype == "key" and jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
        y = jax.random.key_data(y)
    return y


def _sharded(case: Case, f: Function) -> Function:
    lay: Layout = case.layout
    mesh = mesh_of(case)
    spec = PartitionSpec(lay.manual)
    partial = {"axis_names": set(lay.manual)} if case.mesh == "partial" else {}

    def block(*args: jax.Array) -> Any:
        results = f(*(a[0] for a in args))
        return jax.tree.map(lambda y: _finished(case, y)[None], results)

    return jax.shard_map(
        block,
        mesh=mesh.abstract_mesh if case.mesh == "abstract" else mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=case.check_vma,
        **partial,
    )


def program(case: Case, lax: Module) -> Function:
    """A function of `source` and `tangent` of all ranks to what `case_model.expected` says."""
    if case.transform != "grad_outside":
        return _sharded(case, _local(case, lax))

    def outside(s: jax.Array, t: jax.Array) -> Any:
        f = _sharded(case, lambda x: call(case, lax, x))

        def loss(x: jax.Array) -> jax.Array:
            y = f(x)
            return (case_model.weights(y.shape[1:]).astype(y.dtype) * y**2).sum()

        return {"gradient": jax.grad(loss)(cast(s, case.dtype))}

    return outside
