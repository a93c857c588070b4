"""Machines that give less than usual: descriptors, ports, system calls; and two jobs at once."""

import faults
import pytest

pytestmark = pytest.mark.timeout(120)

# Process 1 may open some more files than it has open at the start: `few`.
FEW_FILES = """
    import os, resource, sys, time
    import jax, jaxfabric, worker

    if os.environ["JAXFABRIC_PROCESS_ID"] == "1":
        files = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        print("files", files)
    began = time.monotonic()
    try:
        jaxfabric.initialize()
    except Exception as error:
        print("after", time.monotonic() - began)
        print(type(error).__name__, error, flush=True)
        raise
"""


def test_too_few_descriptors_are_told_at_the_start(tmp_path):
    path = faults.script(tmp_path, FEW_FILES)
    result = faults.launch(path, 2, 24).finish(40)
    assert result.returncode == 1, result.explain()
    assert not result.leftovers
    files, seconds, text = result.lines_of(1)
    limit = files.removeprefix("files ")
    assert text.startswith(f"RuntimeError this process may have {limit} files open and has ")
    assert "a job of 2 processes may need 19 more: raise the limit (ulimit -n " in text
    seconds, other = result.lines_of(0)
    assert other.startswith("RendezvousError process 1 on "), result.explain()
    assert f"cannot take part: this process may have {limit} files open" in other
    # Nobody has waited for a deadline.
    assert float(seconds.removeprefix("after ")) < 15, result.explain()
    assert not any(p["ended_by_launcher"] for p in faults.summary(result)["processes"])
