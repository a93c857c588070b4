"""Taking over the lowering of JAX's primitives.

The primitives of jax._src.lax.parallel; the tables of lowering rules in jax._src.interpreters.mlir.
Read in 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

TESTED_JAX = ((0, 10, 2), (0, 12))


def warn_of_untested_version() -> None:
    """Logs once that this JAX is not among those that lowering rules were tested with."""
    import jax

    oldest, newest = TESTED_JAX
    version = jax.__version_info__
    if not (oldest <= version and version[: len(newest)] <= newest):
        logging.getLogger("jaxfabric").warning(
            "jaxfabric is tested with JAX %s to %s, this is %s: collectives whose lowering has "
            "changed may fail",
            ".".join(map(str, oldest)),
            ".".join(map(str, newest)),
            jax.__version__,
        )


LAX_COLLECTIVES = (
    *("psum", "psum_invariant", "unreduced_psum", "pmax", "unreduced_pmax"),
    *("pmin", "unreduced_pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("reduce_scatter", "unreduced_reduce_scatter", "all_to_all", "ppermute", "pbroadcast"),
    *("pbroadcast_dynamic", "ragged_all_to_all", "psend", "precv"),
)


def lax_primitive(name: str) -> Any:  # noqa: ANN401
    """The collective primitive of jax.lax called `name`, or None where this JAX has none."""
    from jax._src.lax import parallel

    return getattr(parallel, f"{name}_p", None)


_originals: dict[tuple[Any, str], Any] = {}


def xla_lowering(primitive: Any, platform: str) -> Any:  # noqa: ANN401
    """JAX's own rule that lowers `primitive` for a platform, or None."""
    from jax._src.interpreters import mlir

    if (primitive, platform) in _originals:
        return _originals[primitive, platform]
    rules = mlir._platform_specific_lowerings.get(platform, {})
    entry = rules.get(primitive) or mlir._lowerings.get(primitive)
    return None if entry is None else entry.rule


def replace_lowering(primitive: Any, rule: Any, platform: str) -> None:  # noqa: ANN401
    """Makes `rule` lower each call of `primitive` for a platform; `xla_lowering` stays."""
    from jax.interpreters import mlir

    _originals.setdefault((primitive, platform), xla_lowering(primitive, platform))
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def take_typed_psum_of_groups(run: Callable[..., Any], condition: Callable[[], bool]) -> None:
    """Calls `run(x, axes, groups)` for a psum that JAX has no primitive for, if `condition` holds.

    Under check_vma `lax.psum` with axis_index_groups is a NotImplementedError.
    """
    from jax._src.lax import parallel

    original = parallel.bind_psum_invariant

    def bind(leaf: Any, *, axes: Any, axis_index_groups: Any, is_async: bool) -> Any:  # noqa: ANN401
        if axis_index_groups is None or is_async or not condition():
            return original(leaf, axes=axes, axis_index_groups=axis_index_groups, is_async=is_async)
        return run(leaf, axes, axis_index_groups)

    parallel.bind_psum_invariant = bind


def with_shape(aval: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """A type like `aval` with another shape, no dimension of which is sharded."""
    import jax

    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    return aval.update(shape=tuple(shape), sharding=aval.sharding.update(spec=spec))


def with_result_type(ctx: Any, y: Any, aval: Any) -> Any:  # noqa: ANN401
    """The value `y` of type `aval` that a lowering rule returns, with the sharding that it has."""
    from jax._src.interpreters.mlir import lower_with_sharding_in_types

    return lower_with_sharding_in_types(ctx, y, aval)


def module_store(ctx: Any, name: str) -> list[Any]:  # noqa: ANN401
    """A list that belongs to the module being lowered, and goes with it."""
    return ctx.module_context.cached_primitive_lowerings.setdefault(f"jaxfabric {name}", [])


def module_table(ctx: Any, name: str) -> dict[Any, Any]:  # noqa: ANN401
    """As `module_store`, a dictionary."""
    return ctx.module_context.cached_primitive_lowerings.setdefault(f"jaxfabric {name}", {})
