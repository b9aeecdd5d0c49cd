"""Files of a checkpoint from an enemy: typed errors with the file's name, and nothing else."""

import contextlib
import hashlib
import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.samples import ATTEMPT, checkpoint
from shoal.checkpoint.format import (
    blobs,
    header,
    json_files,
    records,
    table_files,
    tiling,
)
from shoal.errors import CorruptCheckpointError, UnsupportedCheckpointError

WRITTEN = checkpoint()
MANIFEST = WRITTEN[records.manifest_name(ATTEMPT)]
INDEX = WRITTEN[records.index_name(ATTEMPT)]
PART = WRITTEN[records.part_name(ATTEMPT, 0)]
REFUSED = (CorruptCheckpointError, UnsupportedCheckpointError)


def seal_text(text):
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


def seal_table(body):
    return body + hashlib.sha256(body).digest()


KINDS = {
    "manifest": (json_files.decode_manifest, MANIFEST, lambda body: body, 0),
    "COMMIT": (json_files.decode_commit, WRITTEN["COMMIT"], seal_text, 65),
    "part": (table_files.decode_part, PART, seal_table, 32),
    "index": (table_files.decode_index, INDEX, seal_table, 32),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_under_a_right_seal(kind, data):
    """The enemy knows SHA-256: bytes are changed, cut out, repeated, and sealed again."""
    decode, written, seal, seal_bytes = KINDS[kind]
    body = bytearray(written[: len(written) - seal_bytes])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                body[at] = data.draw(st.integers(0, 255))
            case 1:
                del body[at : at + data.draw(st.integers(1, 40))]
            case 2:
                body[at:at] = body[at : at + data.draw(st.integers(1, 40))]
            case 3:
                body[at:at] = data.draw(st.binary(max_size=8))
        body = body or bytearray(b"{")
    found, refusal = outcome(decode, seal(bytes(body)))
    if refusal is None:
        use(kind, found)
    else:
        assert str(refusal).startswith("the file")
        assert len(str(refusal)) < 1000


def outcome(decode, data):
    """Return what a decoder returns, and what it raises."""
    try:
        return decode(data, "the file"), None
    except REFUSED as refusal:
        return None, refusal


def use(kind, found):
    """What passed a decoder is used without a further question."""
    if kind == "manifest":
        json_files.encode_manifest(found)
    elif kind == "COMMIT":
        json_files.encode_commit(found)
        assert "/" not in found.manifest.name + found.index.name
    else:
        assert all("/" not in one.name and "\0" not in one.name for one in found.files)
        with contextlib.suppress(CorruptCheckpointError):
            tiling.check_tiling(json_files.decode_manifest(MANIFEST), found.chunks)


VALUES = (
    None, True, 0, -1, 1.5, 1 << 62, 1 << 70, 10**4000, "", "x", "../../etc/passwd", "/etc/passwd",
    "a\0b", "~", "\ud800", [], {}, [[]], [None], ["a"], [-1], [1 << 63], [1] * 70, [[1, 2], [3]],
    {"a": 1}, {"kind": "leaf"}, [1e308], "1" * 5000, {"kind": "list", "children": [0]},
    ["x" * 5000], {"x" * 5000: 1},
)  # fmt: skip


def places(value, path=()):
    """Yield the path of every value in JSON."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


@pytest.mark.parametrize("kind", ["manifest", "COMMIT"])
def test_every_field_replaced_by_anything(kind):
    decode, written, seal, seal_bytes = KINDS[kind]
    said = json.loads(written[: len(written) - seal_bytes])
    for path in list(places(said)):
        for new in VALUES:
            text = json.dumps(changed(said, path, new)).encode()
            found, refusal = outcome(decode, seal(text))
            if refusal is None:
                use(kind, found)
            else:
                assert len(str(refusal)) < 1000


@pytest.mark.parametrize("blob", ["manifest", "index"])
def test_commit_vouches_for_no_more_than_leaves_can_need(blob):
    said = json.loads(WRITTEN["COMMIT"][:-65])
    for num_bytes, is_possible in ((1 << 29, True), (1 << 39, False), ((1 << 62) - 1, False)):
        text = json.dumps(changed(said, (blob, "bytes"), num_bytes)).encode()
        found, refusal = outcome(json_files.decode_commit, seal_text(text))
        assert (found is not None) == is_possible
        if refusal is not None:
            assert f"has {num_bytes:,} bytes in {blob}-" in str(refusal)


def table_file(tables, metadata):
    """Return a sealed part or index of these tables."""
    entries, begin = [], 0
    arrays = {name: np.asarray(table) for name, table in tables.items()}
    for name, table in arrays.items():
        dtype = {"i": "I", "u": "U", "f": "F"}[table.dtype.kind] + str(table.itemsize * 8)
        entries.append(header.Entry(name, dtype, table.shape, begin, begin + table.nbytes))
        begin += table.nbytes
    entries.append(header.Entry("sha256", "U8", (32,), begin, begin + 32))
    body = header.build_header(entries, metadata, page_bytes=8)
    return seal_table(body + b"".join(table.tobytes() for table in arrays.values()))


def tables_of(data):
    found = header.parse_header(data, len(data), "f")
    dtypes = {"I64": np.int64, "U64": np.uint64}
    tables = {
        entry.name: np.frombuffer(
            data, dtypes[entry.dtype], (entry.end - entry.begin) // 8, found.num_bytes + entry.begin
        ).reshape(entry.shape)
        for entry in found.entries
        if entry.dtype in dtypes
    }
    return tables, dict(found.metadata)


ODD = (
    np.zeros(0, np.int64), np.zeros((0, 0), np.int64), np.zeros((3, 1, 1), np.int64),
    np.zeros((1, 70), np.int64), np.zeros(13, np.uint64),
    np.full((13, 2), 1 << 62), np.full((13, 2), -1), np.zeros(13, np.float64),
    np.zeros(13, np.int32),
    np.full(13, np.iinfo(np.int64).max), np.full(13, np.iinfo(np.int64).min), np.int64(1),
)  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 1 << 61), (0, 1 << 30), (1 << 61, 0)], ids=str)
def test_shapes_of_nothing_that_no_memory_holds(shape):
    tables, metadata = tables_of(INDEX)
    entries = [header.Entry(name, "I64", shape, 0, 0) for name in tables]
    entries.append(header.Entry("sha256", "U8", (32,), 0, 32))
    with pytest.raises(CorruptCheckpointError):
        table_files.decode_index(seal_table(header.build_header(entries, metadata)))


@pytest.mark.parametrize("kind", ["part", "index"])
def test_every_table_replaced_by_anything(kind):
    decode, written, _, _ = KINDS[kind]
    tables, metadata = tables_of(written)
    assert decode(table_file(tables, metadata)) is not None
    for name in tables:
        for odd in ODD:
            try:
                use(kind, decode(table_file(tables | {name: odd}, metadata)))
            except CorruptCheckpointError:
                continue
            assert np.array_equal(odd, tables[name])
        with pytest.raises(CorruptCheckpointError):
            decode(table_file({key: one for key, one in tables.items() if key != name}, metadata))
    for key in metadata:
        for new in map(json.dumps, VALUES):
            try:
                use(kind, decode(table_file(tables, metadata | {key: new})))
            except REFUSED:
                continue
        with pytest.raises(CorruptCheckpointError):
            decode(table_file(tables, {one: text for one, text in metadata.items() if one != key}))


@pytest.mark.parametrize("kind", ["part", "index"])
def test_tables_of_later_versions(kind):
    decode, written, _, _ = KINDS[kind]
    tables, metadata = tables_of(written)
    more, later = {"zones": np.zeros(3, np.int64)}, {"version": "[1, 7]", "who": "knows"}
    assert decode(table_file(tables | more, metadata | later)).files == decode(written).files
    with pytest.raises(CorruptCheckpointError, match="lacks one of the tables"):
        decode(table_file(tables | more, metadata))
    with pytest.raises(CorruptCheckpointError, match="unknown keys"):
        decode(table_file(tables, metadata | {"who": "knows"}))
    with pytest.raises(UnsupportedCheckpointError, match="needs zones"):
        decode(table_file(tables | more, metadata | {"required": '["zones"]'}))
    with pytest.raises(UnsupportedCheckpointError, match=r"version 2\.0"):
        decode(table_file(tables, metadata | {"version": "[2, 0]"}))


def test_a_part_speaks_for_its_own_process():
    tables, metadata = tables_of(PART)
    for process in ("1", "-1", "null", "2147483648", "0.0", "true"):
        with pytest.raises(CorruptCheckpointError):
            table_files.decode_part(table_file(tables, metadata | {"process": process}))


def test_files_are_listed_by_process():
    tables, metadata = tables_of(INDEX)
    listed = json.loads(metadata["files"])
    for lie, why in ((listed[::-1], "order of their processes"), (listed * 2, "order"),
                     ([listed[0]] * 2, "should be"), (listed[:1], "one hash")):  # fmt: skip
        with pytest.raises(CorruptCheckpointError, match=why):
            table_files.decode_index(table_file(tables, metadata | {"files": json.dumps(lie)}))


OUTSIDE = (
    "../data", "/etc/passwd", "a/b", "..", ".", "", "COMMIT", "data\0", "data-0123456789ab",
    f"../{records.data_name(ATTEMPT, 0, 2)}", records.data_name("a" * 12, 0, 2),
    records.data_name(ATTEMPT, 1, 2), records.data_name(ATTEMPT, 0, 2, 1),
    records.index_name(ATTEMPT),
    records.data_name(ATTEMPT, 0, 2) + "\n", records.data_name(ATTEMPT, 0, 2).upper(),
)  # fmt: skip


@pytest.mark.parametrize("attempt", ["../../../tmp/x", "/etc/passwd", "..", "", "A" * 12, "a" * 13])
def test_no_attempt_leaves_the_folder(attempt):
    """Names follow from the attempt."""
    commit = json.loads(WRITTEN["COMMIT"][:-65]) | {"attempt": attempt}
    commit["manifest"]["name"] = records.manifest_name(attempt)
    commit["index"]["name"] = records.index_name(attempt)
    with pytest.raises(CorruptCheckpointError, match="not 12 hex digits"):
        json_files.decode_commit(seal_text(json.dumps(commit).encode()))
    tables, metadata = tables_of(PART)
    ((_, size, process),) = json.loads(metadata["files"])
    listed = json.dumps([[records.data_name(attempt, process, 2), size, process]])
    with pytest.raises(CorruptCheckpointError, match="not 12 hex digits"):
        table_files.decode_part(
            table_file(tables, metadata | {"attempt": attempt, "files": listed})
        )
    said = json.loads(MANIFEST) | {"attempt": attempt}
    with pytest.raises(CorruptCheckpointError, match="not 12 hex digits"):
        json_files.decode_manifest(json.dumps(said).encode())


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_no_name_leaves_the_folder(name):
    tables, metadata = tables_of(PART)
    listed = json.loads(metadata["files"])
    said = metadata | {"files": json.dumps([[name, *listed[0][1:]]])}
    with pytest.raises(CorruptCheckpointError):
        table_files.decode_part(table_file(tables, said))
    commit = json.loads(WRITTEN["COMMIT"][:-65])
    for key in ("manifest", "index"):
        if name == commit[key]["name"]:
            continue
        lie = commit | {key: commit[key] | {"name": name}}
        with pytest.raises(CorruptCheckpointError, match=f"COMMIT, {key} has 'name'"):
            json_files.decode_commit(seal_text(json.dumps(lie).encode()))


DEEP = [b"[" * count + b"]" * count for count in (150, 900, 5_000, 100_000)] + [
    b'{"a":' * count + b"1" + b"}" * count for count in (150, 900, 5_000, 100_000)
]


@pytest.mark.parametrize("deep", DEEP, ids=lambda deep: f"{deep[:1].decode()}{len(deep)}")
def test_nested_without_end(deep):
    said = json.loads(MANIFEST)
    for path in (("user",), ("tree",), ("leaves",), ("leaves", 0), ("leaves", 0, "value"),
                 ("leaves", 0, "shape"), ("tree", "children", 0), ("writer", "a"), ("metrics", "a"),
                 ("version",), ("more",)):  # fmt: skip
        target = said if len(path) > 1 else said | {path[0]: None}
        inner = target
        for key in path[:-1]:
            inner = inner[key]
        saved = inner.get(path[-1]) if isinstance(inner, dict) else inner[path[-1]]
        inner[path[-1]] = "HERE"
        text = json.dumps(target).encode().replace(b'"HERE"', deep)
        inner[path[-1]] = saved
        if path == ("writer", "a"):
            del said["writer"]["a"]
        if path == ("metrics", "a"):
            del said["metrics"]["a"]
        with pytest.raises(CorruptCheckpointError):
            json_files.decode_manifest(text)
    with pytest.raises(CorruptCheckpointError):
        json_files.decode_manifest(deep)
    with pytest.raises(CorruptCheckpointError):
        blobs.decode_tree(deep)


class Loud:
    def __reduce__(self):
        return (pytest.fail, ("code of a file ran",))


def test_no_code_runs():
    pickled = pickle.dumps(Loud())
    for decode, _, seal, _ in KINDS.values():
        for data in (pickled, seal(pickled)):
            with pytest.raises(CorruptCheckpointError):
                decode(data)
    with pytest.raises(CorruptCheckpointError):
        blobs.decode_tree(pickled)


@kinds
def test_files_that_end_anywhere(kind):
    decode, written, seal, _ = KINDS[kind]
    for length in range(0, len(written), 7):
        for data in (written[:length], seal(written[:length])):
            with pytest.raises(CorruptCheckpointError):
                decode(data)


@pytest.mark.parametrize("kind", ["part", "index"])
def test_every_bit_of_a_table_is_sealed(kind):
    decode, written, _, _ = KINDS[kind]
    data = bytearray(written)
    for at in range(len(data)):
        data[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            decode(bytes(data))
        data[at] ^= 1 << (at % 8)


@kinds
def test_one_file_in_the_place_of_another(kind):
    decode = KINDS[kind][0]
    for other, (_, written, _, _) in KINDS.items():
        if other != kind:
            with pytest.raises(CorruptCheckpointError):
                decode(written)
