"""The custom calls of the fabric in a program that is being lowered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.interpreters import mlir

from jaxfabric import _compat, _report, runtime
from jaxfabric._compat import i64, i64_array
from jaxfabric._groups import Axes, Groups, replica_groups
from jaxfabric._portable import names_positions

Aval = Any  # JAX's type of an array.
Context = Any  # mlir.LoweringRuleContext

# What the first half of a call gives to the second: on CPUs all there is of the call, on GPUs what
# it waits for.
HANDLE = core.ShapedArray((), np.dtype(np.uint64))
TOKEN = core.ShapedArray((1,), np.dtype(np.uint32))


def mesh_positions(ctx: Context, axes: Axes, groups: Groups | None) -> list[list[int]]:
    """The communicators of a call that is being lowered, as positions in its mesh."""
    return replica_groups(dict(_compat.lowering_mesh(ctx)[0].shape), axes, groups)


def call_fabric(
    ctx: Context,
    operands: Sequence[ir.Value],
    *,
    name: str,
    target: str,
    positions: list[list[int]],
    label: str,
    site: tuple[object, ...],
    attributes: dict[str, ir.Attribute],
    side_effect: bool = False,
    reason: str = "",
    windows: int = 0,
    **options: Any,  # noqa: ANN401
) -> tuple[Sequence[ir.Value], int]:
    """Emits a custom call of the fabric.

    Args:
        ctx: with the types of `operands` and of the result.
        operands: the op's own.
        name: the op, in error messages.
        target: the FFI target.
        positions: from `mesh_positions`.
        label: the op with the type it works on, for messages at run time.
        site: what tells calls of one op apart, beside the above.
        attributes: the op's own.
        side_effect: it must run although nothing uses the result.
        reason: why the fabric runs it, for the report.
        windows: which of operand (1) and result (2) XLA is to put into windows.
        **options: for jax.ffi.build_ffi_lowering_function.

    Returns:
        Its results, and the number of its site.

    Raises:
        NotImplementedError: the call is under a shard_map that it cannot be under.
    """
    mesh, manual = _compat.lowering_mesh(ctx)
    concrete = not isinstance(mesh, jax.sharding.AbstractMesh)
    # Who runs an exported program may have the devices in another order, or others.
    exports = _compat.lowers_for_export(ctx)
    by_position = not concrete or exports or names_positions()
    automatic = [a for a, size in mesh.shape.items() if a not in manual and size > 1]
    if automatic and (by_position or side_effect or not _compat.uses_shardy()):
        # A position cannot be told, a side effect not be replicated, and GSPMD aborts.
        raise NotImplementedError(
            f"jaxfabric.lax.{name} under a shard_map that leaves the axes {automatic} "
            "to the compiler is not supported with an AbstractMesh, in jax.export, in a barrier, "
            "or without Shardy: make all axes of the mesh manual"
        )
    members = positions
    if not by_position:
        ids = [device.id for device in mesh.devices.flat]
        members = [[ids[position] for position in group] for group in positions]
    if not exports:
        runtime.ensure_ready()
    module, ordinal = note(ctx, name, _report.FABRIC, reason, call=label)
    # The types tell programs of one name apart that threads compile in any order.
    number = site_hash(module, ordinal, _compat.parameter_types(ctx), name, label, members, *site)
    runtime.core().register_site(number, _compat.user_source(ctx))
    operands, avals = [*operands], [*ctx.avals_in]
    # On GPUs the process knows which position each of its devices has.
    if by_position and _compat.lowering_platform(ctx) == "cpu":
        operands.append(hlo.partition_id())
        avals.append(core.ShapedArray((), np.dtype(np.uint32)))
    if windows:
        target += "_windows"
        where = i64_array([i for group in positions for i in group])
        attributes = {**attributes, "positions": where, "windows": i64(windows)}
    call = jax.ffi.build_ffi_lowering_function(
        target,
        has_side_effect=side_effect,
        backend_config={
            "site": i64(number),
            "place": i64(site_hash(module, ordinal)),
            "label": ir.StringAttr.get(label),
            "members": i64_array([i for group in members for i in group]),
            "group_sizes": i64_array([len(group) for group in members]),
            "by_position": i64(by_position),
            **attributes,
        },
        **options,
    )
    emitted = call(ctx.replace(avals_in=avals), *operands)
    if windows:
        # Memory space 1 of XLA:GPU is what windows can be put around.
        spaces = {"operands_memory_spaces": windows & 1, "results_memory_spaces": windows & 2}
        emitted.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {name: ir.StringAttr.get("{0:1}") for name, wanted in spaces.items() if wanted}
        )
    return emitted.results, number


def note(ctx: Context, name: str, runner: str, reason: str = "", call: str = "") -> tuple[str, int]:
    """Puts the call being lowered on the report; returns its module and its number in that."""
    module, ordinal = _compat.next_ordinal(ctx)
    aval = ctx.avals_in[0]
    _report.record(
        _report.Entry(
            program=module.removeprefix("jit_"),
            number=ordinal,
            call=call or label(name, aval),
            source=_compat.user_source(ctx),
            size_bytes=aval.size * aval.dtype.itemsize,
            runner=runner,
            reason=reason,
        )
    )
    return module, ordinal


def label(name: str, aval: Aval) -> str:
    """How messages call a collective: "psum float32[4096]"."""
    return f"{name} {aval.dtype.name}[{','.join(map(str, aval.shape))}]"


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
