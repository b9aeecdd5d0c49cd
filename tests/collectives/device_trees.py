"""Trees of arrays on eight devices, and processes that share them between threads of the test."""

import threading

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shoal.collectives.check_finite
import shoal.collectives.check_replicas
from collectives.trees import DTYPES
from shoal.arrays.host.host_values import cannot_hold
from shoal.collectives import device_shards

SPECS = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),)]
SHAPE = (8, 4)
CHECKS = (shoal.collectives.check_finite, shoal.collectives.check_replicas)


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def sharding(spec):
    return NamedSharding(mesh(), PartitionSpec(*spec))


def device_dtypes():
    """Return the dtypes that arrays on devices can have, those of 64 bits too."""
    with jax.enable_x64(True):
        return [dtype for dtype in DTYPES if not cannot_hold(np.zeros(1, dtype))]


def bits(dtype):
    """Random bits as an array of SHAPE; of numbers below a byte only the bits that they have."""
    most = 2 if dtype.kind == "b" else 1 << min(jax.dtypes.itemsize_bits(dtype), 8)

    def drawn(seed):
        raw = np.random.default_rng(seed).integers(most, size=32 * dtype.itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(SHAPE)

    return st.integers(0, 1 << 32).map(drawn)


def placed(value, spec):
    """Return an array of equal replicas."""
    array = jax.device_put(value, sharding(spec))
    assert len(array.addressable_shards) == 8  # JAX fills its list once, not safely for threads
    return array


def replicas(value, spec, change=None):
    """Return an array in which one device's piece was changed in place.

    Args:
      change: (a device's number, a function of its piece), or None.
    """
    where = sharding(spec).addressable_devices_indices_map(value.shape)
    pieces = [np.array(value[index]) for index in where.values()]
    if change is not None:
        change[1](pieces[change[0]])
    own = jax.device_put(pieces, [*where])
    array = jax.make_array_from_single_device_arrays(value.shape, sharding(spec), own)
    assert len(array.addressable_shards) == 8
    return array


def on_devices(monkeypatch):
    """Let the devices check what NumPy would, since this host has only CPUs."""
    monkeypatch.setattr(device_shards, "_in_host_memory", lambda data: False)


class Shared:
    """Devices 0-7 shared between the processes of a job: threads that call `own` first."""

    def __init__(self, monkeypatch, owners):
        self._here = threading.local()
        self.owners = owners  # the process of each device
        for module in CHECKS:
            monkeypatch.setattr(module, "shards_here", self._shards_here)
            monkeypatch.setattr(module, "layout_text", lambda leaf, value: "shared")

    def own(self, process):
        self._here.process = process

    def _shards_here(self, leaf, array):
        shards = device_shards.shards_here(leaf, array)
        return [shard for shard in shards if self.owners[shard.device] == self._here.process]
