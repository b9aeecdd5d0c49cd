"""Values that are no arrays: exact to the bit, by type, and no second text for one value."""

import contextlib
import datetime
import json
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.checkpoint.format import blobs, header
from shoal.checkpoint.tree import plain_values
from shoal.errors import CorruptCheckpointError, UsageError, UsageTypeError

TEXT = st.text(st.characters(codec=None, exclude_categories=()))
PLAIN = (
    st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | st.booleans()
    | TEXT
    | st.binary()
    | st.none()
)
SIGNALLING = struct.unpack(">d", bytes.fromhex("fff4000000000001"))[0]


def bits(value):
    """Return what tells a value from all others."""
    if type(value) is float:
        return struct.pack(">d", value)
    if type(value) is complex:
        return struct.pack(">dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return (value.dtype, value.tobytes())
    if type(value) is np.ndarray:
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        return (native.dtype, native.shape, native.tobytes())
    if type(value) in (list, tuple):
        return type(value), [bits(one) for one in value]
    if type(value) is dict:
        return [(bits(key), bits(one)) for key, one in value.items()]
    return type(value), value


@given(PLAIN)
@example(10**10000)
@example(-(1 << 63))
@example(1 << 63)
@example(SIGNALLING)
@example(complex(SIGNALLING, -0.0))
@example(-0.0)
@example(5e-324)
@example("\ud800\udc00")
@example("a\0\U0010ffff")
def test_plain_values_come_back(value):
    text = json.dumps(
        plain_values.encode_value(value), ensure_ascii=False, allow_nan=False
    ).encode()
    again = plain_values.decode_value(plain_values.kind_of(value), json.loads(text))
    assert bits(again) == bits(value)


SCALARS = (
    np.float32(-0.0), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 - 2j), np.complex128(complex("nan-0j")), ml_dtypes.bfloat16(1.5),
    ml_dtypes.int4(-8), ml_dtypes.uint2(3), ml_dtypes.float4_e2m1fn(-6), np.str_("aß"),
    np.bytes_(b"x\0y"), np.datetime64("2020-01-01T00:00:00.5"), np.timedelta64(5, "D"),
    np.datetime64("NaT", "25s"), np.str_(""),
    np.str_("a\0"), np.str_("\0"), np.str_("\ud800"), np.bytes_(b"\0\0"), np.bytes_(b""),
)  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_of_numpy_come_back(value):
    found = json.loads(json.dumps(plain_values.encode_value(value)))
    again = plain_values.decode_value("scalar", found)
    assert type(again) is type(value)
    assert bits(again) == bits(value)


@pytest.mark.parametrize(
    "value", [np.longdouble(1), np.void(b"abc"), object(), datetime.date.min, [1]]
)
def test_other_values_are_refused(value):
    with pytest.raises(UsageTypeError):
        plain_values.encode_value(value)


@pytest.mark.parametrize(
    ("kind", "found"),
    [("int", 1), ("int", "01"), ("int", "1_0"), ("int", "0x1"), ("int", ""), ("int", "1" * 5000),
     ("int", "9223372036854775808"), ("float", 1.5), ("float", "1.5"), ("float", "nan"),
     ("float", "nan:0000000000000000"), ("float", "nan:7ff"), ("bool", 1), ("bool", "true"),
     ("complex", ["0x0p+0"]), ("complex", "ab"), ("complex", [["inf"], "inf"]), ("str", 3),
     ("str", {"surrogatepass": "YQ=="}), ("str", {}), ("bytes", "YQ"), ("bytes", "YQ=\n="),
     ("bytes", "YR=="), ("none", 0), ("scalar", {}), ("scalar", {"dtype": "object", "bits": ""}),
     ("scalar", {"dtype": "float32", "bits": "00"}), ("scalar", {"dtype": "int4", "bits": "ff"}),
     ("scalar", {"dtype": "float32", "bits": "00000000", "more": 1}), ("array", 1), ("tuple", []),
     ("scalar", None), ("complex", [None, None]), ("int", None), (["int"] and "odd", "x")],
)  # fmt: skip
def test_decode_value_refuses_malformed_values(kind, found):
    with pytest.raises(UsageError):
        plain_values.decode_value(kind, found)


def test_long_text_lies_in_data_files():
    long = "ß" * plain_values.LARGE_BYTES
    for value in (long, long.encode(), "\ud800" * plain_values.LARGE_BYTES):
        data = plain_values.bulk_of(value)
        assert data.dtype == np.uint8
        assert plain_values.value_of_bulk(plain_values.kind_of(value), data) == value
    for value in ("a" * plain_values.LARGE_BYTES, b"a" * plain_values.LARGE_BYTES, 5, None):
        assert plain_values.bulk_of(value) is None
    assert (
        plain_values.bulk_of("a" * (plain_values.LARGE_BYTES + 1)).size
        == plain_values.LARGE_BYTES + 1
    )
    with pytest.raises(UsageError, match="not valid text"):
        plain_values.value_of_bulk("str", np.array([255], np.uint8))


STATIC = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(STATIC)
def test_static_data_come_back(value):
    found = json.loads(json.dumps(plain_values.plain_json(value), ensure_ascii=False).encode())
    assert bits(plain_values.plain_value(found)) == bits(value)


def test_static_data_without_end_are_refused():
    loop: list[object] = []
    loop.append(loop)
    for deep in (loop, {"a": loop}):
        with pytest.raises(UsageError, match="nested"):
            plain_values.plain_json(deep)
        with pytest.raises(UsageError):
            plain_values.plain_value(deep)


ARRAYS = (
    np.arange(6, dtype=">i4").reshape(2, 3).T, np.zeros((3, 0), np.float16), np.array(2.5),
    np.array([1, -8, 7], ml_dtypes.int4), np.array(["a", "ßx"]), np.array([b"", b"xyz"]),
    np.array([1 + 2j, math.nan]), np.array(["2020-01-01", "NaT"], "M8[D]"), np.zeros((), "U0"),
    np.ndarray((2, 3), "S0", b""),
)  # fmt: skip
BLOBS = st.recursive(
    PLAIN | st.sampled_from(ARRAYS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(BLOBS)
@example(list(ARRAYS))
def test_values_of_one_process_come_back(value):
    blob = blobs.encode_tree(value)
    again = blobs.decode_tree(blob)
    assert blobs.encode_tree(again) == blob
    if type(value) is not dict:  # whose order is that of names
        assert bits_sorted(again) == bits_sorted(value)


def bits_sorted(value):
    if type(value) is dict:
        return sorted(((bits(key), bits_sorted(one)) for key, one in value.items()), key=repr)
    if type(value) in (list, tuple):
        return type(value), [bits_sorted(one) for one in value]
    return bits(value)


def test_all_that_a_blob_cannot_hold_is_named():
    bad = {"a": object(), "b": [np.array([object()]), 1], "c": {1, 2}}
    with pytest.raises(UsageTypeError) as error:
        blobs.encode_tree(bad, operation="save: PerProcess at 'loader'")
    text = str(error.value)
    assert text.startswith("save: PerProcess at 'loader': 3 problems")
    for name in ("a: is an object", "b/0: has dtype object", "c: is a set"):
        assert name in text


def test_a_damaged_blob_is_refused_or_another_tree():
    """Its bytes are verified before; still nothing but a typed error may come of them."""
    blob = bytearray(blobs.encode_tree({"a": ARRAYS[0], "b": [1.5, "x", None], "c": ARRAYS[3]}))
    for at in range(len(blob)):
        for bit in (0, 3, 6):
            blob[at] ^= 1 << bit
            with contextlib.suppress(CorruptCheckpointError):
                blobs.decode_tree(bytes(blob))
            blob[at] ^= 1 << bit
    for length in range(len(blob)):
        with pytest.raises(CorruptCheckpointError):
            blobs.decode_tree(bytes(blob[:length]))


@pytest.mark.parametrize(
    ("leaves", "entries"),
    [('[["array","float32",[2]]]', [("a", "F32", (2,)), ("b", "U8", (0,))]),
     ('[["array","float32",[2]]]', [("a", "F32", (1, 2))]),
     ('[["array","float32",[2]]]', [("a", "I32", (2,))]), ('[["array","float32",[2]]]', []),
     ('[["array","float32",[true,2]]]', [("a", "F32", (1, 2))]), ("[]", []), ("{}", []),
     ('[["array","object",[2]]]', [("a", "U8", (2,))]), ('[["int","1"],["int","1"]]', []),
     ('[["int","1"]]', [("a", "U8", (1,))]), ('[["int"]]', []), ("[3]", [])],
)  # fmt: skip
def test_a_blob_that_contradicts_itself_is_refused(leaves, entries):
    placed = header.arrange(entries)
    metadata = {"format": "shoal-values", "leaves": leaves}
    metadata["tree"] = '{"kind":"dict","keys":["a"],"children":[0]}'
    data = header.build_header(placed, metadata) + bytes(placed[-1].end if placed else 0)
    with pytest.raises(CorruptCheckpointError):
        blobs.decode_tree(data)
