"""What does not work, and why: with jaxfabric.lax."""

from __future__ import annotations

from cases import (
    COMPLEX,
    DERIVATIVES,
    GATHERS,
    HALVES,
    MOVED_ONLY,
    PULLED_BACK,
    RAGGED,
    REDUCTIONS,
    SCATTERS,
    UNREDUCED,
)
from rules import Rule

# --- of JAX, whoever runs the collective ---

CASTS = (
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
)

# --- jaxfabric.lax ---

FABRIC = (
    Rule(
        "calls in two halves, but psend and precv, are jax.lax's alone: the switch runs them on "
        "the fabric",
        lambda c: c.op in HALVES,
        (AttributeError,),
    ),
    Rule(
        "psend and precv have no derivative (nor in jax.lax): ppermute has",
        lambda c: c.op == "psend_precv" and c.transform in DERIVATIVES,
        (NotImplementedError,),
    ),
    Rule(
        "vmap over the axis of the collective (nor has jax.lax)",
        lambda c: c.op == RAGGED and c.transform == "vmap_own_axis",
        (NotImplementedError,),
    ),
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
    *CASTS,
    Rule(
        "JAX forgets unreduced and reduced types in a reshape or transposition where axes are left "
        "to the compiler",
        lambda c: (
            c.op in ("psum_scatter_unreduced", "all_gather_reduced")
            and c.mesh == "partial"
            and c.check_vma
            and (
                ((c.tiled or c.form > 0) and c.transform in PULLED_BACK)
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
