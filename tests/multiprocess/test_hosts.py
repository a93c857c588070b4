"""Collectives between hosts, which are network namespaces: every op, sizes on both sides of where
schedules change, and a program with the switch."""

import pytest
import rank_scripts
import support

pytestmark = pytest.mark.timeout(180)


def start(hosts, tmp_path, body, counts=(1, 1), devices=1, address=None):
    """Starts a job with a launcher on each of the hosts."""
    script = support.write_script(tmp_path, rank_scripts.HEAD + body + rank_scripts.TAIL)
    options = ("--devices-per-process", str(devices))
    lines = support.launchers(hosts, str(script), counts=counts, options=options, address=address)
    return [support.Job(line, rank_scripts.environment()) for line in lines]


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
    def block(rank):
        return (np.arange(size * n) % 97 + 1000 * rank).astype(np.float32).reshape(n, size)
    x, blocks = array(block), [block(rank) for rank in range(n)]
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


# How many connections this host has, beside those to itself.
OVER_IPV6 = """
def connections(name):
    with open("/proc/net/" + name) as file:
        lines = [line.split() for line in file][1:]
    ends = [line[1:3] for line in lines if line[3] == "01"]
    return sum(a.split(":")[0] != b.split(":")[0] for a, b in ends)

assert connections("tcp6") >= 3  # of the control plane, and two for data
assert connections("tcp") == 0
"""


def test_every_op_over_ipv6(hosts, tmp_path):
    address = f"[{hosts[0].ipv6}]:{support.new_port()}"
    succeed(start(hosts, tmp_path, EVERY_OP + OVER_IPV6, address=address), (1, 1))


MODEL = """
def step(w, x, y):
    def loss(w):
        h = jnp.tanh(x @ w)
        return jax.lax.pmean(((h.sum(1) - y) ** 2).mean(), "i")
    return w - 0.01 * jax.lax.pmean(jax.grad(loss)(w), "i")

w = np.linspace(-1, 1, 300 * 40, dtype=np.float32).reshape(300, 40)
x = array(lambda rank: np.random.default_rng(rank).normal(size=(8, 300)).astype(np.float32))
y = array(lambda rank: np.arange(8, dtype=np.float32) * rank)
in_specs = (P(), P("i"), P("i"))
run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False))
with jaxfabric.enabled():
    for _ in range(5):
        w = run(w, x, y)
assert np.isfinite(np.asarray(w.addressable_data(0))).all()
assert jaxfabric.status().counters["communicators"] == 1
# The same bits on every rank.
bits = np.asarray(w.addressable_data(0)).view(np.int32)
same(spread(lambda x: lax.pmax(x, "i"))(array(lambda rank: bits)), lambda rank: bits)
"""


def test_a_training_step_with_the_switch(hosts, tmp_path):
    counts = (2, 2)
    succeed(start(hosts, tmp_path, MODEL, counts), counts)
