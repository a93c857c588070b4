"""Everything jaxfabric uses of JAX that JAX does not promise to keep.

Only these modules and `_primitive.py` import private JAX. Each names what it relies on and since
when it has been so, so that a JAX release that moves something breaks one line here. Private JAX is
imported inside the functions, so that the launcher starts without JAX.
"""

from jaxfabric._compat.distributed import (
    backends_are_initialized,
    connect_distributed_client,
    distributed_state,
    recoverability_enabled,
    start_distributed_service,
)
from jaxfabric._compat.launches import (
    watch_compilations,
)
from jaxfabric._compat.lowering import (
    allow_effect,
    as_varying,
    cache_sensitive_context,
    checks_manual_types,
    hide_frames,
    i64,
    i64_array,
    lower_for_each_mesh_if,
    lowering_mesh,
    lowers_for_export,
    manual_state,
    mesh_axes,
    next_ordinal,
    parameter_types,
    result_manual_type,
    skip_one_sized,
    unreduced_primitive,
    user_source,
    uses_shardy,
)
from jaxfabric._compat.programs import (
    Hlo,
    before_first_compilation,
    clear_hlo_transformation,
    extend_cache_key,
    forgets_donation,
    hlo_from_text,
    parse_hlo,
    register_hlo_transformation,
)
from jaxfabric._compat.switch import (
    TESTED_JAX,
    cpu_lowering,
    lax_primitive,
    module_store,
    replace_cpu_lowering,
    take_typed_psum_of_groups,
    warn_of_untested_version,
    with_result_type,
    with_shape,
)

__all__ = [
    "TESTED_JAX",
    "Hlo",
    "allow_effect",
    "as_varying",
    "backends_are_initialized",
    "before_first_compilation",
    "cache_sensitive_context",
    "checks_manual_types",
    "clear_hlo_transformation",
    "connect_distributed_client",
    "cpu_lowering",
    "distributed_state",
    "extend_cache_key",
    "forgets_donation",
    "hide_frames",
    "hlo_from_text",
    "i64",
    "i64_array",
    "lax_primitive",
    "lower_for_each_mesh_if",
    "lowering_mesh",
    "lowers_for_export",
    "manual_state",
    "mesh_axes",
    "module_store",
    "next_ordinal",
    "parameter_types",
    "parse_hlo",
    "recoverability_enabled",
    "register_hlo_transformation",
    "replace_cpu_lowering",
    "result_manual_type",
    "skip_one_sized",
    "start_distributed_service",
    "take_typed_psum_of_groups",
    "unreduced_primitive",
    "user_source",
    "uses_shardy",
    "warn_of_untested_version",
    "watch_compilations",
    "with_result_type",
    "with_shape",
]
