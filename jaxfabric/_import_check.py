"""Refuses a compiled core that the installed XLA would refuse later, and silently."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re


def runtime_ffi_version(root: pathlib.Path | None = None) -> tuple[int, int] | None:
    """Returns (major, minor) of the FFI API of the installed jaxlib, or None if it does not say.

    Args:
        root: jaxlib's folder; default: where the import system finds it. jaxlib is not imported.
    """
    return _version_in_header(root, "c_api.h", "XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR")


def runtime_extension_version(root: pathlib.Path | None = None) -> tuple[int, int] | None:
    """Returns the same of the FFI's extension for collectives, or None if there is none."""
    names = (f"XLA_FFI_Extension_Collectives_{part}Version" for part in ("Major", "Minor"))
    return _version_in_header(root, "collectives_c_api.h", *names)


def _version_in_header(
    root: pathlib.Path | None, name: str, *macros: str
) -> tuple[int, int] | None:
    if root is None:
        spec = importlib.util.find_spec("jaxlib")
        if spec is None or spec.origin is None:
            return None
        root = pathlib.Path(spec.origin).parent
    try:
        header = (root / "include/xla/ffi/api" / name).read_text()
    except OSError:
        return None
    found = [re.search(rf"#define {macro} (\d+)", header) for macro in macros]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]), int(found[1][1])


def check_ffi_version(
    compiled: tuple[int, int] | None = None, runtime: tuple[int, int] | None = None
) -> None:
    """Raises ImportError unless the runtime's FFI API can load the compiled handlers.

    Args:
        compiled: what the core was compiled against; default: asked of the core.
        runtime: what is installed; default: asked of jaxlib.
    """
    if compiled is None:
        try:
            _ext = importlib.import_module("jaxfabric._ext")
        except ModuleNotFoundError as error:
            if error.name != "jaxfabric._ext":
                raise
            # A source tree that has not been built. What needs the core says so on first use, and
            # `jaxfabric doctor` can still explain.
            return
        compiled = _ext.ffi_version()
    runtime = runtime or runtime_ffi_version()
    if runtime is None:
        return
    if compiled[0] != runtime[0] or compiled[1] > runtime[1]:
        raise ImportError(
            f"jaxfabric is compiled against XLA FFI {compiled[0]}.{compiled[1]}, the installed "
            f"jaxlib speaks {runtime[0]}.{runtime[1]}: upgrade jaxlib (pip install -U jax jaxlib), "
            "or rebuild jaxfabric against the installed one (pip install "
            "--no-build-isolation --force-reinstall --no-deps .)"
        )
