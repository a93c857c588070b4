"""Adds up a number of every rank: `jaxfabric run -n 4 examples/hello_psum.py`."""

import jax

import jaxfabric

jaxfabric.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("ranks",))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(), out_specs=jax.P())
def total():
    return jaxfabric.lax.psum(jax.lax.axis_index("ranks") + 1, "ranks")


print(f"process {jax.process_index()} of {jax.process_count()}: the sum is {total()}")
