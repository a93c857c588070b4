"""On GPUs: keeps calls in order, and between the halves of one what the program has there.

XLA:GPU gives a custom call its place by what it needs and by what saves memory: jaxfabric_done
right behind its start, or the start right before its done, and nothing overlaps. (There is a field
by which custom calls say that they want to be early or late; no frontend can set it.) So the work
between them is tied to both by optimization barriers: what goes into it waits for the start's
token, and the token that done takes waits for what came out. Barriers last until XLA has ordered
the program, and cost no copy. Only real work is tied: everything else is free to be fused.

In the same way whole calls of one function or loop are kept in the program's order. A loop, a
branch or a function with calls of its own comes before the calls that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
_BARRIER, _CALL = "stablehlo.optimization_barrier", "stablehlo.custom_call"


def wait_after_the_work_since(ctx: Context, start: ir.Value, token: ir.Value) -> ir.Value:
    """Returns `token` for a wait that is to come after what was lowered since `start`.

    Args:
        ctx: of the second half.
        start: a result of the first half.
        token: what the second half waits for.
    """
    owner = _maker(start)
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
        elif op.name != _BARRIER or not _is_token(op.operands[0]):
            follows, works = any(value in worked for value in op.operands), _is_work(ctx, op)
            if works and not follows:
                first.append(op)
            if works or follows:
                worked |= dict.fromkeys(op.results)
    latest = _latest(ctx)
    under_way = _under_way(ctx)
    under_way[:] = [other for other in under_way if other != token]
    begun = _begin_after(token, first, since)
    token = latest.get(token, begun)
    started = [v for v in started if not list(v.uses)]
    held = [v for v in worked if not list(v.uses) and _is_array(v) and not _is_token(v)]
    if not held:
        return token
    barrier = hlo.OptimizationBarrierOp([token, *started, *held])
    token, *others = barrier.results
    latest |= zip(started, others, strict=False)
    _compat.module_table(ctx, "tied").update(dict.fromkeys(others))
    # Else XLA would see that nothing needs them.
    after = dict(zip(held, others[len(started) :], strict=True))
    _compat.use_from_now_on(after, barrier.operation)
    return token


def _latest(ctx: Context) -> dict[ir.Value, ir.Value]:
    """By the token of a start that is under way: the same after all that is to come before."""
    return _compat.module_table(ctx, "tokens")


def _under_way(ctx: Context) -> list[ir.Value]:
    """The tokens of the starts whose done is still to come."""
    return _compat.module_store(ctx, "under way")


def before_start(ctx: Context, x: ir.Value) -> ir.Value:
    """Returns the operand of a start, which is to come after the starts that are under way."""
    block = ir.InsertionPoint.current.block
    latest = _latest(ctx)
    before = [token for token in _under_way(ctx) if _maker(token).block == block][-1:]
    values = [x, *(latest.get(token, token) for token in before)]
    x, *after = hlo.OptimizationBarrierOp(values).results
    latest |= zip(before, after, strict=True)
    return x


def after_start(ctx: Context, token: ir.Value) -> None:
    """Keeps the token of a start until its done comes."""
    _under_way(ctx).append(token)


def in_memory_of_its_own(value: ir.Value) -> ir.Value:
    """Returns `value`, which XLA will not take for a part of another array.

    XLA:GPU fuses the slice that a custom call takes, or that its result goes to, with the call. The
    halves would then have the same memory no more, and what start reads could be freed before done.
    (`before_start` does so too.)
    """
    return hlo.OptimizationBarrierOp([value]).results[0]


def after_the_last_call(ctx: Context, x: ir.Value) -> ir.Value:
    """Returns the operand of a whole call, which is to come after those that were lowered before.

    XLA orders calls that do not need each other as it likes, and ranks have to agree on an order.
    """
    block = ir.InsertionPoint.current.block
    calls = _compat.module_store(ctx, "last calls")
    before = next((call for call in calls if call.block == block), None)
    tied = _compat.module_table(ctx, "tied")
    operations = [view.operation for view in block.operations]
    follow: dict[ir.Value, None] = dict.fromkeys(before.results if before else ())
    for op in operations[operations.index(before) + 1 if before else 0 :]:
        if _has_calls(ctx, op):
            follow = dict.fromkeys(op.results)
        elif any(value in follow for value in op.operands):
            follow |= dict.fromkeys(op.results)
    if x in follow:
        return x
    free = (v for v in follow if v not in tied and not _is_token(v) and not list(v.uses))
    if (held := next(filter(_is_array, free), None)) is None:
        return x
    barrier = hlo.OptimizationBarrierOp([x, held])
    x, after = barrier.results
    tied |= dict.fromkeys(barrier.results)
    _compat.use_from_now_on({held: after}, barrier.operation)
    return x


def after_call(ctx: Context, result: ir.Value) -> None:
    """Keeps a whole call for `after_the_last_call`."""
    call = _maker(result)
    calls = _compat.module_store(ctx, "last calls")
    calls[:] = [call, *(other for other in calls if other.block != call.block)]


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


def _maker(result: ir.Value) -> ir.Operation:
    return result.owner.operation  # type: ignore[union-attr]


def _is_array(value: ir.Value) -> bool:
    return str(value.type).startswith("tensor<")


def _is_token(value: ir.Value) -> bool:
    return str(value.type) == "tensor<1xui32>"


def _target(op: ir.Operation) -> str:
    """What a custom call calls; empty for another operation."""
    return ir.StringAttr(op.attributes["call_target_name"]).value if op.name == _CALL else ""


def _is_a_start(op: ir.Operation) -> bool:
    return _target(op).endswith("_start")


def _is_work(ctx: Context, op: ir.Operation) -> bool:
    return _contains(ctx, "work", op, lambda op: op.name in _WORK and _target(op) != "Sharding")


def _has_calls(ctx: Context, op: ir.Operation) -> bool:
    """Whether it is a loop, a branch or a call of a function with calls of the fabric."""
    return op.name != _CALL and _contains(
        ctx, "calls", op, lambda op: _target(op).startswith("jaxfabric_")
    )


def _contains(
    ctx: Context, what: str, op: ir.Operation, wanted: Callable[[ir.Operation], bool]
) -> bool:
    """Whether an operation is wanted, or has one inside that is, or calls a function with one."""
    if wanted(op):
        return True
    if op.name != "func.call":
        return any(_contains(ctx, what, inner, wanted) for inner in _inside(op))
    known = _compat.module_table(ctx, f"functions with {what}")
    name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
    if name not in known:
        function = ctx.module_context.symbol_table[name].operation
        known[name] = any(_contains(ctx, what, inner, wanted) for inner in _inside(function))
    return known[name]


def _inside(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region:
            for view in block.operations:
                yield view.operation
