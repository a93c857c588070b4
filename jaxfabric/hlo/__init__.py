"""Whole-program mode: the collectives of compiled programs, wherever they come from.

`jaxfabric.lax` and its drop-in replacement of `jax.lax` see the collectives that a program calls.
Many programs call none: `jit` partitions them, and XLA's partitioner inserts the collectives. Here a
pass over the compiled program replaces those, and what else reaches XLA, by calls of the fabric.
What the fabric does not have is left to XLA, with a reason that `records` returns.

All that happens for the whole process, and in programs compiled from then on: what JAX has compiled
before stays as it is.
"""

from __future__ import annotations

import collections
import logging
import threading

from jaxfabric import _compat, runtime
from jaxfabric.hlo.transformation import Record, Result, has_collectives, transform

__all__ = ["Record", "clear_records", "install", "installed", "records", "uninstall"]

logger = logging.getLogger("jaxfabric")

_NAME = "jaxfabric-collectives"
# Part of the compilation cache's key: to be counted up when what the pass makes changes.
_VERSION = 1
# Programs are compiled by several threads at a time, and a process may compile very many.
_records: collections.deque[Record] = collections.deque(maxlen=10_000)
_lock = threading.Lock()
_installed = False
_process_of_device: dict[int, int] = {}


def install() -> None:
    """Makes programs compiled for CPU devices from now on use the fabric. Idempotent.

    Programs compiled with and without it have different keys in the persistent compilation cache.

    Raises:
        RuntimeError: the job has several processes and jaxfabric.initialize() was not called.
        ImportError: the compiled core is missing.
    """
    import jax

    runtime.ensure_ready()
    global _installed
    with _lock:
        if _installed:
            return
        _process_of_device.clear()
        _process_of_device.update({d.id: d.process_index for d in jax.devices("cpu")})
        _compat.register_hlo_transformation(_NAME, _callback)
        _compat.add_to_cache_key(f"{_NAME}-{_VERSION}")
        _installed = True


def uninstall() -> None:
    """Leaves programs compiled from now on as they are. Idempotent."""
    global _installed
    with _lock:
        if not _installed:
            return
        _compat.clear_hlo_transformation(_NAME)
        _compat.remove_from_cache_key(f"{_NAME}-{_VERSION}")
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


def _callback(data: bytes) -> bytes | None:
    """XLA calls it while it compiles, on any thread; an exception would be a failed compilation."""
    if not has_collectives(data):
        return None
    try:
        if not runtime.is_initialized():
            raise RuntimeError("jaxfabric is not initialized")
        result = transform(data)
        _announce(result)
    except Exception as error:  # noqa: BLE001
        logger.warning("A program is left to XLA: %s", error, exc_info=True)
        _records.append(Record("unknown", "module", "unknown source", 0, False, str(error)))
        return None
    _records.extend(result.records)
    return result.data


def _announce(result: Result) -> None:
    """Tells the core the source lines of the calls, and the devices that launch the program."""
    from jaxfabric import _ext

    for site, source in result.sites.items():
        _ext.register_site(site, source)
    ids = result.device_ids
    if result.sites and ids and len({_process_of_device.get(i) for i in ids}) > 1:
        _ext.add_device_list(ids)
