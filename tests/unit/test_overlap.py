"""What a program for GPUs has between the halves of its calls is kept there."""

from __future__ import annotations

import random
import re

import jax
import jax.numpy as jnp
import lax_model as model
import numpy as np
import pytest
from jax._src.lax import parallel

import jaxfabric
from jaxfabric import lax, runtime

X = jax.ShapeDtypeStruct((8, 16, 16), np.float32)
PAIRS = [(0, 1), (1, 2)]


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_problem", lambda: "")
    with jaxfabric.enabled():
        yield


def operations(f):
    """The operations of f on one rank, in order: (results, name, operands)."""
    per_rank = model.per_rank(f, model.grid({"i": 2, "j": 4}), check_vma=False)
    text = jax.jit(per_rank).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    # Names are those of one function.
    for line in text.split("func.func private")[0].splitlines():
        line = re.sub(r"[\[{<].*", "", line) if "custom_call" not in line else line
        match = re.match(r"\s+(%\w+)(?::\d+)? = (?:stablehlo\.|func\.)?(\w+) ?(@\w+)?(.*)", line)
        if match:
            result, name, target, rest = match.groups()
            operands = re.findall(r"%\w+(?:#\d+)?", rest.split("{")[0])
            found.append((result, (target or "@" + name)[1:], operands))
    return found


def needs(found, result):
    """All operations that one needs, by result."""
    made = {result: operands for result, _, operands in found}
    seen, queue = set(), [result]
    while queue:
        for operand in made.get(queue.pop(), ()):
            name = operand.split("#")[0]
            if name not in seen:
                seen.add(name)
                queue.append(name)
    return seen


def named(found, name):
    return [result for result, op, _ in found if op == name]


def test_work_waits_for_the_start_and_done_for_the_work():
    def f(x):
        started = parallel.ppermute_start(x, "j", PAIRS)
        y = x @ x
        return y + started.done()

    found = operations(f)
    (start,), (work,) = named(found, "jaxfabric_permute_start"), named(found, "dot_general")
    (done,) = named(found, "jaxfabric_done")
    assert start in needs(found, work)
    assert {start, work} <= needs(found, done)
    assert len(named(found, "jaxfabric_done")) == 1


def test_starts_come_in_their_order_and_before_what_is_waited_for():
    def f(x):
        a = parallel.ppermute_start(x, "j", PAIRS)
        b = parallel.ppermute_start(jnp.sin(x), "j", PAIRS)
        first = a.done() @ x
        return first + b.done()

    found = operations(f)
    a, b = named(found, "jaxfabric_permute_start")
    first, second = named(found, "jaxfabric_done")
    (work,) = named(found, "dot_general")
    assert a in needs(found, b)
    assert b in needs(found, first)
    assert {first, work} <= needs(found, second)


def test_what_is_no_work_is_not_held():
    def f(x):
        started = parallel.ppermute_start(x, "j", PAIRS)
        return jnp.cos(x) + started.done()

    found = operations(f)
    (done,), (cosine,) = named(found, "jaxfabric_done"), named(found, "cosine")
    assert cosine not in needs(found, done)


def test_a_result_that_is_not_used_holds_nothing_up():
    def f(x):
        return x @ x, parallel.ppermute_start(x, "j", PAIRS).done()

    found = operations(f)
    (start,), (work,) = named(found, "jaxfabric_permute_start"), named(found, "dot_general")
    assert start not in needs(found, work)
    assert work not in needs(found, start)


def test_whole_calls_come_in_their_order():
    def f(x):
        return lax.psum(jnp.sin(x), "j") + lax.pmax(jnp.cos(x), "j") + lax.pmin(x, "j")

    found = operations(f)
    first, second, third = named(found, "jaxfabric_all_reduce")
    assert first in needs(found, second)
    assert second in needs(found, third)


@pytest.mark.parametrize("kind", ["loop", "function"])
def test_calls_inside_come_before_those_that_follow(kind):
    @jax.jit
    def inner(x):
        return lax.pmax(x, "j")

    def f(x):
        if kind == "loop":
            before = jax.lax.fori_loop(0, 2, lambda _, y: lax.pmax(y, "j"), jnp.cos(x))
        else:
            before = inner(jnp.cos(x))
        return before + lax.psum(x, "j") + lax.psum(jnp.sin(x), "j")

    found = operations(f)
    (before,) = named(found, "while" if kind == "loop" else "inner")
    first, last = named(found, "jaxfabric_all_reduce")[-2:]
    assert before in needs(found, last)
    assert first in needs(found, last)


def random_program(seed, depth=0):
    def f(x):
        choose = random.Random(seed)
        values, open_ = [x, jnp.sin(x)], []

        def start(v):
            if choose.random() < 0.5:
                return parallel.ppermute_start(v, "j", PAIRS)
            return parallel.all_to_all_start(v, "j", 0, 0, tiled=True)

        def inner(v):
            return random_program(31 * seed + 1, depth + 1)(v)

        steps = {
            "start": lambda v: open_.append(start(v)),
            "done": lambda v: open_ and values.append(open_.pop(len(open_) // 2).done()),
            "product": lambda v: values.append(v @ choose.choice(values)),
            "sum": lambda v: values.append(jnp.tanh(v) + choose.choice(values)),
            "barrier": lambda v: values.extend(jax.lax.optimization_barrier((v, values[0]))),
            "inner jit": lambda v: values.append(jax.jit(lambda a: jnp.cos(a @ a))(v)),
            "whole": lambda v: values.append(lax.psum(v, "j")),
            "fused": lambda v: values.append(lax.all_gather_matmul(v, v, "j", pieces=2)[:16]),
            "loop": lambda v: (
                depth < 2 and values.append(jax.lax.fori_loop(0, 2, lambda _, a: inner(a), v))
            ),
            "branch": lambda v: (
                depth < 2 and values.append(jax.lax.cond(v[0, 0] > 0, inner, lambda a: a, v))
            ),
        }
        weights = [6, 5, 5, 3, 1, 1, 1, 1, 1, 1]
        for name in choose.choices([*steps], weights, k=choose.randint(4, 16)):
            steps[name](choose.choice(values))
        values.extend(started.done() for started in open_)
        return sum(values[-4:])

    return f


@pytest.mark.parametrize("seed", range(25))
def test_any_program_holds_together(seed):
    """JAX verifies that each value is there before it is used."""
    found = operations(random_program(seed))
    starts = [op for _, op, _ in found if op.endswith("_start")]
    assert len(starts) == len(named(found, "jaxfabric_done"))
