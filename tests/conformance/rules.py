"""Rules about cases: what does not work, and why.

Everything that no rule matches has to work. The suite runs an example of every rule, so that one
which no longer holds is found; `docs/conformance.md` is made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
from cases import Case

Version = tuple[int, int]
OLDEST: Version = (0, 10)
NEWEST: Version = (0, 12)
NEVER: Version = (99, 0)
RUNNING: Version = tuple(map(int, jax.__version__.split(".")[:2]))  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Cases that do not work.

    Attributes:
        reason: for the document.
        when: which cases.
        errors: what is raised; with nothing the case gives other values or ends the process, and
            is not run.
        since, before: the versions of JAX in which it is so.
        mended: it is not so for jax.lax with the switch on.
    """

    reason: str
    when: Callable[[Case], bool]
    errors: tuple[type[BaseException], ...] = ()
    since: Version = OLDEST
    before: Version = NEVER
    mended: bool = False

    def matches(self, case: Case, version: Version = RUNNING) -> bool:
        return self.since <= version < self.before and self.when(case)


def against(rules: Iterable[Rule], case: Case, version: Version = RUNNING) -> list[Rule]:
    """The rules that say the case does not work."""
    return [rule for rule in rules if rule.matches(case, version)]
