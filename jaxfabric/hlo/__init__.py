"""Whole-program mode: the collectives of compiled programs, wherever they come from.

`jaxfabric.lax` and its drop-in replacement of `jax.lax` see the collectives that a program calls.
Many programs call none: `jit` partitions them, and XLA's partitioner inserts the collectives. Here
a pass over the compiled program replaces those, and what else reaches XLA, by calls of the fabric.
What the fabric does not have is left to XLA, with a reason that `records` returns.

All that happens for the whole process, and in programs compiled from then on: what JAX has compiled
before stays as it is.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import pathlib
import threading
from collections.abc import Callable

from jaxfabric import _compat, _program, _report, runtime
from jaxfabric.hlo.transformation import Record, Result, has_collectives, transform

__all__ = ["Record", "clear_records", "install", "installed", "records", "uninstall"]

logger = logging.getLogger("jaxfabric")

_NAME = "jaxfabric-collectives"
# Programs are compiled by several threads at a time, and a process may compile very many.
_records: collections.deque[Record] = collections.deque(maxlen=10_000)
_lock = threading.Lock()
_installed = False
_platforms: list[str] = []
_undo_cache_key: Callable[[], None] | None = None


def install() -> None:
    """Makes programs compiled from now on use the fabric: for CPU devices, and the job's GPUs.

    Idempotent.

    Programs compiled with and without it have different keys in the persistent compilation cache.

    Raises:
        RuntimeError: the job has several processes and jaxfabric.initialize() was not called.
        ImportError: the compiled core is missing.
    """
    runtime.ensure_ready()
    global _installed, _undo_cache_key
    with _lock:
        if _installed:
            return
        for platform in runtime.platforms():
            callback = functools.partial(_callback, platform != "cpu")
            _compat.register_hlo_transformation(_NAME, callback, platform)
            _platforms.append(platform)
        _undo_cache_key = _compat.extend_cache_key(_cache_key)
        _installed = True


def uninstall() -> None:
    """Leaves programs compiled from now on as they are. Idempotent."""
    global _installed
    with _lock:
        if not _installed:
            return
        while _platforms:
            _compat.clear_hlo_transformation(_NAME, _platforms.pop())
        if _undo_cache_key is not None:
            _undo_cache_key()
        _installed = False


def installed() -> bool:
    """Whether `install` has been called, and `uninstall` has not."""
    return _installed


def records() -> list[Record]:
    """What became of the collectives of the programs compiled so far, oldest first.

    The last ten thousand. A program that comes from the persistent compilation cache leaves none.
    """
    return list(_records)


def clear_records() -> None:
    """Forgets them."""
    _records.clear()


@functools.cache
def _version() -> str:
    """A hash of the source of what makes programs: another pass would have made another program."""
    here = pathlib.Path(__file__).parent
    digest = hashlib.sha256()
    below = (here.parent / name for name in ("_emit.py", "gpu_table.py"))
    for path in [*sorted(here.glob("*.py")), *below]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_key() -> str:
    # Without a fabric programs are those of XLA.
    if not runtime.is_initialized():
        return ""
    # On GPUs limits decide what becomes of a program: all ranks are to have one made with the same.
    limits = runtime.settings().gpu_limits if "cuda" in runtime.platforms() else ""
    return f"{_NAME}-{_version()}-{limits}" if limits else f"{_NAME}-{_version()}"


def _callback(on_gpus: bool, data: bytes) -> bytes | None:
    """XLA calls it while it compiles, on any thread; an exception would be a failed compilation."""
    if not has_collectives(data):
        return None
    if not runtime.is_initialized():
        _leave("jaxfabric was shut down")
        return None
    try:
        result = transform(data, _program.limits() if on_gpus else None)
        _announce(result)
    except Exception as error:
        logger.debug("The pass over a program failed", exc_info=True)
        _leave(f"{type(error).__name__}: {error}")
        return None
    _keep(result.records)
    if result.data is not None and result.donates and _compat.forgets_donation():
        _warn_of_donation()
    return result.data


@functools.cache  # Once is enough.
def _warn_of_donation() -> None:
    logger.warning(
        "This version of JAX forgets which arguments are donated in programs that a pass has "
        "changed: they keep their memory, and results get memory of their own. JAX 0.11 does not"
    )


def _leave(reason: str) -> None:
    logger.warning("All collectives of a program are left to XLA: %s", reason)
    _keep([Record("unknown", "module", "unknown source", 0, False, reason)])


def _keep(records: list[Record]) -> None:
    _records.extend(records)
    for number, record in enumerate(records):
        _report.record(
            _report.Entry(
                program=record.module.removeprefix("jit_"),
                number=number,
                call=record.op,
                source=record.source,
                size_bytes=record.bytes,
                runner=_report.FABRIC if record.taken else _report.XLA,
                reason=record.reason,
            )
        )


def _announce(result: Result) -> None:
    """Tells the core the source lines of the calls."""
    from jaxfabric import _ext

    for site, source in result.sites.items():
        _ext.register_site(site, source)
