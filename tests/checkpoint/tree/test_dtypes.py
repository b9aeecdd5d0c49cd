"""Dtypes: every one of NumPy and ml_dtypes is stored to the bit, or refused by name."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.format import header
from shoal.checkpoint.tree import dtypes
from shoal.errors import UsageError, UsageTypeError

SMALL = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
TEXT_AND_TIME = ["S5", "U7", "S1", "datetime64[ns]", "datetime64[25s]", "timedelta64[D]", "M8"]
ALL = [np.dtype(code) for code in np.typecodes["All"]] + SMALL + [*map(np.dtype, TEXT_AND_TIME)]
REFUSED = {"O": "Python objects", "V": "cannot be stored", "g": "depends on", "G": "depends on"}
STORED = [dtype for dtype in ALL if dtype in SMALL or dtype.char not in REFUSED]
BITS = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def some(dtype, shape):
    """Return every pattern of bits that fits, and more."""
    if dtype.name in BITS:
        count = int(np.prod(shape))
        return (
            (np.arange(count, dtype=np.uint8) % (1 << BITS[dtype.name])).view(dtype).reshape(shape)
        )
    if dtype.kind == "U" and dtype.itemsize:
        return np.resize(np.array(["", "a", "\U0010ffff\0b"], dtype), shape)
    if dtype.kind == "b":
        return np.resize(np.array([False, True, True]), shape)
    raw = np.random.default_rng(3).bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.ndarray(shape, dtype, raw)


def test_all_dtypes_are_known_to_these_tests():
    """A new one shows itself here."""
    assert len(SMALL) == 20, "a new one needs a row: checkpoint/tree/dtypes.py, its page, here"
    assert {dtype.name for dtype in SMALL if dtype.itemsize == 1 and dtype.kind == "V"} >= set(BITS)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (4, 16, 5), (2, 0, 3)], ids=str)
def test_stored_to_the_bit(dtype, shape):
    array = some(dtype, shape)
    data = dtypes.pack_elements(array)
    assert (data.dtype, data.ndim) == (np.uint8, 1)
    assert data.size == dtypes.num_bytes(dtype, shape)
    again = dtypes.unpack_elements(data, dtype, shape)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    assert dtypes.dtype_of(dtypes.dtype_name(dtype)) == dtype


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_entries_are_read_by_the_safetensors_library(dtype):
    array = some(dtype, (4, 6))
    how = dtypes.storage_of(dtype)
    data = dtypes.pack_elements(array).tobytes()
    entries = header.arrange([("x", how.entry, dtypes.entry_shape(dtype, array.shape))])
    assert entries[0].end == len(data)
    file = header.build_header(entries, {}) + data
    if how.entry in ("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        ((name, found),) = safetensors.deserialize(file)  # its NumPy side has no such dtypes
        assert (name, found["dtype"]) == ("x", how.entry)
        assert bytes(found["data"]) == data
    else:
        found = safetensors.numpy.load(file)["x"]
        assert found.shape == dtypes.entry_shape(dtype, array.shape)
        assert found.tobytes() == data
        if how.per_byte == 1 and not how.trailing and dtype.kind in "iufcb":
            assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype not in STORED], ids=str)
def test_unsupported_dtypes_raise_with_the_reason(dtype):
    with pytest.raises(UsageTypeError, match=REFUSED[dtype.char]):
        dtypes.storage_of(dtype)


MORE_REFUSED = (
    [("a", "i4")], "V8", "(2,)i4", np.dtype("V3"), np.dtypes.StringDType(),
    np.dtypes.StringDType(na_object=None), [("o", "O")],
)  # fmt: skip


@pytest.mark.parametrize("dtype", MORE_REFUSED, ids=str)
def test_structures_objects_and_open_strings_are_refused(dtype):
    with pytest.raises(UsageTypeError, match=r"^has dtype"):
        dtypes.dtype_name(dtype)


def test_big_endian_memory_is_stored_little_endian():
    for code in (">i2", ">f8", ">c16", ">U2", ">M8[s]", ">u4"):
        array = some(np.dtype(code), (3,))
        native = array.astype(array.dtype.newbyteorder("="))
        assert dtypes.pack_elements(array).tobytes() == native.tobytes()
        assert dtypes.dtype_name(array.dtype) == dtypes.dtype_name(native.dtype)


@pytest.mark.parametrize(
    "name",
    ["", "object", "O", "V8", "float128", "longdouble", "f4", "<f4", ">f4", "int", "float", "int4 ",
     "datetime64[x]", "datetime64[ns", "datetime64[0s]", "datetime64[-1s]", "S", "U", "S01", "S-1",
     "S99999999999", "U999999999", "datetime64[999999999999s]", "i4,i4", "finfo", "bool_", "str",
     "numpy.float32", "__name__", "\x00", "uint8\n", "S5\n"],
)  # fmt: skip
def test_dtype_of_refuses_unknown_names(name):
    with pytest.raises(UsageError, match="not the name of a dtype"):
        dtypes.dtype_of(name)


@given(st.sampled_from(sorted(BITS)), st.integers(0, 40), st.integers(0, 255))
def test_only_low_bits_are_packed_low_bits_first(name, count, garbage):
    dtype, bits = np.dtype(getattr(ml_dtypes, name)), BITS[name]
    low = np.arange(count) % (1 << bits)
    high = garbage >> bits << bits
    packed = dtypes.pack_elements((low | high).astype(np.uint8).view(dtype))
    wanted = sum(int(value) << (place * bits) for place, value in enumerate(low))
    assert int.from_bytes(packed.tobytes(), "little") == wanted
    assert packed.size == -(-count * bits // 8)


def test_memory_is_shared_where_it_can_be():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(dtypes.pack_elements(array), array)
    data = np.zeros(24, np.uint8)
    again = dtypes.unpack_elements(data, np.float32, (2, 3))
    again[1, 2] = 1
    assert data.any()
    assert dtypes.pack_elements(array.T).tobytes() == array.T.tobytes()


def test_bytes_of_another_length_are_refused():
    for count in (0, 11, 13):
        with pytest.raises(UsageError, match=r"bytes are no float32\[3\]: that has 12"):
            dtypes.unpack_elements(bytes(count), np.float32, (3,))
