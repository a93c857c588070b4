"""Who runs the collectives of a program on GPUs: the fabric all of them, or XLA.

Two libraries that wait on two streams of a GPU can deadlock: each may hold what the other needs.
So `gpu_table` has its say on each call, and the program as a whole goes to one of the two. A
lowering rule sees one call only, so when the first is lowered the whole program is looked through:
`_compat.lowered_equations`. What XLA's partitioner will insert is not there yet; the pass of mode
"hlo" decides once more, over all that it finds.

Nothing here is asked about CPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxfabric import _compat, config, runtime
from jaxfabric._compat import Equation
from jaxfabric._groups import Axes, Groups
from jaxfabric._windowed import ARRAYS
from jaxfabric.gpu_table import Decision, Override, decide, takes_windows

Context = Any  # mlir.LoweringRuleContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that is to be lowered for GPUs.

    Attributes:
        label: how messages call it: "psum float32[4096]".
        op: its name in gpu_table.
        dtype: name of the operand's type.
        size_bytes: the larger of one rank's operand and result.
        ranks: how many ranks exchange data.
        unfit: why the fabric cannot run it; empty if it can.
        only_fabric: XLA cannot run it.
    """

    label: str
    op: str = ""
    dtype: str = ""
    size_bytes: int = 0
    ranks: int = 0
    unfit: str = ""
    only_fabric: bool = False

    def alone(self) -> Decision:
        """What the table says, were it the only one."""
        return decide(self.op, self.dtype, self.size_bytes, self.ranks, limits())


# Makes a Call of an equation; None if it exchanges nothing.
Describe = Callable[[Equation], Call | None]
_describers: dict[Any, Describe] = {}


def describe_with(primitive: Any, describe: Describe) -> None:  # noqa: ANN401
    """Tells what calls the equations of `primitive` are."""
    _describers[primitive] = describe


def ranks_of(equation: Equation, axes: Axes, groups: Groups | None) -> int:
    """The number of ranks of the largest group of a collective."""
    if groups:
        return max(map(len, groups))
    return math.prod(equation.sizes.get(axis, 1) for axis in axes)


def unfit(equation: Equation) -> str:
    """Why the fabric cannot run this equation on GPUs, whatever it is; empty if it can."""
    if equation.automatic:
        return f"the axes {[*equation.automatic]} of its mesh are left to the compiler"
    return ""


def size_of(*avals: Any) -> int:  # noqa: ANN401
    """Bytes of the largest of these types."""
    return max(aval.size * aval.dtype.itemsize for aval in avals)


def limits() -> tuple[Override, ...]:
    """What the environment says, or gpu_limits of `jaxfabric.initialize`."""
    return _parsed(runtime.settings().gpu_limits)


_parsed = functools.cache(functools.partial(config.parse_gpu_limits, "gpu_limits="))


def choose(ctx: Context, call: Call) -> Decision:
    """Says who runs a call that is being lowered for GPUs, and why.

    The answer is the same on all ranks, and in all of a program, but for what only one of the two
    can run.
    """
    # An exported program runs elsewhere.
    if not _compat.lowers_for_export(ctx):
        if not runtime.cuda_problem():
            # Whether the GPUs of all processes can be used is known once they are connected.
            runtime.ensure_ready()
        if problem := runtime.gpu_problem():
            return Decision(False, problem)
    if call.unfit:
        return Decision(False, call.unfit)
    cached = _compat.module_store(ctx, "who runs it")
    if not cached:
        cached.append(_whole_program())
    whole: Decision = cached[0]
    own = call.alone()
    if whole.fabric == own.fabric:
        return own
    if call.only_fabric:
        return Decision(True, "XLA cannot run it")
    return whole


def in_windows(ctx: Context, call: Call, reduction: str | None) -> int:
    """Which arrays of a call of the fabric peers address themselves, see `_windowed.ARRAYS`.

    The same on all ranks. None where the program runs elsewhere.
    """
    if _compat.lowers_for_export(ctx) or runtime.windows_problem():
        return 0
    if not takes_windows(call.op, call.dtype, call.size_bytes, reduction):
        return 0
    return ARRAYS[call.op]


def _whole_program() -> Decision:
    equations = _compat.lowered_equations(_describers)
    if equations is None:
        return Decision(False, "the program it is in is not known")
    only_fabric = not_worth = None
    for equation, call in _calls(equations):
        name = f"the program has {call.label} at {equation.source}"
        if call.unfit:
            return Decision(False, f"{name}: {call.unfit}")
        if call.only_fabric:
            only_fabric = only_fabric or Decision(True, f"{name}: XLA cannot run it")
        elif not (own := call.alone()).fabric:
            not_worth = not_worth or Decision(False, f"{name}: {own.reason}")
    return only_fabric or not_worth or Decision(True, "")


def _calls(equations: Iterator[Equation]) -> Iterator[tuple[Equation, Call]]:
    for equation in equations:
        if (call := described(equation)) is not None:
            yield equation, call


def described(equation: Equation) -> Call | None:
    """The call that an equation is, if it is one."""
    describe = _describers.get(equation.primitive)
    return None if describe is None else describe(equation)


def jax_own(reason: str, equation: Equation) -> Call | None:
    """A collective of jax.lax that XLA runs for this reason, whatever the table says."""
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    if equation.sizes and ranks_of(equation, named, params.get("axis_index_groups")) == 1:
        return None
    return Call(label=f"jax.lax's {equation.primitive.name}", unfit=reason) if named else None


SWITCH_IS_OFF = "the switch, jaxfabric.enable(), is off"


def _not_ours() -> None:
    describe = functools.partial(jax_own, SWITCH_IS_OFF)
    for name in _compat.LAX_COLLECTIVES:
        for half in ("", "_start"):
            if (primitive := _compat.lax_primitive(name + half)) is not None:
                describe_with(primitive, describe)


_compat.remember_lowered_programs()
_not_ours()
