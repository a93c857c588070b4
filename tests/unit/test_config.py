import dataclasses
import inspect
import re

import pytest
import support

import jaxfabric
from jaxfabric import config
from jaxfabric.config import Config, ConfigError, LauncherEnvironment, unknown_variables


def test_defaults_need_no_environment():
    config = Config.from_environment({})
    assert config.deadline == 300.0
    assert config.segment_bytes == 16 << 20


def test_argument_wins_over_variable():
    config = Config.from_environment({"JAXFABRIC_DEADLINE": "5"}, deadline=7.0)
    assert config.deadline == 7.0


def test_none_is_no_argument():
    assert Config.from_environment({"JAXFABRIC_DEADLINE": "5"}, deadline=None).deadline == 5.0


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().deadline = 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", 1 << 20), ("1M", 1 << 20), ("64k", 1 << 16), ("2GiB", 2 << 30), ("1 MB", 1 << 20)],
)
def test_sizes(text, value):
    assert Config.from_environment({"JAXFABRIC_SEGMENT_BYTES": text}).segment_bytes == value


@pytest.mark.parametrize(
    ("variable", "text", "remedy"),
    [
        ("JAXFABRIC_DEADLINE", "soon", "number"),
        ("JAXFABRIC_DEADLINE", "0", "at least 0.001"),
        ("JAXFABRIC_DEADLINE", "-3", "at least"),
        ("JAXFABRIC_DEADLINE", "inf", "finite"),
        ("JAXFABRIC_DEADLINE", "nan", "finite"),
        ("JAXFABRIC_DEADLINE", "1e+300", "at most 1000000000"),
        ("JAXFABRIC_IN_STEP_MICROSECONDS", "1e+30", "at most 1000000000"),
        ("JAXFABRIC_SEGMENT_BYTES", "4611686018427387904", "at most 1099511627776"),
        ("JAXFABRIC_SEGMENT_BYTES", "16 MBytes", "16M"),
        ("JAXFABRIC_SEGMENT_BYTES", "1", "at least 65536"),
        ("JAXFABRIC_LOG_LEVEL", "loud", "error, warning, info"),
        ("JAXFABRIC_NET_INTERFACE", "eth0,10.0.0.0/33", "10.0.0.0/8"),
        ("JAXFABRIC_NET_PORT_RANGE", "40100-40000", "40000-40100"),
        ("JAXFABRIC_NET_PORT_RANGE", "0-10", "40000-40100"),
        ("JAXFABRIC_NET_PORT_RANGE", "1-65536", "40000-40100"),
        ("JAXFABRIC_NET_PORT_RANGE", "80-", "40000-40100"),
        ("JAXFABRIC_TCP_SOCKETS", "0", "at least 1, at most 16"),
        ("JAXFABRIC_TCP_SOCKETS", "17", "at least 1, at most 16"),
        ("JAXFABRIC_PATTERN", "ring,round", "halving-doubling"),
        ("JAXFABRIC_NETWORK_COST", "30", "such as 30,1.2"),
        ("JAXFABRIC_NETWORK_COST", "nan,1", "such as 30,1.2"),
        ("JAXFABRIC_NETWORK_COST", "0,1", "such as 30,1.2"),
        ("JAXFABRIC_UNREACHABLE_AFTER", "1", "at least 2"),
        ("JAXFABRIC_GPU_WINDOWS", "maybe", "use one of on, off"),
    ],
)
def test_bad_value_names_variable_value_and_remedy(variable, text, remedy):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({variable: text})
    message = str(caught.value)
    assert f"{variable}={text}" in message
    assert remedy in message


@pytest.mark.parametrize("text", ["eth0", "Eth0, ib0", "10.0.0.0/8,fd00::/8", "10.0.0.1"])
def test_interfaces(text):
    # The case of a name counts.
    assert Config.from_environment({"JAXFABRIC_NET_INTERFACE": text}).net_interface == text


@pytest.mark.parametrize("text", ["40000-40100", "40000", "1-65535"])
def test_port_ranges(text):
    assert Config.from_environment({"JAXFABRIC_NET_PORT_RANGE": text}).net_port_range == text


def test_bad_argument_names_itself():
    with pytest.raises(ConfigError, match=r"deadline=-1"):
        Config(deadline=-1)
    with pytest.raises(ConfigError, match=r"segment_bytes=1\.5"):
        Config(segment_bytes=1.5)
    with pytest.raises(ConfigError, match=r"deadline='3'"):
        Config(deadline="3")


@pytest.mark.parametrize("name", ["", "Cubic!", "a" * 16])
def test_congestion_controls_have_names(name):
    with pytest.raises(ConfigError, match=f"tcp_congestion_control={name}: use auto, system, or"):
        Config(tcp_congestion_control=name)


def test_unknown_argument():
    with pytest.raises(ConfigError, match=r"unknown setting 'deadlin'.*deadline"):
        Config.from_environment({}, deadlin=3)


def test_options_have_the_types_the_core_takes():
    options = Config(deadline=3, log_level="info").options()
    # These only decide what is lowered.
    names = {field.name for field in dataclasses.fields(Config)}
    assert options.keys() == names - {"gpu_limits", "gpu_windows"}
    assert isinstance(options["deadline"], float)
    assert isinstance(options["segment_bytes"], int)
    assert options["log_level"] == 2


def test_misspelled_variable_is_reported_with_a_guess():
    good = {"JAXFABRIC_DEADLINE": "3", "JAXFABRIC_JOB": "x", "JAXFABRIC_CUDA": "1"}
    environ = {"JAXFABRIC_DEADLNE": "3", **good}
    assert unknown_variables(environ) == [
        "JAXFABRIC_DEADLNE is not a setting: did you mean JAXFABRIC_DEADLINE?"
    ]


def test_launcher_environment_round_trip():
    launcher = LauncherEnvironment(
        coordinator="127.0.0.1:1", process_id=1, num_processes=2, job="abc"
    )
    assert LauncherEnvironment.from_environment(launcher.variables()) == launcher
    assert LauncherEnvironment.from_environment({}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"JAXFABRIC_PROCESS_ID": "2"},
        {"JAXFABRIC_PROCESS_ID": "one"},
        {"JAXFABRIC_PROCESS_ID": ""},
        {"JAXFABRIC_NUM_PROCESSES": "0"},
        {"JAXFABRIC_COORDINATOR": ""},
        {"JAXFABRIC_COORDINATOR": "somewhere"},
        {"JAXFABRIC_COORDINATOR": "127.0.0.1:99999"},
    ],
)
def test_broken_launcher_environment_is_an_error(changes):
    environ = {
        "JAXFABRIC_COORDINATOR": "127.0.0.1:1",
        "JAXFABRIC_PROCESS_ID": "0",
        "JAXFABRIC_NUM_PROCESSES": "2",
    } | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        LauncherEnvironment.from_environment(environ)


_FORMS = {
    "gpu_limits": "OP[/RANKS[/KIND]]=BYTES",
    "net_interface": "NAME",
    "net_port_range": "FIRST-LAST",
    "network_cost": "measured, default or MICROSECONDS,GB/S",
    "pattern": "none or NAME,...",
    "tcp_congestion_control": "auto, system or NAME",
}


def test_the_page_of_settings_is_what_the_code_says():
    text = (support.ROOT / "docs" / "settings.md").read_text()
    rows = [[cell.strip("` ") for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    rows = {row[0]: row[1:] for row in rows if len(row) == 6 and row[1].startswith("JAXFABRIC_")}
    fields = dataclasses.fields(Config)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        variable, unit, default, span, purpose = rows[field.name]
        assert variable == f"JAXFABRIC_{field.name.upper()}"
        assert unit or field.type == "str", field.name
        assert purpose, field.name
        assert getattr(Config.from_environment({variable: default}), field.name) == field.default
        if field.name in _FORMS:
            assert span.startswith(_FORMS[field.name])
            continue
        if field.type == "str":
            assert span.split(", ") == list(config._CHOICES[field.name])
            continue
        ends = [config._parse(field, variable, end) for end in span.split(" to ")]
        assert ends == [field.metadata["minimum"], field.metadata["maximum"]], field.name
    # And no other variable, on the page or in the code.
    known = {row[0] for row in rows.values()} | {*config.LAUNCHER_VARIABLES, config.SWITCH_VARIABLE}
    known |= {*config.RUN_VARIABLES}
    assert {*re.findall(r"JAXFABRIC_[A-Z_]+", text)} == known
    assert rows.keys() < inspect.signature(jaxfabric.initialize).parameters.keys()


def test_patterns_have_the_names_of_the_core():
    from jaxfabric import _ext, _network_settings, _simulate

    names = {
        row["pattern"] for op in _simulate.OPS.values() for row in _ext.simulate(op, 8, 4, 1, {})
    }
    assert names == {*_network_settings.PATTERNS}


@pytest.mark.parametrize("text", ["none", "ring", "tree,bruck", "recursive-doubling"])
def test_patterns(text):
    assert Config.from_environment({"JAXFABRIC_PATTERN": text.upper()}).pattern == text


def test_network_costs_for_the_core():
    assert Config().options()["network_cost"] == "measured"
    assert Config(network_cost="default").options()["network_cost"] == ""
    assert Config(network_cost="30,1.2").options()["network_cost"] == "30,1.2"
