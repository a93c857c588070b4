"""Which calls of `jax.lax` are whose, once the switch is on: questions to types and parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfabric import _compat, _program
from jaxfabric._groups import as_axes
from jaxfabric._plans import LeaveToXlaError, Rule
from jaxfabric._portable import mode
from jaxfabric._primitive import Aval, Collective, Context, Param, collective
from jaxfabric.lax.ragged_all_to_all import describe_ragged

SEVERAL = "a program for several platforms has no halves"


def has_halves(name: str) -> bool:
    """Whether the primitive of this name is one half of a call."""
    return name.endswith(("_start", "_done")) or name in ("psend", "precv")


def is_for_the_pass(name: str, platform: str) -> bool:
    """Whether to leave it to the pass over the compiled program.

    That decides for all of the program on GPUs, with what the partitioner inserts; it sees no
    halves.
    """
    return mode.value == "hlo" and platform != "cpu" and not has_halves(name)


def require_fabric(name: str, ctx: Context, params: dict[str, Param]) -> None:
    """Raises LeaveToXlaError for what XLA is to run on GPUs."""
    if name.endswith("_done") or name == "precv":
        return  # As its start.
    primitive = _compat.lax_primitive(name)
    sizes = dict(_compat.lowering_mesh(ctx)[0].shape)
    equation = _compat.Equation(primitive, params, ctx.avals_in, ctx.avals_out, sizes, (), "")
    call = _program.described(equation)
    if call is not None and not (who := _program.choose(ctx, call)).fabric:
        raise LeaveToXlaError(who.reason)


def describe_call(name: str, plan: Rule | None, equation: _compat.Equation) -> _program.Call | None:
    """What an equation is where it is decided who runs the program, see `_program`."""
    if mode.value is None:
        return _program.jax_own(_program.SWITCH_IS_OFF, equation)
    if is_for_the_pass(name, "cuda") or name == "precv":
        return None
    if not equation.sizes:
        return _program.jax_own("it is outside of jax.shard_map", equation)
    if has_halves(name) and equation.several_platforms:
        return _program.jax_own(SEVERAL, equation)
    unfit, aval, out = _program.unfit(equation), equation.avals_in[0], equation.avals_out[0]
    params = equation.params
    if name == "ragged_all_to_all":
        axes = as_axes(params["axis_name"])
        ranks = _program.ranks_of(equation, axes, params["axis_index_groups"])
        return describe_ragged(aval, equation.avals_in[1], ranks, unfit)
    if plan is None:
        op, axes, groups = collective("all_gather"), as_axes(params["axis_name"]), None
    else:
        try:
            planned = plan(aval, equation.sizes, **params)
            op, axes, groups = collective(planned.op), planned.axes, planned.groups
            require_type(op, aval)
        except LeaveToXlaError as error:
            return _program.jax_own(str(error), equation)
    ranks = _program.ranks_of(equation, axes, groups)
    if name == "psend" or ranks == 1:
        out = aval
    elif has_halves(name):
        out = out.inner_aval
    return None if ranks == 1 else op.call(aval, out, ranks, unfit)


def require_type(op: Collective, aval: Aval) -> None:
    """Raises LeaveToXlaError for a type that the fabric does not take."""
    try:
        op.check_dtype(aval.dtype)
    except TypeError as error:
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise  # XLA could not either, and says less.
        verb = "move" if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else "reduce"
        raise LeaveToXlaError(f"the fabric does not {verb} {aval.dtype}") from error
