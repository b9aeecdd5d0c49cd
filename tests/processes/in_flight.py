"""A program of which devices of all processes compute a part: the beginning of a script."""

IN_FLIGHT = """
initialize(timeout_s=30)
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
devices = np.array(jax.devices())
sharding = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
array = jax.make_array_from_callback(
    (len(devices), 1 << 18), sharding, lambda where: np.ones((1, 1 << 18), np.float32))
total = jax.jit(lambda a: a.sum(0))
total(array).block_until_ready()
"""
