"""Manifest and COMMIT: what is written comes back, the same bytes each time; nothing else is."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.samples import ATTEMPT, blob, checkpoint, manifest
from shoal.checkpoint.format import json_files, records, table_files, tiling
from shoal.checkpoint.tree import flatten, nodes
from shoal.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63) + 1, (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def test_a_manifest_comes_back():
    said = manifest()
    data = json_files.encode_manifest(said)
    assert json_files.decode_manifest(data) == said
    assert json_files.encode_manifest(json_files.decode_manifest(data)) == data
    lines = data.decode().splitlines()
    for leaf in said.leaves:  # one leaf a line
        assert sum(f'{{"name": "{leaf.name}", ' in line for line in lines) == 1


@given(st.dictionaries(st.text(), JSON, max_size=3), st.none() | st.integers(0, 1 << 61))
def test_user_data_round_trip_through_the_manifest(user, step):
    said = replace(manifest(), user=user, step=step)
    again = json_files.decode_manifest(json_files.encode_manifest(said))
    assert repr(again.user) == repr(user)
    assert again.step == step


@pytest.mark.parametrize(
    ("user", "what"),
    [({"a": math.nan}, "user: ['a']: is nan"), ({"a": {1: 2}}, "has the key 1"),
     ({"a": [(1, 2)]}, "['a'][0]: is a tuple"), ({"a": "\ud800"}, "lone surrogate"),
     ({"\ud800": 1}, "lone surrogate"), ({"a": 1 << 70}, "63 bits"), ({"a": object}, "type"),
     ({"a": np.float32(1)}, "is a float32")],
    ids=str,
)  # fmt: skip
def test_user_data_that_are_not_json_are_refused(user, what):
    with pytest.raises(UsageError) as error:
        json_files.encode_manifest(replace(manifest(), user=user))
    assert what in str(error.value)


def test_all_that_is_no_json_is_named_at_once():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="3 problems"):
        json_files.encode_manifest(replace(manifest(), user={"a": loop, "b": {2: 1}, "c": b""}))


def test_a_leaf_alone_and_no_leaf_at_all():
    for value in (np.float32(3), {}, []):
        _, structure = flatten.flatten_tree(value)
        leaves = (records.LeafRecord("~", "array", "float32", (3,)),) if structure == 0 else ()
        said = records.Manifest(ATTEMPT, None, 5, 1, structure, leaves)
        assert json_files.decode_manifest(json_files.encode_manifest(said)) == said


def nested(levels, wrap, inner=1):
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def test_the_deepest_that_is_taken_comes_back():
    static = nested(31, lambda inner: {1: (inner,)[0]})
    value = nested(98, lambda inner: {"a": inner}, flatten.UnknownNode("a:B", ("c",), (5,), static))
    leaves, structure = flatten.flatten_tree(value)
    leaf = records.LeafRecord(nodes.names_of(structure)[0], "int", value="5")
    user = {"u": nested(97, lambda inner: [inner])}
    said = records.Manifest(ATTEMPT, 1, 5, 1, structure, (leaf,), user=user)
    again = json_files.decode_manifest(json_files.encode_manifest(said))
    assert again == said
    assert flatten.unflatten_tree(again.tree, [leaf for _, leaf in leaves]) == value


@pytest.mark.parametrize("step", [True, 1.0, np.int64(3), 1 << 62, "5"], ids=repr)
def test_a_step_that_could_not_be_read_is_not_written(step):
    with pytest.raises(UsageError, match=r"^step: is"):
        json_files.encode_manifest(replace(manifest(), step=step))


METRICS = st.dictionaries(st.text(max_size=4), st.floats(), max_size=5)


def commit(**fields):
    blobs = (
        blob(records.manifest_name(ATTEMPT), b"m"),
        blob(records.index_name(ATTEMPT), b""),
    )
    return replace(records.Commit(ATTEMPT, 5, 6, *blobs, 7, 8), **fields)


@given(METRICS, st.none() | st.integers(0, 1 << 61))
def test_a_commit_comes_back(metrics, step):
    said = commit(metrics=metrics, step=step)
    data = json_files.encode_commit(said)
    again = json_files.decode_commit(data)
    assert repr(again) == repr(said)
    assert json_files.encode_commit(again) == data
    assert data.endswith(hashlib.sha256(data[:-65]).hexdigest().encode() + b"\n")
    assert json.loads(data[:-65])["attempt"] == ATTEMPT


def test_a_commit_is_small():
    metrics = {f"m{number}": math.pi * number for number in range(35)}
    data = json_files.encode_commit(commit(metrics=metrics, step=1 << 61, data_bytes=1 << 61))
    assert len(data) <= records.COMMIT_BYTES
    with pytest.raises(UsageError, match="more than 1024 bytes"):
        json_files.encode_commit(commit(metrics=metrics | {"x" * 900: 0.0}))


def test_numbers_of_numpy_are_metrics_and_other_things_are_not():
    found = json_files.decode_commit(
        json_files.encode_commit(commit(metrics={"a": np.float32(0.5), "b": 2}))
    )
    assert found.metrics == {"a": 0.5, "b": 2.0}
    for value in (True, "0.5", None, np.bool_(True), 10**400, [1.0]):
        with pytest.raises(UsageError, match="metrics: 'a'"):
            json_files.encode_commit(commit(metrics={"a": value}))


def test_every_bit_of_a_commit_is_sealed():
    data = bytearray(json_files.encode_commit(commit(metrics={"loss": 1.5})))
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match="COMMIT is damaged"):
                json_files.decode_commit(bytes(data))
            data[at] ^= 1 << bit
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            json_files.decode_commit(bytes(data[:length]))
    for more in (b"\n", b"x", bytes(4096)):
        with pytest.raises(CorruptCheckpointError):
            json_files.decode_commit(bytes(data) + more)


def sealed(said):
    text = json.dumps(said).encode()
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


def said_by(data):
    return json.loads(data)


def test_a_commit_of_more_than_4_kib_is_refused():
    said = said_by(json_files.encode_commit(commit())[:-65]) | {"version": [1, 1]}
    assert json_files.decode_commit(sealed(said | {"more": "x" * 3000})).step == 5
    with pytest.raises(CorruptCheckpointError):
        json_files.decode_commit(sealed(said | {"more": "x" * 4000}))


ARRAY = {"name": "~", "kind": "array", "dtype": "float32", "shape": [2]}
KEY = {"name": "~", "kind": "key", "dtype": "uint32", "shape": [], "words": [2], "impl": "fry"}
LEAVES = (
    (ARRAY, True), (KEY, True), (ARRAY | {"name": "a"}, False), (ARRAY | {"dtype": "f4"}, False),
    (ARRAY | {"shape": [-1]}, False), (ARRAY | {"shape": [1 << 61, 2]}, False),
    (ARRAY | {"shape": [1 << 60]}, False), (ARRAY | {"shape": [1] * 65}, False),
    (ARRAY | {"shape": [1] * 64}, True), (ARRAY | {"shape": [0, 1 << 61]}, False),
    (ARRAY | {"value": "1"}, False), (ARRAY | {"words": [2]}, False),
    (ARRAY | {"impl": "x"}, False), (ARRAY | {"more": 1}, False),
    (ARRAY | {"kind": "int"}, False), (ARRAY | {"kind": "list"}, False),
    (KEY | {"impl": ""}, False), (KEY | {"words": [-1]}, False), (KEY | {"words": [1.0]}, False),
    (ARRAY | {"kind": "per_process"}, False), (ARRAY | {"kind": "str"}, False),
    (ARRAY | {"kind": "str", "dtype": "uint8"}, True),
    (ARRAY | {"kind": "bytes", "dtype": "int8"}, False),
    (ARRAY | {"kind": "str", "dtype": "uint8", "shape": [2, 2]}, False),
    (ARRAY | {"kind": "per_process", "dtype": "uint8", "shape": []}, True),
    (ARRAY | {"kind": "per_process", "dtype": "uint8"}, False),
    ({"name": "~", "kind": "int", "value": "5"}, True), ({"name": "~", "kind": "int"}, False),
    ({"name": "~", "kind": "int", "value": 5}, False), ({"name": "~", "kind": "none"}, True),
    ({"name": "~", "kind": "int", "value": "5", "shape": []}, False),
    ({"name": "~", "kind": "int", "value": "5", "words": [1]}, False),
    ({"name": "~", "kind": "array"}, False), ({"kind": "none"}, False), ("none", False),
)  # fmt: skip


@pytest.mark.parametrize(("leaf", "is_right"), LEAVES, ids=str)
def test_leaves_that_contradict_themselves_are_refused(leaf, is_right):
    said = records.Manifest(ATTEMPT, 1, 5, 1, 0, (records.LeafRecord("~", "none"),))
    text = said_by(json_files.encode_manifest(said)) | {"leaves": [leaf]}
    if is_right:
        assert json_files.decode_manifest(json.dumps(text).encode()).leaves[0].kind == leaf["kind"]
        return
    with pytest.raises(CorruptCheckpointError, match="leaf") as error:
        json_files.decode_manifest(json.dumps(text).encode())
    assert error.value.leaf in ("~", "a", "")


def test_as_many_leaves_as_the_tree_has():
    text = said_by(json_files.encode_manifest(manifest()))
    for leaves in (text["leaves"][:-1], [*text["leaves"], text["leaves"][-1]], None, {}):
        with pytest.raises(CorruptCheckpointError, match="does not list as many"):
            json_files.decode_manifest(json.dumps(text | {"leaves": leaves}).encode())


@pytest.mark.parametrize("kind", ["commit", "manifest"])
def test_later_versions_are_refused_by_name(kind):
    if kind == "commit":
        said, decode = (
            said_by(json_files.encode_commit(commit())[:-65]),
            json_files.decode_commit,
        )
        written = sealed
    else:
        said, decode = (
            said_by(json_files.encode_manifest(manifest())),
            json_files.decode_manifest,
        )

        def written(changed):
            return json.dumps(changed).encode()

    with pytest.raises(UnsupportedCheckpointError, match=r"version 2\.0.*reads 1\.0") as error:
        decode(written(said | {"version": [2, 0], "who": "knows"}))
    assert error.value.features == ("version 2.0",)
    with pytest.raises(UnsupportedCheckpointError, match="needs holes, zstd") as error:
        decode(written(said | {"version": [1, 9], "required": ["zstd", "holes"]}))
    assert error.value.features == ("holes", "zstd")
    later = decode(written(said | {"version": [1, 1], "more": {"to": "come"}}))
    assert later == decode(written(said))  # what it adds can be left unread
    with pytest.raises(CorruptCheckpointError, match="unknown keys"):
        decode(written(said | {"more": 1}))


def test_files_of_a_checkpoint_belong_together():
    written = checkpoint()
    said = json_files.decode_manifest(written[records.manifest_name(ATTEMPT)])
    index = table_files.decode_index(written[records.index_name(ATTEMPT)])
    found = json_files.decode_commit(written["COMMIT"])
    tiling.check_whole(found, said, index)
    for other in (
        replace(found, step=None), replace(found, data_bytes=found.data_bytes + 1),
        replace(found, num_files=1), replace(found, attempt="a" * 12),
    ):  # fmt: skip
        with pytest.raises(CorruptCheckpointError):
            tiling.check_whole(other, said, index)
    with pytest.raises(CorruptCheckpointError, match="of attempt"):
        tiling.check_index(replace(said, attempt="a" * 12), index)
    with pytest.raises(CorruptCheckpointError, match="not of this checkpoint"):
        tiling.check_index(replace(said, num_processes=3), index)
