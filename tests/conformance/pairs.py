"""Greedy selection of cases: every valid combination of levels of the chosen factors, few rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
Tuple_ = tuple[tuple[str, Any], ...]  # Some factors with a level each, in the order of the table.


def _completions(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool],
    order: Callable[[Row, str], Sequence[Any]],
) -> Iterator[Row]:
    """All valid rows that extend `row`, depth first; `valid` is asked about partial rows too."""
    if not valid(row):
        return
    missing = next((name for name in factors if name not in row), None)
    if missing is None:
        yield row
        return
    for level in order(row, missing):
        yield from _completions({**row, missing: level}, factors, valid, order)


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool]) -> Iterator[Row]:
    """Every valid row, lazily."""
    return _completions({}, factors, valid, lambda _, name: factors[name])


def part(factors: Mapping[str, Sequence[Any]], which: int, parts: int) -> tuple[Iterator[Row], int]:
    """Part `which` of 1 to `parts` of all rows, valid or not, and how many that are.

    The parts have no row in common, together they have all, and each is spread over the whole
    table, so that its beginning is, too. Nobody walks through the rows of the other parts: what
    deals them out is a hash of the row's number.
    """
    counts = [len(levels) for levels in factors.values()]
    mixed = _mix(np.arange(math.prod(counts), dtype=np.uint64))
    numbers = np.flatnonzero(mixed % np.uint64(parts) == which - 1)
    numbers = numbers[np.argsort(mixed[numbers])]
    rows = (
        {
            name: levels[i]
            for (name, levels), i in zip(factors.items(), np.unravel_index(n, counts), strict=True)
        }
        for n in numbers
    )
    return rows, len(numbers)


def _mix(x: np.ndarray) -> np.ndarray:
    """The last step of splitmix64: one to one, and every bit of `x` changes half of the others."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Row], bool],
    together: Iterable[tuple[str, ...]] = (),
) -> list[Row]:
    """Rows that have every valid pair of levels, and every valid tuple over each of `together`.

    Args:
        factors: the levels of each factor.
        valid: whether a row, or the part of one, makes a case.
        together: further sets of factors whose levels must meet in all combinations.
    """
    names = list(factors)
    sets = [*itertools.combinations(names, 2), *together]
    sets = sorted({tuple(sorted(s, key=names.index)) for s in sets}, key=lambda s: (-len(s), s))
    sets_of = {name: [s for s in sets if name in s] for name in names}
    open_: dict[Tuple_, None] = {
        tuple(zip(s, levels, strict=True)): None
        for s in sets
        for levels in itertools.product(*(factors[name] for name in s))
    }

    def gain(row: Row, name: str) -> int:
        """How many open tuples the last choice completes."""
        return sum(
            tuple((k, row[k]) for k in s) in open_
            for s in sets_of[name]
            if all(k in row for k in s)
        )

    rows: list[Row] = []

    def order(row: Row, name: str) -> Sequence[Any]:
        # Of equal levels the one whose turn it is, so that none is preferred throughout.
        levels = factors[name]
        turn = len(rows) % len(levels)
        turned = [*levels[turn:], *levels[:turn]]
        return sorted(turned, key=lambda level: -gain({**row, name: level}, name))

    while open_:
        wanted = next(iter(open_))
        del open_[wanted]
        row = next(_completions(dict(wanted), factors, valid, order), None)
        if row is None:
            continue  # No valid case has this combination.
        rows.append({name: row[name] for name in names})
        for s in sets:
            open_.pop(tuple((k, row[k]) for k in s), None)
    return rows
