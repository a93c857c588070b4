"""Eight virtual CPU devices for the tests that need a mesh, and what several files set up."""

import hlo_programs
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def whole_program():
    with hlo_programs.whole_program():
        yield


@pytest.fixture
def persistent_cache(tmp_path):
    """An empty persistent compilation cache that keeps everything: its directory."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield tmp_path
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
