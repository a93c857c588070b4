"""What does not work, and why: rules about cases, for jaxfabric and for jax.lax itself on CPU.

Everything that no rule matches has to work. The suite runs an example of every rule, so that one
which no longer holds is found; `docs/conformance.md` is made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
from cases import (
    BROADCASTS,
    COMPLEX,
    DERIVATIVES,
    EXCHANGES,
    GATHERS,
    MOVED_ONLY,
    PERMUTATIONS,
    REDUCTIONS,
    SCATTERS,
    UNREDUCED,
    Case,
)

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


def _mixes_vmap(case: Case) -> bool:
    """Whether the collective is over a vmapped axis and axes of the mesh."""
    return case.transform == "vmap_own_axis" and case.axes != "line"


# --- jaxfabric.lax ---

FABRIC = (
    Rule(
        "groups of uneven size only where results have the size of operands",
        lambda c: c.groups == "uneven" and c.op not in REDUCTIONS,
        (ValueError,),
    ),
    Rule(
        "axis_index_groups while vmap is over the axis of the collective (nor has jax.lax)",
        lambda c: c.groups == "even" and c.transform == "vmap_own_axis",
        (NotImplementedError,),
    ),
    Rule(
        "axis_index_groups while vmap is over the axis of the collective (nor has jax.lax)",
        lambda c: c.groups == "uneven" and c.transform == "vmap_own_axis" and c.op in REDUCTIONS,
        (NotImplementedError,),
    ),
    Rule(
        "axis_index_groups with `to`: groups have different results (nor has jax.lax)",
        lambda c: c.groups == "even" and c.op in GATHERS[1:] and c.check_vma,
        (NotImplementedError,),
    ),
    Rule(
        "types that the fabric only moves are not reduced: cast first",
        lambda c: c.dtype in MOVED_ONLY and c.op in (*REDUCTIONS, *SCATTERS, *UNREDUCED),
        (TypeError,),
    ),
    Rule(
        "booleans are not summed into a share: cast first (nor does jax.lax)",
        lambda c: c.dtype == "bool" and c.op in SCATTERS,
        (TypeError,),
    ),
    Rule(
        "complex numbers have no order (nor does jax.lax reduce them on CPU)",
        lambda c: c.dtype in COMPLEX and c.op in ("pmax", "pmin"),
        (TypeError,),
    ),
    Rule(
        "pmax and pmin are not linear (nor transposed by jax.lax)",
        lambda c: c.transform == "linear_transpose" and c.op in ("pmax", "pmin"),
        (NotImplementedError,),
    ),
    Rule(
        "JAX does not batch the casts to and from unreduced and reduced values",
        lambda c: (
            c.transform == "vmap"
            and (c.op in UNREDUCED or (c.op == "all_gather_reduced" and c.check_vma))
        ),
        (NotImplementedError,),
    ),
    Rule(
        "JAX's eager shard_map has unreduced and reduced values on Explicit axes only",
        lambda c: (
            c.transform == "eager"
            and (c.op in UNREDUCED or (c.op == "all_gather_reduced" and c.check_vma))
            and c.mesh != "explicit"
        ),
        (ValueError,),
    ),
    Rule(
        "JAX forgets unreduced and reduced types in a reshape or transposition where axes are left "
        "to the compiler",
        lambda c: (
            c.op in ("psum_scatter_unreduced", "all_gather_reduced")
            and c.mesh == "partial"
            and c.check_vma
            and (
                ((c.tiled or c.form > 0) and c.transform in DERIVATIVES and c.transform != "jvp")
                or (c.form == 2 and not c.tiled)
            )
        ),
        (ValueError,),
    ),
)

# What jaxfabric.lax computes correctly, but with a collective of JAX's own in the program.
BESIDE_FABRIC = (
    Rule(
        "the result is one value for all ranks and is cast where shard_map ends; the derivative of "
        "that cast is JAX's own psum, which only the switch takes to the fabric",
        lambda c: c.transform == "grad_outside" and c.invariant,
    ),
)

# --- jax.lax on CPU ---

_OLD: Version = (0, 12)  # Mended in this version.
_OLDER: Version = (0, 11)  # The same.

STOCK = (
    Rule(
        "psum and pmean with groups under check_vma=True",
        lambda c: c.op in ("psum", "pmean") and c.groups != "whole" and c.check_vma,
        (NotImplementedError, ValueError),
        mended=True,
    ),
    Rule(
        "pmean of uneven groups divides by the size of the first",
        lambda c: c.op == "pmean" and c.groups == "uneven" and not c.check_vma,
    ),
    Rule(
        "pmax and pmin have no derivative",
        lambda c: c.op in ("pmax", "pmin") and c.transform in DERIVATIVES,
        (NotImplementedError,),
    ),
    Rule(
        "pbroadcast does not run on CPU",
        lambda c: c.op in BROADCASTS,
        (NotImplementedError, TypeError),
        mended=True,
    ),
    Rule(
        "a dimension counted from the end",
        lambda c: c.form == 2 and c.op == "psum_scatter",
        (ValueError,),
        before=_OLDER,
        mended=True,
    ),
    Rule(
        "a dimension counted from the end, under vmap",
        lambda c: c.form == 2 and c.op == "psum_scatter" and c.transform == "vmap",
        (IndexError,),
        since=_OLDER,
    ),
    Rule(
        "a dimension counted from the end of an unreduced operand",
        lambda c: c.form == 2 and c.op == "psum_scatter_unreduced",
        (ValueError,),
        mended=True,
    ),
    Rule(
        "a dimension counted from the end",
        lambda c: c.form == 2 and c.op in EXCHANGES,
        (Exception,),
        before=_OLDER,
        mended=True,
    ),
    Rule(
        "the transpose of an all_to_all that is not tiled and moves the dimension",
        lambda c: (
            c.op == "all_to_all"
            and not c.tiled
            and c.transform in DERIVATIVES
            and c.transform != "jvp"
        ),
        (ValueError,),
    ),
    Rule(
        "groups under vmap over another axis",
        lambda c: c.op in EXCHANGES and c.groups != "whole" and c.transform == "vmap",
        (NotImplementedError,),
    ),
    Rule(
        "permutations along a tuple of axes that is not in the order of the mesh",
        lambda c: c.op in PERMUTATIONS and c.axes == "swapped",
        (RuntimeError,),
        since=_OLD,
    ),
    Rule(
        "permutations along a tuple of axes that is not in the order of the mesh: of other ranks",
        lambda c: c.op in PERMUTATIONS and c.axes == "swapped",
        before=_OLD,
    ),
    Rule(
        "permutations in a branch that not all groups take wait for each other",
        lambda c: c.op in PERMUTATIONS and c.transform == "cond_between_groups",
        mended=True,
    ),
    Rule(
        "vmap over the axis of the collective under check_vma=True",
        lambda c: c.transform == "vmap_own_axis" and c.check_vma and c.op not in BROADCASTS,
        (AssertionError, NotImplementedError, ValueError),
    ),
    Rule(
        "gathers and scatters with vmap over one of the axes",
        lambda c: c.op in (*GATHERS, *SCATTERS) and _mixes_vmap(c) and not c.check_vma,
        (AssertionError, NotImplementedError),
    ),
    Rule(
        "keys gathered without `tiled`, of several dimensions",
        lambda c: c.op in GATHERS and c.dtype == "key" and not c.tiled,
    ),
    Rule(
        "permutations with vmap over one of the axes",
        lambda c: c.op in PERMUTATIONS and _mixes_vmap(c) and not c.check_vma,
        (ValueError,),
    ),
    Rule(
        "gathers to one type without check_vma",
        lambda c: c.op in GATHERS[1:] and not c.check_vma,
        before=_OLD,
    ),
    Rule(
        "XLA aborts, or gives other values, with 2-bit integers",
        lambda c: "int2" in c.dtype,
        mended=True,
    ),
    Rule(
        "booleans are not summed from unreduced",
        lambda c: c.dtype == "bool" and c.op == "psum_unreduced",
        (TypeError,),
    ),
    Rule(
        "XLA aborts: bfloat16 with axes left to the compiler",
        lambda c: c.mesh == "partial" and c.dtype == "bfloat16",
    ),
)


# --- jax.lax with the switch on: JAX's rules of differentiation and batching, our lowering ---

SWITCHED = (
    *(rule for rule in STOCK if not rule.mended),
    Rule(
        "pmean of uneven groups divides by the size of the first",
        lambda c: c.op == "pmean" and c.groups == "uneven" and c.check_vma,
    ),
    Rule(
        "a dimension counted from the end, where axes are left to the compiler",
        lambda c: c.form == 2 and c.op == "psum_scatter_unreduced" and c.mesh == "partial",
        (ValueError,),
    ),
    Rule(
        "a dimension counted from the end, where axes are left to the compiler",
        lambda c: c.form == 2 and c.op in ("psum_scatter", *EXCHANGES) and c.mesh == "partial",
        (Exception,),
        before=_OLDER,
    ),
    Rule(
        "a dimension counted from the end without `tiled`: another shape",
        lambda c: c.form == 2 and c.op == "all_to_all" and not c.tiled,
        before=_OLDER,
    ),
    Rule(
        "a dimension counted from the end under vmap",
        lambda c: (
            c.form == 2
            and c.op in ("psum_scatter", *EXCHANGES)
            and c.transform in ("vmap", "vmap_own_axis")
        ),
        before=_OLDER,
    ),
    Rule(
        "2-bit integers where axes are left to the compiler",
        lambda c: "int2" in c.dtype and c.mesh == "partial",
    ),
    Rule(
        "pbroadcast has no transpose, and is not batched along its axis",
        lambda c: (
            c.op in BROADCASTS
            and (
                (c.transform in DERIVATIVES and c.transform != "jvp")
                or c.transform == "vmap_own_axis"
            )
        ),
        (NotImplementedError, TypeError, ValueError),
    ),
    Rule(
        "pbroadcast of a traced source",
        lambda c: c.op == "pbroadcast_traced",
        (TypeError,),
        before=_OLD,
    ),
    Rule(
        "pbroadcast of keys from a traced source",
        lambda c: c.op == "pbroadcast_traced" and c.dtype == "key",
        (ValueError,),
        since=_OLD,
    ),
    Rule(
        "pbroadcast where axes are left to the compiler: XLA has none",
        lambda c: c.op in BROADCASTS and c.mesh == "partial",
        (NotImplementedError,),
    ),
)

LEFT_TO_XLA = (
    Rule("keys are moved by XLA", lambda c: c.dtype == "key"),
    Rule(
        "collectives beside axes that are left to the compiler stay with XLA",
        lambda c: c.mesh == "partial",
    ),
)


def against(rules: Iterable[Rule], case: Case, version: Version = RUNNING) -> list[Rule]:
    """The rules that say the case does not work."""
    return [rule for rule in rules if rule.matches(case, version)]
