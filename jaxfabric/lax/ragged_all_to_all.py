"""ragged_all_to_all: rank i gets slices of every rank's array, of any length.

The primitive takes all six arrays, so it is no `Collective`, which has one operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxfabric import _compat, _program, _report
from jaxfabric._dtypes import check_movable, pack, unpack
from jaxfabric._emit import call_fabric, label, mesh_positions, note
from jaxfabric._groups import (
    Axes,
    AxisGroups,
    AxisName,
    Groups,
    as_axes,
    as_groups,
    communicator_size,
)
from jaxfabric._overlap import after_call, after_the_last_call
from jaxfabric._primitive import (
    Aval,
    Context,
    Param,
    Value,
    axis_effects,
    define,
    hlo,
    ir,
    lower_as_jax,
    lower_with_sharding_in_types,
)
from jaxfabric.lax.all_to_all import all_to_all

_NAME = "ragged_all_to_all"
# XLA:GPU takes no more ranks, unless a flag lets it use NCCL's send and recv.
_XLA_RANKS = 8
_METADATA = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def _check(operand: Aval, output: Aval, metadata: Sequence[Aval], size: int) -> None:
    """Checks types for `size` ranks; the words are jax.lax's where it checks the same."""
    for name, aval in zip(_METADATA, metadata, strict=True):
        if not jnp.issubdtype(aval.dtype, np.integer):
            raise ValueError(f"{_NAME} {name} must be integer type.")
    for name, aval in zip(_METADATA, metadata, strict=True):
        if len(aval.shape) != 1 or aval.shape[0] < 1:
            raise ValueError(
                f"{_NAME} {name} must be rank 1 with positive dimension size, but got shape "
                f"{aval.shape}"
            )
    lengths = {name: a.shape[0] for name, a in zip(_METADATA, metadata, strict=True)}
    if len(set(lengths.values())) > 1 or metadata[0].shape[0] % size:
        raise ValueError(
            f"{_NAME} offsets and sizes must have the same length, a multiple of the number of "
            f"ranks ({size}), but got {lengths}"
        )
    if not operand.shape or not output.shape or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"{_NAME} operand and output must be equal in all dimensions but the first, but got "
            f"shapes {operand.shape} and {output.shape}"
        )
    if operand.dtype != output.dtype:
        raise ValueError(
            f"{_NAME} operand and output must have the same dtype, but got {operand.dtype} and "
            f"{output.dtype}"
        )
    check_movable(_NAME, operand.dtype)


def _type(*avals: Aval, axes: Axes, groups: Groups | None) -> tuple[Aval, set[Any]]:
    operand, output, *metadata = avals
    manual = [_compat.result_manual_type(_NAME, aval, axes, "varying") for aval in avals]
    _check(operand, output, metadata, communicator_size(axes, groups))
    return output.update(weak_type=False, manual_axis_type=manual[1]), axis_effects(axes)


def _bind(*arrays: Value, axes: Axes, groups: Groups | None) -> jax.Array:
    """Binds the primitive, all of whose operands vary over what any of them varies over."""
    varying = frozenset(axes).union(*(jax.typeof(x).mat.varying for x in arrays))
    arrays = tuple(_compat.as_varying(x, tuple(varying)) for x in arrays)
    return _ragged_p.bind(*arrays, axes=axes, groups=groups)


def _wide(x: Value) -> Value:
    """Offsets or sizes in a type that can count the rows of any array."""
    return x if jnp.iinfo(x.dtype).bits >= 32 else x.astype(np.int32)


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], **params: Param
) -> tuple[Value, Value]:
    _, _, *metadata = primals
    dots = tangents[:2]
    y = _bind(*primals, **params)
    if all(isinstance(dot, ad.Zero) for dot in dots):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, _bind(*map(ad.instantiate_zeros, dots), *metadata, **params)


def _transpose(
    ct: Value,
    operand: Value,
    output: Value,
    *metadata: Value,
    axes: Axes,
    groups: Groups | None,
) -> list[Value]:
    """What was sent comes back; what was overwritten gets nothing."""
    arrays = (operand, output)
    if isinstance(ct, ad.Zero):
        zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in arrays]
        return [*zeros, None, None, None, None]
    input_offsets, send_sizes, output_offsets, recv_sizes = map(_wide, metadata)

    def exchanged(offsets: Value) -> Value:
        return all_to_all(offsets, axes, 0, 0, axis_index_groups=groups, tiled=True)

    # Where the slices that came to this rank begin here, and began on their senders.
    here, there = exchanged(output_offsets), exchanged(input_offsets)
    operand_ct = output_ct = None
    if ad.is_undefined_primal(operand):
        zero = jnp.zeros(operand.aval.shape, ct.dtype)
        operand_ct = _bind(ct, zero, here, recv_sizes, there, send_sizes, axes=axes, groups=groups)
    if ad.is_undefined_primal(output):
        # The count of slices that lie over a row: up where one begins, down where one ends.
        rows = ct.shape[0]
        begins = jnp.clip(here, 0, rows)
        steps = jnp.zeros(rows + 1, np.int32).at[begins].add(1)
        steps = steps.at[jnp.clip(begins + recv_sizes, 0, rows)].add(-1)
        covered = (jnp.cumsum(steps)[:rows] > 0).reshape(rows, *[1] * (ct.ndim - 1))
        output_ct = jnp.where(covered, jnp.zeros_like(ct), ct)
    return [operand_ct, output_ct, None, None, None, None]


def _batch(
    axis_data: Param,
    args: Sequence[Value],
    dims: Sequence[int | None],
    *,
    axes: Axes,
    groups: Groups | None,
) -> tuple[Value, int | None]:
    """The elements of the batch lie one behind the other in one operand and one result."""
    if axis_data.name in axes:
        raise NotImplementedError(
            f"{_NAME}: vmap over the axis {axis_data.name!r} of the collective is not supported"
        )
    if all(dim is None for dim in dims):
        return _ragged_p.bind(*args, axes=axes, groups=groups), None
    size = axis_data.size
    operand, output = (
        batching.bdim_at_front(x, dim, size) for x, dim in zip(args[:2], dims[:2], strict=True)
    )

    def slices(x: Value, dim: int | None, rows: int) -> Value:
        # By slice, then by element of the batch: all slices for one rank stay together.
        x = jnp.broadcast_to(x[:, None], (x.shape[0], size)) if dim is None else x
        x = x.T if dim == 0 else x
        return (x + jnp.arange(size, dtype=x.dtype) * rows).reshape(-1)

    rows = (operand.shape[1], 0, output.shape[1], 0)
    metadata = map(slices, map(_wide, args[2:]), dims[2:], rows)
    merged = (x.reshape(-1, *x.shape[2:]) for x in (operand, output))
    y = _bind(*merged, *metadata, axes=axes, groups=groups)
    return y.reshape(output.shape), 0


def describe_ragged(
    operand: Aval, output: Aval, ranks: int, unfit: str = ""
) -> _program.Call | None:
    """What the call is where it is decided who runs it, see `_program`; None for one rank."""
    if ranks == 1:
        return None
    return _program.Call(
        label=label(_NAME, operand),
        op=_NAME,
        dtype=operand.dtype.name,
        size_bytes=_program.size_of(operand, output),
        ranks=ranks,
        unfit=unfit,
        only_fabric=not unfit and ranks > _XLA_RANKS,
    )


def _describe(equation: _compat.Equation) -> _program.Call | None:
    ranks = _program.ranks_of(equation, equation.params["axes"], equation.params["groups"])
    operand, output, *_ = equation.avals_in
    return describe_ragged(operand, output, ranks, _program.unfit(equation))


def _emit(
    ctx: Context, *operands: ir.Value, axes: Axes, groups: Groups | None
) -> Sequence[ir.Value]:
    (aval, output, *metadata), (out,) = ctx.avals_in, ctx.avals_out
    positions = mesh_positions(ctx, axes, groups)
    _check(aval, output, metadata, len(positions[0]))
    reason = ""
    on_gpus = _compat.lowering_platform(ctx) != "cpu"
    if on_gpus and (call := describe_ragged(aval, output, len(positions[0]))) is not None:
        who = _program.choose(ctx, call)
        if not who.fabric:
            note(ctx, _NAME, _report.XLA, who.reason)
            own = {"axis_name": axes, "axis_index_groups": groups}
            return [lower_as_jax(_NAME, ctx, *operands, **own)]
        reason = who.reason
    wide = [m.update(dtype=_index_type(m.dtype, on_gpus)) for m in metadata]
    packed, x = pack(ctx, aval, operands[0])
    initial, y = pack(ctx, output, operands[1])
    arrays = (
        array
        if on_gpus and aval.dtype == have.dtype
        else hlo.convert(mlir.aval_to_ir_type(ctx.module_context, aval), array)
        for aval, have, array in zip(wide, metadata, operands[2:], strict=True)
    )
    if on_gpus:
        x = after_the_last_call(ctx, x)
    (result,), _ = call_fabric(
        ctx.replace(avals_in=[packed, initial, *wide], avals_out=[out.update(dtype=packed.dtype)]),
        [x, y, *arrays],
        name=_NAME,
        target="jaxfabric_ragged_all_to_all",
        positions=positions,
        label=label(_NAME, aval),
        site=(output.shape, metadata[0].shape),
        attributes={},
        reason=reason,
        # The result begins as the output.
        operand_output_aliases={1: 0},
    )
    if on_gpus:
        after_call(ctx, result)
    return [lower_with_sharding_in_types(ctx, unpack(ctx, result, out), out)]


def _index_type(dtype: Aval, on_gpus: bool) -> Aval:
    """The type in which the fabric takes offsets and sizes; a GPU reads two, without conversion."""
    fits = dtype.itemsize < 4 or dtype == np.int32
    return np.dtype(np.int32 if on_gpus and fits else np.int64)


_ragged_p = define(_NAME, _type, _batch, _emit)
_program.describe_with(_ragged_p, _describe)
ad.primitive_jvps[_ragged_p] = _jvp
ad.primitive_transposes[_ragged_p] = _transpose


def lower_ragged_all_to_all(
    ctx: Context,
    *operands: ir.Value,
    axis_name: AxisName,
    axis_index_groups: AxisGroups,
) -> Sequence[ir.Value]:
    """Lowers a call with these operands and parameters onto the fabric.

    For a lowering rule, such as one of jax.lax's primitive `ragged_all_to_all_p`, whose operands
    and parameters are the same. The rule has to be registered with `cacheable=False`, and the
    primitive with `_compat.lower_for_each_mesh_if`.
    """
    return _emit(ctx, *operands, axes=as_axes(axis_name), groups=as_groups(axis_index_groups))


def ragged_all_to_all(
    operand: Any,  # noqa: ANN401
    output: Any,  # noqa: ANN401
    input_offsets: Any,  # noqa: ANN401
    send_sizes: Any,  # noqa: ANN401
    output_offsets: Any,  # noqa: ANN401
    recv_sizes: Any,  # noqa: ANN401
    *,
    axis_name: AxisName,
    axis_index_groups: AxisGroups = None,
) -> jax.Array:
    """Sends slices of any length to the ranks, as `jax.lax.ragged_all_to_all`.

    With n ranks and K slices, rank i gets the slices number `i * K // n` up to
    `(i + 1) * K // n` of each rank: rows `input_offsets[k]` to `input_offsets[k] + send_sizes[k]`
    of its `operand`. They go to the rows of the receiver's result that begin at the *sender's*
    `output_offsets[k]`.

    Offsets and sizes are checked when the program runs: a mistake on one rank is an error on every
    rank, which names the rank and the value. Offsets of slices without rows may be anything. Where
    slices overlap in a result, it is not said which one is seen; a derivative is right only if
    slices overlap neither in an operand nor in a result.

    Args:
        operand: array `[r, ...]` of any dtype, the rows to send.
        output: array `[q, ...]` of the same dtype, what the result holds where nothing is written.
        input_offsets: integers `[K]`, the first row of each slice in `operand`.
        send_sizes: integers `[K]`, the rows of each slice.
        output_offsets: integers `[K]`, the first row of each slice in the receiver's result.
        recv_sizes: integers `[K]`, the rows of each slice that comes here: the senders' send_sizes,
            `all_to_all(send_sizes, axis_name, 0, 0, tiled=True)`.
        axis_name: as in `all_gather`.
        axis_index_groups: lists of indices along `axis_name`, of equal size, that exchange apart.

    Returns:
        An array of the shape of `output`.

    Raises:
        NameError: `axis_name` is not bound here.
        ValueError: offsets or sizes are no integers, have other shapes than `[K]`, or K is no
            multiple of n; `operand` and `output` differ in more than the number of rows; the groups
            differ in size or do not cover all indices once.
        NotImplementedError: vmap over `axis_name`.

    Example:
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.make_mesh((4,), ("i",), axis_types=(auto,))
        >>> def f(x):  # Rank i sends its i rows to the next rank.
        ...     to = jnp.arange(4) == (jax.lax.axis_index("i") + 1) % 4
        ...     sizes = jax.lax.axis_index("i") * to
        ...     zero = jnp.zeros(4, int)
        ...     back = jaxfabric.lax.all_to_all(sizes, "i", 0, 0, tiled=True)
        ...     return jaxfabric.lax.ragged_all_to_all(
        ...         x, jnp.zeros(3, int), zero, sizes, zero, back, axis_name="i"
        ...     )
        >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
        >>> jax.jit(f)(jnp.arange(1, 13)).reshape(4, 3)
        Array([[10, 11, 12],
               [ 0,  0,  0],
               [ 4,  0,  0],
               [ 7,  8,  0]], dtype=int32)
    """
    arrays = [jnp.asarray(x) for x in (operand, output)]
    metadata = [jnp.asarray(x) for x in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    axes, groups = as_axes(axis_name), as_groups(axis_index_groups)
    if all(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays):
        words = _bind(*map(jax.random.key_data, arrays), *metadata, axes=axes, groups=groups)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(arrays[1]))
    return _bind(*arrays, *metadata, axes=axes, groups=groups)
