"""What this machine has for tests/gpu/run.sh, and what it lacks.

Exit code 77: something is missing without which nothing can run, and is named.
"""

import ctypes
import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

SKIPPED = 77


def driver() -> tuple[str, int, str | None]:
    """The driver's CUDA version, how many GPUs it has, and why none can be used."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return "none", 0, f"an NVIDIA driver ({error})"
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    text = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if code := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return text, 0, f"an NVIDIA GPU (the driver says error {code})"
    return text, count.value, None if count.value else "an NVIDIA GPU"


def output_of(*command: str) -> str:
    """What a program prints, or an empty string where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def version(*packages: str) -> str:
    """Name and version of the first that is installed, or an empty string."""
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def main() -> int:
    """Prints the report; returns the exit code."""
    cuda, count, needed = driver()
    query = "--query-gpu=index,name,compute_cap,memory.total,driver_version"
    rows = {
        "cores": str(len(os.sched_getaffinity(0))),
        "driver": cuda,
        "GPUs": str(count),
        "nvidia-smi": output_of("nvidia-smi", query, "--format=csv,noheader"),
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "JAX": version("jax"),
        "CUDA plugin of JAX": version("jax-cuda13-plugin", "jax-cuda12-plugin"),
        "nvcc on the PATH": shutil.which("nvcc") or "",
        "compute-sanitizer": shutil.which("compute-sanitizer") or "",
    }
    for name, value in rows.items():
        print(f"{name:<20}", (value or "none").replace("\n", "\n" + " " * 21))
    packages = {
        **{"jax": "jax[cuda13]", "nanobind": "nanobind", "scikit_build_core": "scikit-build-core"},
        **{"pytest": "pytest", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"},
    }
    absent = [f"'{name}'" for module, name in packages.items() if not find_spec(module)]
    if not shutil.which("cmake"):
        absent += ["cmake", "ninja"]
    missing = [needed] if needed else []
    if absent:
        missing.append(f"Python packages: pip install {' '.join(absent)}")
    if missing:
        print(f"SKIPPED: needs {', and '.join(missing)}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
