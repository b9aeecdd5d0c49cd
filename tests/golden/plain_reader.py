"""A reader of checkpoints written from docs/checkpoint-format.md alone: nothing of shoal is used.

Header, hashes and tables are read by the libraries of others.
"""

import base64
import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import xxhash

PER_BYTE = {
    "int4": 2, "uint4": 2, "float4_e2m1fn": 2, "int2": 4, "uint2": 4, "int1": 8, "uint1": 8,
}  # fmt: skip


def read(folder: Path):
    """Return what COMMIT says, the manifest, and the value of each leaf by name."""
    text = (folder / "COMMIT").read_bytes()
    body, seal = text[:-65], text[-65:]
    assert seal == hashlib.sha256(body).hexdigest().encode() + b"\n"
    commit = json.loads(body)
    manifest = json.loads(vouched(folder, commit["manifest"]))
    data = vouched(folder, commit["index"])
    assert manifest["required"] == []
    index = safetensors.numpy.load(data)
    assert hashlib.sha256(data[:-32]).digest() == index["sha256"].tobytes()
    listed = json.loads(metadata_of(data)["files"])
    files = [(folder / name).read_bytes() for name, _, _ in listed]
    assert [len(file) for file in files] == [size for _, size, _ in listed]
    for number, file in enumerate(files):
        first, last = index["first_block"][number : number + 2]
        blocks = [file[at : at + (256 << 10)] for at in range(0, len(file), 256 << 10)]
        assert len(blocks) == last - first
        for block, wanted in zip(blocks, index["block_hash"][first:last], strict=True):
            assert xxhash.xxh3_64_intdigest(block) == wanted
    leaves = manifest["leaves"]
    values = [value_of(leaf, rows_of(number, index, files)) for number, leaf in enumerate(leaves)]
    return commit, manifest, {leaf["name"]: v for leaf, v in zip(leaves, values, strict=True)}


def vouched(folder, blob):
    data = (folder / blob["name"]).read_bytes()
    assert len(data) == blob["bytes"]
    assert hashlib.sha256(data).hexdigest() == blob["sha256"]
    return data


def metadata_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def rows_of(leaf, index, files):
    """Return the chunks of a leaf: origin, extent, bytes."""
    rows = np.flatnonzero(index["leaf"] == leaf)
    return [
        (
            index["origin"][row],
            index["extent"][row],
            files[index["file"][row]][index["begin"][row] : index["end"][row]],
        )
        for row in rows
    ]


def value_of(leaf, rows):
    if "dtype" not in leaf:
        return inline(leaf["kind"], leaf.get("value"))
    if leaf["kind"] == "per_process":
        return {int(origin[0]): blob(data) for origin, _, data in rows}
    shape = [*leaf["shape"], *leaf.get("words", [])]
    whole = np.zeros(shape, dtype_of(leaf["dtype"]))
    for origin, extent, data in rows:
        box = tuple(slice(o, o + e) for o, e in zip(origin[: len(shape)], extent, strict=False))
        whole[box] = elements(data, leaf["dtype"]).reshape(whole[box].shape)
    if leaf["kind"] in ("str", "bytes"):
        return whole.tobytes() if leaf["kind"] == "bytes" else whole.tobytes().decode()
    return whole


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def elements(data, name):
    count = PER_BYTE.get(name, 1)
    if count == 1:
        return np.frombuffer(data, dtype_of(name))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(-1, 8 // count)
    wide = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    return Packed(wide, dtype_of(name))


class Packed:
    """Elements unpacked from bytes; the last byte may hold too many."""

    def __init__(self, wide, dtype):
        self.wide, self.dtype = wide, dtype

    def reshape(self, shape):
        return self.wide[: int(np.prod(shape))].view(self.dtype).reshape(shape)


def inline(kind, value):
    match kind:
        case "int":
            return int(value, 0)
        case "float":
            return number(value)
        case "complex":
            return complex(*map(number, value))
        case "bytes":
            return base64.b64decode(value)
        case "scalar":
            return np.frombuffer(bytes.fromhex(value["bits"]), dtype_of(value["dtype"]))[0]
    return value


def number(text):
    if text.startswith("nan:"):
        return np.frombuffer(bytes.fromhex(text[4:]), ">f8")[0]
    return float.fromhex(text)


def blob(data):
    """Return the leaves of a process's own value, in order."""
    said = metadata_of(data)
    arrays = safetensors.numpy.load(data)
    keys = json.loads(said["tree"])["keys"]
    return {
        key: arrays[key] if leaf[0] == "array" else inline(*leaf)
        for key, leaf in zip(keys, json.loads(said["leaves"]), strict=True)
    }
