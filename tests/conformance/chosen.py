"""Which cases are run: what the rules let through, all of it or a part that has every pair."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import cases
import pairs
from cases import Case
from faces import ON_FABRIC, STOCK
from rules import Rule, against


def supported(row: pairs.Row) -> bool:
    """Whether a row, or a part of one, makes sense and a face on the fabric may take it.

    A rule that asks for a factor which is not chosen yet says nothing.
    """
    if not cases.valid(row):
        return False
    part: Any = types.SimpleNamespace(**row)
    return not all(_refuses(face.refuses, part) for face in ON_FABRIC)


def _refuses(rules: tuple[Rule, ...], part: Any) -> bool:
    for rule in rules:
        with contextlib.suppress(AttributeError):
            if rule.matches(part):
                return True
    return False


def selection() -> list[Case]:
    """Every pair of levels that works on the fabric, and the triples of `cases.TOGETHER`.

    Also what jax.lax refuses and jaxfabric has.
    """
    rows = pairs.choose(cases.FACTORS, supported, cases.TOGETHER)
    near = examples(STOCK.refuses, cases.near_plain())
    more = [case for _, case in near if any(face.takes(case) for face in ON_FABRIC)]
    return [*dict.fromkeys([*(Case(**row) for row in rows), *more])]


def for_jobs() -> list[Case]:
    """Every pair of fewer levels, for jobs of several processes: what depends on the ranks.

    Tracing, differentiation and batching do not know of processes.
    """
    few = {
        "dtype": ("float32", "bfloat16", "int8", "complex64"),
        "transform": ("jit", "eager", "scan", "cond_between_groups", "grad"),
    }
    return [Case(**row) for row in pairs.choose({**cases.FACTORS, **few}, supported)]


def product(which: int, parts: int) -> Iterator[tuple[float, Case]]:
    """Every case that works on the fabric, or a part, and how much of that has been looked at."""
    rows, count = pairs.part(cases.FACTORS, which, parts)
    return ((i / count, Case(**row)) for i, row in enumerate(rows, 1) if supported(row))


def examples(rules: tuple[Rule, ...], among: Iterable[Case]) -> Iterator[tuple[Rule, Case]]:
    """For every rule and op, one case each with and without `check_vma` that only it is against."""
    seen = set()
    for case in among:
        found = against(rules, case)
        key = (*found, case.op, case.check_vma)
        if len(found) == 1 and key not in seen:
            seen.add(key)
            yield found[0], case
