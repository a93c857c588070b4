"""The kernels of this build fit the GPUs of this machine."""

import jax
import pytest

from jaxfabric import _ext


def test_every_gpu_has_its_code_in_the_build():
    build = _ext.cuda_build()
    if build["reason"]:
        pytest.skip(build["reason"])
    codes = [name.partition("_")[::2] for name in build["architectures"].split()]
    for gpu in jax.devices("gpu"):
        major, minor = map(int, gpu.compute_capability.split("."))
        # Machine code is for later GPUs of the same major number, PTX for all later ones.
        assert any(
            int(code) <= major * 10 + minor and (kind == "compute" or int(code) // 10 == major)
            for kind, code in codes
        ), f"{gpu.device_kind} {gpu.compute_capability}: only {build['architectures']}"
