"""Eight virtual CPU devices, and the options that widen the suite."""

import collections

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
        default="1/1",
        metavar="K/N",
        help="with --full: only part K of N, every N-th batch of cases",
    )


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
