"""What JAX finds under the entry point `jax_plugins`: the switch in the environment.

JAX calls `initialize` when its first backend starts, in every program of an environment that has
jaxfabric in it. So it must cost nothing where nobody asks for it.
"""

from __future__ import annotations

from jaxfabric import config


def initialize() -> None:
    """Turns the switch on if JAXFABRIC_ENABLE says so, and tells of a variable that nobody reads.

    Raises:
        ConfigError: it has a value it cannot have (JAX logs it).
    """
    # A misspelt JAXFABRIC_ENABLE would leave a program to XLA without a word.
    config.warn_of_unknown_variables()
    if config.switch_is_in_environment():
        from jaxfabric import dropin

        dropin.enable_from_environment()
