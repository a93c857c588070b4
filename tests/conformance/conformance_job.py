"""A job that runs cases on a mesh over several processes; each checks what its own ranks got.

Usage, under `jaxfabric run` with eight devices in all: conformance_job.py K N
runs every N-th program of cases from the K-th on. Every process prints what it compared, as JSON.
"""

from __future__ import annotations

import collections
import json
import sys

import jaxfabric


def main() -> None:
    jaxfabric.initialize()
    import jax
    import runner

    assert jax.device_count() == 8
    compared: collections.Counter[str] = collections.Counter()
    rows: collections.Counter[str] = collections.Counter()
    for face, batch in programs(int(sys.argv[1]), int(sys.argv[2])):
        for case, outcome in runner.run_each(batch, face).items():
            rows[face.name] += runner.compare(case, outcome)
            compared[face.name] += 1
    print(json.dumps({"cases": compared, "rows": rows}), flush=True)


def programs(which: int, parts: int) -> list[tuple]:
    """Faces with the batches they run: each case on one of the faces that take it, in turn.

    What the faces make of a case is compared in one process. Here cases stay on the fabric: Gloo
    is not what this job is about.
    """
    import chosen
    import faces
    import rules
    import runner

    dealt = {face: [] for face in faces.ON_FABRIC}
    for case in chosen.for_jobs():
        able = [f for f in dealt if f.takes(case) and not rules.against(f.beside, case)]
        if able:
            dealt[min(able, key=lambda face: len(dealt[face]))].append(case)
    return [(f, batch) for f, cases in dealt.items() for batch in runner.batches(cases)][
        which::parts
    ]


if __name__ == "__main__":
    main()
