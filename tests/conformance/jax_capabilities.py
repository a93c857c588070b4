"""What does not work, and why: with jax.lax on a CPU, by itself and with the switch on."""

from __future__ import annotations

import jax
from cases import (
    BROADCASTS,
    DERIVATIVES,
    EXCHANGES,
    GATHERS,
    MOVED_ONLY,
    PERMUTATIONS,
    PULLED_BACK,
    RAGGED,
    SCATTERS,
    SUMS,
    Case,
)
from rules import Rule
from traced_capabilities import OLD, OLDER, TRACED, TRACED_FOR_SWITCH, left_to_xla

PERMUTED_LATER = ("ppermute_start", "psend_precv")


def _mixes_vmap(case: Case) -> bool:
    """Whether the collective is over a vmapped axis and axes of the mesh."""
    return case.transform == "vmap_own_axis" and case.axes != "line"


# --- jax.lax on CPU ---

STOCK = (
    *TRACED,
    Rule(
        "ragged_all_to_all does not run on CPU",
        lambda c: c.op == RAGGED,
        (jax.errors.JaxRuntimeError,),
        mended=True,
    ),
    Rule(
        "psum_scatter_start without `tiled` or with a dimension counted from the end",
        lambda c: c.op == "psum_scatter_start" and (not c.tiled or c.form == 2),
        (NotImplementedError, ValueError),
        before=OLDER,
        mended=True,
    ),
    Rule(
        "XLA for CPU refuses all_to_all_start",
        lambda c: c.op == "all_to_all_start" and c.tiled,
        (Exception,),
        before=OLDER,
        mended=True,
    ),
    Rule(
        "psend and precv do not run on CPU",
        lambda c: c.op == "psend_precv",
        (NotImplementedError,),
        mended=True,
    ),
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
        lambda c: c.op in (*BROADCASTS, "pbroadcast_start"),
        (AttributeError, NotImplementedError, TypeError),
        mended=True,
    ),
    Rule(
        "a dimension counted from the end",
        lambda c: c.form == 2 and c.op == "psum_scatter",
        (ValueError,),
        before=OLDER,
        mended=True,
    ),
    Rule(
        "a dimension counted from the end, under vmap",
        lambda c: c.form == 2 and c.op == "psum_scatter" and c.transform == "vmap",
        (IndexError,),
        since=OLDER,
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
        before=OLDER,
        mended=True,
    ),
    Rule(
        "the transpose of an all_to_all that is not tiled and moves the dimension",
        lambda c: c.op == "all_to_all" and not c.tiled and c.transform in PULLED_BACK,
        (ValueError,),
    ),
    Rule(
        "groups under vmap over another axis",
        lambda c: c.op in EXCHANGES and c.groups != "whole" and c.transform == "vmap",
        (NotImplementedError,),
    ),
    Rule(
        "permutations along a tuple of axes that is not in the order of the mesh",
        lambda c: c.op in (*PERMUTATIONS, *PERMUTED_LATER) and c.axes == "swapped",
        (RuntimeError,),
        since=OLD,
    ),
    Rule(
        "permutations along a tuple of axes that is not in the order of the mesh: of other ranks",
        lambda c: c.op in (*PERMUTATIONS, *PERMUTED_LATER) and c.axes == "swapped",
        before=OLD,
    ),
    Rule(
        "permutations in a branch that not all groups take wait for each other",
        lambda c: c.op in (*PERMUTATIONS, *PERMUTED_LATER) and c.transform == "cond_between_groups",
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
        before=OLD,
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
    *TRACED_FOR_SWITCH,
    Rule(
        "pmean of uneven groups divides by the size of the first",
        lambda c: c.op == "pmean" and c.groups == "uneven" and c.check_vma,
    ),
    Rule(
        "a dimension counted from the end, where XLA runs it",
        lambda c: c.form == 2 and c.op == "psum_scatter_unreduced" and left_to_xla(c),
        (ValueError,),
    ),
    Rule(
        "a dimension counted from the end, where XLA runs it",
        lambda c: c.form == 2 and c.op in ("psum_scatter", *EXCHANGES) and left_to_xla(c),
        (Exception,),
        before=OLDER,
    ),
    Rule(
        "a dimension counted from the end without `tiled`: another shape",
        lambda c: c.form == 2 and c.op == "all_to_all" and not c.tiled,
        before=OLDER,
    ),
    Rule(
        "a dimension counted from the end under vmap",
        lambda c: (
            c.form == 2
            and c.op in ("psum_scatter", *EXCHANGES)
            and c.transform in ("vmap", "vmap_own_axis")
        ),
        before=OLDER,
    ),
    Rule(
        "2-bit integers where axes are left to the compiler",
        lambda c: "int2" in c.dtype and c.mesh == "partial",
    ),
    Rule(
        "psum and pmean with groups under check_vma=True, of types that the fabric only moves",
        lambda c: (
            c.op in ("psum", "pmean")
            and c.groups != "whole"
            and c.check_vma
            and c.dtype in MOVED_ONLY
        ),
        (TypeError,),
    ),
    Rule(
        "XLA reduces no 2-bit integers",
        lambda c: "int2" in c.dtype and c.op in SUMS,
        (jax.errors.JaxRuntimeError,),
    ),
    Rule(
        "keys in a ragged_all_to_all",
        lambda c: c.op == RAGGED and c.dtype == "key",
        (TypeError,),
    ),
    Rule(
        "keys in psend and pbroadcast",
        lambda c: c.op in ("psend_precv", "pbroadcast", "pbroadcast_start") and c.dtype == "key",
        (NotImplementedError,),
    ),
    Rule(
        "pbroadcast has no transpose, and is not batched along its axis",
        lambda c: (
            c.op in BROADCASTS and (c.transform in PULLED_BACK or c.transform == "vmap_own_axis")
        ),
        (NotImplementedError, TypeError, ValueError),
    ),
    Rule(
        "pbroadcast of a traced source",
        lambda c: c.op == "pbroadcast_traced",
        (TypeError,),
        before=OLD,
    ),
    Rule(
        "pbroadcast of keys from a traced source",
        lambda c: c.op == "pbroadcast_traced" and c.dtype == "key",
        (ValueError,),
        since=OLD,
    ),
    Rule(
        "what XLA has not for CPUs, where axes are left to the compiler",
        lambda c: (
            c.op in (*BROADCASTS, "pbroadcast_start", "psend_precv", RAGGED) and c.mesh == "partial"
        ),
        (NotImplementedError, jax.errors.JaxRuntimeError),
    ),
)

LEFT_TO_XLA = (
    Rule(
        "types that the fabric only moves are reduced by XLA",
        lambda c: c.dtype in MOVED_ONLY and c.op in SUMS,
    ),
    Rule("keys are moved by XLA", lambda c: c.dtype == "key"),
    Rule(
        "collectives beside axes that are left to the compiler stay with XLA",
        lambda c: c.mesh == "partial",
    ),
)
