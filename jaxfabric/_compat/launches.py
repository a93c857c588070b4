"""What JAX numbers the launches of a program with.

An executable's first run id is the low half of a hash of its fingerprint, plus that of its device
list if some of its devices are other processes'; then one more for every launch (jaxlib's
py_executable.cc). compiler.compile_or_get_cached, which every compilation goes through, and
LoadedExecutable.fingerprint are not documented. Seen in 0.10.2 and 0.12.0.1; without them the core
waits a little before an executable's first collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def watch_compilations(
    begin: Callable[[], int],
    end: Callable[[int, bytes | None, Sequence[int]], None],
    on_gpus: tuple[Callable[[], None], Callable[[Sequence[int]], None]] | None = None,
) -> None:
    """Tells of every executable that JAX makes or loads from its cache from now on.

    Args:
        begin: called before that, on the same thread.
        end: called after it with what `begin` returned, the executable's fingerprint (None: it
            failed, or there is none) and, if it spans processes, the ids of its devices in order.
        on_gpus: the two for executables for GPUs; the second is called with the ids of the devices
            in order, as calls there are not told their position. None: of those not.
    """
    from jax._src import compiler, traceback_util

    compile_or_get_cached = getattr(compiler, "compile_or_get_cached", None)
    if compile_or_get_cached is None:
        return

    @functools.wraps(compile_or_get_cached)
    def watched(backend: Any, computation: Any, devices: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if on_gpus is not None and backend.platform in ("gpu", "cuda"):
            begin_on_gpus, end_on_gpus = on_gpus
            begin_on_gpus()
            try:
                return compile_or_get_cached(backend, computation, devices, *args, **options)
            finally:
                end_on_gpus([device.id for device in devices.flat])
        if backend.platform != "cpu":
            return compile_or_get_cached(backend, computation, devices, *args, **options)
        begun, fingerprint, ids = begin(), None, []
        try:
            executable = compile_or_get_cached(backend, computation, devices, *args, **options)
            if isinstance(value := getattr(executable, "fingerprint", None), bytes):
                fingerprint = value
            if any(device.process_index != backend.process_index() for device in devices.flat):
                ids = [device.id for device in devices.flat]
            return executable
        finally:
            end(begun, fingerprint, ids)

    compiler.compile_or_get_cached = watched
    # What a compilation fails with is not about jaxfabric.
    traceback_util.register_exclusion(__file__)
