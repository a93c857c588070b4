"""Every case of the table on every face, against numpy and against jax.lax."""

from __future__ import annotations

import collections
import itertools

import cases
import chosen
import pairs
import pytest
import rules
import runner
from cases import Case
from faces import ON_FABRIC, STOCK

pytestmark = pytest.mark.timeout(240)

SELECTION = chosen.selection()
BATCHES = runner.batches(SELECTION)
FACES = (*ON_FABRIC, STOCK)
EXAMPLES = {face.name: list(chosen.examples(face.refuses, cases.near_plain())) for face in FACES}


def check(batch: list[Case], tally: collections.Counter[str]) -> None:
    """Runs a batch on all faces; `tally` counts what was compared with what."""
    outcomes = {}
    for face in (*ON_FABRIC, STOCK):
        taken = [case for case in batch if face.takes(case)]
        outcomes[face] = runner.run_each(taken, face) if taken else {}
        assert outcomes[face].keys() == set(taken)
        for case, outcome in outcomes[face].items():
            runner.compare(case, outcome)
            tally[f"{face.name} with numpy"] += 1
    for case, outcome in outcomes[STOCK].items():
        for face in ON_FABRIC:
            if case in outcomes[face]:
                runner.equal(case, outcomes[face][case], outcome)
                tally[f"{face.name} with jax.lax"] += 1


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch[0].mesh)
def test_selection(batch, tally):
    before = tally.copy()
    check(batch, tally)
    new = tally - before
    for face in (*ON_FABRIC, STOCK):
        assert new[f"{face.name} with numpy"] == sum(map(face.takes, batch))


@pytest.mark.timeout(0)
def test_product(request, tally, capfd):
    """All cases, for days: `--full`; or a part of them, with `--part K/N`."""
    part = request.config.getoption("--part", default=None)
    if part is None and not request.config.getoption("--full", default=False):
        pytest.skip("only with --full or --part K/N")
    seen = 0.0

    def drawn():
        nonlocal seen
        for seen, case in chosen.product(*(part or (1, 1))):  # noqa: B007
            yield case

    def say(line):
        with capfd.disabled():
            print(line, flush=True)

    failures = []
    ran = 0
    for batch in runner.lazy_batches(drawn()):
        try:
            check(batch, tally)
        except runner.ConformanceError as error:
            failures.append(str(error))
            say(f"FAILED {error}")
        ran += len(batch)
        say(f"{ran} cases, {len(failures)} failures, {seen:.2%} of the part looked at")
    assert ran, "no case of this part makes sense: take a larger one"
    assert not failures, "\n".join(failures)


def test_parts_of_the_product_are_the_product():
    factors = {"a": "xyz", "b": range(8), "c": (False, True)}
    whole = sorted(map(str, pairs.product(factors, lambda row: True)))
    for parts in (1, 2, 6, 100):
        dealt = [list(pairs.part(factors, which, parts)[0]) for which in range(1, parts + 1)]
        assert sorted(str(row) for rows in dealt for row in rows) == whole
    # However many parts, each has all levels: a stride of an even number would not.
    rows, count = pairs.part(cases.FACTORS, 7, 20000)
    drawn = list(rows)
    assert len(drawn) == count
    for name, levels in cases.FACTORS.items():
        assert {row[name] for row in drawn} == {*levels}


def test_selection_has_every_pair_that_works():
    """Counted here by looking at the table, not by asking the generator."""
    assert sorted(case.name for batch in BATCHES for case in batch) == sorted(
        case.name for case in SELECTION
    )
    assert len({case.name for case in SELECTION}) == len(SELECTION)
    for names in itertools.combinations(cases.FACTORS, 2):
        have = {tuple(getattr(case, name) for name in names) for case in SELECTION}
        for levels in itertools.product(*(cases.FACTORS[name] for name in names)):
            only = {name: (level,) for name, level in zip(names, levels, strict=True)}
            if levels not in have:
                rest = {name: cases.FACTORS[name] for name in cases.FACTORS if name not in only}
                possible = pairs.product({**only, **rest}, chosen.supported)
                assert next(possible, None) is None, f"no case has {levels}"
    for face in FACES:
        assert sum(map(face.takes, SELECTION)) > len(SELECTION) / 3


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_every_rule_has_an_example(face):
    now = [r for r in face.refuses if r.since <= rules.RUNNING < r.before]
    shown = [rule for rule, _ in EXAMPLES[face.name]]
    assert [rule.reason for rule in now if rule not in shown] == []


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.name)
def test_what_is_not_supported_raises(face, tally):
    """A rule that no longer holds fails here: take it out, and the cases are run."""
    wrong = []
    for rule, case in EXAMPLES[face.name]:
        if not rule.errors:
            continue
        try:
            runner.run([case], face)
        except rule.errors:
            tally[f"{face.name} refuses"] += 1
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__} instead of {rule.errors}: {error}")
        else:
            wrong.append(f"{case.name}: runs although {rule.reason!r}")
    assert not wrong, "\n".join(wrong)
