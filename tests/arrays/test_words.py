"""Bits as other dtypes of the same size."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from shoal.arrays.words import as_words, bits_as


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4])
def test_of_any_shape_there_and_back(shape, dtype):
    array = jax.device_put(np.full(shape, 3, dtype))
    words = as_words(array)
    back = bits_as(words, array.dtype)
    assert (words.shape, back.shape, back.dtype) == (shape, shape, array.dtype)
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_they_stay_in_their_kind_of_memory(memory_kind):
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    spec = jax.sharding.PartitionSpec("x")
    place = jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind)
    array = jax.device_put(np.arange(16).astype(ml_dtypes.bfloat16), place)
    words = as_words(array)
    assert words.sharding == array.sharding
    assert words.addressable_shards[0].data.sharding.memory_kind == memory_kind
    assert np.asarray(bits_as(words, array.dtype)).tobytes() == np.asarray(array).tobytes()
