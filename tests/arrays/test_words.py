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
