"""What the collectives of `jaxfabric.lax` have in common: one JAX primitive each, with its rules.

A `Collective` works on leading dimensions only: an operand is `[s]`, or `[n, s]` with one row per
rank of the communicator, and so is the result (`s` stands for any shape). The functions in
`jaxfabric.lax` bring other dimensions to the front, so neither a rule here nor the fabric knows
about them, and differentiation passes through transposes that JAX knows already.

Primitives are pure: two of them in one program have no order except by data.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch  # jax.extend has these too, and imports Pallas.
from jax._src.interpreters.mlir import lower_with_sharding_in_types
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.interpreters import ad, batching, mlir

from jaxfabric import _compat, _program, _report, _windowed
from jaxfabric._dtypes import NATIVE_DTYPES, check_movable, pack, unpack
from jaxfabric._emit import HANDLE, TOKEN, call_fabric, label, mesh_positions, note
from jaxfabric._groups import Axes, Groups, Split, communicator_size
from jaxfabric._overlap import (
    after_call,
    after_start,
    after_the_last_call,
    before_start,
    in_memory_of_its_own,
    wait_after_the_work_since,
)
from jaxfabric._portable import lowered_on, names_positions

Value = Any  # An array or a tracer of one.
Aval = Any  # JAX's type of an array.
Context = Any  # mlir.LoweringRuleContext
Param = Any  # A hashable parameter of a primitive.

# Frames of jaxfabric are not the user's: errors name the line that called jaxfabric.lax.
_compat.hide_frames(os.path.join(os.path.dirname(os.path.abspath(__file__)), ""))


class BarrierEffect(core.Effect):
    """Keeps a barrier that nothing depends on; it has no order with respect to anything."""

    def __str__(self) -> str:
        return "jaxfabric barrier"

    def __hash__(self) -> int:
        return hash(BarrierEffect)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BarrierEffect)


_compat.allow_effect(BarrierEffect)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Collective:
    """A collective as a JAX primitive: make one per op, at import, and call `bind`.

    Attributes:
        name: the primitive's name, and the op's in error messages.
        target: the FFI target that runs it.
        counterpart: lowers a call that is left to XLA, as jax.lax does. Called with the lowering
            context and the operand, and as keywords `axes`, `groups`, the size of the first group
            and the parameters.
        over_batch: vmap over one of the collective's own axes. Called with the operand (batch
            first), a function that runs the collective over the remaining axes, the `Split`, and
            the parameters; returns the result and its batch dimension or None.
        transpose: `(cotangent, operand, *, axes, groups, kind, ...)` to the operand's cotangent,
            for a linear collective. It may use `collective(name)` for another one.
        jvp: the JVP rule of a collective that is not linear.
        attributes: from the parameters beside axes, groups and kind to the FFI call's attributes.
        rows_in: 1 if the operand has a leading dimension with one row per rank, else 0.
        rows_out: the same for the result.
        reduction: "sum", "max" or "min", if the collective combines elements.
        side_effect: it must run although nothing uses the result.
        weak_kinds: the values of `kind` with which the result is as weakly typed as the operand.
    """

    name: str
    target: str
    counterpart: Callable[..., Any]
    over_batch: Callable[..., tuple[Any, int | None]]
    transpose: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    attributes: Callable[..., dict[str, ir.Attribute]] = lambda **_: {}
    rows_in: int = 0
    rows_out: int = 0
    reduction: str | None = None
    side_effect: bool = False
    weak_kinds: tuple[str, ...] = ("varying", "invarying", "reduced", "unreduced")
    primitive: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        primitive = define(self.name, self.type_of, self.batch, self.lower)
        object.__setattr__(self, "primitive", primitive)
        _program.describe_with(primitive, self.describe)
        if self.transpose is not None:
            ad.deflinear2(primitive, lambda *args, **params: (self.transpose(*args, **params),))
        if self.jvp is not None:
            ad.primitive_jvps[primitive] = self.jvp
        _collectives[self.name] = self

    def bind(
        self,
        x: Value,
        axes: Axes,
        groups: Groups | None = None,
        kind: str = "varying",
        **params: Param,
    ) -> jax.Array:
        """Applies the collective to one array.

        Args:
            x: `[s]`, or `[n, s]` where `rows_in` is 1.
            axes: names of mesh or vmapped axes; ranks count row-major in this order.
            groups: axis_index_groups, or None for one communicator over all of `axes`.
            kind: what becomes of the manual axis type, see `_compat.result_manual_type`.
            **params: the op's own parameters, hashable.
        """
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and self.reduction is None:
            words = self.bind(jax.random.key_data(x), axes, groups, kind, **params)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        if kind != "unreduced" and not self.side_effect:
            x = _compat.as_varying(x, axes)
        return self.primitive.bind(x, axes=axes, groups=groups, kind=kind, **params)

    # --- rules ---

    def type_of(
        self,
        x: Value,
        *,
        axes: Axes,
        groups: Groups | None,
        kind: str,
        **_: Param,
    ) -> tuple[Any, set[Any]]:
        """The type of the result, and the effects."""
        manual = x.mat if self.side_effect else _compat.result_manual_type(self.name, x, axes, kind)
        size = communicator_size(axes, groups)
        self.check_dtype(x.dtype)
        if self.rows_in and (not x.shape or x.shape[0] != size):
            raise ValueError(f"{self.name} needs {size} rows, one per rank, got shape {x.shape}")
        out = x.update(
            shape=(size,) * self.rows_out + x.shape[self.rows_in :],
            sharding=self._sharding(x.sharding),
            weak_type=x.weak_type and kind in self.weak_kinds,
            manual_axis_type=manual,
        )
        return out, axis_effects(axes) | ({BarrierEffect()} if kind == "effect" else set())

    def _sharding(self, sharding: Param) -> Param:
        if self.rows_in == self.rows_out:
            return sharding
        spec = [*sharding.spec]
        if len(spec) < self.rows_in:
            return sharding
        return sharding.update(
            spec=jax.sharding.PartitionSpec(*[None] * self.rows_out, *spec[self.rows_in :])
        )

    def check_dtype(self, dtype: Aval) -> None:
        """Raises TypeError for a dtype that the collective does not take."""
        if self.reduction is None:
            check_movable(self.name, dtype)
            return
        remedy = None
        if dtype not in NATIVE_DTYPES:
            remedy = "cast it first, for example with x.astype(jnp.float32) or x.astype(jnp.int32)"
        elif self.reduction == "sum" and dtype == np.bool_:
            remedy = "cast it first, for example with x.astype(jnp.int32)"
        elif self.reduction != "sum" and jnp.issubdtype(dtype, np.complexfloating):
            remedy = "complex numbers have no order, so reduce x.real and x.imag, or abs(x)"
        if remedy is not None:
            raise TypeError(f"jaxfabric.lax.{self.name} does not take {dtype}: {remedy}")

    def batch(
        self,
        axis_data: Param,
        args: Sequence[Any],
        dims: Sequence[int | None],
        *,
        axes: Axes,
        groups: Groups | None,
        bind: Callable[..., Any] | None = None,
        **params: Param,
    ) -> tuple[Any, int | None]:
        """The batching rule; `bind` applies another primitive of the same parameters."""
        (x,), (dim,), bind = args, dims, bind or self.primitive.bind
        if axis_data.name not in axes:
            if dim is None:
                return bind(x, axes=axes, groups=groups, **params), None
            at = max(dim, self.rows_in)
            y = bind(jnp.moveaxis(x, dim, at), axes=axes, groups=groups, **params)
            return y, at - self.rows_in + self.rows_out
        if groups is not None:
            raise NotImplementedError(
                f"{self.name}: axis_index_groups are not supported in vmap over the axis "
                f"{axis_data.name!r} of the collective"
            )
        if dim is None:
            x = jnp.broadcast_to(x, (axis_data.size, *x.shape))
        else:
            x = jnp.moveaxis(x, dim, 0)
        rest = tuple(axis for axis in axes if axis != axis_data.name)

        def over_rest(v: jax.Array, **own: Param) -> jax.Array:
            if rest:
                return bind(v, axes=rest, groups=None, **{**params, **own})
            return v.reshape((1,) * self.rows_out + v.shape[self.rows_in :])

        own = {name: value for name, value in params.items() if name != "kind"}
        split = Split.of(axes, axis_data.name, axis_data.size)
        return self.over_batch(x, over_rest, rest, split, **own)

    def call(self, aval: Aval, out: Aval, ranks: int, unfit: str = "") -> _program.Call:
        """How a call is described where it is decided who runs it, see `_program`."""
        return _program.Call(
            label=label(self.name, aval),
            op=self.target.removeprefix("jaxfabric_"),
            dtype=aval.dtype.name,
            size_bytes=_program.size_of(aval, out),
            ranks=ranks,
            unfit=unfit,
        )

    def describe(self, equation: _compat.Equation) -> _program.Call | None:
        """The call that an equation with `axes` and `groups` is; None if it exchanges nothing."""
        own = equation.params
        ranks = _program.ranks_of(equation, own["axes"], own["groups"])
        if ranks == 1:
            return None
        (aval,), (out,) = equation.avals_in, equation.avals_out
        return self.call(aval, out, ranks, _program.unfit(equation))

    def lower(
        self,
        ctx: Context,
        x: ir.Value,
        *,
        axes: Axes,
        groups: Groups | None,
        kind: str,
        **params: Param,
    ) -> Sequence[ir.Value]:
        """The lowering rule. Reads no more of `ctx` than a rule of another primitive has in it."""
        del kind
        y, finish = self.start(ctx, x, axes=axes, groups=groups, halves=False, **params)
        return [lower_with_sharding_in_types(ctx, finish(ctx, y), ctx.avals_out[0])]

    def start(
        self,
        ctx: Context,
        x: ir.Value,
        *,
        axes: Axes,
        groups: Groups | None,
        halves: bool = True,
        remark: str = "",
        **params: Param,
    ) -> tuple[ir.Value, Callable[[Context, ir.Value], ir.Value]]:
        """Emits the call, or where `halves` its first half, which does not wait.

        `remark` goes to what the report says of a call of the fabric on GPUs.

        Returns:
            A value, and what makes the result of it, later in the program. Of what XLA runs the
            value is the result.
        """
        (aval,), (out,) = ctx.avals_in, ctx.avals_out
        positions = mesh_positions(ctx, axes, groups)
        if all(len(group) == 1 for group in positions):
            if aval.shape != out.shape:
                x = hlo.reshape(mlir.aval_to_ir_type(ctx.module_context, out), x)
            return x, lambda _, y: y

        reason, windows = "", 0
        on_gpus = _compat.lowering_platform(ctx) != "cpu"
        if on_gpus:
            described = self.call(aval, out, max(map(len, positions)))
            who = _program.choose(ctx, described)
            if not who.fabric:
                note(ctx, self.name, _report.XLA, who.reason)
                size = len(positions[0])
                y = self.counterpart(ctx, x, axes=axes, groups=groups, size=size, **params)
                return y, lambda _, y: y
            windows = 0 if halves else _program.in_windows(ctx, described, self.reduction)
            reason = "; ".join(filter(None, (who.reason, remark, _windowed.remark(windows))))

        packed, x = pack(ctx, aval, x)
        got = out.update(dtype=packed.dtype)
        handles = [got, TOKEN] if on_gpus else [HANDLE]
        if on_gpus:
            x = before_start(ctx, x) if halves else after_the_last_call(ctx, x)
        (y, *token), site = call_fabric(
            ctx.replace(avals_in=[packed], avals_out=handles if halves else [got]),
            [x],
            name=self.name,
            target=self.target + ("_start" if halves else ""),
            positions=positions,
            label=label(self.name, aval),
            site=(params,),
            # Two equal starts are two.
            side_effect=self.side_effect or halves,
            attributes=self.attributes(**params),
            reason=reason,
            windows=windows,
        )

        if on_gpus and halves:
            after_start(ctx, *token)
        elif on_gpus:
            after_call(ctx, y)

        def finish(ctx: Context, y: ir.Value) -> ir.Value:
            if on_gpus and halves:
                # The operand and the result are in use until then: it takes both.
                call = jax.ffi.build_ffi_lowering_function(
                    "jaxfabric_done",
                    has_side_effect=True,
                    operand_output_aliases={1: 0},
                    backend_config={"site": _compat.i64(site)},
                )
                done = ctx.replace(avals_in=[packed, *handles], avals_out=[got])
                y = call(done, x, y, wait_after_the_work_since(ctx, y, *token)).result
                y = in_memory_of_its_own(y)
            elif halves:
                done = ctx.replace(avals_in=[HANDLE], avals_out=[got])
                # Pure it could be dropped, and what its start holds with it.
                call = jax.ffi.build_ffi_lowering_function("jaxfabric_done", has_side_effect=True)
                y = call(done, y).result
            return unpack(ctx, y, out)

        return y, finish


def define(
    name: str,
    type_rule: Callable[..., Any],
    batch: Callable[..., Any],
    lower: Callable[..., Any],
    *,
    multiple_results: bool = False,
) -> Any:  # noqa: ANN401
    """Makes the primitive jaxfabric_`name` with these rules."""
    primitive = core.Primitive(f"jaxfabric_{name}")
    primitive.multiple_results = multiple_results
    primitive.def_impl(partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(type_rule)
    batching.fancy_primitive_batchers[primitive] = batch
    # The groups name devices.
    _compat.lower_for_each_mesh_if({primitive}, lambda: not names_positions(), lowered_on)
    # Not cacheable: two equal calls in one module are two sites.
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lower, platform=platform, cacheable=False)
    mlir.register_lowering(primitive, partial(_lower_elsewhere, name), cacheable=False)
    return primitive


def axis_effects(axes: Axes) -> set[Any]:
    """The effects of a collective over `axes`."""
    return {core.NamedAxisEffect(axis) for axis in axes}


def _lower_elsewhere(name: str, ctx: Context, *_: Value, **__: Param) -> Value:
    platforms = ctx.platforms or ctx.module_context.platforms
    remedy = f": use jax.lax.{name} there" if hasattr(jax.lax, name) else ""
    raise NotImplementedError(
        f"jaxfabric.lax.{name} runs on the platforms cpu and cuda, not on {', '.join(platforms)}"
        f"{remedy}"
    )


def lower_as_jax(name: str, ctx: Context, *operands: ir.Value, **params: Param) -> ir.Value:
    """Lowers the primitive `name` of jax.lax with these parameters, by JAX's own rule."""
    primitive = _compat.lax_primitive(name)
    rule = _compat.xla_lowering(primitive, _compat.lowering_platform(ctx))
    (y,) = rule(ctx.replace(primitive=primitive), *operands, **params)
    return y


_collectives: dict[str, Collective] = {}


def collective(name: str) -> Collective:
    """Returns the collective called `name`, for rules that turn one into another."""
    return _collectives[name]
