"""The halves of a collective as JAX primitives, for functions that do something in between.

The result of `start` has the type of the collective's, so that vmap and shapes work as ever, but
only `done` may use it, in the same jitted function and outside of loops that the other is not in.
There are no derivatives: functions that use these bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxfabric import _compat, _program
from jaxfabric._groups import Axes
from jaxfabric._primitive import Context, Param, Value, collective, define, ir

_Finish = Callable[[Context, ir.Value], ir.Value]


def start(op: str, x: Value, axes: Axes, **params: Param) -> Value:
    """Begins the collective `op` on `x`, as `Collective.bind` runs it."""
    return _start_p.bind(_compat.as_varying(x, axes), op=op, axes=axes, groups=None, **params)


def done(y: Value) -> Value:
    """Waits for what `start` has begun and returns its result."""
    return _done_p.bind(y)


def _start_type(
    x: Value, *, op: str, axes: Axes, groups: None, **params: Param
) -> tuple[Any, set[Any]]:
    return collective(op).type_of(x, axes=axes, groups=groups, kind="varying", **params)


def _batch_start(
    axis_data: Param, args: Sequence[Value], dims: Sequence[int | None], *, op: str, **own: Param
) -> tuple[Value, int | None]:
    whole = collective(op)
    # Over an axis of the collective itself other things happen around it: it runs in one.
    bind = whole.primitive.bind
    if axis_data.name not in own["axes"]:

        def bind(x: Value, *, kind: str, **own: Param) -> Value:
            del kind
            return _start_p.bind(x, op=op, **own)

    return whole.batch(axis_data, args, dims, bind=bind, kind="varying", **own)


def _lower_start(
    ctx: Context, x: ir.Value, *, op: str, axes: Axes, groups: None, **params: Param
) -> Sequence[ir.Value]:
    halves = _may_be_halved(ctx)
    y, finish = collective(op).start(ctx, x, axes=axes, groups=groups, halves=halves, **params)
    if not halves:
        return [finish(ctx, y)]
    _compat.module_store(ctx, "halves").append((y, finish))
    return [y]


def _may_be_halved(ctx: Context) -> bool:
    # The branches of a program for several platforms give results, and nothing else.
    if _compat.lowers_for_several_platforms(ctx):
        return False
    # A start may not be replicated, as a call is where axes are left to the compiler.
    mesh, manual = _compat.lowering_mesh(ctx)
    if any(axis not in manual and size > 1 for axis, size in mesh.shape.items()):
        return False
    # Without jax.jit every operation is a program.
    ends = _compat.lowered_equations({_done_p})
    return ends is None or any(True for _ in ends)


def _batch_done(
    axis_data: Param, args: Sequence[Value], dims: Sequence[int | None]
) -> tuple[Value, int | None]:
    del axis_data
    return _done_p.bind(*args), dims[0]


def _lower_done(ctx: Context, y: ir.Value) -> Sequence[ir.Value]:
    begun: list[tuple[ir.Value, _Finish]] = _compat.module_store(ctx, "halves")
    finish = next((finish for value, finish in begun if value == y), None)
    return [y if finish is None else _compat.with_result_type(ctx, finish(ctx, y), *ctx.avals_out)]


def _describe(equation: _compat.Equation) -> _program.Call | None:
    return collective(equation.params["op"]).describe(equation)


_start_p = define("start", _start_type, _batch_start, _lower_start)
_done_p = define("done", lambda y: (y, set()), _batch_done, _lower_done)
_program.describe_with(_start_p, _describe)
