"""The pass over programs for GPUs: it takes all of a program's collectives, or none."""

from __future__ import annotations

import hlo_programs
import pytest
from hlo_programs import ALL, transformed

from jaxfabric import _compat, config

SMALL = f"  %s = f32[8] all-reduce(%p), {ALL}, to_apply=%add"


def run(*more, limits="", devices=(4, 5, 6, 7), **options):
    body = ["  %p = f32[8] parameter(0)", SMALL, *more]
    result = transformed(
        body, devices=devices, limits=config.parse_gpu_limits("", limits), **options
    )
    text = "" if result.data is None else _compat.parse_hlo(result.data).to_string()
    return hlo_programs.TARGET.findall(text), text, result


def test_all_are_taken():
    calls, text, result = run(f"  ROOT %t = f32[32] all-gather(%s), {ALL}, dimensions={{0}}")
    assert calls == ["all_reduce", "all_gather"]
    assert all(record.taken and not record.reason for record in result.records)
    assert "partition-id" not in text
    assert len(result.sites) == 2


LEFT = {
    "what the fabric does not have": (
        f"  ROOT %t = f32[8] all-reduce(%s), {ALL}, to_apply=%product",
        "",
        "the reduction multiply",
    ),
    "a large one": (
        f"  ROOT %t = f32[33554432] all-gather(%b), {ALL}, dimensions={{0}}",
        "",
        "128 MiB is not below 64 MiB, the limit for all_gather on 4 GPUs",
    ),
    "one that is overruled": (
        f"  ROOT %t = f32[32] all-gather(%s), {ALL}, dimensions={{0}}",
        "all_gather=0",
        "128 bytes is not below 0 bytes, the limit for all_gather on 4 GPUs (gpu_limits)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_one_that_is_left_leaves_all(name):
    line, limits, reason = LEFT[name]
    big = "  %b = f32[8388608] broadcast(%s), dimensions={}" if "%b" in line else None
    more = [line]
    if big:
        more = ["  %z = f32[] constant(0)", big.replace("%s", "%z"), line]
    calls, _, result = run(*more, limits=limits)
    assert calls == []
    assert result.data is None
    first, second = result.records
    assert (first.taken, second.taken) == (False, False)
    assert second.reason == reason
    assert first.reason.startswith("the program has all-")
    assert first.reason.endswith(reason)


def test_groups_of_one_are_not_asked_about():
    alone = "channel_id=1, replica_groups={{0},{1},{2},{3}}, use_global_device_ids=true"
    calls, text, _ = run(f"  ROOT %t = f32[8] all-reduce(%s), {alone}, to_apply=%add")
    assert calls == ["all_reduce"]
    assert "copy(" in text


def test_on_cpus_nothing_is_asked():
    body = [
        "  %p = f32[8] parameter(0)",
        SMALL,
        f"  ROOT %t = f32[8] all-reduce(%s), {ALL}, to_apply=%product",
    ]
    result = transformed(body)
    assert [record.taken for record in result.records] == [True, False]


def test_an_unknown_number_of_gpus_is_left_to_xla():
    calls, _, result = run("  ROOT %t = f32[8] negate(%s)", devices=(1, 2, 3))
    assert calls == []
    assert result.records[0].reason == "no limit is known for all_reduce on 3 GPUs"
