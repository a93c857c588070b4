"""The table: what a case of the conformance suite can be made of, and which cases make sense.

A case that makes sense is run on every face, whether it is supported or not: `capabilities` says
which ones have to raise instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pairs

REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
GATHERS = ("all_gather", "all_gather_invarying", "all_gather_reduced")
PERMUTATIONS = ("ppermute", "pshuffle")
BROADCASTS = ("pbroadcast", "pbroadcast_traced")
UNREDUCED = ("psum_unreduced", "psum_scatter_unreduced")
SCATTERS = ("psum_scatter", "psum_scatter_unreduced")
EXCHANGES = ("all_to_all", "pswapaxes")
RAGGED = "ragged_all_to_all"
# Two calls, a start and a done: jax.lax has them, most of them without a public name.
HALVES = (
    *("psum_start", "all_gather_start", "psum_scatter_start"),
    *("all_to_all_start", "ppermute_start", "pbroadcast_start"),
)
STARTED = (*HALVES, "psend_precv")
SUMS = (*REDUCTIONS, *SCATTERS, *UNREDUCED[:1], "psum_start", "psum_scatter_start")
# An op needs a line here, a branch in `case_programs.call`, a model in `case_model` and its levels
# in `valid`.
OPS = (
    *REDUCTIONS,
    *GATHERS,
    *SCATTERS[:1],
    *EXCHANGES,
    *PERMUTATIONS,
    *BROADCASTS,
    *UNREDUCED,
    RAGGED,
    *STARTED,
)

FLOATS = ("float32", "float16", "bfloat16", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = tuple(f"{u}int{bits}" for bits in (8, 16, 32, 64) for u in ("", "u"))
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MOVED_ONLY = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2", "key"),
)
WEAK = ("weak float32", "weak int32")
DTYPES = (*FLOATS, *COMPLEX, "bool", *INTEGERS, *FLOAT8, *WEAK, *MOVED_ONLY)
WIDE = ("float64", "complex128", "int64", "uint64")

FIRST_ORDER = ("jvp", "vjp", "linear_transpose")
GRADIENTS = (
    *("grad", "grad_outside", "second_derivative", "custom_vjp"),
    *("remat", "remat_everything_saved", "remat_named"),
)
DERIVATIVES = (*FIRST_ORDER, *GRADIENTS)
PULLED_BACK = tuple(transform for transform in DERIVATIVES if transform != "jvp")
VALUES = (
    *("jit", "eager", "inner_jit_twice", "vmap", "vmap_own_axis", "scan", "while"),
    *("cond_between_groups", "donated"),
)
TRANSFORMS = (*VALUES, *DERIVATIVES)

FACTORS: dict[str, tuple[Any, ...]] = {
    "op": OPS,
    "transform": TRANSFORMS,
    "dtype": DTYPES,
    "axes": ("line", "minor", "major", "both", "swapped"),
    "mesh": ("auto", "explicit", "abstract", "permuted", "subset", "partial"),
    "groups": ("whole", "even", "uneven"),
    "form": (0, 1, 2),  # A dimension, a permutation, a root: see `case_programs.call`.
    "tiled": (False, True),
    "check_vma": (True, False),
}
# Beyond all pairs: what a rule of differentiation or batching branches on.
TOGETHER = (
    ("op", "transform", "check_vma"),
    ("op", "groups", "check_vma"),
    ("op", "form", "tiled"),
)

HAS_GROUPS = (*REDUCTIONS, *GATHERS, "psum_scatter", *EXCHANGES, RAGGED, *HALVES[:4])
HAS_TILED = (*GATHERS, *SCATTERS, "all_to_all", *HALVES[1:4])
HAS_FORMS = (
    *(*GATHERS, *SCATTERS, *EXCHANGES, *PERMUTATIONS, *BROADCASTS, RAGGED),
    *(*HALVES[1:], "psend_precv"),
)


def dtype_of(name: str) -> np.dtype:
    """The numpy type of the values of a dtype of the table (of a key's words, for "key")."""
    if name == "key":
        return np.dtype(np.uint32)
    name = name.removeprefix("weak ")
    return np.dtype(getattr(ml_dtypes, name, None) or getattr(jnp, name))


def valid(row: pairs.Row) -> bool:
    """Whether the row, or a part of one, makes sense (not: whether anything supports it)."""
    op, transform, mesh = (row.get(name) for name in ("op", "transform", "mesh"))
    if op is not None and (
        (row.get("groups", "whole") != "whole" and op not in HAS_GROUPS)
        or (row.get("tiled") and op not in HAS_TILED)
        or (row.get("form") and op not in HAS_FORMS)
        # Types of manual axes are what these are about.
        or (op in UNREDUCED and row.get("check_vma") is False)
        # An axis that vmap brings has no such type, so nothing to be unreduced over.
        or (op in UNREDUCED and transform == "vmap_own_axis")
    ):
        return False
    if (dtype := row.get("dtype")) is not None and (
        # Sums over integers have derivatives only in name, and cubes of small floats round.
        (transform in GRADIENTS and dtype not in ("float32", "float64"))
        or (transform in FIRST_ORDER and dtype not in (*FLOATS, *COMPLEX))
    ):
        return False
    if transform == "eager" and mesh in ("abstract", "partial"):
        return False  # Without devices there is nothing to run on; eager shard_map is manual.
    # "partial" leaves the axis i to the compiler.
    return not (mesh == "partial" and row.get("axes", "minor") != "minor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the ranks of a case are.

    Attributes:
        mesh: sizes of the mesh's axes.
        manual: those of them that shard_map takes; the others are the compiler's.
        vmapped: length of the axis "v" inside each block, or 0.
        axes: the collective's axes.
        groups: axis_index_groups.
        rows: ranks in one communicator (the largest group, where groups are uneven).
    """

    mesh: dict[str, int]
    manual: tuple[str, ...]
    vmapped: int
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None
    rows: int

    @property
    def shape(self) -> dict[str, int]:
        """All axes over which values differ, in the order of the blocks."""
        shape = {axis: self.mesh[axis] for axis in self.manual}
        return shape | ({"v": self.vmapped} if self.vmapped else {})

    @property
    def block(self) -> tuple[int, int, int]:
        """The shape of a rank's operand."""
        return (self.rows, 2 * self.rows, self.rows)


def _groups_of(size: int, kind: str) -> tuple[tuple[int, ...], ...] | None:
    """Groups of `size` ranks, out of order."""
    if kind == "whole":
        return None
    if kind == "uneven":
        return ((size - 1,), tuple(range(size - 1)))
    order = [(i * 3 + size - 1) % size for i in range(size)]
    return (tuple(order[: size // 2]), tuple(order[size // 2 :]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    op: str = "psum"
    transform: str = "jit"
    dtype: str = "float32"
    axes: str = "minor"
    mesh: str = "auto"
    groups: str = "whole"
    form: int = 0
    tiled: bool = False
    check_vma: bool = True

    @property
    def name(self) -> str:
        """Names the case in messages: the levels that are not the plain ones."""
        plain = Case(op=self.op)
        levels = [
            level if isinstance(level, str) else f"{field}={level}"
            for field, level in dataclasses.asdict(self).items()
            if level != getattr(plain, field)
        ]
        return ", ".join([self.op, *levels])

    @property
    def base(self) -> str:
        """The op as one call with operands of plain types."""
        op = {"psend_precv": "ppermute"}.get(self.op, self.op)
        return op.removesuffix("_start").removesuffix("_unreduced")

    @property
    def wide(self) -> bool:
        """Whether it needs 64-bit types."""
        return self.dtype in WIDE

    @property
    def invariant(self) -> bool:
        """Whether the result has the type of one value, the same on all ranks."""
        op = self.op in (*REDUCTIONS, "all_gather_invarying", "psum_unreduced")
        return op and self.check_vma and self.groups == "whole"

    @functools.cached_property
    def layout(self) -> Layout:
        """Where its ranks are, of eight devices."""
        line = self.axes == "line"
        mesh = {"i": 8} if line else {"i": 2, "j": 4}
        if self.mesh == "subset":
            mesh = {"i": 4} if line else {"i": 2, "j": 2}
        axes = {
            "line": ("i",),
            "minor": ("j",),
            "major": ("i",),
            "both": ("i", "j"),
            "swapped": ("j", "i"),
        }[self.axes]
        vmapped = 0
        if self.transform == "vmap_own_axis":
            vmapped = 2
            axes = {
                "line": ("v",),
                "minor": ("j", "v"),
                "major": ("v", "i"),
                "both": ("i", "v", "j"),
                "swapped": ("j", "i", "v"),
            }[self.axes]
        size = math.prod({**mesh, "v": vmapped}[axis] for axis in axes)
        groups = _groups_of(size, self.groups)
        # What deals rows out needs as many as a communicator has ranks.
        rows = size if groups is None or len(groups[0]) != len(groups[1]) else len(groups[0])
        manual = ("j",) if self.mesh == "partial" else tuple(mesh)
        return Layout(
            mesh=mesh, manual=manual, vmapped=vmapped, axes=axes, groups=groups, rows=rows
        )


def near_plain() -> Iterator[Case]:
    """Cases that are plain but for a few factors: the place to look for examples."""
    partial = {"axes": ("minor",), "mesh": ("partial",)}
    for more, few in itertools.product(
        (
            *({}, {"form": (2,)}, {"form": (1,)}, {"axes": ("minor",)}, {"axes": ("swapped",)}),
            *(partial, {**partial, "form": (1,)}, {**partial, "form": (2,)}),
            *({**partial, "form": (2,), "tiled": (True,)}, {"groups": ("even",)}),
        ),
        (("op", "check_vma", "transform", "groups"), ("op", "check_vma", "dtype")),
    ):
        some = {name: FACTORS[name] if name in few else FACTORS[name][:1] for name in FACTORS}
        for row in pairs.product({**some, **more}, valid):
            yield Case(**row)
