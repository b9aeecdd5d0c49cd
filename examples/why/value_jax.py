"""Process 1 has read another learning rate than the other processes."""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

address, count, index = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))
rate = np.float32(0.1 if jax.process_index() == 1 else 0.01)
replicated = NamedSharding(Mesh(jax.devices(), "data"), PartitionSpec())
array = jax.make_array_from_callback((), replicated, lambda _: rate)
multihost_utils.sync_global_devices("start")
print("replicated:", array.is_fully_replicated, "value:", array)
