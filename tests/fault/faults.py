"""Running jobs that fail, and reading what their processes said; see worker.py."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sys
import time
from typing import Any

import support

HERE = pathlib.Path(__file__).resolve().parent
ENV = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
HOST = socket.gethostname()
_started: list[support.Job] = []

# Adds up until something fails, and says what and when; joins as the launcher, or argv, says.
LOOP = """
    import sys
    import jax, jaxfabric, worker

    jaxfabric.initialize(*sys.argv[1:2], *map(int, sys.argv[2:]))
    n = jax.device_count()
    step = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x") / n)  # psum
    x = worker.blocks(1 << 18)
    with worker.failure():
        for i in range(1 << 20):
            x = step(x).block_until_ready()
            if i == 3:
                worker.say("looping")
"""


def script(directory: pathlib.Path, text: str) -> pathlib.Path:
    return support.write_script(directory, text)


def line(path: pathlib.Path, marker: str) -> str:
    """`job.py:12` for the line that ends in the comment `# marker`."""
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if text.endswith(f"# {marker}"):
            return f"{path.name}:{number}"
    raise AssertionError(f"no line of {path} is marked {marker}")


def launch(
    path: pathlib.Path,
    n: int,
    *arguments: object,
    devices: int | None = None,
    **settings: object,
) -> support.Job:
    """Starts a job under `jaxfabric run --json`; settings become JAXFABRIC_* variables."""
    options = ("--json",)
    if devices is not None:
        options += ("--devices-per-process", str(devices))
    argv = support.launcher(n, str(path), *map(str, arguments), options=options)
    return start(argv, **settings)


def start(argv: list[str], **settings: object) -> support.Job:
    """Starts a job; settings become JAXFABRIC_* variables."""
    env = {f"JAXFABRIC_{name.upper()}": str(value) for name, value in settings.items()}
    return _start(argv, env)


def launch_alone(path: pathlib.Path, *arguments: object) -> support.Job:
    """Starts one process without the launcher."""
    return _start([sys.executable, "-P", str(path), *map(str, arguments)], {})


def _start(argv: list[str], env: dict[str, str]) -> support.Job:
    job = support.Job(argv, ENV | env)
    _started.append(job)
    return job


def end_jobs() -> None:
    """Kills what a test that failed has left running."""
    while _started:
        job = _started.pop()
        if job.process.returncode is None:
            for pid in job.members():
                os.kill(pid, signal.SIGKILL)
            job.process.wait()


def events(output: str, rank: int | None = None, event: str | None = None) -> list[dict[str, Any]]:
    """What a rank said (without a rank: a process without a launcher), in order."""
    prefix = "{" if rank is None else f"[{rank}] {{"
    said = [
        json.loads("{" + text.removeprefix(prefix))
        for text in output.splitlines()
        if text.startswith(prefix)
    ]
    return [one for one in said if event is None or one.get("event") == event]


def only(output: str, rank: int | None, event: str) -> dict[str, Any]:
    found = events(output, rank, event)
    assert len(found) == 1, f"{len(found)} times {event} on rank {rank}:\n{output}"
    return found[0]


def summary(result: support.JobResult) -> dict[str, Any]:
    """What the launcher says with --json."""
    return json.loads(result.stdout.splitlines()[-1])


def rank_of(said: dict[str, Any]) -> str:
    """How an error names the first rank of the process that said something."""
    return f"rank {said['rank']} (process {said['process']})"


def name_of(said: dict[str, Any]) -> str:
    """How an error describes it."""
    return f"rank {said['rank']} (process {said['process']}, pid {said['pid']} on {HOST})"


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> float:
    """Sends a signal; returns when, on the clock of worker.say."""
    now = time.monotonic()
    os.kill(pid, number)
    return now


def assert_clean(result: support.JobResult, rank: int | None) -> None:
    """The process held nothing of the fabric after shutdown()."""
    left = only(result.stdout, rank, "left")
    assert left["descriptors"] == {}, result.explain()
    assert left["threads"] == [], result.explain()
    assert left["mappings"] == 0, result.explain()
    assert not result.leftovers, result.explain()


def measured(name: str, **seconds: float) -> None:
    """Prints times of a case: shown by pytest -s or -rP."""
    print(f"{name}: " + ", ".join(f"{what} {value:.3f} s" for what, value in seconds.items()))
