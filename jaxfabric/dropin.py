"""The switch: runs the `jax.lax` collectives of existing programs on the fabric.

JAX traces, differentiates and batches them as ever. Only the lowering of each collective primitive
for CPU devices and GPUs is replaced, by that of the collective in `jaxfabric.lax` which does the
same. A primitive, or a use of one, that has no such counterpart, or that XLA runs faster on GPUs
(`_program`), is left to XLA, and `jaxfabric.report` lists it with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfabric import _compat, _program, _report, config, hlo, runtime
from jaxfabric._emit import lower_locally, note
from jaxfabric._groups import as_axes
from jaxfabric._lax_calls import (
    SEVERAL,
    describe_call,
    has_halves,
    is_for_the_pass,
    require_fabric,
    require_type,
)
from jaxfabric._plans import PLANS, LeaveToXlaError, Plan, Rule, Sizes, group_size
from jaxfabric._portable import lowered_on, names_positions, portable
from jaxfabric._portable import mode as _mode
from jaxfabric._primitive import Aval, Context, Param, Value, collective
from jaxfabric.lax.all_reduce import psum
from jaxfabric.lax.ragged_all_to_all import lower_ragged_all_to_all

__all__ = ["disable", "enable", "enable_from_environment", "enabled", "export_checks", "portable"]

# --- the switch ---


def enable(mode: str = "lax") -> None:
    """Runs the `jax.lax` collectives of every program on the fabric from now on, on any thread.

    A program that was compiled before is compiled again at its next call. Starts the fabric where
    `jaxfabric.initialize` has not been called, under the same conditions.

    Args:
        mode: "lax": the collectives that programs call themselves, under `jax.shard_map`. "hlo":
            those too, and all that XLA's partitioner inserts ([whole-program mode]
            (docs/whole_program.md)).

    Raises:
        ValueError: there is no such mode.
        RuntimeError, ConfigError: as `jaxfabric.initialize`.

    Example:
        >>> import jaxfabric
        >>> jaxfabric.enable()
        >>> jaxfabric.disable()
    """
    _prepare(mode)
    _mode.set_global(mode)
    _set_pass(0)


def disable() -> None:
    """Leaves collectives to XLA again. Programs are compiled again at their next call.

    Example:
        >>> import jaxfabric
        >>> jaxfabric.disable()
    """
    _mode.set_global(None)
    _set_pass(0)


@contextlib.contextmanager
def enabled(mode: str | None = "lax") -> Iterator[None]:
    """As `enable`, for what this thread calls inside the `with` block; None: as `disable`.

    What counts is where a program is lowered, at the call of the outermost `jax.jit`: a `with`
    block inside a function that is being traced changes nothing.

    Args:
        mode: as in `enable`, or None.

    Raises:
        ValueError, RuntimeError, ConfigError: as `enable`.

    Example:
        >>> import jaxfabric
        >>> with jaxfabric.enabled():
        ...     pass
    """
    if mode is not None:
        _prepare(mode)
    whole = int(mode == "hlo")
    _set_pass(whole)
    try:
        with _mode(mode):
            yield
    finally:
        _set_pass(-whole)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=)` needs to let jaxfabric's calls through.

    The process that runs the exported program calls `jaxfabric.initialize` first. JAX needs
    flatbuffers to write a program to a file and to read it: the extra `export`.

    Example:
        >>> import jaxfabric
        >>> len(jaxfabric.export_checks()) > 0
        True
    """
    core = runtime.core()
    names = {**core.registrations(), **core.cuda_registrations()}
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def enable_from_environment() -> None:
    """`enable` for JAXFABRIC_ENABLE=1, without a line of code. JAX calls it as its backend starts.

    There are no devices yet: the fabric starts with the first program that has a collective.

    Raises:
        ConfigError: JAXFABRIC_ENABLE has a value it cannot have.
    """
    mode = config.switch_from_environment()
    if mode is None:
        return
    runtime.start_on_demand()
    _install()
    _mode.set_global(mode)
    if mode == "hlo":
        # Its programs need not have a collective when they are lowered.
        _compat.before_first_compilation(lambda: _set_pass(0))


def _prepare(mode: str) -> None:
    if mode not in config.SWITCH_MODES:
        raise ValueError(f"mode={mode!r}: use one of {', '.join(map(repr, config.SWITCH_MODES))}")
    runtime.initialize()
    _install()
    if mode == "hlo":
        hlo.install()  # It may fail, and then nothing has been turned on.


_report.mode = lambda: _mode.value

_lock = threading.Lock()
_whole_program_contexts = 0


def _set_pass(change: int) -> None:
    """Has the pass over compiled programs in place while "hlo" is on anywhere."""
    global _whole_program_contexts
    with _lock:
        _whole_program_contexts += change
        if _whole_program_contexts > 0 or _mode.get_global() == "hlo":
            hlo.install()
        else:
            hlo.uninstall()


_installed = False


def _install() -> None:
    """Puts our rules before JAX's, for good: they look at the switch."""
    global _installed
    with _lock:  # Nobody goes on while some of them are missing.
        if not _installed:
            _installed = True
            _compat.warn_of_untested_version()
            _replace_lowerings()


def _replace_lowerings() -> None:
    plans = dict(PLANS) | {f"{name}_start": plan for name, plan in PLANS.items()}
    rules: dict[str, Rule] = {
        name: partial(_lower, name, plan, halves=name.endswith("_start"))
        for name, plan in plans.items()
    }
    rules |= {f"{name}_done": _lower_done for name in PLANS}
    # One-sided for JAX; here all ranks of a program do both, and a token is a started ppermute.
    rules["psend"] = partial(_lower, "psend", PLANS["ppermute"], halves=True)
    rules["precv"] = _lower_receive
    rules["ragged_all_to_all"] = lower_ragged_all_to_all
    rules["pbroadcast_dynamic"] = _lower_dynamic_broadcast
    plans["psend"] = PLANS["ppermute"]
    taken = set()
    for name, rule in rules.items():
        if (primitive := _compat.lax_primitive(name)) is not None:
            for platform in ("cpu", "cuda"):
                original = _compat.xla_lowering(primitive, platform)
                switched = partial(_switched, name, rule, original, platform)
                _compat.replace_lowering(primitive, switched, platform)
            taken.add(primitive)
            if not name.endswith("_done"):
                _program.describe_with(primitive, partial(describe_call, name, plans.get(name)))
    _compat.lower_for_each_mesh_if(
        taken, lambda: _mode.value is not None and not names_positions(), lowered_on
    )
    _compat.take_typed_psum_of_groups(
        lambda x, axes, groups: psum(x, axes, axis_index_groups=groups),
        lambda: _mode.value is not None,
    )


def _switched(
    name: str,
    rule: Rule,
    original: Rule | None,
    platform: str,
    ctx: Context,
    *args: Value,
    **params: Param,
) -> Any:  # noqa: ANN401
    remedy = "jaxfabric.enable() runs it"
    if _mode.value is not None and not is_for_the_pass(name, platform):
        try:
            _require_manual(ctx)
            if has_halves(name) and _compat.lowers_for_several_platforms(ctx):
                raise LeaveToXlaError(SEVERAL)
            if platform != "cpu":
                require_fabric(name, ctx, params)
            return rule(ctx, *args, **params)
        except LeaveToXlaError as reason:
            remedy = f"jaxfabric does not run it either: {reason}"
            # A done's start is on the report; the pass over the compiled program sees all.
            if not name.endswith("_done") and _mode.value != "hlo":
                note(ctx, name, _report.XLA, f"{reason}{_remedy(reason)}")
    # JAX lowers this one for CPUs too, and XLA then says less.
    unfinished = name == "ragged_all_to_all" and _mode.value == "lax" and platform == "cpu"
    if original is None or unfinished:
        devices = "CPU devices" if platform == "cpu" else "GPUs"
        raise NotImplementedError(f"{name} is not implemented by JAX for {devices}; {remedy}")
    try:
        return original(ctx, *args, **params)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; {remedy}") from error


class _NotManualError(LeaveToXlaError):
    """Positions in the mesh are known only once the program has been partitioned."""


def _remedy(reason: LeaveToXlaError) -> str:
    return '; try jaxfabric.enable("hlo")' if isinstance(reason, _NotManualError) else ""


def _require_manual(ctx: Context) -> None:
    try:
        mesh, manual = _compat.lowering_mesh(ctx)
    except NotImplementedError:
        raise _NotManualError("it is outside of jax.shard_map") from None
    automatic = [a for a, size in mesh.shape.items() if a not in manual and size > 1]
    if automatic:
        raise _NotManualError(f"the axes {automatic} of its mesh are left to the compiler")


# --- lowering ---


def _lower(
    name: str, plan_of: Rule, ctx: Context, x: Value, *, halves: bool = False, **params: Param
) -> list[Value]:
    aval, out = ctx.avals_in[0], ctx.avals_out[0]
    if halves:
        # What a psend gives is a token, which knows no type.
        out = aval if name == "psend" else out.inner_aval
    sizes = _sizes(ctx)
    plan = plan_of(aval, sizes, **params)
    op = collective(plan.op)
    require_type(op, aval)
    row = aval
    if plan.before is not None:
        row = _compat.with_shape(aval, jax.eval_shape(plan.before, aval).shape)
        x = lower_locally(ctx, plan.before, (x,), (aval,), row)
    size = group_size(sizes, plan.axes, plan.groups)
    got = _compat.with_shape(aval, (size,) * op.rows_out + row.shape[op.rows_in :])
    inner = ctx.replace(avals_in=[row], avals_out=[got])
    empty = plan.op == "ppermute" and not plan.params["pairs"]
    if empty:
        y = lower_locally(ctx, jnp.zeros_like, (x,), (aval,), out)
    else:
        y, wait = op.start(
            inner, x, axes=plan.axes, groups=plan.groups, halves=halves, **plan.params
        )

    def finish(ctx: Context, y: Value) -> Value:
        if not empty:
            y = wait(ctx, y)
        if plan.after is not None:
            y = lower_locally(ctx, plan.after, (y,), (got,), out)
        return _compat.with_result_type(ctx, y, out)

    if halves:
        _compat.module_store(ctx, "started").append(_Started(y, finish, plan, out))
        return [y]
    return [finish(ctx, y)]


@dataclasses.dataclass(frozen=True)
class _Started:
    value: Value
    finish: Callable[[Context, Value], Value]
    plan: Plan
    out: Aval


def _started(ctx: Context, value: Value) -> _Started | None:
    calls = _compat.module_store(ctx, "started")
    return next((call for call in calls if call.value == value), None)


def _lower_done(ctx: Context, y: Value) -> list[Value]:
    if (call := _started(ctx, y)) is None:
        raise LeaveToXlaError("XLA has started it")
    return [call.finish(ctx, y)]


def _lower_receive(
    ctx: Context, token: Value, *, out_shape: Aval, axis_name: Param, perm: Param
) -> list[Value]:
    call = _started(ctx, token)
    if call is None:
        raise ValueError("precv needs the token of a psend of the same program, outside of loops")
    plan = PLANS["ppermute"](call.out, _sizes(ctx), axis_name=axis_name, perm=perm)
    if (plan.axes, plan.params) != (call.plan.axes, call.plan.params):
        raise ValueError(f"precv over {axis_name} with {perm=} gets the token of another psend")
    if (out_shape.shape, out_shape.dtype) != (call.out.shape, call.out.dtype):
        raise ValueError(f"precv of {out_shape} gets the token of a psend of {call.out}")
    return [call.finish(ctx, token)]


def _sizes(ctx: Context) -> Sizes:
    return dict(_compat.lowering_mesh(ctx)[0].shape)


def _lower_dynamic_broadcast(
    ctx: Context, x: Value, source: Value, *, axis_name: Param
) -> list[Value]:
    aval, index = ctx.avals_in
    size = group_size(_sizes(ctx), as_axes(axis_name))
    op = collective("all_gather")
    try:
        op.check_dtype(aval.dtype)
    except TypeError as error:  # XLA could not either.
        raise ValueError(f"pbroadcast from a traced source does not take {aval.dtype}") from error
    rows = _compat.with_shape(aval, (size, *aval.shape))
    inner = ctx.replace(avals_in=[aval], avals_out=[rows])
    (y,) = op.lower(inner, x, axes=as_axes(axis_name), groups=None, kind="varying")

    def pick(rows: jax.Array, source: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(rows, source, 0, keepdims=False)

    y = lower_locally(ctx, pick, (y, source), (rows, index), ctx.avals_out[0])
    return [_compat.with_result_type(ctx, y, ctx.avals_out[0])]
