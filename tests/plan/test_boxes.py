"""A run of items as boxes, held against NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.shards import boxes


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 300), st.integers(0, 300))
def test_boxes_are_the_items_in_order(shape, low, high):
    size = math.prod(shape)
    low, high = min(low, size), min(high, size)
    numbers = np.arange(size).reshape(shape)
    pieces = [numbers[tuple(slice(*cut) for cut in box)].ravel() for box in boxes(shape, low, high)]
    assert np.concatenate([np.zeros(0, int), *pieces]).tolist() == list(range(low, high))
    assert len(pieces) <= 2 * len(shape) + 1
