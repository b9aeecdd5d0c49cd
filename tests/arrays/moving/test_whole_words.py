"""Bits as other dtypes of the same size."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from shoal.arrays.moving.relayout import relayout
from shoal.arrays.moving.whole_words import as_words, bits_as
from shoal.arrays.placing.put import put
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4])
def test_of_any_shape_there_and_back(shape, dtype):
    array = jax.device_put(np.full(shape, 3, dtype))
    words = as_words(array)
    back = bits_as(words, array.dtype)
    assert (words.shape, back.shape, back.dtype) == (shape, shape, array.dtype)
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_words_stay_in_the_memory_kind_of_the_array(memory_kind):
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    spec = jax.sharding.PartitionSpec("x")
    place = jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind)
    array = jax.device_put(np.arange(16).astype(ml_dtypes.bfloat16), place)
    words = as_words(array)
    assert words.sharding == array.sharding
    assert words.addressable_shards[0].data.sharding.memory_kind == memory_kind
    assert np.asarray(bits_as(words, array.dtype)).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e5m2", "float8_e3m4"])
def test_nans_keep_their_bits_between_the_devices_of_one_process(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    patterns = np.arange(1 << 16).astype(f"u{dtype.itemsize}").view(dtype).reshape(256, 256)
    mesh = Mesh({"x": 4, "y": 2})
    placed = put(jax.device_put(patterns, jax.devices()[3]), Layout(mesh, "x", "y"))
    for array in (placed, relayout(placed, Layout(mesh, "y", "x"))):
        assert np.asarray(array).tobytes() == patterns.tobytes()
