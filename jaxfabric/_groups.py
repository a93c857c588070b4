"""Axes, groups and ranks of a collective: arithmetic on names and integers, no arrays."""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
from collections.abc import Hashable, Sequence

import jax
import numpy as np

Axes = tuple[Hashable, ...]
Groups = tuple[tuple[int, ...], ...]
AxisName = Hashable | Sequence[Hashable]
AxisGroups = Sequence[Sequence[int]] | None


@dataclasses.dataclass(frozen=True)
class Split:
    """One of a collective's axes taken out: rank = (outer * size + index) * inner_size + inner."""

    outer: int
    size: int
    inner: int

    @classmethod
    def of(cls, axes: Axes, axis: Hashable, size: int) -> Split:
        """Splits the row-major product of `axes` at `axis`, which has `size` elements."""
        at = axes.index(axis)
        outer, inner = (math.prod(map(jax.lax.axis_size, a)) for a in (axes[:at], axes[at + 1 :]))
        return cls(outer, size, inner)

    def locate(self, rank: int) -> tuple[int, int]:
        """Returns the index of `rank` along the axis, and its rank among the remaining axes."""
        rest, inner = divmod(rank, self.inner)
        outer, index = divmod(rest, self.size)
        return index, outer * self.inner + inner


def as_axes(axis_name: AxisName) -> Axes:
    """Returns an axis name, or a tuple or list of them, as a tuple.

    Raises:
        TypeError: it is something that cannot be a name, such as the array.
        ValueError: an axis is there twice.
    """
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        try:
            hash(axis)
        except TypeError:
            raise TypeError(
                f"axis_name={reprlib.repr(axis)}: use the name of an axis or a tuple of names, in "
                'the order of psum(x, "i") and barrier("i", x)'
            ) from None
    if len({*axes}) < len(axes):
        raise ValueError(f"axis_name={axis_name!r}: name each axis once")
    return axes


def as_groups(axis_index_groups: AxisGroups, even: bool = True) -> Groups | None:
    """Returns `axis_index_groups` as tuples.

    Raises:
        TypeError: it is not made of lists of integers.
        ValueError: an index is missing or there twice, a group is empty, or groups differ in size
            where `even`.
    """
    if axis_index_groups is None:
        return None
    try:
        groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    except TypeError:
        raise TypeError(
            "axis_index_groups must be lists of integers, such as [[0, 1], [2, 3]], got "
            f"{axis_index_groups!r}"
        ) from None
    members = sorted(i for group in groups for i in group)
    if members != list(range(len(members))):
        raise ValueError(f"axis_index_groups must cover all indices exactly once, got {groups}")
    if not all(groups):
        raise ValueError(f"axis_index_groups must not have an empty group, got {groups}")
    if even and len(set(map(len, groups))) > 1:
        raise ValueError(f"axis_index_groups must all be the same size, got {groups}")
    return groups


def communicator_size(axes: Axes, groups: Groups | None) -> int:
    """Returns the number of ranks in one communicator (of the first group)."""
    size = math.prod(map(jax.lax.axis_size, axes))
    if groups is None:
        return size
    if sum(map(len, groups)) != size:
        raise ValueError(
            f"axis_index_groups must cover all indices exactly once, but the axes {axes} have "
            f"{size} and the groups {groups} cover {sum(map(len, groups))}"
        )
    return len(groups[0])


def replica_groups(
    shape: dict[Hashable, int], axes: Axes, groups: Groups | None
) -> list[list[int]]:
    """Returns the communicators of a collective as positions in the mesh.

    Args:
        shape: axis sizes of the mesh in its order.
        axes: the collective's axes; ranks count row-major in this order.
        groups: axis_index_groups over the product of `axes`.
    """
    names = list(shape)
    order = [names.index(axis) for axis in axes]
    positions = np.arange(math.prod(shape.values())).reshape(list(shape.values()))
    size = math.prod(shape[axis] for axis in axes)
    whole = np.moveaxis(positions, order, range(len(order))).reshape(size, -1).T
    return [[int(ranks[i]) for i in group] for ranks in whole for group in groups or [range(size)]]


def canonical_axis(name: str, axis: int, ndim: int) -> int:
    """Returns the argument `name`, a dimension, counted from the front.

    A negative one counts from the back.

    Raises:
        TypeError: it is not an integer.
        ValueError: there is no such dimension.
    """
    try:
        at = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {axis!r}") from None
    if not -ndim <= at < ndim:
        raise ValueError(f"{name}: axis {at} is out of bounds for array of dimension {ndim}")
    return at % ndim
