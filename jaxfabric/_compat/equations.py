"""The program that is being lowered, as its equations.

A lowering rule sees one equation. So mlir.lower_jaxpr_to_module, which makes every module, and
mlir.jaxpr_subcomp, which lowers the equations of a jaxpr, are wrapped; and mlir.lower_per_platform.
Besides jax._src.{core, source_info_util}, and the parameters `mesh` and `newly_manual_axes` of
shard_map. Read in 0.10.2, 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a program, and where it is.

    Attributes:
        primitive: what it calls.
        params: with these parameters.
        avals_in: types of its operands; under shard_map those of one rank.
        avals_out: types of its results.
        sizes: of the axes of the mesh of the innermost shard_map; empty outside of one.
        automatic: the axes of more than one rank that this shard_map leaves to the compiler.
        source: "train.py:42".
        several_platforms: the program is lowered for more than one.
    """

    primitive: Any
    params: Mapping[str, Any]
    avals_in: Sequence[Any]
    avals_out: Sequence[Any]
    sizes: Mapping[Hashable, int]
    automatic: Sequence[Hashable]
    source: str
    several_platforms: bool = False


@dataclasses.dataclass(frozen=True)
class _Change:
    values: Mapping[Any, Any]
    but: Any


class _Lowering(threading.local):
    program: Any = None
    several_platforms = False

    def __init__(self) -> None:
        self.changes: list[_Change] = []


_lowering = _Lowering()


@functools.cache  # Once.
def remember_lowered_programs() -> None:
    """Lets `lowered_equations` see the programs that are lowered from now on."""
    from jax._src.interpreters import mlir

    original = mlir.lower_jaxpr_to_module

    @functools.wraps(original)
    def lower(module_name: str, jaxpr: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before = _lowering.program, _lowering.several_platforms
        _lowering.program = jaxpr
        _lowering.several_platforms = len(kwargs.get("platforms", ())) > 1
        try:
            return original(module_name, jaxpr, *args, **kwargs)
        finally:
            _lowering.program, _lowering.several_platforms = before

    body = mlir.jaxpr_subcomp

    @functools.wraps(body)
    def lower_body(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before, _lowering.changes = _lowering.changes, []
        try:
            results, tokens = body(*args, **kwargs)
            for change in _lowering.changes:
                for old, new in change.values.items():
                    old.replace_all_uses_except(new, change.but)
                results = [_changed(value, change.values) for value in results]
            return results, tokens
        finally:
            _lowering.changes = before

    choose = mlir.lower_per_platform

    @functools.wraps(choose)
    def lower_per_platform(ctx: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # It adds them to a list, and those of a primitive that is not cacheable are a tuple.
        ctx.avals_out = [*ctx.avals_out]
        return choose(ctx, *args, **kwargs)

    mlir.lower_jaxpr_to_module = lower
    mlir.lower_per_platform = lower_per_platform
    mlir.jaxpr_subcomp = lower_body


def _changed(value: Any, values: Mapping[Any, Any]) -> Any:  # noqa: ANN401
    # Arrays of some types are tuples of values.
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(part, values) for part in value)
    return values.get(value, value)


def use_from_now_on(values: Mapping[Any, Any], but: Any) -> None:  # noqa: ANN401
    """Has what is lowered from now on, of the jaxpr being lowered, use one value for another.

    Args:
        values: what to use, by what has been there and has no use so far.
        but: the operation that makes the former of the latter.
    """
    _lowering.changes.append(_Change(values, but))


def lowered_equations(primitives: Container[Any]) -> Iterator[Equation] | None:
    """The equations of these primitives in the program that this thread is lowering.

    Inner ones too, in no order; what is called twice once. None if there is no such program, or it
    is not known.
    """
    program = _lowering.program
    if program is None:
        return None
    return _equations(getattr(program, "jaxpr", program), primitives, {}, (), set())


def _equations(
    jaxpr: Any,  # noqa: ANN401
    primitives: Container[Any],
    sizes: Mapping[Hashable, int],
    automatic: Sequence[Hashable],
    seen: set[Any],
) -> Iterator[Equation]:
    from jax._src import core

    if (key := (id(jaxpr), *sizes.items(), *automatic)) in seen:
        return
    seen.add(key)
    for eqn in jaxpr.eqns:
        if eqn.primitive in primitives:
            avals_in, avals_out = ([v.aval for v in side] for side in (eqn.invars, eqn.outvars))
            yield Equation(
                primitive=eqn.primitive,
                params=eqn.params,
                avals_in=avals_in,
                avals_out=avals_out,
                sizes=sizes,
                automatic=automatic,
                source=source_line(eqn.source_info.traceback),
                several_platforms=_lowering.several_platforms,
            )
        inner = sizes, automatic
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            manual = {*eqn.params["newly_manual_axes"], *mesh.manual_axes}
            shape = dict(mesh.shape)
            inner = shape, [a for a, size in shape.items() if a not in manual and size > 1]
        for body in core.jaxprs_in_params(eqn.params):
            yield from _equations(body, primitives, *inner, seen)


def source_line(traceback: Any) -> str:  # noqa: ANN401
    """ "train.py:42": the innermost frame outside of JAX and jaxfabric."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else "unknown source"
