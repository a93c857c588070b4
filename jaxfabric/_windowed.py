"""The compiled module that has XLA put windows around its arrays on GPUs, where it can be used.

It is built against the headers of one XLA and for no other: `_windows` is there only where the
build found them, and is used only with a jaxlib that fits. Without it calls on GPUs copy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from jaxfabric._devices import core
from jaxfabric._import_check import runtime_extension_version, runtime_ffi_version
from jaxfabric.config import Config, logger

# By op: which arrays peers address, as the attribute `windows` says it (1 operand, 2 result).
ARRAYS = {
    "all_reduce": 3,
    "all_gather": 2,
    "reduce_scatter": 1,
    "all_to_all": 2,
    "permute": 2,
    "broadcast": 2,
}


def remark(arrays: int) -> str:
    """What reports say of a call that has some of its arrays in windows."""
    return "peers address its arrays" if arrays else ""


def problem() -> str:
    """Why this build, or the installed jaxlib, has no windows; an empty string if it has."""
    try:
        module = importlib.import_module("jaxfabric._windows")
    except ModuleNotFoundError:
        return "this build of jaxfabric has none: it needs the headers of jaxlib 0.12"
    except ImportError as error:
        return f"jaxfabric._windows does not load: {error}"
    try:
        module.connect(core().window_core())
    except RuntimeError as error:
        return str(error)
    return mismatch(
        built=(module.jaxlib_version(), module.ffi_version(), module.extension_version()),
        installed=(
            importlib.metadata.version("jaxlib"),
            runtime_ffi_version(),
            runtime_extension_version(),
        ),
    )


def problem_here(config: Config, *, with_gpus: bool) -> str:
    """Why this process has no windows, by its settings too; logs what is not their doing."""
    if config.gpu_windows != "on":
        return "the setting gpu_windows is off"
    if not with_gpus:
        return "it has no GPUs of the fabric"
    if why := problem():
        logger.warning("calls on GPUs copy their arrays: %s", why)
    return why


Versions = tuple[str, tuple[int, int] | None, tuple[int, int] | None]


def mismatch(*, built: Versions, installed: Versions) -> str:
    """Why what was built for one jaxlib cannot be used with another, or an empty string.

    Args:
        built: the version of jaxlib, of its FFI, and of the FFI's extension for collectives.
        installed: the same; None where it has none.
    """
    remedy = "install jaxfabric again (pip install --no-build-isolation .)"
    if built[0].split(".")[:2] != installed[0].split(".")[:2]:
        return f"built for jaxlib {built[0]}, and {installed[0]} is installed: {remedy}"
    if built[1] != installed[1]:
        return f"built for XLA FFI {_text(built[1])}, jaxlib has {_text(installed[1])}: {remedy}"
    wanted, have = built[2], installed[2]
    # Minor versions add to the end.
    if wanted is None or have is None or wanted[0] != have[0] or wanted[1] > have[1]:
        return (
            f"built for the FFI's extension for collectives {_text(wanted)}, jaxlib has "
            f"{_text(have)}: {remedy}"
        )
    return ""


def registrations() -> dict[str, dict[str, Any]]:
    """FFI target -> stage -> handler, for platform CUDA; empty where there are no windows.

    Call it once the core's FFI types are registered.
    """
    if problem():
        return {}
    module = importlib.import_module("jaxfabric._windows")
    own = core().cuda_registrations()
    return {
        f"jaxfabric_{op}_windows": {**own[f"jaxfabric_{op}"], **module.stages()} for op in ARRAYS
    }


def _text(version: tuple[int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
