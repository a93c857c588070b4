"""The fabric of a process that has GPUs: here none are real."""

from __future__ import annotations

import dataclasses
import sys
import types

import fake_core
import jax
import pytest

import jaxfabric
from jaxfabric import _compat, _devices, _windowed, doctor, hlo, runtime


@dataclasses.dataclass
class Gpu:
    id: int
    local_hardware_id: int


GPUS = [Gpu(4, 0), Gpu(6, 2)]


@pytest.fixture
def core(monkeypatch):
    """A fake core in a process with two GPUs; yields what JAX's FFI is called with."""
    calls = []

    def record(name, *_, platform, **__):
        calls.append((name, platform))

    fake = fake_core.module()
    monkeypatch.setitem(sys.modules, "jaxfabric._ext", fake)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", record)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", record)
    for name, value in (("_session", None), ("_membership", None), ("_registered", False)):
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "_exit_hook", True)
    monkeypatch.setattr(_compat, "watch_compilations", lambda *a: calls.append(a[2]))
    monkeypatch.setattr(_windowed, "problem", lambda: "a fake has no windows")
    own = _devices.local_devices
    devices = {"cuda": lambda: GPUS, "cpu": lambda: own("cpu")}
    for module in (runtime, _devices):
        monkeypatch.setattr(module, "local_devices", lambda platform: devices[platform]())
    fake_core.FakeFabric.instances = []
    fake.calls, fake.devices = calls, devices
    yield fake
    runtime.shutdown()


def usable(core):
    core.cuda_status = lambda: ""
    core.cuda_type_registrations = lambda: {"jaxfabric_gpu_type": {"type_id": "capsule"}}
    core.begin_gpu_compilation, core.end_gpu_compilation = (lambda *_: None for _ in range(2))
    core.cuda_registrations = lambda: {"jaxfabric_gpu": {"execute": "capsule"}}


def test_gpus_are_ranks_by_the_number_that_cuda_has_for_them(core):
    """Also where JAX's default is another platform, as here: JAX_PLATFORMS=cpu,cuda."""
    assert jax.default_backend() == "cpu"
    usable(core)
    jaxfabric.initialize()
    (fabric,) = fake_core.FakeFabric.instances
    assert fabric.more == {"gpu_ordinals": [(0, 4), (2, 6)]}
    status = jaxfabric.status()
    assert (status.gpus, status.gpu_problem) == ((4, 6), "")
    assert status.gpu_memory == "memory of a fake"
    assert status.ranks == tuple(device.id for device in jax.local_devices(backend="cpu"))
    assert core.calls == [
        *(("jaxfabric_type", "cpu"), ("jaxfabric_fake", "cpu")),
        *(("jaxfabric_gpu_type", "CUDA"), ("jaxfabric_gpu", "CUDA")),
        (core.begin_gpu_compilation, core.end_gpu_compilation),
    ]
    assert runtime.platforms() == ("cpu", "cuda")


@pytest.mark.parametrize("reason", [None, "libcuda.so.1 not found"])
def test_gpus_that_cannot_be_used_are_left_to_xla(core, caplog, reason):
    if reason is not None:
        core.cuda_status = lambda: reason
    else:
        reason = core.cuda_status()
    jaxfabric.initialize()
    (fabric,) = fake_core.FakeFabric.instances
    assert fabric.more == {}
    assert jaxfabric.status().gpus == ()
    assert jaxfabric.status().gpu_problem == reason
    assert jaxfabric.status().gpu_memory == ""
    assert f"collectives on GPUs are left to XLA: {reason}" in caplog.text
    assert core.calls[-1] is None
    assert runtime.platforms() == ("cpu",)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--xla_a=1 --xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_b=2", True),
        ("--xla_gpu_command_buffer_scheduling_mode='concurrent_regions'", True),
        ("--xla_gpu_command_buffer_scheduling_mode=LHS", False),
        # The last counts.
        (
            "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT "
            "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE",
            False,
        ),
        ("", False),
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_graphs_without_an_order_are_left_to_xla(
    core, monkeypatch, tmp_path, flags, refused, in_a_file
):
    """Two calls of a communicator would run at once, in the same memory."""
    usable(core)
    if in_a_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    monkeypatch.setenv("XLA_FLAGS", flags)
    jaxfabric.initialize()
    status = jaxfabric.status()
    assert status.gpus == (() if refused else (4, 6))
    assert ("CUDA graphs run calls" in status.gpu_problem) == refused


def test_programs_for_gpus_are_compiled_again_for_another_fabric(core, monkeypatch):
    """Their CUDA graphs launch kernels in the memory of the first."""
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(cleared)))
    for fabrics_before, with_gpus in enumerate((True, True, False)):
        if with_gpus:
            usable(core)
        else:
            core.cuda_status = lambda: "a fake has no kernels"
        jaxfabric.initialize()
        assert len(cleared) == (1 if fabrics_before else 0)
        jaxfabric.shutdown()


def test_gpus_that_the_processes_give_up_are_left_to_xla(core, caplog, monkeypatch):
    usable(core)
    reason = "the job is on several hosts, and their GPUs do not share memory: process 1, ..."
    monkeypatch.setattr(fake_core.FakeFabric, "gpu_problem", lambda self: reason)
    jaxfabric.initialize()
    status = jaxfabric.status()
    assert (status.gpus, status.gpu_problem, status.gpu_memory) == ((), reason, "")
    assert f"collectives on GPUs are left to XLA: {reason}" in caplog.text
    assert runtime.platforms() == ("cpu",)
    mesh = jax.sharding.AbstractMesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxfabric.lax.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=jax.P()
        )
    )
    f.trace(jax.ShapeDtypeStruct((4,), "float32")).lower(lowering_platforms=("cuda",))
    assert reason in str(jaxfabric.report())


def test_a_process_whose_jax_has_no_gpus_says_so(core):
    usable(core)
    core.devices["cuda"] = list
    jaxfabric.initialize()
    status = jaxfabric.status()
    assert (status.gpus, status.gpu_problem) == ((), "JAX has no GPU here")
    # Programs for GPUs elsewhere are lowered all the same.
    assert runtime.gpu_problem() == ""


def test_without_cpu_devices(core, monkeypatch):
    """JAX_PLATFORMS=cuda."""
    usable(core)
    core.devices["cpu"] = list
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda backend=None: asked.append(backend) or 1)
    jaxfabric.initialize()
    assert jaxfabric.status().ranks == ()
    assert jaxfabric.status().gpus == (4, 6)
    assert "cpu" not in asked


def test_the_pass_is_for_gpus_too(core, monkeypatch):
    registered = []
    monkeypatch.setattr(
        hlo._compat, "register_hlo_transformation", lambda name, f, p: registered.append(p)
    )
    monkeypatch.setattr(
        hlo._compat, "clear_hlo_transformation", lambda name, p: registered.remove(p)
    )
    usable(core)
    jaxfabric.initialize(gpu_limits="*=1M")
    hlo.install()
    assert registered == ["cpu", "cuda"]
    assert hlo._cache_key().endswith("-*=1M")
    hlo.uninstall()
    assert registered == []


def test_the_doctor_says_why(core, monkeypatch):
    (found,) = [f for f in doctor.examine() if f.name == "collectives on GPUs"]
    assert found.value == "left to XLA: a fake has no kernels"
    assert found.problem is None
    usable(core)
    monkeypatch.setattr(doctor, "_cuda_plugin", lambda: "")
    (found,) = [f for f in doctor.examine() if f.name == "collectives on GPUs"]
    assert found.value.startswith("none: JAX has no GPUs without its CUDA plugin")
    monkeypatch.setattr(doctor, "_cuda_plugin", lambda: "jax-cuda13-plugin 0.12")
    (found,) = [f for f in doctor.examine() if f.name == "collectives on GPUs"]
    run = "run on the fabric (jaxfabric gpu-table)"
    assert found.value == f"{run}; with other hosts left to XLA: GPU 0 offers no fabric handles"
    core.cuda_one_host = lambda: ""
    (found,) = [f for f in doctor.examine() if f.name == "collectives on GPUs"]
    assert found.value == f"{run}; with other hosts too, if they are of one NVLink domain"
    core.cuda_unreachable = lambda: "GPU 0 and GPU 1 cannot reach each other's memory"
    (found,) = [f for f in doctor.examine() if f.name == "collectives on GPUs"]
    assert f"; staged in pinned host memory: {core.cuda_unreachable()}; " in found.value


def test_compilations_for_gpus_name_their_devices(monkeypatch):
    from jax._src import compiler

    class Backend:
        platform = "gpu"

        def process_index(self):
            return 0

    class Device:
        process_index = 0

        def __init__(self, number):
            self.id = number

    devices = types.SimpleNamespace(flat=[Device(6), Device(4)])
    told = []
    for on_gpus in (None, (lambda: told.append("begun"), told.append)):
        monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *_: "executable")
        _compat.watch_compilations(lambda: 7, None, on_gpus)
        assert compiler.compile_or_get_cached(Backend(), None, devices) == "executable"
    assert told == ["begun", [6, 4]]
