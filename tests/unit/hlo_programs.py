"""Compiles programs in whole-program mode, and says what became of their collectives."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.extend.xla
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfabric import _compat, hlo
from jaxfabric.hlo.transformation import transform
from jaxfabric.hlo.wire import Message, encode, varint

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
def edited(edit, fabric=True):
    """Changes each module's text before the fabric sees it; it must find something to change.

    Without `fabric` programs are XLA's.
    """
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
    if fabric:
        hlo.install()
    try:
        yield
    finally:
        jax.extend.xla.clear_hlo_module_transformation(EDIT, platforms="cpu")
    assert done, "nothing was edited, so this has tested nothing"


def compiled(f, *args, **options):
    """The program, the fabric's ops in it, and XLA's collectives in it."""
    # For LLVM only: what the pass sees is the same, and is compiled in less time.
    quickly = {"xla_backend_optimization_level": 0}
    program = jax.jit(f, **options).lower(*args).compile(compiler_options=quickly)
    text = program.as_text()
    return program, sorted(TARGET.findall(text)), sorted(COLLECTIVE.findall(text))


def on_fabric(f, *args, ops, **options):
    """Runs f, which must have the fabric's `ops` and no collective of XLA."""
    program, fabric, xla = compiled(f, *args, **options)
    assert not xla
    assert set(fabric) == set(ops), fabric
    assert all(record.taken and not record.reason for record in hlo.records())
    return jax.tree.map(np.asarray, program(*args))


HEAD = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
%product (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] multiply(%a, %b)
}
%two (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %d = f32[] add(%a, %b)
  ROOT %c = f32[] add(%d, %b)
}
"""
ALL = "channel_id=1, replica_groups={}, use_global_device_ids=true"


def transformed(body, replicas=1, devices=(4, 5, 6, 7), computations="", limits=None):
    """Transforms a module of these instructions, for these devices: GPUs where there are limits."""
    text = HEAD + computations + "ENTRY %e {\n" + "\n".join(body) + "\n}\n"
    message = Message(_compat.hlo_from_text(text))
    per_partition = [encode([(1, 2, varint(d) * replicas)]) for d in devices]
    assignment = [(1, 0, replicas), (2, 0, len(devices)), *((3, 2, p) for p in per_partition)]
    if devices:
        message.set(15, encode(assignment))
    return transform(bytes(message), limits)
