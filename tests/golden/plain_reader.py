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
    for number, file in enumerate(files):
        assert entries_of(file) == entries_by_index(number, file, index, leaves)
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


ENTRIES = {
    "bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "complex64": "C64",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex128": "F64", "complex32": "F16", "bcomplex32": "BF16",
}  # fmt: skip


def entries_of(file):
    """Return what the header of a data file lists: name → dtype, shape, offsets in the file."""
    length = int.from_bytes(file[:8], "little")
    assert (8 + length) % 4096 == 0
    said = json.loads(file[8 : 8 + length])
    assert said.pop("__metadata__")["format"] == "shoal-checkpoint"
    return {
        name: (one["dtype"], one["shape"], [8 + length + at for at in one["data_offsets"]])
        for name, one in said.items()
    }


def entries_by_index(number, file, index, leaves):
    """Return what it should list."""
    found = {}
    for row in np.flatnonzero(index["file"] == number):
        leaf = leaves[index["leaf"][row]]
        begin, end = index["begin"][row].item(), index["end"][row].item()
        shape = [*leaf["shape"], *leaf.get("words", [])]
        origin = index["origin"][row][: max(1, len(shape))].tolist()
        extent = index["extent"][row][: len(shape)].tolist()
        name, dtype = leaf["name"], leaf["dtype"]
        if leaf["kind"] == "per_process":
            name, extent = f"{name}#p{origin[0]}", [end - begin]
        elif extent != shape:
            name = f"{name}#{','.join(map(str, origin))}"
        found[name] = (*entry_of(dtype, extent, end - begin), [begin, end])
    return found


def entry_of(dtype, extent, num_bytes):
    """Return dtype and shape of an entry."""
    kind = dtype_of(dtype).kind
    if dtype in PER_BYTE:
        return "U8", [num_bytes]
    if dtype in ("complex128", "complex32", "bcomplex32"):
        return ENTRIES[dtype], [*extent, 2]
    if kind in "SU":
        return "U8", [*extent, dtype_of(dtype).itemsize]
    if kind in "mM":
        return "I64", extent
    if dtype in ENTRIES or kind in "iuf":
        return ENTRIES.get(dtype) or f"{kind.upper()}{dtype_of(dtype).itemsize * 8}", extent
    return "U8", extent


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
        key: arrays[key] if leaf[0] in ("array", "key") else inline(*leaf)
        for key, leaf in zip(keys, json.loads(said["leaves"]), strict=True)
    }
