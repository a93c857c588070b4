"""A job that runs cases on a mesh over several processes; each checks what its own ranks got.

Usage, under `jaxfabric run` with eight devices in all: conformance_job.py K N
runs every N-th batch of cases from the K-th on. Every process prints what it compared, as JSON.
"""

from __future__ import annotations

import collections
import json
import sys

import jaxfabric


def main() -> None:
    jaxfabric.initialize()
    import chosen
    import faces
    import jax
    import runner

    assert jax.device_count() == 8
    which, parts = int(sys.argv[1]), int(sys.argv[2])
    compared: collections.Counter[str] = collections.Counter()
    rows: collections.Counter[str] = collections.Counter()
    for batch in runner.batches(chosen.for_jobs())[which::parts]:
        for face in faces.ON_FABRIC:
            if taken := [case for case in batch if face.takes(case) and across(case, face)]:
                for case, outcome in runner.run_each(taken, face).items():
                    rows[face.name] += runner.compare(case, outcome)
                    compared[face.name] += 1
    print(json.dumps({"cases": compared, "rows": rows}), flush=True)


def across(case, face) -> bool:
    """Whether the case stays on the fabric: Gloo is not what this job is about."""
    import capabilities

    return not capabilities.against(face.beside, case)


if __name__ == "__main__":
    main()
