"""Which tests run beside each other when there are several workers (`pytest -n 2`).

Those that start jobs and wait for their deaths and deadlines are one group, for one worker: beside
each other they would measure each other.
"""

import pathlib

import pytest

_JOBS = ("multiprocess", "fault")


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in _JOBS:
            item.add_marker(pytest.mark.xdist_group("jobs"))
