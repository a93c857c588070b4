"""The examples in plain JAX run on the fabric as they are, and learn what they learn without it."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import re
import shutil
import sys
import tempfile

import numpy as np
import pytest
import support

pytestmark = pytest.mark.timeout(240)

EXAMPLES = support.ROOT / "examples"
COLLECTIVES = {
    "transformer_tensor_parallel": {"psum", "all_gather", "psum_scatter"},
    "transformer_fully_sharded": {"psum", "all_gather", "psum_scatter"},
    "pipeline_parallel": {"psum", "ppermute"},
    "expert_parallel": {"psum", "all_gather", "all_to_all", "ragged_all_to_all"},
    "auto_sharded": {"all-reduce"},
}
TOLERANCE = 1e-5  # of the examples

# Runs an example as the main program, and then says who has run its collectives.
WATCHED = """
import json, os, runpy, sys

example = sys.argv[1]
sys.path.insert(0, os.path.dirname(example))
runpy.run_path(example, run_name="__main__")

import jaxfabric
entries = [(entry.call.split()[0], entry.runner) for entry in jaxfabric.report().entries]
print("watched", json.dumps([entries, jaxfabric.status().counters]), flush=True)
"""


@functools.cache
def on_the_fabric(example, mode, processes, devices):
    """The result of the job, and the losses that its first process printed."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        script = support.write_script(directory, WATCHED)
        result = support.run_job(
            script,
            processes,
            str(EXAMPLES / f"{example}.py"),
            options=("--devices-per-process", str(devices)),
            env={"JAXFABRIC_ENABLE": mode, "PYTHONPATH": support.plugin_path(directory)},
            timeout=200,
        )
    assert result.returncode == 0, result.explain()
    assert not result.leftovers, result.explain()
    return result, losses(result.lines_of(0))


def alone(path, devices):
    """The same in one process, without the launcher and the switch."""
    return support.Job([sys.executable, str(path)], {"JAX_NUM_CPU_DEVICES": str(devices)}).finish(
        200
    )


@functools.cache
def without_the_fabric(example, devices):
    result = alone(EXAMPLES / f"{example}.py", devices)
    assert result.returncode == 0, result.explain()
    return losses(result.stdout.splitlines())


def losses(lines):
    found = [m[1] for line in lines if (m := re.match(r"step +\d+  loss (\S+)  on one", line))]
    assert len(found) >= 5, lines
    return np.array(found, np.float32)


def check(example, mode, processes, devices):
    result, _ = on_the_fabric(example, mode, processes, devices)
    for rank in range(processes):
        (watched,) = (x for x in result.lines_of(rank) if x.startswith("watched "))
        entries, counters = json.loads(watched.removeprefix("watched "))
        assert {op for op, _ in entries} == COLLECTIVES[example]
        assert {runner for _, runner in entries} == {"jaxfabric"}
        assert counters["communicators"] > 0
    assert f"{processes * devices} device(s) in {processes} process(es)" in result.stdout
    last = [x for x in result.lines_of(0) if not x.startswith("watched ")][-1]
    difference = re.fullmatch(r"within (\S+) of one device \(tolerance 1e-05\)", last)
    assert float(difference[1]) <= TOLERANCE


MODES = [
    *[(name, "1") for name in COLLECTIVES if name not in ("auto_sharded", "expert_parallel")],
    ("auto_sharded", "hlo"),
]
SHAPES = [(2, 2), (1, 4)]  # processes, devices of each


@pytest.mark.parametrize(("processes", "devices"), SHAPES)
@pytest.mark.parametrize(("example", "mode"), MODES)
def test_on_the_fabric(example, mode, processes, devices):
    check(example, mode, processes, devices)
    _, found = on_the_fabric(example, mode, processes, devices)
    np.testing.assert_allclose(
        found, without_the_fabric(example, processes * devices), rtol=TOLERANCE
    )


@pytest.mark.parametrize(("processes", "devices"), SHAPES)
def test_experts_on_the_fabric(processes, devices):
    check("expert_parallel", "1", processes, devices)
    result, _ = on_the_fabric("expert_parallel", "1", processes, devices)
    tokens = re.findall(r"device \d gets +(\d+) of 256 tokens", result.stdout)
    assert len(tokens) == 4
    assert sum(map(int, tokens)) == 256
    assert re.search(r"within \S+ of numpy \(tolerance 1e-05\)", result.stdout)


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_losses_have_the_same_bits_however_devices_are_spread(processes, devices):
    _, found = on_the_fabric("transformer_tensor_parallel", "1", processes, devices)
    _, expected = on_the_fabric("transformer_tensor_parallel", "1", 1, 4)
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


def test_an_example_says_when_losses_differ(tmp_path):
    source = (EXAMPLES / "pipeline_parallel.py").read_text()
    assert source.count("jax.lax.psum(") == 1
    script = tmp_path / "pipeline_parallel.py"
    script.write_text(source.replace("jax.lax.psum(", "jax.lax.pmean("))
    shutil.copy(EXAMPLES / "common.py", tmp_path)
    result = alone(script, 2)
    assert result.returncode == 1, result.explain()
    assert "from one device: more than the tolerance 1e-05" in result.stderr, result.explain()


@pytest.mark.parametrize("example", COLLECTIVES)
def test_a_number_of_devices_that_does_not_divide(example):
    result = alone(EXAMPLES / f"{example}.py", 3)
    assert result.returncode == 1, result.explain()
    assert "3 devices cannot share" in result.stderr, result.explain()


def test_the_commands_of_the_page():
    page = (support.ROOT / "docs" / "switch.md").read_text()
    commands = re.findall(r"JAXFABRIC_ENABLE=(\w+) jaxfabric run -n 2 examples/(\w+)\.py", page)
    assert commands == [("hlo" if name == "auto_sharded" else "1", name) for name in COLLECTIVES]
    for mode, name in commands:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f"JAXFABRIC_ENABLE={mode} jaxfabric run -n 2 examples/{name}.py" in text


@pytest.mark.parametrize("name", [*COLLECTIVES, "transformer", "common"])
def test_no_jaxfabric_in_them(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    names = {x.name for node in ast.walk(tree) for x in getattr(node, "names", ())}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "jax" in names
    assert not any(name.startswith("jaxfabric") for name in names)
