"""ragged_all_to_all against a numpy model: values, types, derivatives, vmap, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ragged_model import SPEC, blocks, call, expected, slices, spread

from jaxfabric import lax
from jaxfabric.lax.ragged_all_to_all import lower_ragged_all_to_all

VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4")
TYPES = (
    *INTEGERS,
    *("bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn", "uint4", "int2"),
)


@VMA
@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 11, 3000])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_values(n, rows, each, check_vma):
    mesh = model.grid({"i": n})
    f = jax.jit(spread(call, mesh, check_vma))
    x, y = blocks(n, n * rows)
    for seed in range(2):
        metadata = slices(n, each, rows, seed)
        np.testing.assert_array_equal(f(x, y, *metadata), expected(x, y, metadata))


def test_the_example_of_jax_lax():
    x = np.array([[1, 2, 2], [3, 4, 0]])
    metadata = np.array(
        [[[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]], np.int32
    )
    y = jax.jit(spread(call, model.grid({"i": 2})))(x, np.zeros((2, 4), int), *metadata)
    np.testing.assert_array_equal(y, [[1, 3, 0, 0], [2, 2, 4, 0]])


@pytest.mark.parametrize("tail", [(), (0,), (2, 3, 5)], ids=str)
def test_rows_of_any_shape(tail):
    x, y = blocks(4, 40, tail)
    metadata = slices(4, 2, 10)
    got = jax.jit(spread(call, model.grid({"i": 4})))(x, y, *metadata)
    np.testing.assert_array_equal(got, expected(x, y, metadata))


def test_operand_and_result_may_differ_in_length_and_be_one_array():
    mesh = model.grid({"i": 4})
    x, y = blocks(4, 40)
    metadata = slices(4, 1, 10)
    wide = np.concatenate([y, 1 + y], 1)
    got = jax.jit(spread(call, mesh))(x, wide, *metadata)
    np.testing.assert_array_equal(got, expected(x, wide, metadata))
    # The result begins in the memory of `output`, where XLA can do that.
    for rows in (10, 2000):
        x, _ = blocks(4, 4 * rows)
        metadata = slices(4, 1, rows)
        same = jax.jit(spread(lambda x, *m: (call(x, x, *m), x + 1), mesh))
        got, beside = same(x, *metadata)
        np.testing.assert_array_equal(got, expected(x, x, metadata))
        np.testing.assert_array_equal(beside, x + 1)
        given = jax.jit(spread(lambda x, *m: call(x + 1, x, *m), mesh), donate_argnums=0)
        got = given(jax.device_put(x, jax.sharding.NamedSharding(mesh, SPEC)), *metadata)
        np.testing.assert_array_equal(got, expected(x + 1, x, metadata))


def test_types():
    mesh = model.grid({"i": 4})
    metadata = slices(4, 2, 6)
    with jax.enable_x64(True):
        for name in TYPES:
            dtype = jnp.dtype(name)
            x, y = (np.abs(b) % 2 if name == "int2" else b for b in blocks(4, 24, dtype=np.float64))
            x, y = (np.abs(b) if name.startswith("u") else b for b in (x, y))
            if name == "float4_e2m1fn":
                x, y = np.clip(x, -4, 4), np.clip(y, -4, 4)
            x, y = x.astype(dtype), y.astype(dtype)
            got = jax.jit(spread(call, mesh))(x, y, *metadata)
            assert got.dtype == dtype
            want = expected(x, y, metadata)
            np.testing.assert_array_equal(
                np.asarray(got).astype(np.complex128), want.astype(np.complex128), err_msg=name
            )
        for name in INTEGERS:
            narrow = slices(4, 1, 2 if name == "int4" else 25, dtype=jnp.dtype(name))
            rows = 8 if name == "int4" else 100
            x, y = blocks(4, rows)
            mixed = (*narrow[:3], narrow[3].astype(np.int64))
            got = jax.jit(spread(call, mesh))(x, y, *mixed)
            wide = [array.astype(int) for array in narrow]
            np.testing.assert_array_equal(got, expected(x, y, wide), err_msg=name)


def test_keys():
    keys = jax.vmap(lambda s: jax.random.split(jax.random.key(s), 8))(jnp.arange(8))
    metadata = slices(4, 1, 2)
    got = jax.jit(spread(call, model.grid({"i": 4})))(keys[:4], keys[4:], *metadata)
    words = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(
        jax.random.key_data(got), expected(words[:4], words[4:], metadata)
    )


@VMA
@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i"), "j", ["i"]], ids=str)
def test_meshes_and_axes(axes, check_vma):
    shape = {"i": 2, "j": 4}
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    communicators = model.communicators(shape, names)
    size = len(communicators[0])
    x, y = blocks(8, 6 * size)
    metadata = [np.zeros((8, 2 * size), np.int32) for _ in range(4)]
    for seed, ranks in enumerate(communicators):
        for array, part in zip(metadata, slices(size, 2, 6, seed), strict=True):
            array[ranks] = part
    want = expected(x, y, metadata, communicators)
    spec = PartitionSpec(("i", "j"))
    f = functools.partial(call, axis_name=axes)
    for mesh in (model.grid(shape), model.grid(shape, devices=[3, 0, 6, 5, 1, 7, 4, 2])):
        got = jax.jit(spread(f, mesh, check_vma, spec))(x, y, *metadata)
        np.testing.assert_array_equal(got, want)
    abstract = model.grid(shape).abstract_mesh
    arrays = [model.put(array, model.grid(shape)) for array in (x, y, *metadata)]
    np.testing.assert_array_equal(jax.jit(spread(f, abstract, check_vma, spec))(*arrays), want)


GROUPS = ((3, 0), (1, 2))


def grouped(each=2, rows=6):
    metadata = [np.zeros((4, 2 * each), np.int32) for _ in range(4)]
    for seed, group in enumerate(GROUPS):
        for array, part in zip(metadata, slices(2, each, rows, seed), strict=True):
            array[list(group)] = part
    return metadata


def test_groups():
    x, y = blocks(4, 12)
    metadata = grouped()
    got = jax.jit(spread(functools.partial(call, axis_index_groups=GROUPS), model.grid({"i": 4})))(
        x, y, *metadata
    )
    np.testing.assert_array_equal(got, expected(x, y, metadata, GROUPS))


def test_an_output_that_is_the_same_on_all_ranks():
    x, _ = blocks(4, 24)
    metadata = slices(4, 2, 6)
    f = spread(lambda x, *m: call(x, jnp.zeros((24, 3)), *m), model.grid({"i": 4}))
    np.testing.assert_array_equal(jax.jit(f)(x, *metadata), expected(x, np.zeros_like(x), metadata))


@VMA
@pytest.mark.parametrize("in_groups", [False, True], ids=["whole", "groups"])
def test_derivatives(in_groups, check_vma):
    """The call is linear: its matrix is that of the model, applied to unit vectors."""
    mesh = model.grid({"i": 4})
    metadata = grouped() if in_groups else slices(4, 2, 6, dtype=np.int8)
    rows = 12 if in_groups else 24
    groups = GROUPS if in_groups else None
    x, y = blocks(4, rows)
    dx, dy = blocks(4, rows, seed=2)
    ct, _ = blocks(4, rows, seed=3)
    f = spread(functools.partial(call, axis_index_groups=groups), mesh, check_vma)
    g = functools.partial(expected, metadata=metadata, groups=groups)

    def both(x, y, dx, dy, ct):
        jvp = jax.jvp(lambda x, y: f(x, y, *metadata), (x, y), (dx, dy))
        only_x = jax.jvp(lambda x: f(x, y, *metadata), (x,), (dx,))
        only_y = jax.vjp(lambda y: f(x, y, *metadata), y)[1](ct)
        back = jax.vjp(jax.checkpoint(lambda x, y: f(x, y, *metadata)), x, y)[1](ct)
        second = jax.grad(lambda x: (f(x * x, y, *metadata) ** 2).sum())(x)
        return jvp, only_x, only_y, back, second

    jvp, only_x, only_y, back, second = jax.jit(both)(x, y, dx, dy, ct)
    np.testing.assert_array_equal(jvp[0], g(x, y))
    np.testing.assert_array_equal(jvp[1], g(dx, dy))
    np.testing.assert_array_equal(only_x[1], g(dx, np.zeros_like(y)))

    # Element [r, k] of the result is that of `origin`: numbers of operand elements are positive.
    numbers = np.arange(1, x.size + 1).reshape(x.shape)
    origin = g(numbers, -numbers)
    want_x, want_y = np.zeros(x.size + 1), np.zeros(y.size + 1)
    np.add.at(want_x, np.maximum(origin, 0).ravel(), ct.ravel())
    np.add.at(want_y, np.maximum(-origin, 0).ravel(), ct.ravel())
    np.testing.assert_array_equal(np.ravel(back[0]), want_x[1:])
    np.testing.assert_array_equal(np.ravel(back[1]), want_y[1:])
    np.testing.assert_array_equal(only_y[0], back[1])
    sent = (want_x[1:] != 0).reshape(x.shape) | np.isin(numbers, origin)
    np.testing.assert_allclose(second, np.where(sent, 4.0 * x**3, 0))


@VMA
@pytest.mark.parametrize("dims", [(0,) * 6, (1, None, 1, 0, None, None), (None, 2, 0, 1, 1, 0)])
def test_vmap_over_another_axis(dims, check_vma):
    n, size, each, rows = 4, 3, 2, 6
    batch = [slices(n, each, rows, seed) for seed in range(size)]
    same = [d is None for d in dims]
    if same[4] or same[2]:  # The sizes that fit belong together.
        keep = batch[0]
        batch = [keep] * size
    xs = [blocks(n, n * rows, seed=0 if same[0] else seed)[0] for seed in range(size)]
    ys = [blocks(n, n * rows, seed=0 if same[1] else seed)[1] for seed in range(size)]
    per_element = [(x, y, *m) for x, y, m in zip(xs, ys, batch, strict=True)]
    arrays = [
        parts[0] if dim is None else np.stack(parts, 1 + dim)
        for parts, dim in zip(zip(*per_element, strict=True), dims, strict=True)
    ]
    f = spread(jax.vmap(call, in_axes=dims), model.grid({"i": n}), check_vma)
    want = np.stack([expected(x, y, m) for x, y, *m in per_element], 1)
    np.testing.assert_array_equal(jax.jit(f)(*arrays), want)


def test_vmap_in_groups():
    x, y = blocks(4, 12)
    metadata = grouped()

    def f(x, y, *m):
        return jax.vmap(lambda v: call(v, y, *m, axis_index_groups=GROUPS))(jnp.stack([x, -x]))

    got = jax.jit(spread(f, model.grid({"i": 4})))(x, y, *metadata)
    want = [expected(v, y, metadata, GROUPS) for v in (x, -x)]
    np.testing.assert_array_equal(got, np.stack(want, 1))


def test_control_flow():
    mesh = model.grid({"i": 4})
    x, y = blocks(4, 24)
    metadata = slices(4, 2, 6)

    def f(x, y, *m):
        return jax.lax.fori_loop(0, 3, lambda _, y: call(x + y, y, *m), y)

    want = y
    for _ in range(3):
        want = expected(x + want, want, metadata)
    np.testing.assert_array_equal(jax.jit(spread(f, mesh))(x, y, *metadata), want)


def test_lowering_rule_for_another_primitive():
    """With the operands and parameters of jax.lax's own primitive."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    other = Primitive("other")
    other.def_abstract_eval(lambda x, y, *_, **__: y)
    mlir.register_lowering(other, lower_ragged_all_to_all, cacheable=False)
    x, y = blocks(4, 12)
    metadata = grouped()

    def f(*arrays):
        return other.bind(*arrays, axis_name=("i",), axis_index_groups=GROUPS)

    got = jax.jit(spread(f, model.grid({"i": 4}), check_vma=False))(x, y, *metadata)
    np.testing.assert_array_equal(got, expected(x, y, metadata, GROUPS))


def changed(**arrays):
    """Arguments of one rank of four, some of them others."""
    zero = np.zeros(4, np.int32)
    names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    given = {"x": np.zeros((8, 2)), "y": np.zeros((9, 2)), **dict.fromkeys(names, zero)}
    return [*(given | arrays).values()]


ERRORS = {
    "float offsets": (
        changed(input_offsets=np.zeros(4)),
        ValueError,
        "input_offsets must be integer type",
    ),
    "two dimensions": (
        changed(recv_sizes=np.zeros((4, 1), int)),
        ValueError,
        r"recv_sizes must be rank 1 with positive dimension size, but got shape \(4, 1\)",
    ),
    "no slices": (changed(send_sizes=np.zeros(0, int)), ValueError, "send_sizes must be rank 1"),
    "lengths": (changed(output_offsets=np.zeros(8, int)), ValueError, "'output_offsets': 8"),
    "multiple": (
        [*changed()[:2], *[np.zeros(6, int)] * 4],
        ValueError,
        r"multiple of the number of ranks \(4\)",
    ),
    "rows": (changed(y=np.zeros((9, 3))), ValueError, r"\(8, 2\) and \(9, 3\)"),
    "scalars": (changed(x=np.zeros(())), ValueError, "in all dimensions but the first"),
    "dtypes": (changed(y=np.zeros((9, 2), int)), ValueError, "float32 and int32"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_when_traced(name):
    arguments, error, message = ERRORS[name]
    f = jax.shard_map(
        lambda: call(*arguments), mesh=model.grid({"i": 4}), in_specs=(), out_specs=SPEC
    )
    with pytest.raises(error, match=message):
        jax.jit(f).lower()


def test_other_errors_when_traced():
    with pytest.raises(NameError, match="unbound axis name"):
        call(*changed())
    with pytest.raises(ValueError, match="must all be the same size"):
        call(*changed(), axis_index_groups=[[0], [1, 2, 3]])
    arrays = [np.stack([a] * 4) for a in changed()]
    with pytest.raises(NotImplementedError, match="vmap over the axis 'i'"):
        jax.vmap(call, axis_name="i")(*arrays)


@pytest.mark.parametrize("rows", [2, 3000])
def test_mistakes_are_errors_that_name_rank_line_and_value(rows):
    import jaxfabric

    x, y = blocks(4, 4 * rows)
    metadata = slices(4, 1, rows)
    metadata[1][2, 3] = -7

    def from_here(*arrays):
        return lax.ragged_all_to_all(*arrays, axis_name="i")

    f = jax.jit(spread(from_here, model.grid({"i": 4})))
    try:
        with pytest.raises(
            Exception, match=r"on rank 2 \(process 0.*send_sizes\[3\] is -7"
        ) as error:
            jax.block_until_ready(f(x, y, *metadata))
        assert "ragged_all_to_all float32[" in str(error.value)
        assert "test_lax_ragged.py:" in str(error.value)
    finally:
        jaxfabric.shutdown()
        jaxfabric.initialize()
    metadata[1][2, 3] = metadata[3][3, 2]
    np.testing.assert_array_equal(f(x, y, *metadata), expected(x, y, metadata))


def test_custom_call():
    x, y = blocks(4, 12)
    metadata = slices(4, 1, 3, dtype=np.uint8)
    f = jax.jit(spread(call, model.grid({"i": 4}).abstract_mesh))
    text = f.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, y, *metadata))).as_text()
    (line,) = (line for line in text.splitlines() if "@jaxfabric_ragged_all_to_all" in line)
    assert 'label = "ragged_all_to_all float32[12,3]"' in line
    assert "operand_index = 1" in line  # The result begins as the output.
    types = ", ".join([*["tensor<12x3xf32>"] * 2, *["tensor<4xi64>"] * 4, "tensor<ui32>"])
    assert f"({types}) -> tensor<12x3xf32>" in line
