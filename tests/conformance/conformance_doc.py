"""Makes docs/conformance.md out of the table of cases and the rules of `capabilities`.

python tests/conformance/conformance_doc.py            prints it
python tests/conformance/conformance_doc.py --write    updates the file
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import capabilities
import cases
import jax_capabilities
from cases import Case
from rules import NEWEST, OLDEST, Rule, Version, against

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "conformance.md"

HEAD = """\
# Conformance

What works, op by op: the verdicts that `tests/conformance` checks. Do not edit:
`python tests/conformance/conformance_doc.py --write` makes this page from the rules in
`capabilities.py` and `jax_capabilities.py` there, and a test fails when it is stale.

    pytest tests/conformance                                a selection: all pairs, and some triples
    pytest tests/conformance -k test_product --part 1/5000  a part of the full product: 330 cases
    pytest tests/conformance -k test_product --full         all of it: 1.6 million

A part is drawn by a hash from the whole table: part 1/5000 is the same cases each time, has none of
part 2/5000's, and all 5000 have every case. It begins within seconds and prints how far it is;
`-k test_product` leaves out the selection.

Each case is an op with a transformation, dtype, axes, mesh, groups, form and manual types. Every
case that works is compared with numpy, with `jax.lax` where that has it (values, shapes, dtypes,
weak types), and its program is searched for collectives of XLA's. Of what does not work one example
per rule and op must raise. Two jobs, of two and of four processes, run the pairs again. Calls that
are wrong are in `test_conformance_errors.py`, with the differences to `jax.lax` there.

In a cell: **yes**; **by XLA**, for a reason at the end of this page; **no** with the reason below;
**typed**, only under `check_vma=True`; **untyped**, only without it; nothing, if it makes no sense.
A cell changes one thing at a time; what does not work together is in the reasons too.
"""

# A row of the tables: a name, and what is changed of a plain case.
Feature = tuple[str, dict[str, object]]


def features() -> Iterator[Feature]:
    for transform in cases.TRANSFORMS:
        yield transform, {"transform": transform}
    yield "vmap_own_axis of one axis only", {"transform": "vmap_own_axis", "axes": "line"}
    for groups in cases.FACTORS["groups"][1:]:
        yield f"{groups} groups", {"groups": groups}
    yield "groups, vmap", {"groups": "even", "transform": "vmap"}
    for axes in cases.FACTORS["axes"]:
        yield f"axes: {axes}", {"axes": axes}
    for mesh in cases.FACTORS["mesh"][1:]:
        yield f"mesh: {mesh}", {"mesh": mesh}
    yield "tiled", {"tiled": True}
    yield "dimension 1, or another form", {"form": 1}
    yield "dimension -1, or another form", {"form": 2}
    for dtype in cases.DTYPES:
        yield dtype, {"dtype": dtype}


def cell(
    op: str,
    change: dict[str, object],
    rules: tuple[Rule, ...],
    beside: tuple[Rule, ...],
    version: Version,
    notes: list[str],
) -> str:
    verdicts: dict[bool, list[Rule]] = {}
    for check_vma in (True, False):
        row = {"op": op, "check_vma": check_vma, **change}
        if cases.valid({**cases.dataclasses.asdict(Case()), **row}):
            verdicts[check_vma] = against(rules, Case(**row), version)  # type: ignore[arg-type]
    if not verdicts:
        return ""
    reasons = dict.fromkeys(rule.reason for found in verdicts.values() for rule in found)
    for reason in reasons:
        if reason not in notes:
            notes.append(reason)
    numbers = ", ".join(str(notes.index(reason) + 1) for reason in reasons)
    works = [check_vma for check_vma, found in verdicts.items() if not found]
    if len(works) == len(verdicts):
        cases_ = (Case(**{"op": op, "check_vma": vma, **change}) for vma in works)  # type: ignore[arg-type]
        return "by XLA" if all(against(beside, case, version) for case in cases_) else "yes"
    word = "no" if not works else "typed" if works == [True] else "untyped"
    return f"{word} ({numbers})"


def table(rules: tuple[Rule, ...], beside: tuple[Rule, ...], version: Version) -> list[str]:
    notes: list[str] = []
    lines = [
        f"| | {' | '.join(cases.OPS)} |".replace("_", " "),
        "|---" * (len(cases.OPS) + 1) + "|",
    ]
    for name, change in features():
        cells = [cell(op, change, rules, beside, version, notes) for op in cases.OPS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for rule in rules:
        if rule.since <= version < rule.before and rule.reason not in notes:
            notes.append(rule.reason)
    lines.append("")
    for number, reason in enumerate(notes, 1):
        kinds = [r for r in rules if r.reason == reason and r.since <= version < r.before]
        raised = sorted({error.__name__ for rule in kinds for error in rule.errors})
        how = "raises " + " or ".join(raised) if raised else "not refused: other values, or worse"
        lines.append(f"{number}. {reason}: {how}")
    return [*lines, ""]


def text() -> str:
    """The whole page."""
    versions = [(OLDEST, "JAX 0.10"), (NEWEST, "JAX 0.12")]
    parts = [HEAD]
    for title, rules, beside in (
        ("jaxfabric.lax", capabilities.FABRIC, capabilities.BESIDE_FABRIC),
        (
            "jax.lax with the switch on",
            jax_capabilities.SWITCHED,
            jax_capabilities.LEFT_TO_XLA,
        ),
        ("jax.lax alone, on CPU", jax_capabilities.STOCK, ()),
    ):
        tables = [table(rules, beside, version) for version, _ in versions]
        if tables[0] == tables[1]:
            parts += [f"## {title}, both versions\n", *tables[0]]
            continue
        for (_, name), lines in zip(versions, tables, strict=True):
            parts += [f"## {title}, {name}\n", *lines]
    parts += ["## With the help of XLA's collectives\n"]
    parts += [f"- `jaxfabric.lax`: {rule.reason}" for rule in capabilities.BESIDE_FABRIC]
    parts += [f"- `jax.lax` with the switch on: {r.reason}" for r in jax_capabilities.LEFT_TO_XLA]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PATH.write_text(text())
    else:
        print(text(), end="")
