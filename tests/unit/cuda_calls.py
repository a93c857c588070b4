"""Compiles the fabric's calls for H200 GPUs, on a machine that has none, beside XLA's own.

Prints as JSON, by name of the program and of the topology: the calls in the order of the compiled
program, and how often it has each other operation; the same with XLA's own collectives.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
import sys
import tempfile

import cuda_topology  # First: it says which platforms JAX is to have.
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax import parallel
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfabric
from jaxfabric import lax as ours
from jaxfabric import runtime

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
X = P("x")


def each(call):
    """A program with something to fuse before the call and after it."""
    return lambda lax, x: jnp.cos(call(lax, jnp.sin(x)))


def ragged(lax, x):
    ranks = jax.lax.axis_size("x")
    ones = jnp.ones(ranks, np.int32) + 0 * jax.lax.axis_index("x")
    return lax.ragged_all_to_all(x, x * 0, ones, ones, ones * 2, ones, axis_name="x")


def gradient(call):
    return lambda lax, x: jax.grad(lambda y: (call(lax, jnp.sin(y)) ** 2).sum())(x)


def loop(lax, x):
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(lax.psum(y, "x")), x)


def several(lax, x):
    """One after another, as each needs the one before."""
    for k in range(3):
        x = jnp.tanh(lax.psum(x, "x"))
        x = lax.ppermute(x * k, "x", [(0, 1), (1, 0)]) + x
    return x


def independent(lax, x):
    """Which XLA would run in another order."""
    return x + sum(lax.psum(jnp.sin(x * k)[:, : 8 * k], "x").sum() for k in range(1, 6))


def work(x):
    return jnp.tanh(x @ jnp.ones((512, 4096), x.dtype)) @ jnp.ones((4096, 512), x.dtype)


def halves(lax, x):
    del lax
    first = parallel.all_gather_start(jnp.sin(x), "x")
    second = parallel.psum_scatter_start(jnp.cos(x), "x", tiled=True)
    y = work(x)
    z = work(first.done().sum(0))
    return y + z + second.done().sum()


def started(start):
    """A program of one call in halves, with products between them."""

    def f(lax, x):
        del lax
        end = start(jnp.sin(x))
        y = work(x)
        return y + end().sum()

    return f


def sent(x):
    pair = [(1, 0)]
    handle = ours.psend(x, "x", pair)
    return lambda: ours.precv(handle, jax.typeof(x), "x", pair)


STARTS = {
    "psum": lambda x: parallel.psum_start(x, "x").done,
    "all_gather": lambda x: parallel.all_gather_start(x, "x", tiled=True).done,
    "psum_scatter": lambda x: parallel.psum_scatter_start(x, "x", tiled=True).done,
    "all_to_all": lambda x: parallel.all_to_all_start(x, "x", 1, 0, tiled=True).done,
    "ppermute": lambda x: parallel.ppermute_start(x, "x", [(0, 1), (1, 2)]).done,
    "psend": sent,
}
# The argument's memory may be the result's.
DONATED = "psum of a donated array"
CALLS = {
    "psum": each(lambda lax, x: lax.psum(x, "x")),
    "psum of bfloat16": each(lambda lax, x: lax.psum(x.astype(jnp.bfloat16), "x")),
    "psum of a part": each(lambda lax, x: lax.psum(x[256:], "x")),
    DONATED: each(lambda lax, x: lax.psum(x, "x")),
    "pmax": each(lambda lax, x: lax.pmax(x, "x")),
    "pmin": each(lambda lax, x: lax.pmin(x, "x")),
    "all_gather": each(lambda lax, x: lax.all_gather(x, "x")),
    "all_gather of columns": each(lambda lax, x: lax.all_gather(x, "x", axis=1, tiled=True)),
    "psum_scatter": each(lambda lax, x: lax.psum_scatter(x, "x", tiled=True)),
    "psum_scatter of columns": each(
        lambda lax, x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    ),
    "all_to_all": each(lambda lax, x: lax.all_to_all(x, "x", 1, 0, tiled=True)),
    "ragged_all_to_all": each(ragged),
    "ppermute": each(lambda lax, x: lax.ppermute(x, "x", [(0, 1), (1, 2)])),
    "pbroadcast": each(lambda lax, x: lax.pbroadcast(x, "x", 2)),
    "gradient of psum": gradient(lambda lax, x: lax.psum(x, "x")),
    "gradient of all_gather": gradient(lambda lax, x: lax.all_gather(x, "x", tiled=True)),
    "gradient of psum_scatter": gradient(lambda lax, x: lax.psum_scatter(x, "x", tiled=True)),
    "gradient of all_to_all": gradient(lambda lax, x: lax.all_to_all(x, "x", 0, 1, tiled=True)),
    "vmap of all_gather": each(
        lambda lax, x: jax.vmap(lambda row: lax.all_gather(row, "x", tiled=True))(x)
    ),
    "vmap over the axis": each(
        lambda lax, x: jax.vmap(lambda row: lax.psum(row, ("x", "rows")), axis_name="rows")(x)
    ),
    "loop": loop,
    "several": several,
    "independent": independent,
}
# Those that XLA's calls are not compared with.
MORE = {
    "all_gather_matmul": lambda lax, x: lax.all_gather_matmul(jnp.sin(x), x, "x", pieces=2),
    "matmul_reduce_scatter": lambda lax, x: lax.matmul_reduce_scatter(x, x, "x", pieces=2),
    "barrier": each(lambda lax, x: ours.barrier("x", x)),
    "halves": halves,
    **{f"start of {name}": started(start) for name, start in STARTS.items()},
}
# Those that are compiled once more with the arrays of large calls in windows.
IN_WINDOWS = (
    *("psum", "psum of bfloat16", "pmax", "all_gather", "psum_scatter", "all_to_all"),
    *("ppermute", "pbroadcast", "gradient of all_gather", "several"),
)


# By name: GPUs of one host, and of two.
TOPOLOGIES = {
    "1x1x4": lambda: cuda_topology.devices(1, 4),
    "1x2x8": lambda: cuda_topology.devices(2, 8),
}


def program(call, lax, mesh, check_vma=False, donate_argnums=()):
    f = jax.shard_map(
        lambda x: call(lax, x), mesh=mesh, in_specs=X, out_specs=X, check_vma=check_vma
    )
    ranks = mesh.devices.size
    x = jax.ShapeDtypeStruct((512 * ranks, 512), np.float32, sharding=NamedSharding(mesh, X))
    return jax.jit(f, donate_argnums=donate_argnums).lower(x)


def transformer_step(mesh):
    import transformer
    import transformer_tensor_parallel as example

    transformer.HEADS = 16  # one for each GPU of two hosts

    def placed(like, specs):
        return jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            ),
            like,
            specs,
            is_leaf=lambda a: isinstance(a, P),
        )

    state = jax.eval_shape(lambda: transformer.first_state(transformer.first_parameters()))
    specs = example.STATE
    if jax.tree.structure(state) != jax.tree.structure(specs, is_leaf=lambda a: isinstance(a, P)):
        raise ValueError(f"the example's state has become {jax.tree.structure(state)}")
    tokens = jax.ShapeDtypeStruct((4, transformer.LENGTH), np.int32)
    f = jax.shard_map(
        example.step,
        mesh=mesh,
        in_specs=(specs, example.POSITIONS, example.POSITIONS),
        out_specs=(specs, example.COPY),
    )
    tokens = placed(tokens, example.POSITIONS)
    return jax.jit(f).lower(placed(state, specs), tokens, tokens)


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)$")
FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}


def read(text):
    """The calls of a compiled program, and how often it has each other operation."""
    calls, others = [], collections.Counter()
    shapes = {}  # by name of the instruction
    inside = ""
    fused = {}  # XLA fuses a call with the slice that it takes: by name of the fusion.
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            inside = line.split(" ")[0]
        found = INSTRUCTION.match(line)
        if not found or inside.startswith(("%fused_", "%wrapped_")):
            continue
        name, shape, opcode, rest = found.groups()
        shapes[name] = shape
        called = re.search(r"calls=(\S+?)(?:,|$)", rest)
        if target := re.search(r'custom_call_target="jaxfabric_(\w+)"', rest):
            call = describe(target[1], shape, rest, shapes)
            if inside.startswith("%dynamic-slice-fusion"):
                fused[inside] = call
            else:
                calls.append(call)
        elif called and called[1] in fused:
            calls.append(fused[called[1]])
        elif inside.startswith("%dynamic-slice-fusion") or opcode in FREE:
            continue
        elif called and "gemm" in called[1]:
            calls.append({"target": "product"})
            others["product"] += 1
        else:
            others[opcode] += 1
    return calls, others


def describe(target, shape, rest, shapes):
    operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
    return {
        "target": target,
        "operands": len(operands),
        "spaces": re.findall(r"S\(\d\)", shape),
        "operand spaces": re.findall(r"S\(\d\)", "".join(shapes.get(o, "") for o in operands)),
        "label": re.search(r'label = "(.*?)"|$', rest)[1],
        "by_position": re.search(r"by_position = (\d)|$", rest)[1],
        "site": re.search(r"site = (\d+)", rest)[1],
        "aliased": "output_to_operand_aliasing={{}: (1, {})}" in rest,
    }


def compiled(lowered):
    text = lowered.compile().as_text()
    calls, others = read(text)
    sites = re.findall(r"@jaxfabric_\w+\(.*?\bsite = (\d+)", lowered.as_text())
    donated = "input_output_alias={" in text
    return {"calls": calls, "others": others, "lowered": sites, "donated": donated}


def norm(x, residual, weight):
    return ours.all_reduce_rms_norm(x, residual, weight, "x")


def norms(f, mesh):
    """A program of `f`, a function like `norm`, with nothing that belongs to it not."""
    f = jax.shard_map(f, mesh=mesh, in_specs=(X, X, P()), out_specs=X, check_vma=False)
    shapes = ((512, 4096), X), ((512, 4096), X), ((4096,), P())
    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    )
    return jax.jit(f).lower(*args)


def norm_gradient(*args):
    def loss(*args):
        normalised, residual = norm(*args)
        return (normalised.astype(np.float32) ** 2).sum() + residual.astype(np.float32).sum()

    return jax.value_and_grad(loss)(*args)[1]


def in_command_buffers(mesh, folder):
    """How many calls a program of small ones has, and how many of them XLA captures."""

    def captured(x):
        return norm(several(ours, x), x, x[0])

    f = jax.shard_map(captured, mesh=mesh, in_specs=X, out_specs=X, check_vma=False)
    x = jax.ShapeDtypeStruct((512, 512), np.float32, sharding=NamedSharding(mesh, X))
    jax.jit(f).lower(x).compile()
    return cuda_topology.captured_calls(folder)


def main(folder):
    # As if each GPU were this process's.
    runtime.cuda_problem = lambda: ""
    cuda_topology.register()
    found = collections.defaultdict(dict)
    for topology, gpus in TOPOLOGIES.items():
        line = Mesh(np.array(gpus()), ("x",))
        model = Mesh(line.devices, ("model",))
        own = f"{topology}, own"
        for name, call in (CALLS | MORE).items():
            # psum_start is a psum without the check.
            options = {
                "check_vma": name == "start of psum",
                "donate_argnums": (0,) if name == DONATED else (),
            }
            with jaxfabric.enabled():
                found[name][topology] = compiled(program(call, ours, line, **options))
            if name in CALLS:
                found[name][own] = compiled(program(call, jax.lax, line, **options))
        with jaxfabric.enabled():
            found["transformer"][topology] = compiled(transformer_step(model))
        found["transformer"][own] = compiled(transformer_step(model))
        for name, f in (("norm", norm), ("gradient of norm", norm_gradient)):
            found[name][topology] = compiled(norms(f, line))
        found["command buffers"][topology] = in_command_buffers(line, folder)
    runtime.windows_problem = lambda: ""
    for topology, gpus in TOPOLOGIES.items():
        line = Mesh(np.array(gpus()), ("x",))
        for name in IN_WINDOWS:
            windowed = found[f"{name} in windows"]
            with jaxfabric.enabled():
                windowed[topology] = compiled(program(CALLS[name], ours, line))
            windowed[f"{topology}, own"] = found[name][f"{topology}, own"]
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        cuda_topology.dump_captured(folder)
        main(folder)
