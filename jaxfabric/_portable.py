"""Programs whose collectives name positions in the mesh, not devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxfabric import _compat

# JAX looks its programs up by the values of such contexts, of all that there are: one that is made
# while a program is traced makes JAX trace it again at the next call. So this module is imported
# early: see jaxfabric/__init__.py and runtime._start.
_portable = _compat.cache_sensitive_context()
# What runs on the fabric: see dropin.py.
mode = _compat.cache_sensitive_context()
# The devices of `jax.set_mesh`, while a program that names them is lowered.
lowered_on = _compat.cache_sensitive_context()


def names_positions() -> bool:
    """Whether calls lowered now name positions in the mesh, not devices: see `portable`."""
    return bool(_portable.value)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Lowers programs, inside the `with` block, so that they run on any devices.

    Collectives name positions in the mesh instead of devices, as they do anyway in `jax.export` and
    under an AbstractMesh. Then one lowered program serves all meshes of a shape, if their axes are
    all manual. Two such programs that are equal must not run at once on meshes that overlap.

    Example:
        >>> import jaxfabric
        >>> with jaxfabric.portable():
        ...     pass  # step(params, batch)
    """
    with _portable(True):
        yield
