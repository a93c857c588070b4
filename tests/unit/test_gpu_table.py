"""Which calls on GPUs the table gives to whom, and how it is changed and printed."""

from __future__ import annotations

import json

import pytest

from jaxfabric import cli, config, gpu_table
from jaxfabric.gpu_table import decide


@pytest.mark.parametrize(
    ("op", "dtype", "size", "ranks", "fabric"),
    [
        ("all_reduce", "bfloat16", 8, 2, True),
        ("all_reduce", "float32", (64 << 20) - 4, 8, True),
        ("all_reduce", "float32", 64 << 20, 8, False),
        ("all_reduce", "int32", 512 << 10, 8, False),
        ("all_reduce", "float64", (512 << 10) - 8, 8, True),
        ("all_reduce", "float16", 512 << 10, 6, True),
        ("all_gather", "int8", 1 << 20, 4, True),
        ("all_gather", "int8", 64 << 20, 4, False),
        ("broadcast", "bool", 4 << 20, 8, False),
        ("permute", "float32", 0, 3, False),
        ("all_to_all", "float32", 8, 16, False),
        ("barrier", "int32", 4, 1000, True),
    ],
)
def test_decisions(op, dtype, size, ranks, fabric):
    decision = decide(op, dtype, size, ranks)
    assert decision.fabric == fabric
    assert op in decision.reason
    assert decision == decide(op, dtype, size, ranks)


def test_reasons_are_in_words():
    assert decide("all_reduce", "int32", 1 << 20, 4).reason == (
        "1 MiB is below 2 MiB, the limit for all_reduce of types other than float32, float16 and "
        "bfloat16 on 4 GPUs"
    )
    assert decide("permute", "int32", 8, 5).reason == "no limit is known for permute on 5 GPUs"
    assert decide("permute", "int32", 1001, 2).reason.startswith("1,001 bytes is below")


def overruled(text, *call):
    return decide(*call, config.parse_gpu_limits("x=", text))


def test_limits_overrule_the_table_and_the_last_that_fits_wins():
    text = " all_reduce/8/float=1M , all_to_all=0,*/16 = 2MiB, */16/other=1K,"
    assert not overruled(text, "all_reduce", "float32", 1 << 20, 8).fabric
    assert overruled(text, "all_reduce", "int32", 400 << 10, 8).fabric
    assert overruled(text, "all_reduce", "float32", 1 << 20, 4).fabric
    assert not overruled(text, "all_to_all", "float32", 0, 2).fabric
    assert overruled(text, "all_to_all", "float32", 8, 16).fabric is True
    assert overruled(text, "permute", "int8", (1 << 10) - 1, 16).reason == (
        "1,023 bytes is below 1 KiB, the limit for permute on 16 GPUs (gpu_limits)"
    )
    for text in ("*=0", "broadcast=0, barrier=0"):
        assert not overruled(text, "broadcast", "int8", 0, 2).fabric
        assert not overruled(text, "barrier", "int32", 0, 2).fabric
    assert overruled("*=1K", "barrier", "int32", 1 << 20, 2).fabric


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("psum=3", r"'psum=3' is not OP\[/RANKS\[/KIND\]\]=BYTES.*all_reduce, all_gather"),
        ("all_reduce", "'all_reduce' is not OP"),
        ("all_reduce/8/float/1=3", "is not OP"),
        ("all_reduce/eight=3", "'eight' in 'all_reduce/eight=3' is no number of ranks"),
        ("all_reduce/0=3", "'0' in 'all_reduce/0=3' is no number of ranks"),
        ("all_reduce/8/int=3", "'int' in 'all_reduce/8/int=3' is not float, other or"),
        ("all_reduce=much", "JAXFABRIC_GPU_LIMITS=all_reduce=much: use a number of bytes"),
    ],
)
def test_what_is_no_limit_is_an_error(text, message):
    with pytest.raises(config.ConfigError, match=message) as caught:
        config.Config.from_environment({"JAXFABRIC_GPU_LIMITS": text})
    assert str(caught.value).startswith("JAXFABRIC_GPU_LIMITS=")
    with pytest.raises(config.ConfigError, match="gpu_limits="):
        config.Config(gpu_limits=text)


def test_the_command_prints_the_table(monkeypatch, capsys):
    monkeypatch.setenv("JAXFABRIC_GPU_LIMITS", "all_reduce/16=1M,broadcast=0")
    assert cli.main(["gpu-table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ranks", "op", "types", "XLA", "runs", "it", "from"]
    assert len({len(line.partition("  (")[0]) for line in lines[:-1]}) == 1  # In columns.
    assert ["8", "all_reduce", "other", "512", "KiB"] in map(str.split, lines)
    assert ["16", "all_reduce", "float", "1", "MiB", "(gpu_limits)"] in map(str.split, lines)
    assert ["2", "broadcast", "any", "0", "(gpu_limits)"] in map(str.split, lines)
    assert cli.main(["gpu-table", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(lines) - 2  # The titles, and gpu_windows.
    for row in rows:
        if row["limit"]:
            call = (row["op"], {"other": "int32"}.get(row["kind"], "float32"))
            limits = config.parse_gpu_limits("", "all_reduce/16=1M,broadcast=0")
            assert decide(*call, row["limit"] - 1, row["ranks"], limits).fabric
            assert not decide(*call, row["limit"], row["ranks"], limits).fabric
    monkeypatch.setenv("JAXFABRIC_GPU_LIMITS", "everything")
    assert cli.main(["gpu-table"]) == 2
    assert "JAXFABRIC_GPU_LIMITS=everything" in capsys.readouterr().err


def test_the_command_tells_of_a_variable_that_nobody_reads(monkeypatch, caplog):
    config.warn_of_unknown_variables.cache_clear()
    monkeypatch.setenv("JAXFABRIC_GPU_LIMIT", "*=0")
    assert cli.main(["gpu-table"]) == 0
    assert "did you mean JAXFABRIC_GPU_LIMITS?" in caplog.text


def test_help_names_the_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["gpu-table", "--help"])
    assert "JAXFABRIC_GPU_LIMITS" in capsys.readouterr().out


def test_each_op_is_in_the_table():
    ops = {row.op for row in gpu_table.rows()}
    assert ops == {*gpu_table.OPS} - {"barrier"}
