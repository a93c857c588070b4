"""`jaxfabric bench`: what it refuses, what its document holds, and that it sees wrong results."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import Mesh

import jaxfabric
from jaxfabric import _bench_worker, bench, cli

pytestmark = pytest.mark.timeout(120)


def run(*options):
    command = [sys.executable, "-P", "-m", "jaxfabric", "bench", "--op=psum", "--bytes=8"]
    result = support.Job([*command, "--rounds=1", *options]).finish(100)
    assert not result.leftovers, result.explain()
    return result


def status(*arguments):
    try:
        return cli.main(["bench", *arguments])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "psum,pmax"], "--op: 'pmax': use some of psum,"),
        (["--op", ""], "--op: '': use some of psum,"),
        (["--bytes", "8,1Q"], "--bytes: '8,1Q': use sizes"),
        (["--bytes", "8,"], "--bytes: '8,': use sizes"),
        (["--bytes", "0"], "--bytes: '0': use sizes"),
        (["--bytes", "8,1024GiB"], "--bytes 1099511627776: 2 ranks would need"),
        (["-n", "0"], "--num-processes: '0' is not a whole number"),
        (["-d", "x"], "--devices-per-process: 'x' is not a whole number"),
        (["-n", "1"], "--num-processes 1 with --devices-per-process 1: one rank"),
        (["--against", "nccl"], "--against: 'nccl': use some of xla"),
        (["--against", "mpi4jax", "-d", "2"], "mpi4jax with --devices-per-process 2: each"),
        (["--rounds", "1.5"], "--rounds: '1.5' is not a whole number"),
        (["--timeout", "soon"], "--timeout: 'soon' is not a number"),
    ],
)
def test_bad_values_are_named_before_anything_starts(arguments, named, capsys, monkeypatch):
    monkeypatch.setattr(bench.launch, "run", None)
    assert status(*arguments) == 2
    output = capsys.readouterr()
    assert named in output.err
    assert not output.out


def test_sizes_are_rounded_up_to_what_the_ranks_can_share():
    plan = bench.Plan(ops=("psum", "ppermute"), sizes=(8, 16, 17), processes=2, devices=2)
    assert plan.cases == (("psum", 16), ("psum", 32), ("ppermute", 16), ("ppermute", 32))


def test_a_run_gives_one_document():
    result = run("--json")
    assert result.returncode == 0, result.explain()
    document = json.loads(result.stdout)
    assert document["ranks"] == document["processes"] == 2
    assert document["cores"] > 0
    assert document["jax"] == jax.__version__
    (row,) = document["results"]
    assert (row["op"], row["bytes"], row["wrong"]) == ("psum", 8, {})
    assert set(row["us"]) == set(row["us_of_rounds"]) == {"jaxfabric", "xla"}
    assert row["times_faster"] > 0
    assert row["busbw"] == row["algbw"] > 0


def test_a_process_that_does_not_come_back_is_ended():
    result = run("-n=1", "-d=2", "--timeout=0.01")
    assert result.returncode == 1
    assert "was killed by SIGALRM, after 0.01 s without a result" in result.stderr
    assert "at psum of 8 B. Its last lines:\n" in result.stderr
    assert "_bench_worker.py" in result.stderr  # Where it was.


def test_a_wrong_result_is_an_error_and_never_a_time(capsys, monkeypatch):
    def job(plan, name, turn):
        wrong = "rank 1 got 2 values wrong" if (name, turn) == ("xla", "round 2 of 2") else None
        rows = [{"us": 2.0 * int(turn[6]), "wrong": None}, {"us": 4.0, "wrong": wrong}]
        return SimpleNamespace(run=lambda: rows)

    monkeypatch.setattr(bench, "_Job", job)
    assert status("--op=psum", "--bytes=8,2MiB", "--rounds=2") == 1
    output = capsys.readouterr()
    assert "xla: psum of 2 MiB: rank 1 got 2 values wrong" in output.err
    right, wrong = (line.split() for line in output.out.splitlines()[-4:-2])
    assert right == ["psum", "8", "B", "2.0~", "2.0~", "1.0", "0.004", "0.004"]
    assert wrong == ["psum", "2", "MiB", "4.0", "wrong", "-", "524", "524"]


def case(lax, op):
    mesh = Mesh(np.array(jax.devices()[:3]), ("ranks",))
    return _bench_worker._Case(_bench_worker._Side(lax, mesh, 3), op, 48, calls=4)


@pytest.mark.parametrize("op", bench.BUS_FACTORS)
def test_right_results_are_right(op):
    measured = case(jaxfabric.lax, op)
    assert measured.difference()
    for _ in range(2):
        measured.run()
        assert not measured.difference()


def late(x, axis):
    """The sum of the call before."""
    return jax.lax.psum(jnp.concatenate((15 - x[:1], x[1:])), axis)


@pytest.mark.parametrize(("psum", "count"), [(lambda x, _: x, 12), (late, 1)])
def test_wrong_results_are_described(psum, count):
    measured = case(SimpleNamespace(psum=psum), "psum")
    measured.run()
    assert f"rank 0 got {count} of 12 values wrong, the first of them" in measured.difference()
