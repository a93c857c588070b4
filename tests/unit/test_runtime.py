import os
import subprocess
import sys
import threading

import fake_core
import jax
import pytest

import jaxfabric
from jaxfabric import _ext, _import_check, _plugin, config, runtime

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def core(monkeypatch):
    """A runtime that was never started, on a fake core; yields the calls made to JAX's FFI."""
    import jax

    calls = []
    monkeypatch.setitem(sys.modules, "jaxfabric._ext", fake_core.module())
    monkeypatch.setattr(
        jax.ffi, "register_ffi_type", lambda name, *_, **__: calls.append(("type", name))
    )
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, *_, **__: calls.append(("target", name))
    )
    for name, value in (("_session", None), ("_membership", None), ("_registered", False)):
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "_exit_hook", True)
    for name in list(os.environ):
        if name.startswith("JAXFABRIC_"):
            monkeypatch.delenv(name)
    fake_core.FakeFabric.instances = []
    yield calls
    runtime.shutdown()


@pytest.mark.parametrize(("process", "count"), [(None, 1), ("0", 1), ("1", 0)])
def test_a_misspelt_variable_is_one_warning_in_a_job(core, monkeypatch, caplog, process, count):
    config.warn_of_unknown_variables.cache_clear()
    monkeypatch.setenv("JAXFABRIC_ENABEL", "hlo")
    if process is not None:
        monkeypatch.setenv("JAXFABRIC_PROCESS_ID", process)
    _plugin.initialize()  # JAX's backend starts, in a program that may know of no jaxfabric.
    assert len(caplog.messages) == count
    jaxfabric.initialize()
    told = "JAXFABRIC_ENABEL is not a setting: did you mean JAXFABRIC_ENABLE?"
    assert caplog.messages == [told] * count


def test_one_process_needs_no_arguments(core):
    import jax

    assert not jaxfabric.is_initialized()
    jaxfabric.initialize()
    assert jaxfabric.is_initialized()
    (fabric,) = fake_core.FakeFabric.instances
    assert (fabric.process_index, fabric.process_count) == (0, 1)
    assert fabric.local_ranks == [d.id for d in jax.local_devices(backend="cpu")]
    assert fabric.addresses == [b"address of 0"]
    assert fabric.options["deadline"] == 300.0


def test_types_are_registered_before_targets_and_once(core):
    jaxfabric.initialize()
    jaxfabric.shutdown()
    jaxfabric.initialize()
    assert core == [("type", "jaxfabric_type"), ("target", "jaxfabric_fake")]


def test_second_initialize_is_a_no_op_or_an_error(core):
    jaxfabric.initialize(deadline=30)
    jaxfabric.initialize()
    jaxfabric.initialize(deadline=30, num_processes=1)
    with pytest.raises(RuntimeError, match=r"deadline=30, not 31.*shutdown\(\)"):
        jaxfabric.initialize(deadline=31)
    with pytest.raises(RuntimeError, match="num_processes=1, not 2"):
        jaxfabric.initialize(num_processes=2)
    assert len(fake_core.FakeFabric.instances) == 1


def test_shutdown_is_idempotent_and_allows_another_start(core):
    jaxfabric.shutdown()
    jaxfabric.initialize(deadline=30)
    jaxfabric.shutdown()
    jaxfabric.shutdown()
    assert fake_core.FakeFabric.instances[0].shutdowns == 1
    jaxfabric.initialize(deadline=31)
    assert jaxfabric.status().config.deadline == 31


def test_status_does_not_wait_for_a_shutdown(core, monkeypatch):
    """Which waits for kernels of GPUs that may wait for a host callback that asks."""
    jaxfabric.initialize()
    ending, asked = threading.Event(), threading.Event()

    def shut_down(fabric):
        ending.set()
        assert asked.wait(60)

    monkeypatch.setattr(fake_core.FakeFabric, "shutdown", shut_down)
    thread = threading.Thread(target=jaxfabric.shutdown)
    thread.start()
    assert ending.wait(60)
    found = []
    asker = threading.Thread(target=lambda: found.append(jaxfabric.status()), daemon=True)
    asker.start()
    asker.join(10)
    meanwhile = [*found]
    asked.set()
    thread.join()
    assert meanwhile == [runtime.Status(initialized=False)]


def test_ensure_ready_starts_a_single_process_only(core, monkeypatch):
    import jax

    runtime.ensure_ready()
    assert jaxfabric.is_initialized()
    jaxfabric.shutdown()
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    with pytest.raises(RuntimeError, match=r"process 0 of 2.*initialize\(\)"):
        runtime.ensure_ready()


def test_forgotten_initialize_under_the_launcher_is_an_error(core, monkeypatch):
    """JAX alone would take each process for a job of one, and sum over nobody."""
    for name, value in {
        "JAXFABRIC_NUM_PROCESSES": "2",
        "JAXFABRIC_PROCESS_ID": "1",
        "JAXFABRIC_COORDINATOR": "127.0.0.1:1",
        "JAXFABRIC_JOB": "a",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"process 1 of 2 .* before jaxfabric.initialize"):
        runtime.ensure_ready()
    assert not runtime.is_initialized()


def test_status(core):
    assert jaxfabric.status() == runtime.Status(initialized=False)
    jaxfabric.initialize()
    status = jaxfabric.status()
    assert status.initialized
    assert status.origin == "alone"
    assert status.counters == {"calls": 0}
    assert status.failure is None
    assert status.peers[0].endswith(f":{os.getpid()}")
    fake_core.FakeFabric.instances[0].text = "rank 1 died"
    assert jaxfabric.status().failure == "rank 1 died"


def test_failed_connect_leaves_nothing(core, monkeypatch):
    monkeypatch.setattr(
        fake_core.FakeFabric, "address", lambda self: setattr(self, "text", "refuse") or b""
    )
    with pytest.raises(fake_core.FakeError, match="refused"):
        jaxfabric.initialize()
    assert not jaxfabric.is_initialized()
    assert fake_core.FakeFabric.instances[0].shutdowns == 1


def test_memory_that_cannot_be_had_is_an_error():
    # Deeper than what Config lets through: the same happens where memory is short.
    options = jaxfabric.config.Config().options() | {"segment_bytes": 1 << 47}
    with pytest.raises(jaxfabric.FabricError, match=r"segment_bytes, 140737488355328, for each of"):
        _ext.Fabric(0, 1, [0], options)


def test_a_program_that_cannot_be_compiled_does_not_lead_into_jaxfabric():
    import jax

    jaxfabric.initialize()
    with pytest.raises(jax.errors.JaxRuntimeError, match="nobody_registered_it") as caught:
        jax.jit(lambda x: jax.ffi.ffi_call("nobody_registered_it", x)(x))(jax.numpy.zeros(2))
    assert [entry.path for entry in caught.traceback if "_compat" in str(entry.path)] == []


def test_incomplete_description_of_the_job(core):
    with pytest.raises(ValueError, match="belong together"):
        jaxfabric.initialize("127.0.0.1:1", 2)
    for address in ("somewhere", "127.0.0.1:99999", ":80", 80):
        with pytest.raises(ValueError, match=f"coordinator_address={address}: use host:port"):
            jaxfabric.initialize(address, 2, 0)
    with pytest.raises(ValueError, match="deadline=-1"):
        jaxfabric.initialize(deadline=-1)


def test_several_processes_after_the_backend_is_too_late(core, monkeypatch):
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="comes too late"):
        jaxfabric.initialize("127.0.0.1:1", 2, 0)
    for name, value in (("COORDINATOR", "127.0.0.1:1"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAXFABRIC_{name}", value)
    monkeypatch.setenv("JAXFABRIC_NUM_PROCESSES", "2")
    with pytest.raises(RuntimeError, match="comes too late"):
        jaxfabric.initialize()


# --- the import check


@pytest.mark.parametrize("runtime_version", [(0, 3), (0, 5)])
def test_core_loads_on_the_same_or_a_newer_xla(runtime_version):
    _import_check.check_ffi_version((0, 3), runtime_version)


@pytest.mark.parametrize(("compiled", "have"), [((0, 4), (0, 3)), ((1, 0), (0, 5))])
def test_core_newer_than_xla_is_an_import_error(compiled, have):
    with pytest.raises(ImportError) as caught:
        _import_check.check_ffi_version(compiled, have)
    message = str(caught.value)
    assert ".".join(map(str, compiled)) in message
    assert ".".join(map(str, have)) in message
    assert "upgrade jaxlib" in message


def test_a_source_tree_without_the_core_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxfabric._ext", None)
    monkeypatch.delattr(jaxfabric, "_ext", raising=False)
    total = jax.shard_map(
        lambda: jaxfabric.lax.psum(1, "i") + jaxfabric.lax.psum(jax.lax.axis_index("i"), "i"),
        mesh=jax.make_mesh((2,), ("i",)),
        in_specs=(),
        out_specs=jax.P(),
    )
    for use in (lambda: jaxfabric.FabricError, jaxfabric.export_checks, jax.jit(total).lower):
        with pytest.raises(ImportError, match=r"core is missing from .*move the program"):
            use()


def test_ffi_version_of_the_installed_jaxlib(tmp_path):
    major, minor = _import_check.runtime_ffi_version()
    assert major == 0
    assert minor >= 3
    assert _import_check.runtime_ffi_version(tmp_path) is None


def test_importing_jaxfabric_and_listing_its_names_imports_no_jax():
    code = (
        "import sys, jaxfabric; assert {*jaxfabric.__all__} <= {*dir(jaxfabric)}; "
        "assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert all(hasattr(jaxfabric, name) for name in dir(jaxfabric))
