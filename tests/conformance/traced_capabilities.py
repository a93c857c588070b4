"""What does not work, and why: with jax.lax on a CPU, whether the switch is on or off."""

from __future__ import annotations

import jax
from capabilities import CASTS
from cases import (
    COMPLEX,
    DERIVATIVES,
    GATHERS,
    MOVED_ONLY,
    PULLED_BACK,
    RAGGED,
    REDUCTIONS,
    SCATTERS,
    STARTED,
    SUMS,
    Case,
)
from rules import Rule, Version

OLD: Version = (0, 12)  # Mended in this version.
OLDER: Version = (0, 11)  # The same.


def left_to_xla(case: Case) -> bool:
    """Whether the switch does."""
    return case.mesh == "partial" or (case.dtype in MOVED_ONLY and case.op in SUMS)


TRACED = (
    *CASTS,
    Rule(
        "groups of uneven size only where results have the size of operands",
        lambda c: c.groups == "uneven" and c.op not in (*REDUCTIONS, "psum_start"),
        (NotImplementedError, ValueError, jax.errors.JaxRuntimeError),
    ),
    Rule(
        "axis_index_groups while vmap is over the axis of the collective",
        lambda c: c.groups != "whole" and c.transform == "vmap_own_axis",
        (AssertionError, NotImplementedError, ValueError),
    ),
    Rule(
        "axis_index_groups with `to`: groups have different results",
        lambda c: c.groups == "even" and c.op in GATHERS[1:] and c.check_vma,
        (NotImplementedError,),
    ),
    Rule(
        "JAX forgets reduced types where axes are left to the compiler",
        lambda c: (
            c.op == "psum_scatter_unreduced"
            and c.mesh == "partial"
            and c.form == 1
            and c.transform in PULLED_BACK
        ),
        (ValueError,),
    ),
    Rule(
        "keys are not added",
        lambda c: c.dtype == "key" and c.op in SUMS,
        (TypeError,),
    ),
    Rule(
        "booleans are not summed into a share",
        lambda c: c.dtype == "bool" and c.op in (*SCATTERS, "psum_scatter_start"),
        (NotImplementedError, TypeError),
    ),
    Rule(
        "complex numbers have no order",
        lambda c: c.dtype in COMPLEX and c.op in ("pmax", "pmin"),
        (TypeError, jax.errors.JaxRuntimeError),
    ),
    Rule(
        "means of float4_e2m1fn are rounded more than once",
        lambda c: c.dtype == "float4_e2m1fn" and c.op == "pmean",
    ),
    Rule(
        "keys gathered without `tiled`, of several dimensions",
        lambda c: c.op == "all_gather_start" and c.dtype == "key" and not c.tiled,
        (ValueError,),
    ),
    Rule(
        "the halves of a call have no derivative",
        lambda c: c.op in STARTED and c.transform in DERIVATIVES,
        (NotImplementedError,),
    ),
    Rule(
        "the halves of a call are not batched",
        lambda c: c.op in STARTED and c.transform in ("vmap", "vmap_own_axis"),
        (NotImplementedError, TypeError),
    ),
    Rule(
        "what the first half of a call gives is no array, which eager shard_map needs",
        lambda c: c.op in STARTED and c.transform == "eager",
        (AttributeError, TypeError, ValueError),
    ),
    Rule(
        "psum_start without check_vma has no second half",
        lambda c: c.op == "psum_start" and not c.check_vma,
        (AttributeError,),
        since=OLDER,
    ),
    Rule(
        "psum_start with groups under check_vma=True",
        lambda c: c.op == "psum_start" and c.groups != "whole" and c.check_vma,
        (NotImplementedError,),
    ),
    Rule(
        "psum_scatter_start without `tiled`",
        lambda c: c.op == "psum_scatter_start" and not c.tiled,
        (NotImplementedError,),
        since=OLDER,
    ),
    Rule(
        "all_to_all_start without `tiled`",
        lambda c: c.op == "all_to_all_start" and not c.tiled,
        (TypeError, ValueError),
    ),
)

# Of what only the switch runs on a CPU.
TRACED_FOR_SWITCH = (
    Rule(
        "psum_scatter_start without `tiled`, where XLA runs it",
        lambda c: c.op == "psum_scatter_start" and not c.tiled and left_to_xla(c),
        (NotImplementedError,),
        before=OLDER,
    ),
    Rule(
        "all_to_all_start, where XLA runs it",
        lambda c: c.op == "all_to_all_start" and (c.mesh == "partial" or c.dtype == "key"),
        (Exception,),
        before=OLDER,
    ),
    Rule(
        "a dimension counted from the end, where XLA runs it",
        lambda c: c.op == "psum_scatter_start" and c.form == 2 and left_to_xla(c),
        (ValueError,),
        before=OLDER,
    ),
    Rule(
        "pbroadcast_start is no more",
        lambda c: c.op == "pbroadcast_start",
        (AttributeError,),
        since=OLDER,
    ),
    Rule(
        "ragged_all_to_all is batched only where offsets and sizes are",
        lambda c: c.op == RAGGED and c.transform == "vmap",
        (AssertionError, NotImplementedError),
    ),
    Rule(
        "vmap over the axis of a ragged_all_to_all",
        lambda c: c.op == RAGGED and c.transform == "vmap_own_axis",
        (NotImplementedError,),
    ),
    Rule(
        "the transpose of a ragged_all_to_all with slices that begin at one row of the result",
        lambda c: c.op == RAGGED and c.form == 2 and c.transform in PULLED_BACK,
    ),
    Rule(
        "the transpose of a ragged_all_to_all in groups exchanges offsets among all",
        lambda c: c.op == RAGGED and c.groups != "whole" and c.transform in PULLED_BACK,
        (ValueError,),
    ),
)
