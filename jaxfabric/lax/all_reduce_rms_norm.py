"""all_reduce_rms_norm: a sum over the ranks with what follows it in a transformer.

A psum and local operations, but on GPUs one kernel where there is one. The primitive has three
operands and two results, so it is no `Collective`; its derivative and vmap keep the psum that is in
it on the fabric.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxfabric import _compat, _program
from jaxfabric._emit import call_fabric, label, mesh_positions
from jaxfabric._groups import Axes, AxisName, as_axes
from jaxfabric._overlap import after_call, after_the_last_call
from jaxfabric._primitive import (
    Aval,
    Context,
    Param,
    Value,
    axis_effects,
    collective,
    core,
    define,
    ir,
    lower_with_sharding_in_types,
)
from jaxfabric.gpu_table import decide
from jaxfabric.lax.all_reduce import psum

_NAME = "all_reduce_rms_norm"
_TYPES = frozenset(np.dtype(t) for t in (np.float32, np.float16, jnp.bfloat16))
# What the kernel works on.
_UNIT = 16


def _normalise(y: Value, weight: Value, epsilon: float) -> jax.Array:
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (wide * scale).astype(y.dtype) * weight.astype(y.dtype)


def _after_the_sum(
    total: Value, residual: Value, weight: Value, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    y = total.astype(residual.dtype) + residual
    return _normalise(y, weight, epsilon), y


def _one_by_one(
    x: Value, residual: Value, weight: Value, *, axes: Axes, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    return _after_the_sum(psum(x, axes), residual, weight, epsilon)


def _type(
    x: Aval, residual: Aval, weight: Aval, *, axes: Axes, epsilon: float
) -> tuple[list[Aval], set[Any]]:
    del epsilon
    kind = "invarying" if _compat.checks_manual_types() else "varying"
    varying = _compat.result_manual_type("psum", x, axes, kind).varying | residual.mat.varying
    results = [
        residual.update(weak_type=False, manual_axis_type=residual.mat.update(varying=over))
        for over in (varying | weight.mat.varying, varying)
    ]
    return results, axis_effects(axes)


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, axes: Axes, epsilon: float
) -> tuple[Sequence[Value], Sequence[Value]]:
    x, residual, weight = primals
    moved, residual_dot, weight_dot = tangents
    normalised, y = _p.bind(x, residual, weight, axes=axes, epsilon=epsilon)
    parts = [] if isinstance(moved, ad.Zero) else [psum(moved, axes).astype(y.dtype)]
    parts += [] if isinstance(residual_dot, ad.Zero) else [residual_dot]
    y_dot: Any = ad.Zero(jax.typeof(y).to_tangent_aval())
    if parts:
        y_dot = _compat.as_varying(sum(parts[1:], parts[0]), tuple(jax.typeof(y).mat.varying))
    values = {"y": y, "weight": weight}
    dots = {"y": y_dot, "weight": weight_dot}
    dots = {name: dot for name, dot in dots.items() if not isinstance(dot, ad.Zero)}
    if not dots:
        return (normalised, y), (ad.Zero(jax.typeof(normalised).to_tangent_aval()), y_dot)
    moving = {name: values[name] for name in dots}
    _, dot = jax.jvp(lambda v: _normalise(**(values | v), epsilon=epsilon), (moving,), (dots,))
    return (normalised, y), (dot, y_dot)


def _batch(
    axis_data: Param,
    args: Sequence[Value],
    dims: Sequence[int | None],
    *,
    axes: Axes,
    epsilon: float,
) -> tuple[Sequence[Value], Sequence[int | None]]:
    """More rows; with a weight for each element of the batch, or over the own axis, one by one."""
    x, residual, weight = args
    if axis_data.name in axes or dims[2] is not None:
        rank = partial(_one_by_one, axes=axes, epsilon=epsilon)
        options = {"axis_name": axis_data.name, "axis_size": axis_data.size}
        return jax.vmap(rank, tuple(dims), **options)(*args), (0, 0)
    if dims[0] is None and dims[1] is None:
        return _p.bind(*args, axes=axes, epsilon=epsilon), (None, None)
    x, residual = (
        batching.bdim_at_front(value, dim, axis_data.size)
        for value, dim in zip((x, residual), dims[:2], strict=True)
    )
    return _p.bind(x, residual, weight, axes=axes, epsilon=epsilon), (0, 0)


def _call(x: Aval, ranks: int, unfit: str = "") -> _program.Call:
    """What it is where it is decided who runs the program: with or without a kernel, its psum."""
    return _program.Call(
        label=label(_NAME, x),
        op="all_reduce",
        dtype=x.dtype.name,
        size_bytes=_program.size_of(x),
        ranks=ranks,
        unfit=unfit,
    )


def _describe(equation: _compat.Equation) -> _program.Call | None:
    ranks = _program.ranks_of(equation, equation.params["axes"], None)
    return None if ranks == 1 else _call(equation.avals_in[0], ranks, _program.unfit(equation))


def _why_not_the_kernel(x: Aval, residual: Aval) -> str:
    """Why the kernel does not take these arrays; empty if it does."""
    if x.dtype != residual.dtype:
        return f"{_NAME} of {x.dtype} with a residual of {residual.dtype} has no kernel"
    if x.dtype not in _TYPES:
        return f"{_NAME} of {x.dtype} has no kernel"
    row = x.shape[-1] * x.dtype.itemsize
    if row % _UNIT or not x.size:
        return f"{_NAME} has no kernel for {x.size} elements in rows of {row} bytes"
    return ""


def _lower(
    ctx: Context, x: ir.Value, residual: ir.Value, weight: ir.Value, *, axes: Axes, epsilon: float
) -> Sequence[ir.Value]:
    # Only JAX's type checks need more of a type, and they are done.
    avals = [core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    outs = [core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_out]
    positions = mesh_positions(ctx, axes, None)
    call, remark, results = _call(avals[0], len(positions[0])), "", None
    on_gpus = call.ranks > 1 and _compat.lowering_platform(ctx) != "cpu"
    if on_gpus and _program.choose(ctx, call).fabric:
        kernel = decide(_NAME, call.dtype, call.size_bytes, call.ranks, _program.limits())
        remark = _why_not_the_kernel(*avals[:2]) or ("" if kernel.fabric else kernel.reason)
        if not remark:
            results, _ = call_fabric(
                ctx.replace(avals_in=avals, avals_out=outs),
                [after_the_last_call(ctx, x), residual, weight],
                name=_NAME,
                target=f"jaxfabric_{_NAME}",
                positions=positions,
                label=call.label,
                site=(epsilon,),
                attributes={"epsilon": ir.FloatAttr.get(ir.F32Type.get(), epsilon)},
                reason=kernel.reason,
            )
            after_call(ctx, results[0])
    if results is None:
        sum_only = ctx.replace(avals_in=avals[:1], avals_out=avals[:1])
        total, finish = collective("psum").start(
            sum_only, x, axes=axes, groups=None, halves=False, remark=remark
        )
        rule = mlir.lower_fun(partial(_after_the_sum, epsilon=epsilon), multiple_results=True)
        rest = ctx.replace(primitive=None, avals_in=avals, avals_out=outs)
        results = rule(rest, finish(sum_only, total), residual, weight)
    return [
        lower_with_sharding_in_types(ctx, result, out)
        for result, out in zip(results, ctx.avals_out, strict=True)
    ]


_p = define(_NAME, _type, _batch, _lower, multiple_results=True)
_program.describe_with(_p, _describe)
ad.primitive_jvps[_p] = _jvp


def all_reduce_rms_norm(
    x: Any,  # noqa: ANN401
    residual: Any,  # noqa: ANN401
    weight: Any,  # noqa: ANN401
    axis_name: AxisName,
    *,
    epsilon: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """Sums `x` over all ranks, adds `residual`, and normalises by the root of the mean square.

    What ends a block of a tensor-parallel transformer: `x` is the rank's part of the block's
    result. Equal to `y = psum(x, axis_name) + residual` and
    `y / sqrt(mean(y ** 2, -1) + epsilon) * weight`, with the mean in float32.

    On GPUs one kernel does all of it where it pays and `x` and `residual` are of one type, float32,
    float16 or bfloat16, with rows of a multiple of 16 bytes; `jaxfabric.report()` says where not.
    The new residual has the same bits as on CPUs. The normalised array is rounded once, after the
    weight, and otherwise twice: it may differ by that, and by 1e-6 of the value.

    Args:
        x: array `[..., d]` of a float type.
        residual: array `[..., d]`, what `x` is added to.
        weight: array `[d]`, the scale of each feature.
        axis_name: as in `psum`.
        epsilon: added to the mean square.

    Returns:
        The normalised array and the new residual, both `[..., d]` of the type of `residual`.

    Raises:
        NameError: `axis_name` is not bound here.
        TypeError: `x` is not of a float type.
        ValueError: the shapes do not fit.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> def f(x):
        ...     ones = jnp.ones(2)
        ...     return jaxfabric.lax.all_reduce_rms_norm(x[0], ones, 2 * ones, "i", epsilon=0.0)
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
        >>> normalised, residual = jax.jit(f)(jnp.ones((4, 2)))
        >>> normalised.tolist(), residual.tolist()
        ([2.0, 2.0], [5.0, 5.0])
    """
    x, residual, weight = map(jnp.asarray, (x, residual, weight))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"all_reduce_rms_norm x has the type {x.dtype}: use a float type")
    if x.shape != residual.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            "all_reduce_rms_norm needs x and residual [..., d] and weight [d], got "
            f"{x.shape}, {residual.shape} and {weight.shape}"
        )
    axes = _compat.skip_one_sized(as_axes(axis_name))
    plain = all(
        not (mat.reduced or mat.unreduced)
        for mat in (jax.typeof(value).mat for value in (x, residual, weight))
    )
    # Axes of a vmap and dimensions of x are for psum.
    if not axes or not plain or _compat.mesh_axes(axes) != axes:
        return _one_by_one(x, residual, weight, axes=axes, epsilon=epsilon)
    x, weight = _compat.as_varying(x, axes), weight.astype(residual.dtype)
    normalised, y = _p.bind(x, residual, weight, axes=axes, epsilon=float(epsilon))
    return normalised, y
