"""Everything jaxfabric uses of JAX that JAX does not promise to keep.

Only this module and `_primitive.py` import private JAX. Each section names what it relies on and
since when it has been so, so that a JAX release that moves something breaks one line here.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Hashable
from typing import Any

# --- jax.distributed ---
# jax._src.distributed.global_state and the coordination service's client and server, which have no
# public face that lets the launcher host the service or a rank connect as a recoverable client.
# Read in 0.10.2 and 0.12.0.1.


def distributed_state() -> Any:  # noqa: ANN401
    """Returns JAX's own record of the distributed job (its `client` is None outside of one)."""
    from jax._src import distributed

    return distributed.global_state


def backends_are_initialized() -> bool:
    """Whether a JAX backend exists already, after which no distributed client can be added."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def recoverability_enabled() -> bool:
    """Whether `jax_enable_recoverability` is set: JAX tasks may then die without their peers."""
    from jax._src import distributed

    return bool(distributed._ENABLE_RECOVERABILITY.value)


def start_distributed_service(address: str, num_processes: int, heartbeat_timeout: int) -> Any:  # noqa: ANN401
    """Starts a coordination service whose clients may die without taking the others along.

    Imports jaxlib only: no JAX backend comes to life in the process that hosts the service.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=heartbeat_timeout,
        shutdown_timeout=5,
        recoverable=True,
    )


def connect_distributed_client(
    address: str,
    num_processes: int,
    process_id: int,
    init_timeout: int,
    heartbeat_timeout: int,
) -> Any:  # noqa: ANN401
    """Connects a recoverable client and makes it the one JAX uses.

    `shutdown_on_destruction=False`, because the shutdown of a job with a dead member blocks.

    Raises:
        RuntimeError: not all processes came within `init_timeout` and a few seconds.
    """
    from jax._src import distributed
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=init_timeout,
        shutdown_timeout=5,
        heartbeat_timeout=heartbeat_timeout,
        # Without a callback jaxlib ends the process where connect() fails. It cannot call this one
        # (its argument has no Python type), so connect() raises RuntimeError("std::bad_cast").
        missed_heartbeat_callback=lambda *_: None,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    state.client = client
    return client


# --- end of jax.distributed ---


# --- launches ---
# An executable's first run id is the low half of a hash of its fingerprint, plus that of its device
# list if some of its devices are other processes'; then one more for every launch (jaxlib's
# py_executable.cc). Client.live_executables() and LoadedExecutable.fingerprint are
# not documented. Seen in 0.10.2 and 0.12.0.1; without them the core waits a little before an
# executable's first collective.

_fingerprints: collections.Counter[bytes] = collections.Counter()


def new_fingerprints() -> list[bytes]:
    """Fingerprints of this process's CPU executables that it has not returned before.

    As often as there are more executables with one than there were at any time before.
    """
    import jax

    try:
        executables = jax.local_devices(backend="cpu")[0].client.live_executables()
        values = [executable.fingerprint for executable in executables]
    except (AttributeError, RuntimeError):
        return []
    found = collections.Counter(value for value in values if isinstance(value, bytes))
    new = found - _fingerprints
    _fingerprints.update(new)
    return list(new.elements())


# --- end of launches ---


# --- tracing and lowering of collectives ---
# jax._src.{config, core, effects, source_info_util}, jax._src.lax.parallel, the lowering context of
# jax._src.interpreters.mlir. Read in 0.10.2 and 0.12.0.1. Imported inside the functions, so that
# the launcher, which needs the section above, starts without JAX.


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


def user_source(ctx: Any) -> str:  # noqa: ANN401
    """ "train.py:42": the innermost frame of the operation outside of JAX and jaxfabric."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(ctx.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else "unknown source"


def lower_for_each_device_assignment(primitive: Any) -> None:  # noqa: ANN401
    """Keeps JAX from reusing the lowering of a program with `primitive` on other devices.

    By default one lowering serves all meshes of one shape, although under `jax.set_mesh` the rule
    sees the devices of the first.
    """
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


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


# --- end of tracing and lowering ---


# --- compiled programs ---
# jax.extend.xla's module transformations, which are announced but without a promise; jaxlib._hlo,
# which reads HLO; and jax._src.cache_key.custom_hook, which the cache calls and anybody may
# replace. Read in 0.10.2 and 0.12.0.1.

Hlo = Any


def register_hlo_transformation(name: str, callback: Callable[[bytes], bytes | None]) -> None:
    """Passes every module compiled for CPU devices through `callback`, just before scheduling."""
    from jax.extend import xla

    # Here is all that XLA inserts, and copies are in place: what is put in must not return an
    # operand as its result.
    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.register_hlo_module_transformation(callback, name=name, stage=stage, platforms="cpu")


def clear_hlo_transformation(name: str) -> None:
    """Ends what `register_hlo_transformation` began."""
    from jax.extend import xla

    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.clear_hlo_module_transformation(name, stage=stage, platforms="cpu")


def parse_hlo(data: bytes) -> Hlo:
    """Reads a serialized HloModuleProto.

    Returns an object with `computations()`; these have a `name` and `instructions()`, and these a
    `name`, `operands()` and `to_string()`.
    """
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return _hlo.HloModule.from_serialized_hlo_module_proto(data)


def hlo_from_text(text: str) -> bytes:
    """Returns HLO text as a serialized HloModuleProto."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def forgets_donation() -> bool:
    """Whether XLA loses which arguments are donated when a transformation changes a module.

    So it is in 0.10.2, and not in 0.11.2. They then keep their memory, and results are right.
    """
    import jax

    return jax.__version_info__ < (0, 11)


def extend_cache_key(part: Callable[[], str]) -> Callable[[], None]:
    """Adds what `part` returns to the persistent compilation cache's keys, beside what others add.

    Returns a function that takes it back.
    """
    from jax._src import cache_key

    previous = cache_key.custom_hook
    wanted = True

    def custom_hook() -> str:
        return previous() + (part() if wanted else "")

    def undo() -> None:
        nonlocal wanted
        # Somebody may have put a hook around this one, which then stays and adds nothing.
        wanted = False
        if cache_key.custom_hook is custom_hook:
            cache_key.custom_hook = previous

    cache_key.custom_hook = custom_hook
    return undo


# --- end of compiled programs ---
