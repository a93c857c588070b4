"""`jaxfabric bench simulate`: what it predicts, what it refuses, and how it compares."""

import json
import subprocess
import sys

import pytest
import support

from jaxfabric import _ext, _simulate, bench, cli

pytestmark = pytest.mark.timeout(120)

FLAT = {"hop": 1e-12, "host_beta": 1e-9, "beta": 1e-9, "alpha": 1e-5, "gamma": 1e-12}


def run(capsys, *arguments):
    assert cli.main(["bench", "simulate", *arguments]) == 0
    return capsys.readouterr().out


def document(capsys, *arguments):
    return json.loads(run(capsys, "--json", *arguments))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "psum,pmax"], "--op: 'pmax': use some of psum,"),
        (["--ranks", "8,0"], "--ranks: '0' is not a whole number from 1 to 1048576"),
        (["--ranks", "1048577"], "--ranks: '1048577' is not a whole number"),
        (["--link", "0"], "--link: '0' is not a number above 0"),
        (["--alpha", "fast"], "--alpha: 'fast' is not a number above 0"),
        (["--bytes", "8,"], "--bytes: '8,': use sizes"),
    ],
)
def test_bad_values_are_named(arguments, named, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "simulate", *arguments])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_both_ways_to_start_it_print_the_same():
    arguments = ["simulate", "--ranks=16", "--bytes=8"]
    texts = [
        subprocess.run(
            [sys.executable, "-P", "-m", *module, *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=support.environment(),
        ).stdout
        for module in (["jaxfabric.bench"], ["jaxfabric", "bench"])
    ]
    assert texts[0] == texts[1]
    assert "one-shot*" in texts[0]


def test_large_arrays_take_the_time_of_their_bytes():
    network = _simulate.Network(figures=FLAT, ranks_per_host=1)
    size, ranks = 1 << 30, 16
    (row,) = (row for row in network.collective("psum", size, ranks) if row["chosen"])
    assert row["seconds"] == pytest.approx(2 * (ranks - 1) / ranks * size * 1e-9, rel=0.01)
    assert row["model"] == pytest.approx(row["seconds"], rel=0.01)


def test_cores_that_all_ranks_share():
    """Of 8 hosts each sends 7 messages, which 2 cores carry one after the other."""
    figures = {"alpha": 9e-6, "overhead": 1e-9, "beta": 1e-15, "host_beta": 1e-15, "gamma": 1e-15}
    alone, shared, many = (
        next(row for row in network.collective("psum", 8, 8) if row["pattern"] == "one-shot")
        for network in (
            _simulate.Network(figures=figures, ranks_per_host=1, cores=cores)
            for cores in (0, 2, 999)
        )
    )
    assert alone["seconds"] == pytest.approx(9e-6, rel=0.1)
    assert shared["seconds"] == pytest.approx(8 * 7 * 9e-6 / 2, rel=0.01)
    assert many["seconds"] == alone["seconds"]


def test_every_op_has_a_choice_for_any_number_of_ranks():
    network = _simulate.Network(figures={})
    for op in _simulate.OPS:
        for ranks in (1, 2, 8, 9, 100, 4096):
            rows = network.collective(op, 0 if op == "barrier" else 4096, ranks)
            assert sum(row["chosen"] for row in rows) == 1, (op, ranks)


def test_on_one_host_there_is_no_pattern():
    (row,) = _simulate.Network(figures={}).collective("all_gather", 4096, 8)
    assert (row["pattern"], row["lanes"], row["between"], row["peers"]) == ("none", 0, 0, 0)


def test_what_leaves_a_narrow_switch_takes_longer():
    def seconds(pattern, oversubscription):
        network = _simulate.Network(
            figures={"oversubscription": oversubscription}, ranks_per_host=1
        )
        rows = network.collective("psum", 64 << 20, 256)
        return next(row["seconds"] for row in rows if row["pattern"] == pattern)

    assert seconds("halving-doubling", 8) > 2 * seconds("halving-doubling", 1)
    assert seconds("ring", 8) == pytest.approx(seconds("ring", 1))


def test_the_document_has_the_figures_the_start_up_and_all_patterns(capsys):
    told = document(capsys, "--ranks=16,65536", "--bytes=8,1MiB", "--all", "--link=12.5")
    assert told["network"]["figures"]["host_beta"] == pytest.approx(1 / 12.5e9)
    assert told["network"]["figures"].keys() == _ext.cost_model().keys()
    assert [start["hosts"] for start in told["start_up"]] == [2, 8192]
    assert told["start_up"][0]["rendezvous"] < told["start_up"][1]["rendezvous"]
    rows = told["collectives"]
    assert {row["pattern"] for row in rows if row["ranks"] == 65536} == {
        *("direct", "one-shot", "ring", "recursive-doubling", "halving-doubling"),
    }
    chosen = [row for row in rows if row["chosen"]]
    assert [(row["ranks"], row["bytes"]) for row in chosen] == [
        *((16, 8), (16, 1 << 20), (65536, 8), (65536, 1 << 20)),
    ]
    assert all(row["peers"] <= told["network"]["figures"]["most_peers"] for row in chosen)


def test_measured_times_stand_beside_predicted_ones(capsys, tmp_path):
    path = tmp_path / "bench.json"
    results = [
        {"op": "psum", "bytes": 1024, "us": {"jaxfabric": 100.0, "xla": 300.0}},
        {"op": "all_to_all", "bytes": 1024, "us": {"xla": 300.0}},
    ]
    path.write_text(json.dumps({"ranks": 4, "results": results}))
    (row,) = document(capsys, "--measured", str(path), "--ranks-per-host=2")["measured"]
    assert (row["op"], row["ranks"], row["hosts"], row["measured_us"]) == ("psum", 4, 2, 100.0)
    assert row["ratio"] == pytest.approx(row["predicted_us"] / 100)
    table = run(capsys, "--measured", str(path), "--ranks-per-host=2")
    assert table.split()[-1] == bench.number_text(row["ratio"])


@pytest.mark.parametrize("text", ["", "{}", '{"ranks": 2, "results": [1]}'])
def test_a_file_that_is_no_measurement_is_named(text, capsys, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert cli.main(["bench", "simulate", "--measured", str(path)]) == 2
    assert f"--measured {path}: it is no document" in capsys.readouterr().err
    assert cli.main(["bench", "simulate", "--measured", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_core_names_a_figure_or_an_op_it_does_not_know():
    with pytest.raises(KeyError, match="unknown figure of the cost model: gama"):
        _ext.simulate("all_reduce", 8, 2, 1, {"gama": 1.0})
    with pytest.raises(ValueError, match="no such collective: psum on 2 hosts of 1 ranks"):
        _ext.simulate("psum", 8, 2, 1, {})
