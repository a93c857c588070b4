"""The ways to ask for a collective: each face runs the same cases."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import capabilities
import jax
import jax_capabilities
from cases import Case
from rules import Rule, against

import jaxfabric


@dataclasses.dataclass(frozen=True)
class Face:
    """A module of collectives, and the context in which its programs are made and run.

    Attributes:
        refuses: what it does not do.
        beside: what it does with the help of XLA's collectives; None: everything.
    """

    name: str
    module: Any
    context: Callable[[], AbstractContextManager[Any]]
    refuses: tuple[Rule, ...]
    beside: tuple[Rule, ...] | None

    def takes(self, case: Case) -> bool:
        return not against(self.refuses, case)


FABRIC = Face(
    "jaxfabric.lax",
    jaxfabric.lax,
    contextlib.nullcontext,
    capabilities.FABRIC,
    capabilities.BESIDE_FABRIC,
)
STOCK = Face("jax.lax", jax.lax, contextlib.nullcontext, jax_capabilities.STOCK, None)
DROPIN = Face(
    "jax.lax, switched on",
    jax.lax,
    jaxfabric.enabled,
    jax_capabilities.SWITCHED,
    jax_capabilities.LEFT_TO_XLA,
)
# Those whose results must be right and whose programs must run on the fabric.
ON_FABRIC = (FABRIC, DROPIN)
