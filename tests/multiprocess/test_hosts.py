"""Collectives between hosts, which are network namespaces: every op, sizes on both sides of where
schedules change, programs with the switch, and what ranks are told when a host is lost."""

import netns
import pytest
import rank_scripts
import support

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hosts():
    if reason := netns.unavailable():
        pytest.skip(reason)
    with netns.Lab() as lab:
        yield lab.host("hosta"), lab.host("hostb")


_ports = iter(range(5000, 5200, 2))


def start(hosts, tmp_path, body, counts=(1, 1), devices=1, env=None):
    """Starts a job with a launcher on each of the hosts."""
    script = support.write_script(tmp_path, rank_scripts.HEAD + body + rank_scripts.TAIL)
    address = f"{hosts[0].ipv4}:{next(_ports)}"
    jobs = []
    for rank, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        where = ("--nnodes", str(len(hosts)), "--node-rank", str(rank), "--coordinator", address)
        options = (*where, "--devices-per-process", str(devices))
        argv = support.launcher(count, str(script), options=options)
        jobs.append(support.Job(host.command(*argv), rank_scripts.environment(env)))
    return jobs


def succeed(jobs, counts):
    results = [job.finish(120) for job in jobs]
    first = 0
    for result, count in zip(results, counts, strict=True):
        assert result.returncode == 0, result.explain()
        assert not result.leftovers, result.explain()
        for process in range(first, first + count):
            assert result.lines_of(process)[-1] == "done", result.explain()
        first += count


EVERY_OP = """
assert jax.device_count() > jax.local_device_count()
for size in (1, 9, 3000, 700001):
    row = np.arange(size * n, dtype=np.float32).reshape(n, size) % 97
    x = array(lambda rank: row + np.float32(1000 * rank))
    blocks = [row + np.float32(1000 * r) for r in range(n)]
    total = np.sum(blocks, axis=0)
    same(spread(lambda x: lax.psum(x, "i"))(x), lambda rank: total)
    same(spread(lambda x: lax.pmax(x, "i"))(x), lambda rank: blocks[-1])
    same(spread(lambda x: lax.psum_scatter(x, "i"))(x), lambda rank: total[rank])
    same(spread(lambda x: lax.all_gather(x, "i").reshape(n * n, size))(x),
         lambda rank: np.concatenate(blocks))
    same(spread(lambda x: lax.all_to_all(x, "i", 0, 0))(x),
         lambda rank: np.stack([b[rank] for b in blocks]))
    same(spread(lambda x: lax.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)]))(x),
         lambda rank: blocks[(rank - 1) % n])
    same(spread(lambda x: lax.pbroadcast(x, "i", n - 1))(x), lambda rank: blocks[-1])
    spread(lambda x: lax.barrier("i") or x)(x).block_until_ready()
"""


@pytest.mark.parametrize(
    ("counts", "devices"), [((1, 1), 1), ((2, 2), 1), ((2, 1), 2)], ids=["1+1", "2+2", "2x2+1x2"]
)
def test_every_op(hosts, tmp_path, counts, devices):
    succeed(start(hosts, tmp_path, EVERY_OP, counts, devices), counts)


MODEL = """
def step(w, x, y):
    def loss(w):
        h = jnp.tanh(x @ w)
        return jax.lax.pmean(((h.sum(1) - y) ** 2).mean(), "i")
    return w - 0.01 * jax.lax.pmean(jax.grad(loss)(w), "i")

from jax.sharding import PartitionSpec as P
w = np.linspace(-1, 1, 300 * 40, dtype=np.float32).reshape(300, 40)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(n * 8, 300)).astype(np.float32), rng.normal(size=n * 8).astype(np.float32)
results = []
for stock in (False, True):
    run = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=False))
    with jaxfabric.enabled():
        v = w
        for _ in range(5):
            v = run(v, x, y)
    results.append(np.asarray(v.addressable_data(0)))
np.testing.assert_array_equal(*results)
report = jaxfabric.report()
assert jaxfabric.status().counters["communicators"] >= 1
"""


def test_a_training_step_with_the_switch(hosts, tmp_path):
    counts = (2, 2)
    succeed(start(hosts, tmp_path, MODEL, counts), counts)
