"""The records of the format (manifest, index, part, COMMIT), and the names of files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.tree.nodes import Structure

VERSION = (1, 0)
FEATURES: frozenset[str] = frozenset()  # known to this reader, beyond version 1.0
BLOCK_BYTES = 256 << 10  # hashed separately (xxh3-64), counted from offset 0 of the file
PAGE_BYTES = 4096  # headers of data files are padded to a multiple of it

COMMIT_BYTES = 4096  # of COMMIT at most
REGISTER_BYTES = 64 << 10  # of COMMIT in a bucket at most
METRICS_BYTES = 1024  # of its metrics, as JSON
MANIFEST_BYTES = 1 << 30  # at most: millions of leaves; an index may also grow with the data
MOST_DIMS = 64  # of data in files: the limit of NumPy
LARGEST = 1 << 62  # sizes and offsets stay below: sums of two fit into 64 bits

IntArray = NDArray[np.int64]


def manifest_name(attempt: str) -> str:
    """Return the name of an attempt's manifest."""
    return f"manifest-{attempt}.json"


def index_name(attempt: str) -> str:
    """Return the name of an attempt's index."""
    return f"index-{attempt}.safetensors"


def part_name(attempt: str, process: int) -> str:
    """Return the name of the part of one process."""
    return f"part-{attempt}-{process:05d}.safetensors"


def data_name(attempt: str, process: int, num_processes: int, index: int = 0) -> str:
    """Return the name of a process's data file number `index`, counted from 0."""
    more = f"-{index:03d}" if index else ""
    return f"data-{attempt}-{process:05d}-of-{num_processes:05d}{more}.safetensors"


@dataclass(frozen=True)
class LeafRecord:
    """One leaf of the tree, without its data."""

    name: str  # see `names`; the name of its entry in a data file if it is stored whole
    kind: str  # "array", "scalar" (of NumPy), "key"; "int", "float", "bool", "complex", "str",
    # "bytes", "none"; "per_process"
    dtype: str = ""  # of its data in files, if any: "float32", "int4"; see `dtypes`.
    # Long str and bytes: "uint8" and one dim; "per_process": "uint8" and shape ()
    shape: tuple[int, ...] = ()  # of the leaf
    words: tuple[int, ...] = ()  # trailing dims of a key's words
    impl: str = ""  # of a key: "threefry2x32"
    layout: str = ""  # text of the saved layout; information only
    value: Any = None  # of a leaf without data in files, as JSON; see `plain_values.encode_value`

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of its data in files; chunks are boxes of it."""
        return self.shape + self.words

    @property
    def has_data(self) -> bool:
        """Does it have data in files?"""
        return bool(self.dtype)


@dataclass(frozen=True)
class Manifest:
    """The saved tree and its leaves. Written when an attempt begins."""

    attempt: str  # 12 hex digits
    step: int | None
    created_ns: int  # since 1970, UTC
    num_processes: int
    tree: Structure  # see `tree`; its names are those of the leaves, in their order
    leaves: tuple[LeafRecord, ...]
    writer: Mapping[str, str] = field(default_factory=dict)  # versions: shoal, numpy, jax
    mesh: str = ""  # text of the mesh, if any; information only
    user: Mapping[str, Any] = field(default_factory=dict)  # JSON of the caller
    # For retention. Here, so that every process that commits writes the same bytes.
    metrics: Mapping[str, float] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # features needed to read it
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    """One data file."""

    name: str
    bytes: int
    process: int  # the writer


@dataclass(frozen=True, eq=False)
class Chunks:
    """Boxes of leaves in files, one per row, sorted by leaf, then origin.

    A chunk's bytes are its elements in C order, packed as `dtypes` says. Ranks differ: rows are
    padded at the end with origin 0 and extent 1; `rank` is that of the widest leaf, and at least 1.
    A leaf without elements has one chunk, the whole. A "per_process" leaf has one chunk per
    process: origin [p, 0, …], extent [bytes, 1, …], in a file of process p.
    """

    leaf: IntArray  # its number in the manifest [chunks]
    file: IntArray  # its number in the list of files [chunks]
    begin: IntArray  # first byte, from offset 0 of the file [chunks]
    end: IntArray  # one past the last [chunks]
    origin: IntArray  # of the box in the leaf [chunks, rank]
    extent: IntArray  # of the box [chunks, rank]


@dataclass(frozen=True, eq=False)
class Index:
    """The location and hashes of all data. Written when all parts exist."""

    attempt: str
    files: tuple[FileRecord, ...]
    chunks: Chunks
    first_block: IntArray  # of each file in `block_hash`, and one past the last [files + 1]
    block_hash: NDArray[np.uint64]  # xxh3-64 of every block of every file [blocks]


@dataclass(frozen=True, eq=False)
class Part:
    """One process's rows of the index.

    `chunks.file` and `files` count this process's files from 0.
    """

    attempt: str
    process: int
    files: tuple[FileRecord, ...]
    chunks: Chunks
    block_hash: NDArray[np.uint64]  # of its files, concatenated [blocks]


@dataclass(frozen=True)
class Blob:
    """A file that COMMIT vouches for."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """The file COMMIT, at most 4 KiB: a step is saved if and only if it exists and is valid."""

    attempt: str
    step: int | None
    created_ns: int  # as in the manifest
    manifest: Blob
    index: Blob
    data_bytes: int  # of all data files
    num_files: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # for retention: at most 1 KiB


@dataclass(frozen=True)
class Register:
    """COMMIT in a bucket: it also says what must no longer be committed. It is never removed."""

    commit: Commit | None = None  # None: nothing is saved
    ended: tuple[str, ...] = ()  # attempts that must not be committed any more
    is_pinned: bool = False
    nonce: str = ""  # new in each change, so that no two versions have equal bytes
    is_single_writer: bool = False  # the user's word: it was changed without conditions


# ---- Layout and memory kind of an array as one line of text.
#
# `"x, - @ x=4"` is in the devices' default memory, `"x, - @ x=4 in pinned_host"` in another.


_MEMORY = re.compile(r"(.*) in ([a-z][a-z0-9_]*)", re.DOTALL)


def in_memory(layout: str, memory: str) -> str:
    """Return the text of a layout in a memory kind; "" is the default memory."""
    if layout and memory:
        return f"{layout} in {memory}"
    return layout


def layout_and_memory(text: str) -> tuple[str, str]:
    """Split the text into the layout's and the memory kind.

    >>> layout_and_memory("x, - @ x=4 in pinned_host"), layout_and_memory("x @ x=4")
    (('x, - @ x=4', 'pinned_host'), ('x @ x=4', ''))
    """
    match = _MEMORY.fullmatch(text)
    return (match[1], match[2]) if match else (text, "")
