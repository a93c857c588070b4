"""A short soak; the long one is `python tests/soak.py`."""

import netns
import pytest
import soak

pytestmark = pytest.mark.timeout(120)


def test_random_collectives_while_the_network_fails():
    if reason := netns.unavailable():
        pytest.skip(reason)
    figures = soak.run(480, programs=12, seed=7, timeout=90)
    assert not figures["problems"], "\n".join(figures["problems"])
    # It has been a bad network.
    assert figures["packets"]["dropped"] > 0
    assert all(figures["spells"].values()), figures["spells"]
