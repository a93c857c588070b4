"""Eight virtual CPU devices, and the options that widen the suite."""

import argparse
import collections
import re

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser):
    group = parser.getgroup("conformance")
    group.addoption(
        "--full",
        action="store_true",
        help="run every valid case of the conformance table, not a selection",
    )
    group.addoption(
        "--part",
        type=_part,
        metavar="K/N",
        help="run part K of N of every valid case: the same part each time, from the whole table",
    )


def _part(text):
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: use K/N with K from 1 to N, such as 1/5000")
    return int(match[1]), int(match[2])


_TALLY: collections.Counter[str] = collections.Counter()


@pytest.fixture
def tally():
    """Counts comparisons, for the line at the end of the run."""
    return _TALLY


def pytest_sessionfinish(session):
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["tally"] = dict(_TALLY)  # Of a worker, for the process that prints.


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _TALLY.update(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_terminal_summary(terminalreporter):
    for what, count in sorted(_TALLY.items()):
        terminalreporter.write_line(f"conformance, {what}: {count} cases")
