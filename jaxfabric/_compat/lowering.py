"""Tracing and lowering of primitives of our own.

jax._src.{config, core, effects, mesh, source_info_util, util}, jax._src.lax.parallel, the lowering
context of jax._src.interpreters.mlir, the cache of lowered programs in pxla; of
jax.make_user_context (public) that the value for all threads can be set. Read in 0.10.2, 0.11.2 and
0.12.0.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from jaxfabric._compat.equations import source_line


def checks_manual_types() -> bool:
    """Whether the code being traced is under `shard_map(check_vma=True)`."""
    from jax._src import config

    return bool(config._check_vma.value)


def mesh_axes(axes: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Those of `axes` that are manual mesh axes, the only ones that appear in manual axis types."""
    import jax

    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis in manual)


def skip_one_sized(axes: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Drops mesh axes of size one where `jax_remove_size_one_mesh_axis_from_type` says so."""
    from jax._src.lax import parallel

    return tuple(parallel._maybe_skip_one_sized_axes(axes))


def manual_state(x: Any, axes: tuple[Hashable, ...], op: str) -> str:  # noqa: ANN401
    """ "varying", "invarying", "reduced" or "unreduced": the type of `x` over the mesh `axes`.

    Raises:
        ValueError: the axes differ in it.
    """
    import jax
    from jax._src.lax import parallel

    typed = mesh_axes(axes)
    return parallel._get_from(jax.typeof(x), typed, f"jaxfabric.lax.{op}") if typed else "invarying"


def as_varying(x: Any, axes: tuple[Hashable, ...]) -> Any:  # noqa: ANN401
    """Casts `x` to vary over the mesh `axes` where it does not yet, as jax.lax does by itself."""
    from jax._src.lax import parallel

    typed = mesh_axes(axes)
    return parallel.insert_collective_pvary(typed, x) if typed else x


def result_manual_type(op: str, aval: Any, axes: tuple[Hashable, ...], kind: str) -> Any:  # noqa: ANN401
    """Checks the manual axis type of a collective's operand and returns that of its result.

    Args:
        op: name in error messages.
        aval: the operand's type.
        axes: the collective's axes.
        kind: what becomes of a varying operand: "varying", "invarying" or "reduced"; or
            "unreduced", an unreduced operand that becomes invarying (in psum_scatter: varying).

    Raises:
        NameError: an axis is not bound.
        ValueError: the operand has a type that the collective does not take.
    """
    from jax._src import core
    from jax._src.lax import parallel

    parallel._check_axis_names(axes, op)
    core.check_avals_context_mesh([aval], op)
    typed = mesh_axes(axes)
    if kind == "unreduced":
        manual = unreduced_primitive(op).abstract_eval(aval, axes=typed)[0].mat
        # Of the sum each rank keeps its own rows.
        scattered = frozenset(typed) if op == "psum_scatter" else frozenset()
        return manual.update(varying=manual.varying | scattered)
    core.check_unreduced_args([aval], typed, op)
    if not typed or not checks_manual_types():
        return aval.mat
    parallel.collective_vma_rule(op, typed, aval)
    if kind == "varying":
        return aval.mat
    varying = aval.mat.varying - frozenset(typed)
    if kind == "invarying":
        return aval.mat.update(varying=varying)
    return aval.mat.update(varying=varying, reduced=aval.mat.reduced | frozenset(typed))


def unreduced_primitive(op: str) -> Any:  # noqa: ANN401
    """JAX's own primitive whose type rule an unreduced operand of `op` follows."""
    from jax._src.lax import parallel

    name = "psum" if op == "psum_scatter" else op
    if (primitive := getattr(parallel, f"unreduced_{name}_p", None)) is None:
        raise NotImplementedError(f"{op} of an unreduced array needs a newer JAX")
    return primitive


def lowering_mesh(ctx: Any) -> tuple[Any, frozenset[Hashable]]:  # noqa: ANN401
    """The mesh (a jax.sharding.Mesh or AbstractMesh) of the code being lowered, its manual axes."""
    from jax._src.sharding_impls import SPMDAxisContext

    context = ctx.module_context.axis_context
    if not isinstance(context, SPMDAxisContext):
        raise NotImplementedError(
            f"{ctx.primitive} was lowered outside of jax.shard_map: call it inside"
        )
    return context.mesh, frozenset(context.manual_axes)


def uses_shardy() -> bool:
    """Whether Shardy partitions the program (the default), and not GSPMD."""
    from jax._src import config

    return bool(config.use_shardy_partitioner.value)


def lowers_for_export(ctx: Any) -> bool:  # noqa: ANN401
    """Whether the module is made by jax.export, so that it will not run in this process."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def next_ordinal(ctx: Any) -> tuple[str, int]:  # noqa: ANN401
    """The name of the module being lowered, and how often this was called for it before."""
    from jax._src.lib.mlir import ir

    # Shared by all contexts of one module and dropped with them.
    store = ctx.module_context.cached_primitive_lowerings
    ordinal = store["jaxfabric"] = store.get("jaxfabric", -1) + 1
    name = ctx.module_context.module.operation.attributes["sym_name"]
    return ir.StringAttr(name).value, ordinal


def parameter_types(ctx: Any) -> str:  # noqa: ANN401
    """The types of the arrays that the program being lowered takes."""
    store = ctx.module_context.cached_primitive_lowerings
    if "jaxfabric types" not in store:
        symbols = ctx.module_context.symbol_table
        inputs = map(str, symbols["main"].type.inputs) if "main" in symbols else ()
        # Others are tokens, of effects that one process alone may have.
        store["jaxfabric types"] = ",".join(x for x in inputs if x.startswith("tensor<"))
    return store["jaxfabric types"]


def user_source(ctx: Any) -> str:  # noqa: ANN401
    """ "train.py:42": the innermost frame of the operation outside of JAX and jaxfabric."""
    return source_line(ctx.traceback)


def lowering_platform(ctx: Any) -> str:  # noqa: ANN401
    """The platform that a rule is called for; a rule registered for one has it here."""
    (platform,) = ctx.platforms or ctx.module_context.platforms
    return platform


def lowers_for_several_platforms(ctx: Any) -> bool:  # noqa: ANN401
    """Whether the module will choose between platforms when it runs."""
    return len(ctx.module_context.platforms) > 1


def cache_sensitive_context() -> Any:  # noqa: ANN401
    """A context whose value is part of the keys of JAX's caches: `value`, `set_global`, `(value)`.

    Called with a value it is a context manager for this thread.
    """
    import jax

    return jax.make_user_context(None)


_requiring: list[tuple[Collection[Any], Callable[[], bool]]] = []


def lower_for_each_mesh_if(
    primitives: Collection[Any],
    condition: Callable[[], bool],
    context: Any,  # noqa: ANN401
) -> None:
    """Keeps JAX from reusing the lowering of programs with `primitives` on other devices.

    By default one lowering serves all meshes of one shape, although under `jax.set_mesh` the rule
    sees the devices of the first. (JAX's own list of primitives that require devices would do, but
    it refuses programs whose arguments are on a mesh of another shape.)

    Args:
        primitives: those whose lowering depends on the devices.
        condition: whether it does so now.
        context: a cache-sensitive context, whose value will be the mesh; the same in all calls.
    """
    from jax._src import core, mesh, util
    from jax._src.interpreters import pxla

    _requiring.append((primitives, condition))
    if len(_requiring) > 1:
        return
    original = pxla._cached_lowering_to_hlo

    @util.weakref_lru_cache
    def primitives_of(jaxpr: Any) -> frozenset[Any]:  # noqa: ANN401
        own = frozenset(eqn.primitive for eqn in jaxpr.eqns)
        return own.union(*map(primitives_of, core.subjaxprs(jaxpr)))

    @functools.wraps(original)
    def lowering(jaxpr: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        devices = mesh.get_concrete_mesh()
        if not devices.empty:
            found = primitives_of(getattr(jaxpr, "jaxpr", jaxpr))
            if any(condition() and not found.isdisjoint(ours) for ours, condition in _requiring):
                with context(devices):
                    return original(jaxpr, *args, **kwargs)
        return original(jaxpr, *args, **kwargs)

    pxla._cached_lowering_to_hlo = lowering  # type: ignore[assignment]


def hide_frames(path: str) -> None:
    """Makes JAX attribute operations made under `path` to the caller's line."""
    from jax._src import source_info_util

    source_info_util.register_exclusion(path)


def allow_effect(effect: type) -> None:
    """Lets programs with `effect` be compiled, differentiated and put into control flow."""
    from jax._src import effects

    effects.lowerable_effects.add_type(effect)
    effects.control_flow_allowed_effects.add_type(effect)
    effects.custom_derivatives_allowed_effects.add_type(effect)
    effects.remat_allowed_effects.add_type(effect)


def i64(value: int) -> Any:  # noqa: ANN401
    """Returns an FFI attribute that the handler reads as int64."""
    from jax._src.lib.mlir import ir

    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(value))


def i64_array(values: Sequence[int]) -> Any:  # noqa: ANN401
    """Returns an FFI attribute that the handler reads as a span of int64."""
    from jax._src.lib.mlir import ir

    return ir.DenseI64ArrayAttr.get([int(value) for value in values])
