"""What the report says when it has little to say."""

import dataclasses

import jaxfabric
from jaxfabric import _report


def test_a_report_without_collectives_says_what_to_do(monkeypatch):
    def text(*entries):
        monkeypatch.setattr(_report, "_entries", dict(enumerate(entries)))
        return str(jaxfabric.report())

    assert "JAXFABRIC_ENABLE=1, or call jaxfabric.enable() before the program" in text()
    monkeypatch.setenv("JAXFABRIC_ENABLE", "1")
    assert "JAXFABRIC_ENABLE is set, but the switch is off" in text()
    monkeypatch.setenv("JAXFABRIC_ENABLE", "xla")
    assert "JAXFABRIC_ENABLE=xla: use 0, 1 or" in text()
    with jaxfabric.enabled():
        assert 'mode "lax"' in text()
        assert 'jaxfabric.enable("hlo")' in text()
    with jaxfabric.enabled("hlo"):
        assert 'mode "hlo"' in text()
        assert "shard its arrays" in text()
        entry = _report.Entry("f", 0, "psum int2[8]", "x.py:1", 2, _report.XLA, "why")
        assert text(entry).endswith(
            "1 run by XLA\njaxfabric runs none of them, for the reasons above"
        )
        assert "none of them" not in text(entry, dataclasses.replace(entry, runner="jaxfabric"))
    assert "\n" not in text()
