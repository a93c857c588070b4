"""Keeps what a program does between the halves of a call between them, on GPUs.

XLA:GPU gives a custom call its place by what it needs and by what saves memory: jaxfabric_done
right behind its start, or the start right before its done, and nothing overlaps. (There is a field
by which custom calls say that they want to be early or late; no frontend can set it.) So the work
between them is tied to both by optimization barriers: what goes into it waits for the start's
token, and the token that done takes waits for what came out. Barriers last until XLA has ordered
the program, and cost no copy. Only real work is tied: everything else is free to be fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxfabric import _compat
from jaxfabric._emit import hlo, ir

Context = Any  # mlir.LoweringRuleContext

_WORK = frozenset(
    {
        *("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.custom_call"),
        *("stablehlo.while", "stablehlo.sort", "stablehlo.fft", "stablehlo.cholesky"),
        *("stablehlo.triangular_solve", "stablehlo.reduce_window", "stablehlo.scatter"),
    }
)
_BARRIER = "stablehlo.optimization_barrier"


def wait_after_the_work_since(ctx: Context, start: ir.Value, token: ir.Value) -> ir.Value:
    """Returns `token` for a wait that is to come after what was lowered since `start`.

    Args:
        ctx: of the second half.
        start: a result of the first half.
        token: what the second half waits for.
    """
    owner: ir.Operation = start.owner.operation  # type: ignore[union-attr]
    if ir.InsertionPoint.current.block != owner.block:
        return token
    operations = [view.operation for view in owner.block.operations]
    since = operations[operations.index(owner) + 1 :]
    worked: dict[ir.Value, None] = {}  # Results of work, or of something that uses such.
    started: list[ir.Value] = []
    first = []  # Work that needs no other.
    for op in since:
        if _is_a_start(op):
            started.append(list(op.results)[-1])
        elif op.name != _BARRIER:
            follows, works = any(value in worked for value in op.operands), _is_work(ctx, op)
            if works and not follows:
                first.append(op)
            if works or follows:
                worked |= dict.fromkeys(op.results)
    # By the token of a start that is under way: the same after the waits that came first.
    latest = _compat.module_table(ctx, "tokens")
    begun = _begin_after(token, first, since)
    token = latest.get(token, begun)
    started = [v for v in started if not list(v.uses)]
    held = [v for v in worked if not list(v.uses) and _is_array(v)]
    if not held:
        return token
    barrier = hlo.OptimizationBarrierOp([token, *started, *held])
    token, *others = barrier.results
    latest |= zip(started, others, strict=False)
    # Else XLA would see that nothing needs them.
    after = dict(zip(held, others[len(started) :], strict=True))
    _compat.use_from_now_on(after, barrier.operation)
    return token


def _begin_after(
    token: ir.Value, work: Sequence[ir.Operation], since: Sequence[ir.Operation]
) -> ir.Value:
    """Ties one operand of each piece of work to `token`, which is from right before `since`."""
    inside: dict[ir.Value, ir.Operation] = {value: op for op in since for value in op.results}
    entering: dict[ir.Value, list[tuple[ir.Operation, int]]] = {}
    for op in work:
        if (found := next(_entries(op, inside), None)) is not None:
            value, user, index = found
            entering.setdefault(value, []).append((user, index))
    if not entering:
        return token
    with ir.InsertionPoint(since[0]):
        barrier = hlo.OptimizationBarrierOp([token, *entering])
    begun, *values = barrier.results
    token.replace_all_uses_except(begun, barrier.operation)
    for value, users in zip(values, entering.values(), strict=True):
        for user, index in users:
            user.operands[index] = value
    return begun


def _entries(
    op: ir.Operation, inside: dict[ir.Value, ir.Operation]
) -> Iterator[tuple[ir.Value, ir.Operation, int]]:
    """The values from before `inside` that an operation needs: each with who takes it, and where.

    Not those that it gets through another call, which has its own time.
    """
    for index, value in enumerate(op.operands):
        maker = inside.get(value)
        if maker is None:
            if _is_array(value):
                yield value, op, index
        elif not _is_a_start(maker) and maker.name != _BARRIER:
            yield from _entries(maker, inside)


def _is_array(value: ir.Value) -> bool:
    return str(value.type).startswith("tensor<")


def _target(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _is_a_start(op: ir.Operation) -> bool:
    return op.name == "stablehlo.custom_call" and _target(op).endswith("_start")


def _is_work(ctx: Context, op: ir.Operation) -> bool:
    if op.name in _WORK:
        return op.name != "stablehlo.custom_call" or _target(op) != "Sharding"
    if op.name != "func.call":
        return False
    callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
    return any(
        _is_work(ctx, inner.operation)
        for block in ctx.module_context.symbol_table[callee].body.blocks
        for inner in block.operations
    )
