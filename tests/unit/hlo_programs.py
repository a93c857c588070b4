"""Compiles programs in whole-program mode, and says what became of their collectives."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.extend.xla
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfabric import _compat, hlo
from jaxfabric.hlo.wire import Message

COLLECTIVE = re.compile(
    r"\b((?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?)\("
)
TARGET = re.compile(r'custom_call_target="jaxfabric_(\w+)"')
EDIT = "edit-before-the-fabric"


def grid(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def constrain(mesh, x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


@contextlib.contextmanager
def whole_program():
    """Programs compiled inside run on the fabric, and no program compiled outside is used."""
    jax.clear_caches()
    hlo.install()
    hlo.clear_records()
    try:
        yield
    finally:
        hlo.uninstall()
        jax.clear_caches()


@contextlib.contextmanager
def edited(edit):
    """Changes each module's text before the fabric sees it; it must find something to change."""
    from jaxlib import _hlo

    done = []

    def callback(data):
        options = _hlo.HloPrintOptions()
        options.print_large_constants = True
        before = _compat.parse_hlo(data).to_string(options)
        after = edit(before)
        if after == before:
            return None
        done.append(after)
        message = Message(_compat.hlo_from_text(after))
        message.set(15, Message(data).bytes_of(15))  # The devices are not in the text.
        return bytes(message)

    hlo.uninstall()  # In the order of registration.
    jax.extend.xla.register_hlo_module_transformation(callback, name=EDIT, platforms="cpu")
    hlo.install()
    try:
        yield
    finally:
        jax.extend.xla.clear_hlo_module_transformation(EDIT, platforms="cpu")
    assert done, "nothing was edited, so this has tested nothing"


def compiled(f, *args, **options):
    """The program, the fabric's ops in it, and XLA's collectives in it."""
    program = jax.jit(f, **options).lower(*args).compile()
    text = program.as_text()
    return program, sorted(TARGET.findall(text)), sorted(COLLECTIVE.findall(text))


def on_fabric(f, *args, ops, **options):
    """Runs f, which must have the fabric's `ops` and no collective of XLA."""
    program, fabric, xla = compiled(f, *args, **options)
    assert not xla
    assert set(fabric) == set(ops), fabric
    assert all(record.taken and not record.reason for record in hlo.records())
    return jax.tree.map(np.asarray, program(*args))
