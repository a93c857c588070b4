"""Collectives for JAX on a fabric of their own.

import jaxfabric
jaxfabric.initialize()
jaxfabric.lax.psum(x, "i")      # inside jax.jit and jax.shard_map, as jax.lax.psum
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jaxfabric._import_check import check_ffi_version as _check_ffi_version
from jaxfabric._report import report
from jaxfabric.bootstrap import clusters as _clusters
from jaxfabric.runtime import core as _core
from jaxfabric.runtime import initialize, is_initialized, shutdown, status

if TYPE_CHECKING:
    from jaxfabric import lax
    from jaxfabric._ext import FabricError
    from jaxfabric._portable import portable
    from jaxfabric.dropin import disable, enable, enabled, export_checks

__version__ = "0.1.0"
__all__ = [
    "FabricError",
    "__version__",
    "disable",
    "enable",
    "enabled",
    "export_checks",
    "initialize",
    "is_initialized",
    "lax",
    "portable",
    "report",
    "shutdown",
    "status",
]

_check_ffi_version()
if "jax" in sys.modules:  # Programs may be traced before `initialize` is called.
    importlib.import_module("jaxfabric._portable")
    _clusters.tell_jax()


def __getattr__(name: str) -> Any:  # noqa: ANN401
    # What needs JAX or the compiled core is imported on first use.
    if name == "lax":
        return importlib.import_module("jaxfabric.lax")
    if name in ("disable", "enable", "enabled", "export_checks", "portable"):
        return getattr(importlib.import_module("jaxfabric.dropin"), name)
    if name == "FabricError":
        return _core().FabricError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # With what has not been imported yet.
    return sorted({*globals(), *__all__})
