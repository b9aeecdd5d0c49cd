"""The request of a save, and the lines that must be equal on all processes."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal import settings
from shoal.arrays.host.host_values import native
from shoal.checkpoint.format.records import Manifest
from shoal.checkpoint.saving.file_images import words_here
from shoal.checkpoint.saving.state import Array, State, StateLeaf
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.tree import dtypes
from shoal.checkpoint.tree.nodes import encode_structure
from shoal.collectives.hashes import FlatItems, digest_of
from shoal.hashing import content_digest, quick_digest
from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.rules.spec_lines import END, SpecLine


class Waits(NamedTuple):
    """Time limits: a time-out per wait, or a deadline on the monotonic clock."""

    each_s: float
    until: float | None

    @classmethod
    def of(cls, operation: str, timeout_s: float | None) -> Waits:
        """Without a time-out, each wait of a save may take SHOAL_TIMEOUT_S."""
        limit_s = settings.timeout(operation, timeout_s, "SHOAL_TIMEOUT_S")
        return cls(limit_s, None if timeout_s is None else time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Time left; always positive."""
        if self.until is None:
            return self.each_s
        return Allowance(max(self.until - time.monotonic(), 0.001), self.each_s)


class SaveOptions(NamedTuple):
    """What is saved beside the state, and how: equal on all processes, by every field."""

    step: int | None
    user: Mapping[str, Any]
    metrics: Mapping[str, float]
    overwrite: bool  # the lead looks what is to be replaced

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each."""
        return tuple(f"{key}={json_digest(value)}" for key, value in self._asdict().items())


class Request(NamedTuple):
    """A state to save, and its path."""

    store: Store
    options: SaveOptions
    name: str | None
    site: str
    waits: Waits
    lease_s: float  # after which other processes may end this save as stale
    lane: str = "main"  # in which all processes agree
    replaces: str = ""  # the committed attempt that this save replaces, if any
    check: Callable[[State], None] = lambda _: None  # refuses a state, on all processes

    @property
    def operation(self) -> str:
        """The call as named in messages."""
        return f"save({self.store.path!r})"


def manifest_of(request: Request, state: State, attempt: str, num_processes: int) -> Manifest:
    """Return the manifest, without its data, which the lead writes first."""
    return Manifest(
        attempt=attempt,
        step=request.options.step,
        created_ns=time.time_ns(),
        num_processes=num_processes,
        tree=state.structure,
        leaves=tuple(leaf.record for leaf in state.leaves),
        writer=dict(_versions()),
        mesh=state.mesh,
        user=request.options.user,
        metrics=request.options.metrics,
    )


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that save."""
    versions = []
    for name in ("shoal", "numpy", "jax"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append((name, metadata.version(name)))
    return tuple(versions)


# ---- The lines that must be equal on all processes before they save, one for each leaf.
#
# An array that spans processes contributes its layout; a value held by all contributes the value,
# or a digest.


_SMALL_BYTES = 1 << 20
_FEW = 8  # items shown
_SHOWN = 100  # characters shown of a value
_NODES = 2000  # characters shown of a tree


def state_lines(state: State, options: Sequence[str], num_processes: int) -> tuple[str, ...]:
    """Return the lines; values are hashed only if there is another process to compare with."""
    if num_processes == 1:
        return tuple(options)
    nodes = json.dumps(encode_structure(state.structure))
    with jax.transfer_guard("allow"):
        leaves = [_line(leaf) for leaf in state.leaves]
    # A differing leaf is more informative than differing trees.
    return (*options, *leaves, END, SpecLine("tree", value=_cut(nodes, _NODES)).packed)


def json_digest(value: object) -> str:
    """Return JSON, truncated for reading, and its digest."""
    return _cut(json.dumps(value, sort_keys=True), _SHOWN)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]}… (digest {quick_digest(text.encode()).hex()})"


def _line(leaf: StateLeaf) -> str:
    """Return the line of a leaf: its value or a digest, or its layout if it spans processes."""
    record = leaf.record
    if record.kind == "per_process":
        return SpecLine(path=record.name, value="each process's own").packed
    if not record.dtype:
        value = json_digest(record.value)
        scalar = _scalar(record.value)
        if scalar is not None:
            value = f"{scalar}, {value}"
        return SpecLine(path=record.name, dtype=record.kind, value=value).packed
    dtype = f"key<{record.impl}>" if record.impl else record.dtype
    shape = f"[{','.join(map(str, record.shape))}]"
    line = SpecLine(path=record.name, kind=record.kind, dtype=dtype, shape=shape)
    if leaf.shards is not None:
        return line._replace(layout=f"{record.layout} ({leaf.shards.digest})").packed
    return line._replace(value=_value(leaf), digest=_digest(leaf)).packed


def _scalar(value: object) -> str | None:
    """Return a NumPy scalar, of which a record holds the bits, as it prints; None: it is none."""
    if not isinstance(value, dict) or value.keys() != {"bits", "dtype"}:
        return None
    dtype = dtypes.dtype_of(value["dtype"])
    return str(np.frombuffer(bytes.fromhex(value["bits"]), dtype)[0])


def _value(leaf: StateLeaf) -> str:
    """Return a small value as it prints: more informative than a digest."""
    if leaf.record.impl or math.prod(leaf.record.shape) > _FEW:
        return ""
    shape = tuple(leaf.record.stored_shape)
    pieces = list(words_here(leaf))
    if len(pieces) != 1 or pieces[0][1].shape != shape or not pieces[0][1].size:
        return ""
    return str(pieces[0][1].tolist())


def _digest(leaf: StateLeaf) -> str:
    """Return a digest of a value that is whole on this host, whatever its layout."""
    pieces = [(box.origin, piece) for box, piece in words_here(leaf)]
    shape = leaf.record.stored_shape
    dtype = dtypes.dtype_of(leaf.record.dtype)
    if math.prod(shape) * dtype.itemsize > _SMALL_BYTES:
        return digest_of(FlatItems(shape, dtype, pieces)).hex()
    if len(pieces) == 1:
        return content_digest(_bytes(pieces[0][1])).hex()
    whole: Array = np.empty(shape, dtype)
    for origin, piece in pieces:
        where = tuple(slice(a, a + n) for a, n in zip(origin, piece.shape, strict=True))
        whole[where] = piece
    return content_digest(_bytes(whole)).hex()


def _bytes(array: Array) -> bytes | memoryview:
    if not array.size or not array.dtype.itemsize:
        return b""
    return np.ascontiguousarray(native(array)).reshape(-1).view(np.uint8).data
