"""The examples, and the code and commands of the README, do what they say."""

import re
import subprocess
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(240)

EXAMPLES = support.ROOT / "examples"
README = (support.ROOT / "README.md").read_text()


def blocks(page, language="python"):
    """The code in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def digits(n, devices=1):
    pytest.importorskip("sklearn")
    options = ("--devices-per-process", str(devices)) if devices > 1 else ()
    result = support.run_job(EXAMPLES / "digits_parallel.py", n, options=options, timeout=180)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers, result.explain()
    return result


@pytest.mark.parametrize(("n", "devices"), [(2, 1), (4, 1), (1, 4), (2, 2)])
def test_digits(n, devices):
    result = digits(n, devices)
    assert result.lines_of(0)[0] == f"{n * devices} ranks in {n} process(es)"
    assert sum("epoch" in line for line in result.lines_of(0)) == 5
    for rank in range(n):
        last = result.lines_of(rank)[-1]
        accuracy = float(re.search(r"test accuracy ([\d.]+)%", last)[1])
        assert accuracy > 95, last
        assert "match those of one device" in last
        assert float(re.search(r"largest difference ([\d.e+-]+)", last)[1]) <= 1e-5


def test_digits_without_the_launcher():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-P", str(EXAMPLES / "digits_parallel.py")]
    result = support.Job(command).finish(180)
    assert result.returncode == 0, result.explain()
    assert "match those of one device" in result.stdout


def test_digits_says_when_parameters_differ(tmp_path):
    pytest.importorskip("sklearn")
    source = (EXAMPLES / "digits_parallel.py").read_text()
    broken = source.replace("EPOCHS = 25", "EPOCHS = 2").replace(
        "total=partial(psum", "total=partial(jaxfabric.lax.pmean"
    )
    assert broken.count("pmean") == 1
    script = support.write_script(tmp_path, broken)
    result = support.run_job(script, 2, timeout=180)
    assert result.returncode == 1, result.explain()
    assert "DIFFER FROM" in result.stdout


@pytest.mark.parametrize(("n", "devices"), [(1, 1), (3, 1), (2, 2)])
def test_hello(n, devices):
    options = ("--devices-per-process", str(devices))
    result = support.run_job(EXAMPLES / "hello_psum.py", n, options=options)
    assert result.returncode == 0, result.explain()
    ranks = n * devices
    for process in range(n):
        expected = f"process {process} of {n}: the sum is {ranks * (ranks + 1) // 2}"
        assert result.lines_of(process) == [expected]


def test_the_code_of_the_readme(tmp_path):
    (code,) = blocks(README)
    result = support.run_job(support.write_script(tmp_path, code), 2)
    assert result.returncode == 0, result.explain()
    assert result.lines_of(0) == result.lines_of(1) == ["[1. 3. 5. 7.]"]


def test_an_exported_program_runs_in_other_processes(tmp_path):
    pytest.importorskip(
        "flatbuffers", reason="jax.export writes files with it: pip install '.[export]'"
    )
    page = (support.ROOT / "docs" / "switch.md").read_text()
    for code, processes, said in zip(
        blocks(page), (1, 2), ([], ["[ 4.  6.  8. 10.]"]), strict=True
    ):
        code = code.replace("step.bin", str(tmp_path / "step.bin"))
        result = support.run_job(support.write_script(tmp_path, code), processes)
        assert result.returncode == 0, result.explain()
        assert [result.lines_of(process) for process in range(processes)] == [said] * processes


def test_the_commands_of_the_readme_exist():
    commands = blocks(README, "sh")
    assert [block.count("\n") for block in commands] == [1, 1]
    for block in commands:
        assert block.startswith("python3 -m venv .venv && .venv/bin/pip install '.[")
    assert "jaxfabric run -n 2 examples/digits_parallel.py" in commands[0]
    help_text = subprocess.run(
        [sys.executable, "-P", "-m", "jaxfabric", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "--devices-per-process" in help_text


PAGES = [support.ROOT / "README.md", *sorted((support.ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
