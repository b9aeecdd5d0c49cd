"""Headers of safetensors: what we write its own library reads; what lies is refused."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.format import header
from shoal.errors import CorruptCheckpointError, UsageError

DTYPES = {"F64": "f8", "I32": "i4", "U16": "u2", "F16": "f2", "U8": "u1", "BOOL": "?", "C64": "c8"}
NAMES = st.text(max_size=4).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ITEMS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6)


@given(ITEMS, st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
def test_files_are_read_by_us_and_by_the_library(items, metadata):
    entries = header.arrange((name, *item) for name, item in items.items())
    first = header.build_header(entries, metadata)
    assert len(first) % 4096 == 0
    size = entries[-1].end if entries else 0
    found = header.parse_header(first + bytes(7), len(first) + size, "f")
    assert found == (tuple(entries), metadata, len(first))
    assert header.header_bytes(first[:8], len(first) + size, "f") == len(first)
    data = np.random.default_rng(1).integers(0, 2, size, np.uint8).tobytes()
    loaded = safetensors.numpy.load(first + data)
    assert {name: array.shape for name, array in loaded.items()} == {
        name: shape for name, (_, shape) in items.items()
    }
    for entry in entries:
        array = loaded[entry.name]
        assert array.tobytes() == data[entry.begin : entry.end]
        assert array.dtype == DTYPES[entry.dtype]
        assert entry.begin % max(1, array.itemsize) == 0


def file_of(said, data_bytes=0):
    """Return a file whose header says that, as JSON or as text."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def one(**fields):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}


HUGE = 1 << 62
EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HOSTILE = {
    "no bytes": b"",
    "seven bytes": b"\0" * 7,
    "length 0": bytes(8),
    "length beyond the file": (100).to_bytes(8, "little") + b"{}",
    "length of 16 EiB": b"\xff" * 8 + b"{}",
    "length beyond the limit": (100_000_001).to_bytes(8, "little") + b"{}",
    "no JSON": file_of(b"{nonsense}"),
    "no object": file_of([1]),
    "blanks before": file_of(b"  {}"),
    "something behind": file_of(b"{} x"),
    "bad UTF-8": file_of(b'{"\xff": 1}'),
    "a byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "NaN": file_of(b'{"__metadata__": NaN}'),
    "nested": file_of(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nested lists": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 10,000 digits": file_of(b'{"a":' + b"1" * 10_000 + b"}"),
    "a key twice": file_of(b"{" + b",".join([b'"a":' + EMPTY] * 2) + b"}"),
    "a field twice": file_of(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "metadata of a list": file_of({"__metadata__": []}),
    "an entry of nothing": file_of({"x": None}),
    "an entry without shape": file_of({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
    "an entry with more": file_of(one(more=1), 8),
    "no dtype": file_of(one(dtype="F99"), 8),
    "dtype of a list": file_of(one(dtype=["F32"]), 8),
    "negative size": file_of(one(shape=[-2]), 8),
    "two negative sizes": file_of(one(shape=[-1, -2]), 8),
    "fractions": file_of(one(shape=[2.0]), 8),
    "booleans": file_of(one(shape=[True, 2]), 8),
    "text": file_of(one(shape="2"), 8),
    "huge shape": file_of(one(shape=[HUGE, HUGE]), 8),
    "shape that overflows to 2": file_of(one(shape=[1 << 32, 1 << 32, 2]), 8),
    "shape of another size": file_of(one(shape=[3]), 8),
    "offsets backwards": file_of(one(data_offsets=[8, 0]), 8),
    "three offsets": file_of(one(data_offsets=[0, 8, 8]), 8),
    "negative offsets": file_of(one(data_offsets=[-8, 0]), 8),
    "huge offsets": file_of(one(data_offsets=[HUGE, HUGE + 8]), 8),
    "beyond the file": file_of(one(), 7),
    "bytes left": file_of(one(), 9),
    "a hole": file_of(one(data_offsets=[4, 12]), 12),
    "an overlap": file_of(one() | {"y": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, 8),
    "half a byte": file_of(one(dtype="F4", shape=[3], data_offsets=[0, 1]), 1),
}  # fmt: skip


@pytest.mark.parametrize("file", HOSTILE.values(), ids=list(HOSTILE))
def test_lies_are_refused(file):
    with pytest.raises(CorruptCheckpointError) as error:
        header.parse_header(file, len(file), "data.safetensors")
    assert error.value.file == "data.safetensors"
    assert "data.safetensors" in str(error.value)
    assert len(str(error.value)) < 500


def test_no_header_beyond_the_limit_is_read():
    limit = 100_000_000
    assert header.header_bytes(limit.to_bytes(8, "little"), 1 << 40, "f") == limit + 8
    with pytest.raises(CorruptCheckpointError, match="says that its header has 100000001 bytes"):
        header.header_bytes((limit + 1).to_bytes(8, "little"), 1 << 40, "f")


@pytest.mark.parametrize("text", ["[NaN]", "[-Infinity]", '{"a":1,"a":1}', "[01]", "'a'", "[1,]"])
def test_strict_json_refuses_lenient_json(text):
    with pytest.raises(CorruptCheckpointError, match="f is not valid JSON"):
        header.strict_json(text, "f")


def test_unmodified_header_parses():
    file = file_of(one(), 8)
    assert header.parse_header(file, len(file), "f").entries == (
        header.Entry("x", "F32", (2,), 0, 8),
    )
    file = file_of(one(dtype="F4", shape=[4], data_offsets=[0, 2]), 2)
    assert header.parse_header(file, len(file), "f").entries[0].end == 2


def test_headers_beyond_the_limit_are_not_written():
    entry = header.Entry("x" * 60_000_000, "U8", (0,), 0, 0)
    with pytest.raises(UsageError, match="write more files"):
        header.build_header([entry, entry], {})
