"""`jaxfabric doctor`: what is installed, what this machine allows, and what stands in the way."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from typing import Any

from jaxfabric import _windowed, runtime
from jaxfabric._import_check import runtime_ffi_version
from jaxfabric.bootstrap import clusters
from jaxfabric.config import (
    SWITCH_VARIABLE,
    Config,
    ConfigError,
    LauncherEnvironment,
    switch_from_environment,
    unknown_variables,
)

# Reads 8 bytes of a sibling process that allows it, as processes of a job do of each other.
_READ_SIBLING = """
import ctypes, os, sys
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
value = ctypes.create_string_buffer(b"12345678", 8)
if len(sys.argv) == 1:
    libc.prctl(0x59616d61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    print(os.getpid(), ctypes.addressof(value), flush=True)
    sys.stdin.read()
else:
    target = ctypes.create_string_buffer(8)
    ours, theirs = Span(ctypes.addressof(target), 8), Span(int(sys.argv[2]), 8)
    n = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    print("ok" if n == 8 else os.strerror(ctypes.get_errno()))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: `problem` is None where all is well."""

    section: str
    name: str
    value: str
    problem: str | None = None


def examine() -> list[Finding]:
    """Looks at the installation and the machine; starts no JAX backend."""
    return [*_versions(), *_core(), *_machine(), *_job(), *_settings()]


def main(*, as_json: bool = False) -> int:
    """Prints the report; returns 1 if something stands in the way, else 0."""
    findings = examine()
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        section = None
        for finding in findings:
            if finding.section != section:
                section = finding.section
                print(f"{section}:")
            mark = "  ! " if finding.problem else "    "
            print(f"{mark}{finding.name:<{width}}  {finding.value}")
            if finding.problem:
                print(f"      {finding.problem}")
    return int(any(finding.problem for finding in findings))


def _versions() -> list[Finding]:
    findings = [Finding("versions", "python", platform.python_version())]
    for package in ("jaxfabric", "jax", "jaxlib", "numpy"):
        try:
            findings.append(Finding("versions", package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            problem = f"pip install {package}" if package != "jaxfabric" else "run pip install ."
            findings.append(Finding("versions", package, "not installed", problem))
    plugin = _cuda_plugin() or f"none: {_NO_PLUGIN}"
    findings.append(Finding("versions", "CUDA plugin of JAX", plugin))
    findings.append(Finding("versions", "kernel", platform.release()))
    return findings


_NO_PLUGIN = "JAX has no GPUs without its CUDA plugin (pip install 'jax[cuda13]')"


def _cuda_plugin() -> str:
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _core() -> list[Finding]:
    version = ".".join(map(str, runtime_ffi_version() or ("unknown",)))
    findings = [Finding("core", "XLA FFI of jaxlib", version)]
    try:
        ext: Any = importlib.import_module("jaxfabric._ext")
    except ImportError as error:
        return [*findings, Finding("core", "compiled core", "missing", f"{error}; pip install .")]
    compiled = ".".join(map(str, ext.ffi_version()))
    findings.append(Finding("core", "XLA FFI compiled against", compiled))
    findings.append(Finding("core", "operations", ", ".join(sorted(ext.registrations()))))
    findings.append(Finding("core", "GPU kernels", _kernels(ext.cuda_build())))
    # Not a problem: most machines have no GPU.
    findings.append(Finding("core", "collectives on GPUs", _gpus(ext)))
    windows = _windowed.problem()
    value = f"none: {windows}" if windows else "of XLA's own arrays (gpu_windows)"
    findings.append(Finding("core", "windows on GPUs", value))
    # Each transport answers for itself: a name, and a reason where it cannot be used.
    for name, reason in getattr(ext, "transports", dict)().items():
        problem = (
            f"{reason}: the devices it would connect cannot run collectives" if reason else None
        )
        value = "not usable" if reason else "usable"
        findings.append(Finding("transports", name, value, problem))
    return findings


def _gpus(ext: Any) -> str:  # noqa: ANN401
    if problem := runtime.cuda_problem():
        return f"left to XLA: {problem}"
    if not _cuda_plugin():
        return f"none: {_NO_PLUGIN}"
    value = "run on the fabric (jaxfabric gpu-table)"
    if pair := ext.cuda_unreachable():
        value += f"; staged in pinned host memory: {pair}"
    if alone := ext.cuda_one_host():
        return f"{value}; with other hosts left to XLA: {alone}"
    return f"{value}; with other hosts too, if they are of one NVLink domain"


def _kernels(build: dict[str, Any]) -> str:
    if not build["images"]:
        why = build["reason"] or "the sources have none"
        return f"none: {why} (with kernels: JAXFABRIC_CUDA=1 pip install .)"
    size = sum(build["images"].values()) / 2**20
    return f"{build['architectures']}, {size:.1f} MiB, {build['compiler']}"


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    findings = [Finding("machine", "cores", f"{cores} of {os.cpu_count()}")]
    reading = _sibling_memory()
    findings.append(
        Finding(
            "machine",
            "process_vm_readv",
            "allowed" if reading == "ok" else f"{reading} (large transfers take a second copy)",
        )
    )
    try:
        os.close(os.memfd_create("jaxfabric-doctor", os.MFD_CLOEXEC))
        findings.append(Finding("machine", "memfd_create", "works"))
    except OSError as error:
        findings.append(
            Finding(
                "machine", "memfd_create", str(error), "shared memory needs it: a seccomp rule?"
            )
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    findings.append(
        Finding(
            "machine",
            "open files",
            _limit(files),
            "raise it: ulimit -n 1024" if 0 <= files < 256 else None,
        )
    )
    findings.append(
        Finding("machine", "locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    )
    findings.append(
        Finding("machine", "address space", _limit(resource.getrlimit(resource.RLIMIT_AS)[0]))
    )
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free >> 20
        findings.append(Finding("machine", "/dev/shm", f"{free} MiB free (not used)"))
    return findings


def _job() -> list[Finding]:
    """What jaxfabric.initialize() would find in this environment."""
    try:
        launched = LauncherEnvironment.from_environment()
        found = None if launched else clusters.detect()
    except ConfigError as error:
        return [Finding("job", "launcher", "unclear", str(error))]
    text = "none: a job of one process, unless jaxfabric.initialize() is told more"
    if launched:
        text = f"jaxfabric run: process {launched.process_id} of {launched.num_processes}"
    return [Finding("job", "launcher", str(found or text))]


def _settings() -> list[Finding]:
    findings = [
        Finding("settings", line.split()[0], "not a setting", line) for line in unknown_variables()
    ]
    try:
        mode = switch_from_environment() or "off"
        text = f"{mode}  ({SWITCH_VARIABLE}: run the collectives of jax.lax too)"
        findings.append(Finding("settings", "switch", text))
    except ConfigError as error:
        findings.append(Finding("settings", "switch", "invalid", str(error)))
    try:
        config = Config.from_environment()
    except ConfigError as error:
        return [*findings, Finding("settings", "environment", "invalid", str(error))]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = f"{value}  ({field.metadata['help']})"
        findings.append(Finding("settings", field.name, text))
    return [*findings, *_network(config.net_interface)]


def _network(net_interface: str) -> list[Finding]:
    try:
        ext: Any = importlib.import_module("jaxfabric._ext")
        value, problem = ext.network(net_interface), None
    except ImportError:
        return []  # Said above.
    except RuntimeError as error:
        # Of no concern to a job of one host, unless somebody has asked for an interface.
        value, problem = (str(error), None) if not net_interface else ("none fits", str(error))
    return [Finding("settings", "network for other hosts", value, problem)]


def _sibling_memory() -> str:
    probe = [sys.executable, "-S", "-c", _READ_SIBLING]
    try:
        with subprocess.Popen(
            probe, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdin is not None
            assert owner.stdout is not None
            try:
                where = owner.stdout.readline().split()
                reader = subprocess.run(
                    [*probe, *where], capture_output=True, text=True, timeout=10, check=False
                )
                return reader.stdout.strip() or "the probe failed"
            finally:
                owner.stdin.close()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
