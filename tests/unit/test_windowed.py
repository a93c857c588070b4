"""Calls on GPUs whose arrays are in windows of XLA: which they are, and where there are none."""

from __future__ import annotations

import dataclasses
import re
import sys
import types

import fake_core
import jax
import numpy as np
import pytest
from test_cuda_lowering import CALLS, entries, lower
from test_lax_lowering import custom_calls

import jaxfabric
from jaxfabric import _compat, _windowed, cli, doctor, gpu_table, lax, runtime
from jaxfabric._import_check import runtime_extension_version

LARGE = jax.ShapeDtypeStruct((8, 512, 1024), np.float32)  # 2 MiB of each rank.
BUILT = ("0.12.0.1", (0, 5), (0, 2))


@pytest.fixture
def windows(monkeypatch):
    """As if the fabric had GPUs, and XLA windows."""
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")
    monkeypatch.setattr(runtime, "windows_problem", lambda: "")


def test_every_op_has_an_answer():
    without = {"ragged_all_to_all", "barrier", "all_reduce_rms_norm"}
    assert {*_windowed.ARRAYS} | without == {*gpu_table.OPS}
    for op in gpu_table.OPS:
        assert gpu_table.takes_windows(op, "float32", 1 << 30) == (op in _windowed.ARRAYS)


@pytest.mark.parametrize("op", _windowed.ARRAYS)
def test_what_takes_windows(op):
    limit = gpu_table.WINDOWS_FROM
    assert gpu_table.takes_windows(op, "float32", limit, "sum")
    assert not gpu_table.takes_windows(op, "float32", limit - 1, "sum")
    assert gpu_table.takes_windows(op, "int8", limit)
    assert not gpu_table.takes_windows(op, "int8", limit, "sum")
    assert not gpu_table.takes_windows(op, "float32", limit, "max")


def spaces(text):
    """Operands and results that are to be in memory space 1."""
    found = re.search(r"mhlo.frontend_attributes = \{(.*?)\}[,}]", text)
    return re.findall(r"(\w+)_memory_spaces = \"\{0:1\}", found[1] + "}" if found else "")


@pytest.mark.parametrize("name", [n for n in CALLS if n != "ragged_all_to_all"])
@pytest.mark.usefixtures("windows")
def test_large_calls_have_their_arrays_in_windows(name):
    call, op = CALLS[name]
    text = lower(lambda x: call(lax, x), x=LARGE)
    (found,) = custom_calls(text)
    (entry,) = entries(text)
    if name in ("pmax", "pmin"):
        assert found["target"] == "jaxfabric_all_reduce"
        assert spaces(text) == []
        return
    assert found["target"] == f"jaxfabric_{op}_windows"
    arrays = _windowed.ARRAYS[op]
    assert found["windows"] == arrays
    assert spaces(text) == [w for bit, w in ((1, "operands"), (2, "results")) if arrays & bit]
    # The mesh is that of the devices in order.
    assert found["positions"] == found["members"]
    assert entry.reason.endswith("; peers address its arrays")


@pytest.mark.usefixtures("windows")
def test_other_calls_have_not():
    def small(x):
        return lax.psum(x[0, 0], "j")

    assert "_windows" not in lower(small, x=LARGE)
    assert "_windows" not in lower(lambda x: lax.psum(x, "j"), x=LARGE, platforms=("cpu",))
    ints = jax.ShapeDtypeStruct(LARGE.shape, np.int32)
    assert "_windows" not in lower(lambda x: lax.psum(x, "j"), x=ints)
    assert "_windows" in lower(lambda x: lax.all_gather(x, "j"), x=ints)
    halves = lower(lambda x: lax.all_gather_matmul(x, x.T, "j"), x=LARGE)
    assert "all_gather_start" in halves
    assert "_windows" not in halves


def test_without_windows_calls_are_as_before(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")
    with_problem = lower(lambda x: lax.psum(x, "j"), x=LARGE)
    assert "_windows" not in with_problem
    assert "positions" not in with_problem
    assert runtime.windows_problem()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (BUILT, ""),
        (("0.12.3", (0, 5), (0, 4)), ""),
        (("0.11.2", (0, 4), (0, 1)), "built for jaxlib 0.12.0.1, and 0.11.2 is installed"),
        (("0.12.1", (0, 6), (0, 2)), "built for XLA FFI 0.5, jaxlib has 0.6"),
        (("0.12.1", None, (0, 2)), "built for XLA FFI 0.5, jaxlib has none"),
        (("0.12.1", (0, 5), (0, 1)), "extension for collectives 0.2, jaxlib has 0.1"),
        (("0.12.1", (0, 5), (1, 2)), "extension for collectives 0.2, jaxlib has 1.2"),
        (("0.12.1", (0, 5), None), "extension for collectives 0.2, jaxlib has none"),
    ],
)
def test_it_is_used_with_what_it_was_built_for(installed, reason):
    problem = _windowed.mismatch(built=BUILT, installed=installed)
    assert reason in problem
    assert bool(problem) == bool(reason)
    assert not problem or "install jaxfabric again" in problem


def test_a_build_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxfabric._windows", None)
    assert "needs the headers of jaxlib 0.12" in _windowed.problem()
    assert _windowed.registrations() == {}
    (found,) = [f for f in doctor.examine() if f.name == "windows on GPUs"]
    assert found.value == f"none: {_windowed.problem()}"
    assert found.problem is None


def fake_module(jaxlib="0.12.0.1"):
    module = types.ModuleType("jaxfabric._windows")
    module.connected = []
    module.connect = module.connected.append
    module.stages = lambda: {"prepare": "p", "initialize": "i"}
    module.jaxlib_version = lambda: jaxlib
    module.ffi_version = lambda: (0, 5)
    module.extension_version = lambda: (0, 2)
    return module


def test_stages_are_those_of_both_modules(monkeypatch):
    module = fake_module()
    monkeypatch.setitem(sys.modules, "jaxfabric._windows", module)
    monkeypatch.setattr(_windowed, "mismatch", lambda **_: "")
    core = fake_core.module()
    monkeypatch.setitem(sys.modules, "jaxfabric._ext", core)
    core.window_core = lambda: "core"
    core.cuda_registrations = lambda: {
        f"jaxfabric_{op}": {"instantiate": "n", "initialize": "old", "execute": op}
        for op in gpu_table.OPS
    }
    found = _windowed.registrations()
    assert module.connected == ["core"]
    assert {*found} == {f"jaxfabric_{op}_windows" for op in _windowed.ARRAYS}
    for op in _windowed.ARRAYS:
        stages = found[f"jaxfabric_{op}_windows"]
        assert stages == {"instantiate": "n", "prepare": "p", "initialize": "i", "execute": op}


def test_a_module_of_another_build_is_not_used(monkeypatch):
    def refuse(core):
        raise RuntimeError("the modules of jaxfabric are of two builds")

    module = fake_module()
    module.connect = refuse
    monkeypatch.setitem(sys.modules, "jaxfabric._windows", module)
    assert _windowed.problem() == "the modules of jaxfabric are of two builds"
    assert _windowed.registrations() == {}


def test_the_module_of_this_build():
    module = pytest.importorskip("jaxfabric._windows")
    if runtime_extension_version() is None:
        pytest.skip("built for another jaxlib")
    assert _windowed.problem() == ""
    assert {*module.stages()} == {"prepare", "initialize"}
    assert module.extension_version() >= (0, 2)
    (found,) = [f for f in doctor.examine() if f.name == "windows on GPUs"]
    assert "gpu_windows" in found.value


@pytest.fixture
def core(monkeypatch):
    fake = fake_core.module()
    monkeypatch.setitem(sys.modules, "jaxfabric._ext", fake)
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(jax.ffi, name, lambda *_, **__: None)
    for name, value in (("_session", None), ("_membership", None), ("_registered", False)):
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "_exit_hook", True)
    monkeypatch.setattr(_compat, "watch_compilations", lambda *_: None)
    monkeypatch.setattr(runtime, "usable_gpus", lambda: ({0: 4}, ""))
    monkeypatch.setattr(_windowed, "problem", lambda: "")
    monkeypatch.setattr(_windowed, "registrations", dict)
    fake.cuda_status = lambda: ""
    fake.cuda_type_registrations = fake.cuda_registrations = dict
    fake.begin_gpu_compilation = fake.end_gpu_compilation = lambda *_: None
    yield fake
    runtime.shutdown()


def test_windows_are_off_unless_asked_for(core):
    jaxfabric.initialize()
    assert jaxfabric.status().windows_problem == "the setting gpu_windows is off"


def test_windows_where_all_have_them(core, monkeypatch):
    jaxfabric.initialize(gpu_windows="on")
    assert jaxfabric.status().windows_problem == ""
    runtime.shutdown()
    monkeypatch.setenv("JAXFABRIC_GPU_WINDOWS", "on")
    jaxfabric.initialize()
    assert runtime.windows_problem() == ""


def test_no_windows_where_this_process_has_none(core, monkeypatch, caplog):
    monkeypatch.setattr(_windowed, "problem", lambda: "built for another")
    jaxfabric.initialize(gpu_windows="on")
    assert jaxfabric.status().windows_problem == "built for another"
    assert "calls on GPUs copy their arrays: built for another" in caplog.text


def test_no_windows_where_another_process_has_none(core, monkeypatch):
    from jaxfabric.bootstrap.membership import Membership
    from jaxfabric.bootstrap.rendezvous import Roster

    def exchange(self, own, timeout):
        assert own.without_windows == ""
        assert own.agreed["gpu_windows"] == "on"
        self.members = [own, dataclasses.replace(own, without_windows="built for another")]
        return Roster(self.members)

    monkeypatch.setattr(Membership, "exchange", exchange)
    jaxfabric.initialize(gpu_windows="on")
    assert jaxfabric.status().windows_problem == "process 1: built for another"


def test_the_table_says_from_where_on(monkeypatch, capsys):
    monkeypatch.setenv("JAXFABRIC_GPU_WINDOWS", "on")
    assert cli.main(["gpu-table"]) == 0
    assert "gpu_windows is on: on, peers address XLA's own arrays from 1 MiB" in (
        capsys.readouterr().out
    )
