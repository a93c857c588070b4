"""Random collectives of 2 x 2 processes, between hosts whose network fails all the time.

    python tests/soak.py --collectives 100000

Two network namespaces, joined by a wire that loses packets, is late with them, and is cut for up
to a second. Every result is compared with numpy, and memory, open files and threads must not grow.
Exits with 1 if something is wrong. Needs what tests/netns.py needs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import sys
import threading
import time

import netns
import netns_wire
import support

JOB = pathlib.Path(__file__).resolve().parent / "fault" / "soak_job.py"
# Little shared memory: all of it has been used soon, and what is used first is no growth.
SETTINGS = {"JAXFABRIC_DEADLINE": "60", "JAXFABRIC_SEGMENT_BYTES": "4M"}
# What may grow. What a process holds of memory that it has freed goes up and down by some 30 MiB,
# and pools, those of XLA and that for completions, start a thread when they first need one more.
GROWTH = {"kib": 32 << 10, "files": 0, "fixed threads": 0, "threads": 8}


class Weather(threading.Thread):
    """Changes what the wire does, for a while each; ends with a good one."""

    def __init__(self, wire: netns_wire.Wire, seed: int) -> None:
        super().__init__(daemon=True)
        self._wire, self._random = wire, random.Random(seed)
        self._end = threading.Event()
        self.spells = {"calm": 0, "late": 0, "lossy": 0, "cut": 0}

    def run(self) -> None:
        first = list(self.spells)
        while not self._end.is_set():
            kind = (
                first.pop() if first else self._random.choices(list(self.spells), (6, 2, 2, 1))[0]
            )
            self.spells[kind] += 1
            self._wire.tell("loss 0.02" if kind == "lossy" else "loss 0")
            self._wire.tell("delay 0.002 0.01" if kind == "late" else "delay 0 0")
            if kind == "cut":
                self._wire.tell("cut")
            self._end.wait(self._random.uniform(0.1, 1.0))
            if kind == "cut":
                self._wire.tell("restore")
        self._wire.tell("loss 0")
        self._wire.tell("delay 0 0")

    def finish(self) -> None:
        self._end.set()
        self.join()


def run(collectives: int, *, programs: int, seed: int, timeout: float) -> dict:
    """One soak; returns its figures, of which `problems` must be empty."""
    began = time.monotonic()
    with netns.Lab() as lab:
        hosts = lab.host("hosta"), lab.host("hostb")
        with netns_wire.Wire(*hosts) as wire:
            arguments = {"collectives": collectives, "programs": programs, "seed": seed}
            command = [f"--{name}={value}" for name, value in arguments.items()]
            lines = support.launchers(hosts, str(JOB), *command, counts=(2, 2))
            weather = Weather(wire, seed)
            env = SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            jobs = [support.Job(line, env) for line in lines]
            weather.start()
            try:
                results = [job.finish(timeout) for job in jobs]
            finally:
                weather.finish()
            packets = wire.counts()
    figures = {"seconds": round(time.monotonic() - began, 1), "packets": packets}
    return figures | {"spells": weather.spells} | judge(results, collectives)


def judge(results: list[support.JobResult], collectives: int) -> dict:
    problems = [r.explain() for r in results if r.returncode != 0 or r.leftovers]
    held: dict[str, tuple[int, int]] = {}
    for process in range(4):
        lines = results[process // 2].lines_of(process)
        said = [json.loads(line) for line in lines if line.startswith("{")]
        wrong, at, done = (
            [each for each in said if each["event"] == event] for event in ("wrong", "at", "done")
        )
        problems += [f"process {process}: {each}" for each in wrong]
        if len(done) != 1 or done[0]["collectives"] < collectives or done[0]["wrong"]:
            problems.append(f"process {process} did not do all: {done}")
        if len(at) < 3:
            problems.append(f"process {process} has said too little")
            continue
        # In the first third not all programs have run.
        third = len(at) // 3
        for what, more in GROWTH.items():
            before = max(each[what] for each in at[third : 2 * third])
            after = max(each[what] for each in at[2 * third :])
            held[f"{what} of process {process}"] = (before, after)
            if after > before + more:
                problems.append(f"process {process}: {what}: {[each[what] for each in at]}")
    return {"held": held, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--programs", type=int, default=100, help="of 4 collectives each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=7200, help="seconds")
    options = parser.parse_args()
    if reason := netns.unavailable():
        sys.exit(reason)
    figures = run(
        options.collectives, programs=options.programs, seed=options.seed, timeout=options.timeout
    )
    print(json.dumps({k: v for k, v in figures.items() if k != "problems"}))
    print("\n".join(figures["problems"]) or "all as it must be")
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
