"""Ranks that do different things: an error naming both sides, never a result, never a hang."""

import faults
import pytest

pytestmark = pytest.mark.timeout(120)

DEADLINE = 2.0

# Every case ends with a failure, and the same processes go on to the next one.
CASES = """
    import sys
    import jax, jaxfabric, worker
    import jax.numpy as jnp
    from jaxfabric.lax import all_gather, all_to_all, pmax, ppermute, psum

    settings = dict(deadline=float(sys.argv[1]), mismatch_after=0.3)
    jaxfabric.initialize(**settings)
    first = jax.process_index() == 0
    x = worker.blocks(64)

    def shapes():
        if first:
            def step(x): return psum(x, "x")  # shapes 0
            return step, x
        def step(x): return psum(x, "x")  # shapes 1
        return step, worker.blocks(128)

    def large_shapes():
        if first:
            def step(x): return all_to_all(x, "x", 0, 0, tiled=True)  # large_shapes 0
            return step, worker.blocks(1 << 18)
        def step(x): return all_to_all(x, "x", 0, 0, tiled=True)  # large_shapes 1
        return step, worker.blocks(1 << 19)

    def dtypes():
        if first:
            def step(x): return psum(x, "x")  # dtypes 0
            return step, x
        def step(x): return psum(x, "x")  # dtypes 1
        return step, worker.blocks(64, dtype=jnp.int32)

    def reductions():
        if first:
            def step(x): return psum(x, "x")  # reductions 0
            return step, x
        def step(x): return pmax(x, "x")  # reductions 1
        return step, x

    def ops():
        if first:
            def step(x): return psum(x, "x")  # ops 0
            return step, x
        def step(x): return all_gather(x, "x", tiled=True)  # ops 1
        return step, x

    def orders():
        if first:
            def step(x):
                y = psum(x, "x")  # orders 0
                return all_gather(y, "x", tiled=True)
            return step, x
        def step(x):
            y = all_gather(x, "x", tiled=True)  # orders 1
            return psum(y, "x")
        return step, x

    def free_orders():
        if first:
            def step(x): return (
                psum(x, "x"),  # free_orders 0
                all_gather(x, "x", tiled=True))  # free_orders 0b
            return step, x
        def step(x): return (
            all_gather(x, "x", tiled=True),  # free_orders 1
            psum(x, "x"))  # free_orders 1b
        return step, x

    def directions():
        if first:
            def step(x): return ppermute(x, "x", [(0, 1)])  # directions 0
            return step, x
        def step(x): return ppermute(x, "x", [(1, 0)])  # directions 1
        return step, x

    def programs():
        if first:
            def this(x): return psum(x, "x")  # programs 0
            return this, x
        def that(x): return psum(x, "x")  # programs 1
        return that, x

    def mesh_positions():
        if first:
            def step(x): return psum(x, "x")  # mesh_positions 0
            return step, x
        def step(x): return pmax(x, "x")  # mesh_positions 1
        return step, x

    for case in (shapes, large_shapes, dtypes, reductions, ops, orders, free_orders, directions,
                 programs, mesh_positions):
        step, operand = case()
        # The last program sees a mesh without devices: its communicators are made of positions.
        step = worker.spmd(step, abstract=case is mesh_positions)
        worker.say("begins", case=case.__name__)
        with worker.failure():
            jax.block_until_ready(step(operand))
        jaxfabric.shutdown()
        jaxfabric.initialize(**settings)
    good = worker.spmd(lambda x: psum(x, "x"))
    assert all((block == 3).all() for block in worker.local(good(x)))
    worker.say("done")
"""

CALLS = {
    "shapes": ("psum float32[64]", "psum float32[128]"),
    "large_shapes": ("all_to_all float32[2,131072]", "all_to_all float32[2,262144]"),
    "dtypes": ("psum float32[64]", "psum int32[64]"),
    "reductions": ("psum float32[64]", "pmax float32[64]"),
    "ops": ("psum float32[64]", "all_gather float32[64]"),
    "orders": ("psum float32[64]", "all_gather float32[64]"),
    "free_orders": ("psum float32[64]", "all_gather float32[64]"),
    "directions": ("ppermute float32[64]", "ppermute float32[64]"),
    "programs": ("psum float32[64]", "psum float32[64]"),
    "mesh_positions": ("psum float32[64]", "pmax float32[64]"),
}


def test_two_processes(tmp_path):
    path = faults.script(tmp_path, CASES)
    result = faults.launch(path, 2, DEADLINE).finish(100)
    assert result.returncode == 0, result.explain()
    assert not result.leftovers
    for rank in range(2):
        assert not faults.events(result.stdout, rank, "finished"), result.explain()
        begun = faults.events(result.stdout, rank, "begins")
        raised = faults.events(result.stdout, rank, "raised")
        assert [one["case"] for one in begun] == list(CALLS)
        assert len(raised) == len(CALLS)
        for begins, error in zip(begun, raised, strict=True):
            case = begins["case"]
            seconds = error["time"] - begins["time"]
            faults.measured(f"{case} on process {rank}", raised=seconds)
            assert seconds < DEADLINE + 1, result.explain()
            if case == "directions":
                assert_names_both_sides(case, error, path, lines_only=True)
            else:
                assert_names_both_sides(case, error, path)


def assert_names_both_sides(case, error, path, lines_only=False):
    text = error["text"]
    assert "disagree" in text, (case, text)
    for process, call in enumerate(CALLS[case]):
        lines = [faults.line(path, f"{case} {process}")]
        if case == "free_orders":
            # The two calls of a rank have no order: either may be the one that is found out.
            lines.append(faults.line(path, f"{case} {process}b"))
            assert any(line in text for line in lines), (case, text)
        else:
            assert f"{call} at {lines[0]}" in text, (case, text)
    for process in range(2):
        assert f"rank {2048 * process} (process {process}" in text, (case, text)


TWO_DEVICES = """
    import jax, jaxfabric, worker
    from jaxfabric.lax import all_gather, psum

    jax.config.update("jax_num_cpu_devices", 2)
    jax.devices()
    snapshot = worker.Snapshot()
    jaxfabric.initialize(deadline=1, mismatch_after=0.2)

    def one(x):
        return psum(x, "x")  # one

    def other(x):
        return all_gather(x, "x", tiled=True)[: x.size]  # other

    @worker.spmd
    def step(x):
        return jax.lax.cond(jax.lax.axis_index("x") == 0, one, other, x)

    for size in (8, 1 << 16):
        worker.say("begins")
        with worker.failure():
            step(worker.blocks(size)).block_until_ready()
        jaxfabric.shutdown()
        jaxfabric.initialize(deadline=1, mismatch_after=0.2)
    snapshot.check()
"""


def test_two_devices_of_one_process(tmp_path):
    path = faults.script(tmp_path, TWO_DEVICES)
    result = faults.launch(path, 1).finish(60)
    assert result.returncode == 0, result.explain()
    faults.assert_clean(result, 0)
    begun = faults.events(result.stdout, 0, "begins")
    raised = faults.events(result.stdout, 0, "raised")
    assert len(raised) == 2, result.explain()
    for begins, error, size in zip(begun, raised, (8, 1 << 16), strict=True):
        assert f"psum float32[{size}] at {faults.line(path, 'one')}" in error["text"]
        assert f"all_gather float32[{size}] at {faults.line(path, 'other')}" in error["text"]
        assert "disagree" in error["text"]
        faults.measured("two devices", raised=error["time"] - begins["time"])
        assert error["time"] - begins["time"] < 3
