"""Patterns between four hosts, which are network namespaces: named by the setting, with costs that
two of the hosts have measured."""

import pytest
import rank_scripts
import support

pytestmark = pytest.mark.timeout(180)

# By op, what runs it if these are named.
NAMED = "ring,tree,dissemination,bruck"
EVERY_OP = """
assert n == 4
for size in (1, 3000):
    def block(rank):
        return (np.arange(size * n) % 97 + 1000 * rank).astype(np.float32).reshape(n, size)
    x, blocks = array(block), [block(rank) for rank in range(n)]
    total = np.sum(blocks, axis=0)
    same(spread(lambda x: lax.psum(x, "i"))(x), lambda rank: total)
    same(spread(lambda x: lax.psum_scatter(x, "i"))(x), lambda rank: total[rank])
    same(spread(lambda x: lax.all_gather(x, "i").reshape(n * n, size))(x),
         lambda rank: np.concatenate(blocks))
    same(spread(lambda x: lax.all_to_all(x, "i", 0, 0))(x),
         lambda rank: np.stack([b[rank] for b in blocks]))
    same(spread(lambda x: lax.pbroadcast(x, "i", n - 1))(x), lambda rank: blocks[-1])
    spread(lambda x: lax.barrier("i") or x)(x).block_until_ready()
    # No pattern has an order of its own for this one.
    same(spread(lambda x: lax.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)]))(x),
         lambda rank: blocks[(rank - 1) % n])
counters = jaxfabric.status().counters
run_by = {name: count for name, count in counters.items() if name.startswith("run_by_")}
assert run_by.keys() >= {"run_by_ring", "run_by_tree", "run_by_dissemination"}, run_by
assert run_by["run_by_ring"] + run_by.get("run_by_bruck", 0) == 8, run_by
assert run_by["run_by_tree"] == 2 and run_by["run_by_dissemination"] == 2, run_by
print("costs", *(counters[name] for name in sorted(counters) if name.startswith("network_")))
"""


def test_named_patterns_run_every_op_they_have(lab, tmp_path):
    hosts = [lab.host(f"host{i}") for i in range(4)]
    script = support.write_script(tmp_path, rank_scripts.HEAD + EVERY_OP + rank_scripts.TAIL)
    lines = support.launchers(hosts, str(script), counts=(1, 1, 1, 1))
    environment = rank_scripts.environment({"JAXFABRIC_PATTERN": NAMED})
    jobs = [support.Job(line, environment) for line in lines]
    results = [job.finish(120) for job in jobs]
    costs = set()
    for process, result in enumerate(results):
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
        lines_of = result.lines_of(process)
        assert lines_of[-1] == "done", result.explain()
        costs.update(line for line in lines_of if line.startswith("costs"))
    # All choose by the same figures.
    assert len(costs) == 1, costs
