"""What needs a kernel of its own: netem, which not every one has, and a clock that may jump."""

import json
import os
import pathlib
import re
import subprocess
import sys

import faults
import pytest
import support

pytestmark = pytest.mark.timeout(240)

PROGRAM = "run-in-rdma-vm.sh"


@pytest.fixture
def vm():
    """The program that runs a command in a user-mode Linux."""
    folder = os.environ.get("RDMA_VM", support.ROOT.parent / "shared" / "rdma-vm")
    path = pathlib.Path(folder) / PROGRAM
    if not path.exists():
        pytest.skip(f"there is no {path}; RDMA_VM=DIR says where {PROGRAM} is")
    found = subprocess.run([path, "-t", "60", "--", "true"], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(found.stderr.strip())
    return path


LOOP = """
    import os, sys, time
    import jax, jaxfabric, worker
    import numpy as np

    jaxfabric.initialize()
    n = jax.device_count()
    step = worker.spmd(lambda x: jaxfabric.lax.psum(x, "x"))
    x = worker.blocks(30_000, dtype=np.int32)
    with worker.failure():
        for i in range(1 << 20):
            assert (worker.local(step(x))[0] == n * (n + 1) // 2).all()
            if i == 1:
                worker.say("looping")
            if i > 1 and i % 3 == 0:
                worker.say("on")
                told = worker.blocks(1) * os.path.exists(sys.argv[1])
                if worker.local(step(told))[0].any():
                    break
"""


def test_netem_and_jumps_of_the_clock_change_nothing(vm, tmp_path):
    path = faults.script(tmp_path, LOOP)
    inside = pathlib.Path(__file__).with_name("in_vm.py")
    argv = [vm, "-t", "200", "--", sys.executable, str(inside), str(path)]
    ran = subprocess.run(argv, capture_output=True, text=True, env=support.environment(faults.ENV))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results, network = (json.loads(line) for line in ran.stdout.splitlines()[-2:])
    for process, result in enumerate(results):
        assert result["returncode"] == 0, result
        assert not result["leftovers"], result
        faults.only(result["stdout"], process, "finished")
    sent, dropped = re.search(r"(\d+) pkt \(dropped (\d+)", network).groups()
    assert int(dropped) > int(sent) / 300 > 0
