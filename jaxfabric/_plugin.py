"""What JAX finds under the entry point `jax_plugins`: the switch in the environment.

JAX calls `initialize` when its first backend starts, in every program of an environment that has
jaxfabric in it. So it must cost nothing where nobody asks for it.
"""

from __future__ import annotations

from jaxfabric import config


def initialize() -> None:
    """Turns the switch on if JAXFABRIC_ENABLE says so.

    Raises:
        ConfigError: it has a value it cannot have (JAX logs it).
    """
    if config.switch_is_in_environment():
        from jaxfabric import dropin

        dropin.enable_from_environment()
