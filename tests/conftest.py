"""Which tests run, and which of them beside each other when there are several workers (`-n 2`).

Those in tests/gpu need a GPU and a JAX on it: `--gpu`, which tests/gpu/run.sh gives them.

Those that start jobs go file by file: a worker's jobs follow each other, and share what they find.
"""

import pathlib

import netns
import pytest

_JOBS = ("multiprocess", "fault")


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run tests/gpu, on the GPUs that JAX has")


def pytest_collection_modifyitems(config, items):
    here = pathlib.Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in _JOBS:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if folder == "gpu" and not config.getoption("--gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: tests/gpu/run.sh"))


@pytest.fixture
def lab():
    """A switch for hosts of the test's own, see netns.py; skips without what that needs."""
    if reason := netns.unavailable():
        pytest.skip(reason)
    with netns.Lab() as made:
        yield made


@pytest.fixture(scope="module")
def hosts():
    """Two hosts for all tests of a module, each of which leaves them as they were."""
    if reason := netns.unavailable():
        pytest.skip(reason)
    with netns.Lab() as made:
        yield made.host("hosta", shm="64m"), made.host("hostb", shm="absent")
