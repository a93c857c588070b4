"""What this process has for collectives: the compiled core, and the devices that it can serve."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
from typing import Any

from jaxfabric.config import logger


def core() -> Any:  # noqa: ANN401
    """Returns the compiled core.

    Raises:
        ImportError: it is not there; the message names the folder and the remedy.
    """
    try:
        return importlib.import_module("jaxfabric._ext")
    except ModuleNotFoundError as error:
        if error.name != "jaxfabric._ext":
            raise
        raise ImportError(
            f"jaxfabric's compiled core is missing from {os.path.dirname(__file__)}, a source tree "
            "that has not been built. Python looks for modules beside the program first: if "
            "jaxfabric is installed (pip install .), move the program elsewhere"
        ) from error


# What `usable_gpus` says of a process that has no GPU.
NO_GPUS = "none"


def cuda_problem() -> str:
    """Why this process cannot run collectives on GPUs, or an empty string."""
    return core().cuda_status() or _unordered_graphs()


_GRAPHS = "--xla_gpu_command_buffer_scheduling_mode"


def _unordered_graphs() -> str:
    """Why calls in XLA's CUDA graphs would have no order; empty if they have one.

    Calls of a communicator share its memory, and that they do so XLA does not see.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # The name of a file with them.
        path = pathlib.Path(flags)
        flags = path.read_text() if path.is_file() else ""
    modes = re.findall(rf"{_GRAPHS}=[\"']?(\w+)", flags)
    if not modes or not modes[-1].upper().startswith("CONCURRENT"):
        return ""
    return (
        f"XLA_FLAGS has {_GRAPHS}={modes[-1]}, with which CUDA graphs run calls that share no "
        "array in no order; leave it out, or use LHS or SERIALIZE"
    )


def local_devices(platform: str) -> list[Any]:
    """This process's devices of a platform; none where JAX does without it."""
    import jax

    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX_PLATFORMS leaves it out.
        return []


def usable_gpus() -> tuple[dict[int, int], str]:
    """The ids of this process's GPUs by CUDA's number; why there are none for the fabric."""
    if not (devices := local_devices("cuda")):
        return {}, NO_GPUS
    if problem := cuda_problem():
        logger.warning("collectives on GPUs are left to XLA: %s", problem)
        return {}, problem
    return {device.local_hardware_id: device.id for device in devices}, ""
