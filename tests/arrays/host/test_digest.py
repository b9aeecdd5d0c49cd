"""The digest of a host value depends on its values alone, and reads little."""

import mmap
import os
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.arrays.host import digest as file
from shoal.arrays.host.digest import digest

DTYPES = ["float32", "int8", "bool", "complex64", "bfloat16", "int4", "float4_e2m1fn", "uint16"]
LARGE = (1 << 20) // 4 + 5  # float32: more than is read as a whole


def patterns(shape, dtype, seed=0):
    """Return values of any bits, but for bool and dtypes narrower than a byte."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype in (bool, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        bits %= 2
    return np.asarray(bits.view(dtype)[..., 0])


@given(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.integers(0, 9), st.data()
)
def test_memory_order_strides_and_byte_order_do_not_matter(shape, dtype, seed, data):
    array = patterns(tuple(shape), dtype, seed)
    wide = np.zeros([2 * size for size in shape], array.dtype)
    strided = wide[(..., *[slice(None, None, 2)] * len(shape))]
    strided[...] = array
    backward = np.flip(np.ascontiguousarray(np.flip(array)))
    versions = [np.asfortranarray(array), strided, backward, np.array(jnp.asarray(array))]
    if np.dtype(dtype).kind in "fcu":
        versions.append(array.astype(array.dtype.newbyteorder()))
    assert {digest(version) for version in versions} == {digest(array)}
    if array.size:
        index = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
        other = array.copy()
        other.reshape(-1).view(np.uint8).reshape(*shape, -1)[(*index, 0)] ^= 1
        assert digest(other) != digest(array)


@pytest.mark.parametrize("shape", [(LARGE,), (LARGE // 500 + 1, 500), (3, LARGE // 12 + 1, 4)])
def test_digest_of_large_arrays_is_a_sample_in_any_memory_order(shape):
    array = patterns(shape, np.float32)
    turned = np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0)
    swapped = array.astype(">f4")
    assert digest(array) == digest(turned) == digest(swapped)
    assert digest(array).endswith(" (a sample)")
    assert "sample" not in digest(array.reshape(-1)[: 1 << 18])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, None), (1000, 3080), (77_000, 79_080)])
def test_the_ends_and_any_run_longer_than_a_gap_are_seen(low, high):
    array = np.zeros(LARGE, np.float32)
    array[low:high] = 1
    assert digest(array) != digest(np.zeros(LARGE, np.float32))


@given(st.integers(2, 20), st.integers(1, 5), st.integers(0, 200))
def test_a_sample_is_even(places, items, more):
    array = np.arange(items + more)
    taken = file._sample(array, places, items).reshape(places, items)
    assert (taken == taken[:, :1] + np.arange(items)).all()
    assert (taken[0, 0], taken[-1, -1]) == (0, array.size - 1)
    gaps = np.diff(taken[:, 0])
    assert gaps.max() - gaps.min() <= 1
    folded = array.reshape(-1, 1)[::-1][::-1]
    assert (file._sample(np.asfortranarray(folded), places, items) == taken.ravel()).all()
    assert (file._sample(np.repeat(array, 2)[::2], places, items) == taken.ravel()).all()


def test_bits_beside_a_narrow_value_do_not_count():
    low, high = (np.array([bits], np.uint8).view("int4") for bits in (0x0F, 0xFF))
    assert (low == high).all()
    assert digest(low) == digest(high)


def test_bits_count():
    assert digest(np.float32([0.0])) != digest(np.float32([-0.0]))
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(nan[:1]) == digest(nan[:1].copy()) != digest(nan[1:])


@pytest.mark.parametrize("kind", ["memmap", "view", "buffer", "turned"])
def test_of_a_mapped_file_few_pages_are_read(kind, tmp_path):
    """The kernel counts: it maps up to 16 pages around each that is read, and here nothing more."""
    path, rows = tmp_path / "rows", 1 << 16
    with open(path, "wb+") as opened:
        opened.truncate(rows * mmap.PAGESIZE)  # holes: no disk has to hold it
        opened.seek(-8, os.SEEK_END)
        opened.write(b"the last")
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(mapped, np.float32).reshape(rows, -1)
    if kind in ("memmap", "view"):
        array = np.memmap(path, np.float32, "r", shape=(rows, mmap.PAGESIZE // 4))
        mapped = array._mmap
        array = np.asarray(array)[1:] if kind == "view" else array
    array = array.T if kind == "turned" else array
    mapped.madvise(mmap.MADV_RANDOM)  # no reading ahead
    told = digest(array)
    assert told.endswith(" (a sample of a mapped file)")
    assert 0 < resident_bytes(array.ctypes.data) <= 16 * 16 * mmap.PAGESIZE
    assert told == digest(array)


def test_a_copy_of_a_mapped_file_is_like_any_array(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(1 << 12, dtype=np.float32))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert digest(mapped).endswith(" (a sample of a mapped file)")
    for copy in (mapped.copy(), mapped.astype(np.float64)):
        assert isinstance(copy, np.memmap)
        assert digest(copy) == digest(np.array(copy))


def resident_bytes(address):
    """Return how much of the mapping that holds an address is in memory: man 5 proc."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            is_it = low <= address < high
        elif is_it and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")
