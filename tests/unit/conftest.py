"""Eight virtual CPU devices for the tests that need a mesh."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
