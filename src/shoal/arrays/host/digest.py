"""Digest of a host value, cheap compared to moving it: of all of it, or of an even sample.

It depends on the values alone: not on memory order, strides or byte order. xxh3-64 (XXH3,
https://xxhash.com): fast, not cryptographic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shoal.arrays.host.host_values import is_mapped, native
from shoal.hashing import quick_digest

HostArray = np.ndarray[Any, Any]

WHOLE_BYTES = 1 << 20  # arrays up to this size are hashed whole
PLACES, PLACE_BYTES = 128, 64  # samples of larger arrays, evenly spaced, ends included
# A mapped file may have to be read from disk: sample a few pages only.
MAPPED_PLACES, MAPPED_PLACE_BYTES = 8, 512
MAPPED_WHOLE_BYTES = MAPPED_PLACES * MAPPED_PLACE_BYTES


def digest(value: HostArray, *, whole: bool = False) -> str:
    """Return a text that is equal for equal values of one shape and dtype.

    Arrays over WHOLE_BYTES, and memory-mapped files over eight places of 512 bytes, are sampled
    unless `whole`; the text says so, for a sample is never equal to another kind of sample. NaNs
    are equal if their bits are, and -0.0 differs from 0.0.

    >>> digest(np.arange(3)) == digest(np.arange(6)[::2] // 2)
    True
    """
    array = np.asarray(value)
    if whole:
        return _hash(np.ascontiguousarray(array))
    if array.nbytes > MAPPED_WHOLE_BYTES and is_mapped(array):
        # Each item of a strided array may be in another page.
        items = MAPPED_PLACE_BYTES // array.itemsize if array.flags.c_contiguous else 1
        sample = _sample(array, MAPPED_PLACES, max(1, items))
        return f"{_hash(sample)} (a sample of a mapped file)"
    if array.nbytes <= WHOLE_BYTES:
        return _hash(np.ascontiguousarray(array))
    return f"{_hash(_sample(array, PLACES, max(1, PLACE_BYTES // array.itemsize)))} (a sample)"


def _sample(array: HostArray, places: int, items: int) -> HostArray:
    """Return `items` items, in C order, at each of `places` places, the first and last included.

    Of 10 items, 2 at each of 3 places: items 0, 1, 4, 5, 8, 9.
    """
    step, more = divmod(array.size - items, places - 1)  # this many gaps are longer by one
    if array.flags.c_contiguous and step >= items:  # the same items, without an index array
        flat, turn = array.reshape(-1), more * (step + 1)
        wide = flat[:turn].reshape(more, step + 1)[:, :items]
        rest = flat[turn : array.size - items].reshape(-1, step)[:, :items]
        return np.concatenate((wide.reshape(-1), rest.reshape(-1), flat[-items:]))
    numbers = np.arange(places)
    starts = numbers * step + np.minimum(numbers, more)
    numbers = (starts[:, None] + np.arange(items)).ravel()
    return np.asarray(array[np.unravel_index(numbers, array.shape)])


def _hash(array: HostArray) -> str:
    data = native(array).reshape(-1).view(np.uint8)
    bits = _bits(array.dtype)
    if bits < 8:  # a byte each in memory, of which the upper bits are undefined
        data = data & np.uint8((1 << bits) - 1)
    return quick_digest(data.data).hex()


@lru_cache(maxsize=64)
def _bits(dtype: np.dtype[Any]) -> int:
    return int(jax.dtypes.itemsize_bits(dtype.newbyteorder("=")))
