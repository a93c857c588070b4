"""Ends what a failed test has left running."""

import faults
import pytest


@pytest.fixture(autouse=True)
def _end_jobs():
    yield
    faults.end_jobs()
