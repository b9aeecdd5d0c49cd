"""The programs of a planned move, run one after the other."""

import jax
import numpy as np

from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.moving.move_program import stages


def as_it_lies(array, target, shape):
    """Return the same shards under another sharding."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    own = [shards[device] for device in target.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(shape, target, own)


def run(array, source, target, steps):
    """Return the moved array, and the texts of the programs."""
    shape, texts = array.shape, []
    for stage in stages(steps, source, target, shape, 4):
        shard = array.addressable_shards[0].data.shape
        array = as_it_lies(array, stage.takes, whole(shard, stage.takes))
        program = jax.jit(stage.run, in_shardings=stage.takes, out_shardings=stage.gives)
        texts.append(program.lower(array).compile().as_text())
        array = program(array)
    return as_it_lies(array, sharding_of(target), shape), texts


def whole(shard, sharding):
    dims = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    dims += [()] * (len(shard) - len(dims))
    counts = [np.prod([sharding.mesh.shape[axis] for axis in dim], dtype=int) for dim in dims]
    return tuple(int(n * size) for n, size in zip(counts, shard, strict=True))
