"""What the collectives of `jaxfabric.lax` have in common: one JAX primitive each, with its rules.

A `Collective` works on leading dimensions only: an operand is `[s]`, or `[n, s]` with one row per
rank of the communicator, and so is the result (`s` stands for any shape). The functions in
`jaxfabric.lax` bring other dimensions to the front, so neither a rule here nor the fabric knows
about them, and differentiation passes through transposes that JAX knows already.

Primitives are pure: two of them in one program have no order except by data.
"""

from __future__ import annotations

import dataclasses
import hashlib
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

from jaxfabric import _compat, _report
from jaxfabric._dtypes import NATIVE_DTYPES, carrier_of, pack, unpack
from jaxfabric._groups import Axes, Groups, Split, communicator_size, replica_groups
from jaxfabric._portable import names_positions

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
        primitive = core.Primitive(f"jaxfabric_{self.name}")
        object.__setattr__(self, "primitive", primitive)
        primitive.def_impl(partial(dispatch.apply_primitive, primitive))
        primitive.def_effectful_abstract_eval(self._type)
        if self.transpose is not None:
            ad.deflinear2(primitive, lambda *args, **params: (self.transpose(*args, **params),))
        if self.jvp is not None:
            ad.primitive_jvps[primitive] = self.jvp
        batching.fancy_primitive_batchers[primitive] = self._batch
        # The groups name devices.
        _compat.lower_for_each_device_assignment_if({primitive}, lambda: not names_positions())
        # Not cacheable: two equal calls in one module are two sites.
        mlir.register_lowering(primitive, self.lower, platform="cpu", cacheable=False)
        mlir.register_lowering(primitive, self._lower_elsewhere, cacheable=False)
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

    def _type(
        self,
        x: Value,
        *,
        axes: Axes,
        groups: Groups | None,
        kind: str,
        **_: Param,
    ) -> tuple[Any, set[Any]]:
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
        effects: set[Any] = {core.NamedAxisEffect(axis) for axis in axes}
        return out, effects | ({BarrierEffect()} if kind == "effect" else set())

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
        remedy = None
        if self.reduction is None:
            if carrier_of(dtype) is None:
                remedy = "cast it to a supported type first"
        elif dtype not in NATIVE_DTYPES:
            remedy = "cast it first, for example with x.astype(jnp.float32) or x.astype(jnp.int32)"
        elif self.reduction == "sum" and dtype == np.bool_:
            remedy = "cast it first, for example with x.astype(jnp.int32)"
        elif self.reduction != "sum" and jnp.issubdtype(dtype, np.complexfloating):
            remedy = "complex numbers have no order, so reduce x.real and x.imag, or abs(x)"
        if remedy is not None:
            raise TypeError(f"jaxfabric.lax.{self.name} does not take {dtype}: {remedy}")

    def _batch(
        self,
        axis_data: Param,
        args: Sequence[Any],
        dims: Sequence[int | None],
        *,
        axes: Axes,
        groups: Groups | None,
        **params: Param,
    ) -> tuple[Any, int | None]:
        (x,), (dim,) = args, dims
        if axis_data.name not in axes:
            if dim is None:
                return self.primitive.bind(x, axes=axes, groups=groups, **params), None
            at = max(dim, self.rows_in)
            y = self.primitive.bind(jnp.moveaxis(x, dim, at), axes=axes, groups=groups, **params)
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
                return self.primitive.bind(v, axes=rest, groups=None, **{**params, **own})
            return v.reshape((1,) * self.rows_out + v.shape[self.rows_in :])

        own = {name: value for name, value in params.items() if name != "kind"}
        split = Split.of(axes, axis_data.name, axis_data.size)
        return self.over_batch(x, over_rest, rest, split, **own)

    def _lower_elsewhere(self, ctx: Context, x: Value, **_: Param) -> Value:
        platforms = ctx.platforms or ctx.module_context.platforms
        raise NotImplementedError(
            f"jaxfabric.lax.{self.name} runs on the platform cpu, not on {', '.join(platforms)}: "
            f"use jax.lax.{self.name} there, or a mesh of CPU devices"
        )

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
        (aval,), (out,) = ctx.avals_in, ctx.avals_out
        mesh, manual = _compat.lowering_mesh(ctx)
        positions = replica_groups(dict(mesh.shape), axes, groups)
        if all(len(group) == 1 for group in positions):
            if aval.shape != out.shape:
                x = hlo.reshape(mlir.aval_to_ir_type(ctx.module_context, out), x)
            return [lower_with_sharding_in_types(ctx, x, out)]

        concrete = not isinstance(mesh, jax.sharding.AbstractMesh)
        if concrete:
            _expect_launches(mesh)
        abstract = not concrete or names_positions()
        automatic = [a for a, size in mesh.shape.items() if a not in manual and size > 1]
        if automatic and (abstract or self.side_effect or not _compat.uses_shardy()):
            # A position cannot be told, a side effect not be replicated, and GSPMD aborts.
            raise NotImplementedError(
                f"jaxfabric.lax.{self.name} under a shard_map that leaves the axes {automatic} "
                "to the compiler is not supported with an AbstractMesh, in a barrier, or without "
                "Shardy: make all axes of the mesh manual"
            )
        if not abstract:
            ids = [device.id for device in mesh.devices.flat]
            positions = [[ids[position] for position in group] for group in positions]
        label = _label(self.name, aval)

        def call(ctx: Context, x: ir.Value) -> ir.Value:
            return self._call(ctx, x, positions, abstract, label, **params)

        if (carrier := carrier_of(aval.dtype)) == aval.dtype:
            y = call(ctx, x)
        else:
            packed = aval.update(dtype=carrier), out.update(dtype=carrier)
            x = lower_locally(ctx, partial(pack, carrier=carrier), (x,), (aval,), packed[0])
            y = call(ctx.replace(avals_in=packed[:1], avals_out=packed[1:]), x)
            y = lower_locally(ctx, partial(unpack, dtype=out.dtype), (y,), packed[1:], out)
        return [lower_with_sharding_in_types(ctx, y, out)]

    def _call(
        self,
        ctx: Context,
        x: ir.Value,
        members: list[list[int]],
        by_position: bool,
        label: str,
        **params: Param,
    ) -> ir.Value:
        # Here, not at the top: importing jaxfabric.lax loads no compiled module.
        from jaxfabric import _ext, runtime

        if not _compat.lowers_for_export(ctx):
            runtime.ensure_ready()
        module, ordinal = note(ctx, self.name, _report.FABRIC)
        site = site_hash(module, ordinal, self.name, label, members, params)
        _ext.register_site(site, _compat.user_source(ctx))
        operands, avals = [x], [*ctx.avals_in]
        if by_position:
            operands.append(hlo.partition_id())
            avals.append(core.ShapedArray((), np.dtype(np.uint32)))
        call = jax.ffi.build_ffi_lowering_function(
            self.target,
            has_side_effect=self.side_effect,
            backend_config={
                "site": i64(site),
                "place": i64(site_hash(module, ordinal)),
                "label": ir.StringAttr.get(label),
                "members": i64_array([i for group in members for i in group]),
                "group_sizes": i64_array([len(group) for group in members]),
                "by_position": i64(by_position),
                **self.attributes(**params),
            },
        )
        return call(ctx.replace(avals_in=avals), *operands).result


def note(ctx: Context, name: str, runner: str, reason: str = "") -> tuple[str, int]:
    """Puts the call being lowered on the report; returns its module and its number in that."""
    module, ordinal = _compat.next_ordinal(ctx)
    aval = ctx.avals_in[0]
    _report.record(
        _report.Entry(
            program=module.removeprefix("jit_"),
            number=ordinal,
            call=_label(name, aval),
            source=_compat.user_source(ctx),
            size_bytes=aval.size * aval.dtype.itemsize,
            runner=runner,
            reason=reason,
        )
    )
    return module, ordinal


def _label(name: str, aval: Aval) -> str:
    return f"{name} {aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _expect_launches(mesh: jax.sharding.Mesh) -> None:
    """Lets the core work out the first run id of a program on a mesh over several processes."""
    from jaxfabric import _ext

    if mesh.is_multi_process:
        _ext.add_device_list([device.id for device in mesh.devices.flat])


_collectives: dict[str, Collective] = {}


def collective(name: str) -> Collective:
    """Returns the collective called `name`, for rules that turn one into another."""
    return _collectives[name]


def canonical_axis(axis: int, ndim: int) -> int:
    """Returns a dimension counted from the front; a negative one counts from the back."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of bounds for array of dimension {ndim}")
    return axis % ndim


def i64(value: int) -> ir.Attribute:
    """Returns an FFI attribute that the handler reads as int64."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(value))


def i64_array(values: Sequence[int]) -> ir.Attribute:
    """Returns an FFI attribute that the handler reads as a span of int64."""
    return ir.DenseI64ArrayAttr.get([int(value) for value in values])


def site_hash(*what: object) -> int:
    """Returns 63 bits that are the same on every process for the same call of the same program."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def lower_locally(
    ctx: Context,
    f: Callable[..., jax.Array],
    operands: Sequence[ir.Value],
    avals: Sequence[Aval],
    out: Aval,
) -> ir.Value:
    """Emits the operations of `f`, which has no collective, around a custom call."""
    rule = mlir.lower_fun(f, multiple_results=False)
    inner = ctx.replace(primitive=None, avals_in=[*avals], avals_out=[out])
    return rule(inner, *operands)[0]
