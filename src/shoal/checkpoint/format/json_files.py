"""Manifest and COMMIT ↔ JSON: one leaf per line, deterministic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.checkpoint.format.fields import Fields, check_json, check_version, head, is_step, is_text
from shoal.checkpoint.format.header import strict_json
from shoal.checkpoint.format.records import (
    COMMIT_BYTES,
    LARGEST,
    MANIFEST_BYTES,
    METRICS_BYTES,
    MOST_DIMS,
    REGISTER_BYTES,
    Blob,
    Commit,
    LeafRecord,
    Manifest,
    Register,
    index_name,
    manifest_name,
)
from shoal.checkpoint.tree import dtypes
from shoal.checkpoint.tree.nodes import decode_structure, encode_structure, names_of
from shoal.checkpoint.tree.plain_values import decode_value, json_excerpt
from shoal.errors import CorruptCheckpointError, UsageError, with_article
from shoal.hashing import SEAL_BYTES, seal

_HEAD = {"format", "file", "version", "required", "attempt", "step", "created_ns", "metrics"}
_MANIFEST_KEYS = frozenset(
    _HEAD | {"optional", "num_processes", "writer", "mesh", "user", "tree", "leaves"}
)
_COMMIT_KEYS = frozenset(_HEAD | {"manifest", "index", "data_bytes", "num_files", "register"})
_REGISTER_KEYS = frozenset({"ended", "pinned", "nonce", "single_writer"})
_LEAF_KEYS = frozenset({"name", "kind", "dtype", "shape", "words", "impl", "layout", "value"})
_BLOB_KEYS = frozenset({"name", "bytes", "sha256"})
_DATA_PER_INDEX = 256  # bytes: far more than hashes of blocks and rows of chunks take
_INLINE = frozenset({"scalar", "int", "float", "bool", "complex", "str", "bytes", "none"})


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest.

    Raises:
      UsageError: `user` is not JSON.
    """
    user = dict(manifest.user)
    check_json(user, "user")
    if manifest.step is not None and not is_step(manifest.step):
        raise UsageError(
            f"step: is {json_excerpt(manifest.step)}; pass an int of less than 62 bits"
        )
    first = {
        **head("manifest"),
        "required": list(manifest.required),
        "optional": list(manifest.optional),
        "attempt": manifest.attempt,
        "step": manifest.step,
        "created_ns": manifest.created_ns,
        "num_processes": manifest.num_processes,
        "writer": dict(manifest.writer),
        "mesh": manifest.mesh,
        "user": user,
        "metrics": metrics_json(manifest.metrics),
        "tree": encode_structure(manifest.tree),
    }
    lines = [f"{_line(key)}: {_line(value)}," for key, value in first.items()]
    leaves = ",\n".join([_line(_leaf_json(leaf)) for leaf in manifest.leaves])
    text = "{\n" + "\n".join(lines) + '\n"leaves": [\n' + leaves + "\n]\n}\n"
    return text.encode("utf-8", "replace")  # for information only


def _leaf_json(leaf: LeafRecord) -> dict[str, Any]:
    record: dict[str, Any] = {"name": leaf.name, "kind": leaf.kind}
    if leaf.dtype:
        record |= {"dtype": leaf.dtype, "shape": leaf.shape}
    if leaf.kind == "key":
        record |= {"words": leaf.words, "impl": leaf.impl}
    if leaf.layout:
        record["layout"] = leaf.layout
    if leaf.value is not None:
        record["value"] = leaf.value
    return record


def decode_manifest(data: bytes, file: str = "the manifest") -> Manifest:
    """Decode a manifest.

    Raises:
      CorruptCheckpointError: it is malformed or contradicts itself.
      UnsupportedCheckpointError: it needs unknown features.
    """
    fields = Fields(strict_json(data, file), file)
    knows_all = check_version(fields, "manifest")
    if knows_all:
        fields.only(_MANIFEST_KEYS)
    num_processes = fields.size("num_processes")
    fields.expect("num_processes", 1 <= num_processes < 1 << 31, "not a number of processes")
    writer = fields.mapping("writer")
    fields.expect("writer", all(map(is_text, [*writer, *writer.values()])), "not text")
    structure, count = decode_structure(fields.found.get("tree"), file)
    listed = fields.found.get("leaves")
    if type(listed) is not list or len(listed) != count:
        fields.refuse(f"has a tree of {count} leaves, and does not list as many")
    leaves = tuple([_leaf(encoded, file, knows_all) for encoded in listed])
    for leaf, name in zip(leaves, names_of(structure), strict=True):
        if leaf.name != name:
            called, place = leaf.name[:100], name[:100]
            fields.refuse(f"calls a leaf {called!r} whose place in the tree is {place!r}")
    return Manifest(
        attempt=fields.attempt(),
        step=fields.step(),
        created_ns=fields.size("created_ns"),
        num_processes=num_processes,
        tree=structure,
        leaves=leaves,
        writer=writer,
        mesh=fields.text("mesh", ""),
        user=fields.free("user"),
        metrics=_metrics(fields),
        required=fields.texts("required"),
        optional=fields.texts("optional"),
    )


def _leaf(encoded: Any, file: str, knows_all: bool) -> LeafRecord:
    name = encoded.get("name") if type(encoded) is dict else None
    if type(name) is not str:
        raise CorruptCheckpointError(f"{file} lists a leaf without a name", file=file)
    get = encoded.get
    texts = (get("kind", ""), get("dtype", ""), get("impl", ""), get("layout", ""))
    shape, key_words = get("shape", []), get("words", [])
    odd = knows_all and not encoded.keys() <= _LEAF_KEYS
    odd = odd or ("dtype" in encoded) != ("shape" in encoded)
    if odd or not all(map(is_text, texts)) or type(shape) is not list:
        why = "has unknown fields, or a field of the wrong type"
    elif type(key_words) is not list or {*map(type, shape), *map(type, key_words)} - {int}:
        why = "has a shape that is not a list of sizes"
    else:
        kind, dtype, impl, layout = texts
        leaf = LeafRecord(
            name,
            kind,
            dtype,
            shape=tuple(shape),
            words=tuple(key_words),
            impl=impl,
            layout=layout,
            value=get("value"),
        )
        why = _why_no_leaf(leaf)
    if why:
        raise CorruptCheckpointError(f"{file}: leaf {name[:100]!r} {why}", file=file, leaf=name)
    return leaf


def _why_no_leaf(leaf: LeafRecord) -> str:
    """Return what is wrong with a leaf, or an empty string."""
    try:
        if leaf.has_data:
            if leaf.value is not None:
                return "has both a value here and data in files"
            return _why_no_data(leaf.kind, leaf.dtype, leaf.shape, leaf.words, leaf.impl)
        if leaf.kind not in _INLINE:
            return f"is of kind {leaf.kind[:40]!r} and has no dtype"
        if leaf.shape or leaf.words or leaf.impl:
            return f"is of kind {leaf.kind} and has a shape"
        decode_value(leaf.kind, leaf.value)
    except UsageError as why:
        return f"is none: {why}"
    return ""


@lru_cache(maxsize=1024)
def _why_no_data(
    kind: str, dtype: str, shape: tuple[int, ...], key_words: tuple[int, ...], impl: str
) -> str:
    """Return what is wrong with a leaf that has data in files, or an empty string."""
    stored = shape + key_words
    if min(stored, default=0) < 0:
        return "has a shape that is not a list of sizes"
    item_bytes = max(1, dtypes.dtype_of(dtype).itemsize)
    if (
        len(stored) > MOST_DIMS
        or math.prod(max(1, size) for size in stored) * item_bytes >= LARGEST
    ):
        return "is impossibly large"
    is_key = kind == "key"
    if is_key != bool(impl) or (key_words and not is_key):
        return "is not a whole number of keys"
    if kind in ("array", "key"):
        return ""
    rank = {"str": 1, "bytes": 1, "per_process": 0}.get(kind)
    if dtype != "uint8" or rank != len(shape):
        return f"is of kind {kind[:40]!r}, which cannot be {dtype}{list(shape)}"
    return ""


def encode_commit(commit: Commit) -> bytes:
    """Encode COMMIT, deterministically.

    Raises:
      UsageError: the metrics are not numbers, or too large, or the manifest or the index is.
    """
    return _sealed({**head("commit"), **_commit_json(commit)})


def _commit_json(commit: Commit) -> dict[str, Any]:
    why = _too_large(commit)
    if why:
        raise UsageError(f"the checkpoint {why}; save fewer leaves, or shorter `user` data")
    return {
        "attempt": commit.attempt,
        "step": commit.step,
        "created_ns": commit.created_ns,
        "manifest": vars(commit.manifest),
        "index": vars(commit.index),
        "data_bytes": commit.data_bytes,
        "num_files": commit.num_files,
        "metrics": metrics_json(commit.metrics),
    }


def _too_large(commit: Commit) -> str:
    """Return which file that is read as a whole is larger than leaves can need; "": none is."""
    index_bytes = MANIFEST_BYTES + commit.data_bytes // _DATA_PER_INDEX
    for blob, most_bytes in ((commit.manifest, MANIFEST_BYTES), (commit.index, index_bytes)):
        if blob.bytes > most_bytes:
            return f"has {blob.bytes:,} bytes in {blob.name}, at most {most_bytes:,} are possible"
    return ""


def encode_register(register: Register) -> bytes:
    """Encode COMMIT in a bucket: that of a file, if something is committed, and the register.

    Raises:
      UsageError: it has become too large.
    """
    state: dict[str, Any] = {
        "ended": list(register.ended),
        "pinned": register.is_pinned,
        "nonce": register.nonce,
    }
    state |= {"single_writer": True} if register.is_single_writer else {}
    if register.commit is None:
        data = _sealed({**head("register"), "register": state})
    else:
        data = _sealed({**head("commit"), **_commit_json(register.commit), "register": state})
    if len(data) > REGISTER_BYTES:
        raise UsageError(f"COMMIT: {len(register.ended)} attempts were ended; save another step")
    return data


def _sealed(fields: Mapping[str, Any]) -> bytes:
    lines = ",\n".join([f"{_line(key)}: {_line(value)}" for key, value in fields.items()])
    text = ("{\n" + lines + "\n}\n").encode()
    return text + _last_line(text)


def _last_line(text: bytes) -> bytes:
    return seal(text).hex().encode() + b"\n"


def metrics_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON; non-finite values become text.

    Raises:
      UsageError: one is not a number, or they are too large.
    """
    numbers = {name: _metric(name, value) for name, value in metrics.items()}
    check_json(numbers, "metrics")
    if len(_line(numbers).encode()) > METRICS_BYTES:
        raise UsageError(f"metrics have more than {METRICS_BYTES} bytes as JSON; keep fewer")
    return numbers


def _metric(name: str, value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise UsageError(f"metrics: {name!r} is {with_article(type(value).__name__)}; pass a float")
    try:
        number = float(value)
    except OverflowError:
        raise UsageError(f"metrics: {name!r} is too large for a float") from None
    return number if math.isfinite(number) else str(number)


def decode_commit(data: bytes, file: str = "COMMIT") -> Commit:
    """Decode COMMIT.

    Raises:
      CorruptCheckpointError: it is malformed, or its bytes have changed.
      UnsupportedCheckpointError: it is of a later version.
    """
    return _commit(_unsealed(data, file, COMMIT_BYTES))


def decode_register(data: bytes, file: str = "COMMIT") -> Register:
    """Decode COMMIT in a bucket; that of a file is one without ended attempts.

    Raises:
      CorruptCheckpointError: it is malformed, or its bytes have changed.
      UnsupportedCheckpointError: it is of a later version.
    """
    fields = _unsealed(data, file, REGISTER_BYTES)
    commit = None
    if fields.found.get("file") != "register":
        commit = _commit(fields)
    elif check_version(fields, "register"):
        fields.only(frozenset({"format", "file", "version", "required", "register"}))
    if "register" not in fields.found:
        return Register(commit)
    inner = Fields(fields.found["register"], file, "register")
    inner.only(_REGISTER_KEYS)
    is_pinned = inner.found.get("pinned")
    inner.expect("pinned", type(is_pinned) is bool, "no truth value")
    is_single = inner.found.get("single_writer", False)
    inner.expect("single_writer", type(is_single) is bool, "no truth value")
    return Register(
        commit,
        ended=inner.texts("ended"),
        is_pinned=is_pinned is True,
        nonce=inner.text("nonce"),
        is_single_writer=is_single is True,
    )


def _unsealed(data: bytes, file: str, most_bytes: int) -> Fields:
    text = data[: -2 * SEAL_BYTES - 1]
    if len(data) > most_bytes or data[len(text) :] != _last_line(text):
        raise CorruptCheckpointError(
            f"{file} is damaged: its last line is not the SHA-256 of the bytes before it", file=file
        )
    return Fields(strict_json(text, file), file)


def _commit(fields: Fields) -> Commit:
    if check_version(fields, "commit"):
        fields.only(_COMMIT_KEYS)
    attempt = fields.attempt()
    commit = Commit(
        attempt=attempt,
        step=fields.step(),
        created_ns=fields.size("created_ns"),
        manifest=_blob(fields, "manifest", manifest_name(attempt)),
        index=_blob(fields, "index", index_name(attempt)),
        data_bytes=fields.size("data_bytes"),
        num_files=fields.size("num_files"),
        metrics=_metrics(fields),
    )
    why = _too_large(commit)
    if why:
        fields.refuse(why)
    return commit


def _blob(fields: Fields, key: str, name: str) -> Blob:
    inner = Fields(fields.found.get(key), fields.file, key)
    inner.only(_BLOB_KEYS)
    inner.expect("name", inner.text("name") == name, f"not {name!r}")
    return Blob(name, inner.size("bytes"), inner.sha256("sha256"))


def _metrics(fields: Fields) -> Mapping[str, float]:
    numbers = fields.mapping("metrics")
    fields.expect("metrics", all(map(is_text, numbers)), "not text")
    for value in numbers.values():
        right = type(value) is float or value in ("nan", "inf", "-inf")
        fields.expect("metrics", right, "no numbers")
    return {name: float(value) for name, value in numbers.items()}
