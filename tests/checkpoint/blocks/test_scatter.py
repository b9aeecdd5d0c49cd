"""Boxes come out right whatever part of their bytes is at hand at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.blocks.reader import box_of, scatter

DTYPES = ("u1", "u2", "f4", "f8", "c16", "S3")


@given(st.data(), st.integers(0, 4), st.sampled_from(DTYPES), st.integers(1, 40))
def test_a_box_is_filled_from_windows_of_its_chunk(data, rank, dtype, window):
    shape = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    extent = [data.draw(st.integers(1, s - a)) for s, a in zip(shape, low, strict=True)]
    item = np.dtype(dtype).itemsize
    bits = np.arange(int(np.prod(shape)) * item, dtype=np.int64).astype(np.uint8)
    chunk = np.frombuffer(bits.tobytes(), dtype).reshape(shape)
    wanted = chunk[tuple(slice(a, a + n) for a, n in zip(low, extent, strict=True))]
    before = data.draw(st.integers(0, 9))  # other bytes before and behind the box in its memory
    memory = np.full(before + wanted.nbytes + 9, 255, np.uint8)
    target = np.empty(extent, dtype).strides
    box = box_of(extent, chunk.strides, target, item)
    first = sum(a * s for a, s in zip(low, chunk.strides, strict=True))
    for begin in range(0, len(bits), window):
        scatter(box, bits[begin : begin + window], first - begin, memory, before)
    assert memory[before : before + wanted.nbytes].tobytes() == wanted.tobytes()
    assert (memory[:before] == 255).all()
    assert (memory[before + wanted.nbytes :] == 255).all()


def test_contiguous_dims_are_one():
    assert box_of((4, 8), (32, 4), (32, 4), 4).shape == (128,)
    assert box_of((4, 1, 8), (64, 64, 4), (32, 32, 4), 4).shape == (4, 32)
    assert box_of((), (), (), 8).shape == (8,)
