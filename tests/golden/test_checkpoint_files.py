"""Checkpoints that others stored stay readable, byte for byte, and by readers of the page alone."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import safetensors

from checkpoint import samples
from golden import plain_reader
from shoal.checkpoint.format import blobs, json_files, records, table_files, tiling
from shoal.checkpoint.history.checkpoint_info import checkpoint_info
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.tree import dtypes, flatten, names, nodes, plain_values

HERE = Path(__file__).parent / "checkpoint"
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "checkpoint-format.md").read_text(encoding="utf-8")
SCHEMA = json.loads((DOCS / "checkpoint-format.schema.json").read_text(encoding="utf-8"))


def test_the_same_bytes_are_written():
    """If this fails, the format has changed: that needs a version or a feature."""
    written = samples.checkpoint()
    assert sorted(path.name for path in HERE.iterdir()) == sorted(written)
    for name, data in written.items():
        assert (HERE / name).read_bytes() == data, name


def test_golden_checkpoints_are_read():
    commit = json_files.decode_commit((HERE / "COMMIT").read_bytes())
    manifest = json_files.decode_manifest((HERE / commit.manifest.name).read_bytes())
    index = table_files.decode_index((HERE / commit.index.name).read_bytes())
    tiling.check_whole(commit, manifest, index)
    assert repr(manifest) == repr(samples.manifest())
    parts = [
        table_files.decode_part((HERE / records.part_name(samples.ATTEMPT, process)).read_bytes())
        for process in range(2)
    ]
    assert table_files.encode_index(
        table_files.join_parts(manifest, parts)
    ) == table_files.encode_index(index)


def test_golden_checkpoints_are_restored():
    """Without the key, whose generator is made up."""
    found = restore(HERE, only="!key", form="flat", merge=lambda values: values)
    assert found["params/w"].tobytes() == samples.W.tobytes()
    assert (found["params/b"].dtype, found["params/q"].tolist()) == ("bfloat16", [1, -8, 7, 0, -1])
    assert [found[f"opt/mu/{n}"] for n in range(7)] == samples.STATE["opt"].mu
    assert [own["row"] for own in found["loader"].value] == [3, 5]
    assert (found["long"], found["~i1"], found["1"]) == (samples.LONG, 10**30, 1j)
    assert checkpoint_info(HERE).step == 1000


def test_a_reader_of_the_page_alone_gets_every_value():
    commit, manifest, found = plain_reader.read(HERE)
    assert (commit["step"], commit["metrics"]["loss"]) == (1000, 0.25)
    assert manifest["user"] == {"lr": [0.1, None], "größe": "ß"}
    leaves, _ = flatten.flatten_tree(samples.STATE, is_leaf=samples.is_leaf)
    assert list(found) == [names.name_of(path) for path, _ in leaves]
    for path, leaf in leaves:
        value = found[names.name_of(path)]
        if isinstance(leaf, samples.Cut) and leaf.record.kind != "str":
            assert (value.dtype, value.tobytes()) == (leaf.value.dtype, leaf.value.tobytes())
        elif not isinstance(leaf, samples.Cut) and samples.is_leaf(leaf):
            for process, own in enumerate(leaf):
                assert value[process]["row"] == own["row"]
                assert np.array_equal(value[process]["seen"], own["seen"])
        elif not isinstance(leaf, samples.Cut):
            assert repr(value) == repr(leaf)
    assert found["long"] == samples.LONG


def test_whole_leaves_are_loaded_by_name_with_the_safetensors_library():
    path = HERE / records.data_name(samples.ATTEMPT, 0, 2)
    with safetensors.safe_open(path, "np") as file:
        assert file.get_tensor("params/empty").shape == (0, 3)
        assert np.array_equal(file.get_tensor("params/w#0,0"), samples.W[:2])
        assert file.metadata() == {
            "format": "shoal-checkpoint",
            "attempt": samples.ATTEMPT,
        }
        assert "params/b" in file.keys()  # noqa: SIM118 - it is no dict


def schema_of(kind):
    return jsonschema.Draft202012Validator(SCHEMA | {"oneOf": [{"$ref": f"#/$defs/{kind}"}]})


def test_json_files_follow_the_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    commit = json.loads((HERE / "COMMIT").read_bytes()[:-65])
    manifest = json.loads((HERE / records.manifest_name(samples.ATTEMPT)).read_bytes())
    schema_of("commit").validate(commit)
    schema_of("manifest").validate(manifest)
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest)
    for leaf in manifest["leaves"]:
        for key in [*leaf, "more"]:
            lie = {one: value for one, value in leaf.items() if one != key}
            lie |= {key: 1} if key == "more" else {}
            if key not in ("layout",):
                assert not schema_of("leaf").is_valid(lie), (leaf, key)


def test_the_schema_and_the_reader_know_the_same_keys():
    from shoal.checkpoint.format import json_files

    known = SCHEMA["$defs"]
    assert set(known["manifest"]["properties"]) == json_files._MANIFEST_KEYS
    assert set(known["commit"]["properties"]) == json_files._COMMIT_KEYS
    assert set(known["leaf"]["properties"]) == json_files._LEAF_KEYS
    assert known["node"]["properties"]["kind"]["enum"] == list(nodes._KINDS)
    kinds = {*plain_values._KINDS.values(), "array", "key", "scalar", "per_process"}
    assert set(known["leaf"]["properties"]["kind"]["enum"]) == kinds
    factories = known["node"]["allOf"][2]["then"]["properties"]["static"]["enum"]
    assert factories == list(nodes.FACTORIES)


def test_the_page_says_the_numbers():
    for text in ("2^63", "4096 bytes", "256 KiB", "64 KiB", "1 KiB", "64 bytes", "16 in one"):
        assert text in PAGE
    assert f"{nodes.DEEPEST} nodes" in PAGE
    assert f"{plain_values._DEEPEST} levels" in PAGE
    assert (records.COMMIT_BYTES, records.BLOCK_BYTES, plain_values.LARGE_BYTES) == (
        4096,
        256 << 10,
        64 << 10,
    )


def test_the_page_lists_every_dtype_and_kind():
    rows = {*re.sub(r"[`,;()|]", " ", PAGE).split()}
    for name in (*dtypes._ONE_PER_BYTE, *dtypes._BITS_PACKED, *dtypes._PAIRS):
        assert rows & {name, name.partition("_")[2], name.removeprefix("u")}, name
    for entry in {*dtypes._ENTRIES.values()} - {
        "I16",
        "I32",
        "I64",
        "U16",
        "U32",
        "U64",
        "F16",
        "F32",
    }:
        assert entry in rows, entry
    for kind in SCHEMA["$defs"]["leaf"]["properties"]["kind"]["enum"]:
        assert f"`{kind}`" in PAGE
    assert f"`{blobs._FORMAT}`" in PAGE
