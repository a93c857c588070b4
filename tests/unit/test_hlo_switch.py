"""Whole-program mode: switching it on and off, and the compilation cache."""

from __future__ import annotations

import re

import hlo_programs as programs
import jax
import numpy as np
import pytest
from hlo_programs import grid
from jax._src import cache_key
from jax.sharding import PartitionSpec as P

import jaxfabric
from jaxfabric import _compat, hlo, runtime

pytestmark = pytest.mark.timeout(300)


def numbers(*shape):
    return (np.arange(np.prod(shape)) % 13 - 6).reshape(shape).astype(np.float32)


def mapped(f, mesh):
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)


def test_install_twice_and_uninstall():
    hook = cache_key.custom_hook
    f = mapped(lambda x: jax.lax.psum(x, "i"), grid(i=8))
    x = numbers(8, 4)
    with programs.whole_program():
        hlo.install()
        assert hlo.installed()
        assert programs.compiled(f, x)[1:] == (["all_reduce"], [])
        assert len(hlo.records()) == 1, "the pass ran twice"
        assert re.fullmatch(
            f"{hook()}jaxfabric-collectives-[0-9a-f]{{16}}", cache_key.custom_hook()
        )
        # Somebody else's hook around it stays, and what the fabric added goes.
        ours = cache_key.custom_hook
        cache_key.custom_hook = lambda: ours() + "theirs"
        hlo.uninstall()
        assert cache_key.custom_hook() == hook() + "theirs"
        cache_key.custom_hook = hook
    hlo.uninstall()
    assert not hlo.installed()
    assert programs.compiled(f, x)[1:] == ([], ["all-reduce"])
    with programs.whole_program():
        pass
    assert cache_key.custom_hook is hook


@pytest.mark.usefixtures("whole_program")
def test_failures_leave_the_program_to_xla(monkeypatch, caplog):
    f = mapped(lambda x: jax.lax.psum(x, "i"), grid(i=8))
    x = numbers(8, 4)
    monkeypatch.setattr(runtime, "is_initialized", lambda: False)
    assert programs.compiled(f, x)[1:] == ([], ["all-reduce"])
    assert hlo.records()[-1].reason == "jaxfabric was shut down"
    assert "jaxfabric was shut down" in caplog.text
    assert "jaxfabric" not in cache_key.custom_hook()
    monkeypatch.undo()
    jax.clear_caches()
    monkeypatch.setattr(_compat, "hlo_from_text", lambda text: b"\xff")
    assert programs.compiled(f, x)[1:] == ([], ["all-reduce"])
    assert hlo.records()[-1].reason.startswith("ValueError: ")


def test_a_mode_that_fails_leaves_nothing_turned_on(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no pass in this JAX")

    f = jax.jit(mapped(lambda x: jax.lax.psum(x, "i"), grid(i=8)))
    x = numbers(8, 4)
    monkeypatch.setattr(_compat, "register_hlo_transformation", refuse)
    for turn_on in (jaxfabric.enable, lambda mode: jaxfabric.enabled(mode).__enter__()):
        with pytest.raises(RuntimeError, match="no pass"):
            turn_on("hlo")
        assert "jaxfabric" not in f.lower(x).as_text()
        with jaxfabric.enabled():
            assert "jaxfabric" in f.lower(x).as_text()


def test_persistent_cache(persistent_cache, monkeypatch):
    f = mapped(lambda x: jax.lax.psum(x, "i") + jax.lax.ppermute(x, "i", [(0, 1)]), grid(i=8))
    x = numbers(8, 4)
    want = np.tile(x.sum(0), (8, 1))
    want[1] += x[0]

    def runs(fabric, xla, recorded):
        jax.clear_caches()
        hlo.clear_records()
        program, *found = programs.compiled(f, x)
        assert found == [fabric, xla]
        assert len(hlo.records()) == recorded
        np.testing.assert_array_equal(program(x), want)

    ours = ["all_reduce", "permute"], []
    theirs = [], ["all-reduce", "collective-permute"]
    with programs.whole_program():
        runs(*ours, recorded=2)
        entries = set(persistent_cache.iterdir())
        assert entries
        runs(*ours, recorded=0)
        assert {p.name for p in persistent_cache.glob("*-cache")} == {
            p.name for p in entries if p.name.endswith("-cache")
        }
        hlo.uninstall()
        runs(*theirs, recorded=0)
        assert len(list(persistent_cache.glob("*-cache"))) == 2 * len(
            [p for p in entries if p.name.endswith("-cache")]
        )
        runs(*theirs, recorded=0)
        hlo.install()
        runs(*ours, recorded=0)
        # What another version of the pass has made is not taken.
        monkeypatch.setattr(hlo, "_version", lambda: "another")
        runs(*ours, recorded=2)
