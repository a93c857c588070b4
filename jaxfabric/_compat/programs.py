"""Programs as XLA compiles them.

jax.extend.xla's module transformations, which are announced but without a promise; jaxlib._hlo,
which reads HLO; and jax._src.cache_key.custom_hook, which the cache calls and anybody may replace.
Read in 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Hlo = Any


def register_hlo_transformation(
    name: str, callback: Callable[[bytes], bytes | None], platform: str
) -> None:
    """Passes every module compiled for a platform through `callback`, just before scheduling."""
    from jax.extend import xla

    # Here is all that XLA inserts, and copies are in place: what is put in must not return an
    # operand as its result.
    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.register_hlo_module_transformation(callback, name=name, stage=stage, platforms=platform)


def clear_hlo_transformation(name: str, platform: str) -> None:
    """Ends what `register_hlo_transformation` began."""
    from jax.extend import xla

    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.clear_hlo_module_transformation(name, stage=stage, platforms=platform)


def parse_hlo(data: bytes) -> Hlo:
    """Reads a serialized HloModuleProto.

    Returns an object with `computations()`; these have a `name` and `instructions()`, and these a
    `name`, `operands()` and `to_string()`.
    """
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return _hlo.HloModule.from_serialized_hlo_module_proto(data)


def hlo_from_text(text: str) -> bytes:
    """Returns HLO text as a serialized HloModuleProto."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def forgets_donation() -> bool:
    """Whether XLA loses which arguments are donated when a transformation changes a module.

    So it is in 0.10.2, and not in 0.11.2. They then keep their memory, and results are right.
    """
    import jax

    return jax.__version_info__ < (0, 11)


def extend_cache_key(part: Callable[[], str]) -> Callable[[], None]:
    """Adds what `part` returns to the persistent compilation cache's keys, beside what others add.

    Returns a function that takes it back.
    """
    from jax._src import cache_key

    previous = cache_key.custom_hook
    wanted = True

    def custom_hook() -> str:
        return previous() + (part() if wanted else "")

    def undo() -> None:
        nonlocal wanted
        # Somebody may have put a hook around this one, which then stays and adds nothing.
        wanted = False
        if cache_key.custom_hook is custom_hook:
            cache_key.custom_hook = previous

    cache_key.custom_hook = custom_hook
    return undo


def before_first_compilation(callback: Callable[[], None]) -> None:
    """Calls `callback` once: when the first program has been lowered, before XLA compiles it."""
    import jax

    called = False
    lock = threading.RLock()

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal called
        del duration_secs
        # JAX has a backend by then. Compiling something in `callback` would come here again, and
        # what other threads compile waits for it.
        if event.endswith("jaxpr_to_mlir_module_duration"):
            with lock:
                if not called:
                    called = True
                    callback()

    jax.monitoring.register_event_duration_secs_listener(listener)
