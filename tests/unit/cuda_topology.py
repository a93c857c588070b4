"""GPUs that are not there, for which XLA:GPU compiles nevertheless.

For programs of their own: what is registered here is for a platform that the suite's process does
not have. Where there are no CUDA handlers, those of the CPU stand in: their code is not run, but
XLA looks for them, and has them read the attributes.
"""

from __future__ import annotations

import os
import pathlib

# The libraries that a GPU would need are not looked for.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import topologies

from jaxfabric import _ext, _windowed

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def devices(hosts, gpus):
    """The GPUs of so many hosts with so many each."""
    return topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology=f"1x{hosts}x{gpus}"
    ).devices


def register():
    """Registers the fabric's handlers for GPUs."""
    for name, registration in _ext.cuda_type_registrations().items():
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    targets = _ext.cuda_registrations()
    # Without windows in this build, the handlers of calls that copy stand in.
    more = _windowed.registrations() or {
        f"jaxfabric_{op}_windows": targets[f"jaxfabric_{op}"] for op in _windowed.ARRAYS
    }
    for name, stages in (targets | more).items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA", api_version=1)


def dump_captured(folder):
    """Has XLA write down what it makes of programs called captured; before it comes to life."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} "
        "--xla_dump_hlo_module_re=.*captured.*"
    )


def captured_calls(folder):
    """How many calls the last program called captured has, and how many of them XLA captures."""
    # There are two of them if the passes found something to capture, and "_after" comes last.
    *_, path = sorted(pathlib.Path(folder).glob("*jit_captured*.thunk_sequence*.txt"))
    calls = [line for line in path.read_text().splitlines() if "kCustomCall" in line]
    return {"calls": len(calls), "captured": sum(line.startswith(" ") for line in calls)}
