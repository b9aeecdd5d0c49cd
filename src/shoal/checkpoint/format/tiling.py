"""Check that chunks tile every leaf and lie inside their files. Vectorised."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.format.records import (
    LARGEST,
    MOST_DIMS,
    Chunks,
    Commit,
    FileRecord,
    Index,
    IntArray,
    Manifest,
    Part,
    data_name,
)
from shoal.checkpoint.tree import dtypes
from shoal.errors import CorruptCheckpointError

_PRIME = (1 << 31) - 1  # products of two smaller numbers fit into 64 bits
Bools = NDArray[np.bool_]


def check_places(chunks: Chunks, files: Sequence[FileRecord], file: str) -> None:
    """Reject chunks that lie outside their file, overlap in it, or are not sorted.

    Raises:
      CorruptCheckpointError: names the first offender.
    """
    room = np.array([record.bytes for record in files], np.int64)
    if not chunks.leaf.size:
        return
    if int(chunks.file.min()) < 0 or int(chunks.file.max()) >= len(files):
        _refuse(file, "has a chunk in a file that it does not list")
    if int(chunks.leaf.min()) < 0:
        _refuse(file, "has a chunk of an unknown leaf")
    begin, end = chunks.begin, chunks.end
    wrong = (begin < 0) | (begin > end) | (end > room[chunks.file])
    for table in (chunks.origin, chunks.extent):
        wrong |= ((table < 0) | (table >= LARGEST)).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        _refuse(file, f"has a chunk outside of {files[int(chunks.file[row])].name}", row)
    order = np.lexsort((end, begin, chunks.file))
    same = chunks.file[order][1:] == chunks.file[order][:-1]
    over = same & (begin[order][1:] < end[order][:-1])
    if over.any():
        row = int(order[1:][over.argmax()])
        _refuse(file, f"has overlapping chunks in {files[int(chunks.file[row])].name}", row)
    if not _is_sorted(chunks):
        _refuse(file, "has chunks not in the order of leaves and origins, or twice")


def _is_sorted(chunks: Chunks) -> bool:
    """Are the rows strictly sorted by leaf, then origin?"""
    columns = [chunks.leaf, *chunks.origin.T]
    undecided = np.ones(max(0, chunks.leaf.size - 1), bool)
    for column in columns:
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return not undecided.any()


class _Leaves(NamedTuple):
    """The leaves of the manifest, as arrays."""

    dims: IntArray  # [leaves, rank]
    per_byte: IntArray
    item_bytes: IntArray
    has_data: Bools
    is_own: Bools  # of kind "per_process"
    is_empty: Bools


def check_tiling(manifest: Manifest, chunks: Chunks, file: str = "the index") -> None:
    """Reject chunks that do not tile every leaf: holes, overlaps, wrong sizes.

    The rows have passed `check_places`.

    Raises:
      CorruptCheckpointError: names a leaf.
    """
    leaves = _leaves(manifest, chunks, file)
    leaf, origin, extent = chunks.leaf, chunks.origin, chunks.extent
    if leaf.size and int(leaf.max()) >= len(manifest.leaves):
        _refuse(file, "has a chunk of a leaf that the manifest does not list")

    def refuse_if(wrong: Bools, what: str) -> None:
        if wrong.any():
            name = manifest.leaves[int(wrong.argmax())].name
            problem = f"{file}: leaf {name[:100]!r} {what}"
            raise CorruptCheckpointError(problem, file=file, leaf=name)

    def refuse_rows(wrong: Bools, what: str) -> None:
        refuse_if(np.bincount(leaf[wrong], minlength=len(manifest.leaves)) > 0, what)

    count = np.bincount(leaf, minlength=len(manifest.leaves))
    refuse_if((count > 0) & ~leaves.has_data, "has chunks, and its value is in the manifest")
    refuse_if((count == 0) & leaves.has_data, "has no chunk")
    refuse_if(
        leaves.is_own & (count != manifest.num_processes),
        f"does not have one value of each of {manifest.num_processes} processes",
    )
    own = leaves.is_own[leaf]
    refuse_rows(~own & (origin + extent > leaves.dims[leaf]).any(axis=1), "has a chunk outside")
    if own.any():
        wrong = _not_own(chunks, manifest.num_processes)
        refuse_rows(own & wrong, "has a value of an unknown process")
    elements = extent.prod(axis=1)
    packed = -(-elements // leaves.per_byte[leaf])
    wanted = np.where(leaves.per_byte[leaf] > 1, packed, elements * leaves.item_bytes[leaf])
    refuse_rows(chunks.end - chunks.begin != wanted, "has a chunk of the wrong number of bytes")
    refuse_rows(~own & ~leaves.is_empty[leaf] & (elements == 0), "has a chunk without elements")
    refuse_if(leaves.is_empty & ~leaves.is_own & (count > 1), "is empty and has several chunks")
    whole = (count == 1) & ~leaves.is_own
    single = whole[leaf]
    refuse_rows(
        single & (extent != leaves.dims[leaf]).any(axis=1), "is not filled by its only chunk"
    )
    rows = ~single & ~own
    refuse_if(_untiled(leaf[rows], origin[rows], extent[rows], leaves.dims), _HOLES)


_HOLES = "is not filled exactly once: chunks overlap, or leave a hole"


def _leaves(manifest: Manifest, chunks: Chunks, file: str) -> _Leaves:
    rank = chunks.origin.shape[1]
    records = manifest.leaves
    shapes = [record.stored_shape for record in records]
    widest = max(map(len, shapes), default=0)
    widest = max(widest, any(record.kind == "per_process" for record in records))
    if not widest <= rank <= MOST_DIMS:
        _refuse(file, f"has {rank} dims, and the widest leaf {widest}")
    dims = np.array([shape + (1,) * (rank - len(shape)) for shape in shapes], np.int64)
    how = {
        name: dtypes.storage_of(dtypes.dtype_of(name)) if name else None
        for name in {record.dtype for record in records}
    }
    stored = [how[record.dtype] for record in records]
    return _Leaves(
        dims=dims.reshape(len(records), rank),
        per_byte=np.array([storage.per_byte if storage else 1 for storage in stored], np.int64),
        item_bytes=np.array([storage.item_bytes if storage else 0 for storage in stored], np.int64),
        has_data=np.array([record.has_data for record in records], bool),
        is_own=np.array([record.kind == "per_process" for record in records], bool),
        is_empty=np.array([0 in shape for shape in shapes], bool),
    )


def _not_own(chunks: Chunks, num_processes: int) -> Bools:
    """Return which rows are not per-process values, of which there is one per process."""
    first = np.searchsorted(chunks.leaf, chunks.leaf)
    process = np.arange(chunks.leaf.size) - first
    wrong = (chunks.origin[:, 0] != process) | (process >= num_processes)
    wrong |= (chunks.origin[:, 1:] != 0).any(axis=1) | (chunks.extent[:, 1:] != 1).any(axis=1)
    return np.asarray(wrong, bool)


def _untiled(leaf: IntArray, origin: IntArray, extent: IntArray, dims: IntArray) -> Bools:
    """Return the leaves that are not tiled. Boxes lie inside their leaf; rows are sorted by leaf.

    A randomised identity test: assign every coordinate of every dim a random number, and each box
    the product over its dims of the differences between its two ends. The products of boxes that
    tile the leaf sum to that of the leaf; for any others the difference is a nonzero polynomial in
    the random numbers, which vanishes with probability at most rank / 2^31 (Schwartz-Zippel lemma:
    J. Schwartz, "Fast probabilistic algorithms for verification of polynomial identities", JACM 27,
    1980). Two independent draws square that.
    """
    wrong = np.zeros(len(dims), bool)
    if not leaf.size:
        return wrong
    starts = np.flatnonzero(np.diff(leaf, prepend=-1))
    some = leaf[starts]
    random = np.random.default_rng(secrets.randbits(128))
    parts = np.ones((2, leaf.size), np.int64)
    whole = np.ones((2, some.size), np.int64)
    for dim in range(dims.shape[1]):
        begin, end, size = origin[:, dim], origin[:, dim] + extent[:, dim], dims[some, dim]
        if not begin.any() and np.array_equal(end, dims[leaf, dim]):
            continue  # no leaf is split along this dim
        known, where = np.unique(np.concatenate([begin, end, size, [0]]), return_inverse=True)
        drawn = random.integers(0, _PRIME, (2, known.size))[:, where]
        at_begin, at_end, at_size = np.split(drawn[:, :-1], [leaf.size, 2 * leaf.size], axis=1)
        parts = parts * ((at_end - at_begin) % _PRIME) % _PRIME
        whole = whole * ((at_size - drawn[:, -1:]) % _PRIME) % _PRIME
    sums = np.add.reduceat(parts, starts, axis=1) % _PRIME
    wrong[some] = (sums != whole).any(axis=0)
    return wrong


def check_index(manifest: Manifest, index: Index, file: str = "the index") -> None:
    """Reject an index that does not belong to the manifest, or does not tile its leaves.

    Raises:
      CorruptCheckpointError: says why.
    """
    if index.attempt != manifest.attempt:
        _refuse(file, f"is of attempt {index.attempt}, and the manifest of {manifest.attempt}")
    last_place: dict[int, int] = {}
    for record in index.files:
        place = last_place[record.process] = last_place.get(record.process, -1) + 1
        wanted = data_name(manifest.attempt, record.process, manifest.num_processes, place)
        if record.process >= manifest.num_processes or record.name != wanted:
            _refuse(file, f"lists a file {record.name[:100]!r} that is not of this checkpoint")
    check_tiling(manifest, index.chunks, file=file)
    is_own = np.array([record.kind == "per_process" for record in manifest.leaves], bool)
    rows = is_own[index.chunks.leaf] if index.chunks.leaf.size else np.zeros(0, bool)
    process = np.array([record.process for record in index.files], np.int64)
    if rows.any() and (process[index.chunks.file[rows]] != index.chunks.origin[rows, 0]).any():
        _refuse(file, "has a process's own value in a file of another")


def check_whole(commit: Commit, manifest: Manifest, index: Index) -> None:
    """Reject files of a checkpoint that contradict one another or do not fill every leaf.

    Raises:
      CorruptCheckpointError: says why.
    """
    if (commit.attempt, commit.step) != (manifest.attempt, manifest.step):
        _refuse(commit.manifest.name, "is of another attempt or step than COMMIT")
    totals = (sum(record.bytes for record in index.files), len(index.files))
    if totals != (commit.data_bytes, commit.num_files):
        _refuse(commit.index.name, "lists other files than COMMIT counts")
    check_index(manifest, index, commit.index.name)


def join_chunks(parts: Sequence[Part]) -> Chunks:
    """Concatenate the chunks of parts, renumbering files, sorted by leaf and origin."""
    rank = max((part.chunks.origin.shape[1] for part in parts), default=1)
    before = np.cumsum([0, *(len(part.files) for part in parts)])

    def joined(columns: list[Any], width: tuple[int, ...] = ()) -> IntArray:
        return np.concatenate([np.zeros((0, *width), np.int64), *columns])

    def widened(table: IntArray, value: int) -> IntArray:
        more = rank - table.shape[1]
        return np.pad(table, ((0, 0), (0, more)), constant_values=value)

    chunks = [part.chunks for part in parts]
    leaf = joined([table.leaf for table in chunks])
    origin = joined([widened(table.origin, 0) for table in chunks], (rank,))
    extent = joined([widened(table.extent, 1) for table in chunks], (rank,))
    file = joined([table.file + first for table, first in zip(chunks, before, strict=False)])
    begin, end = joined([table.begin for table in chunks]), joined([table.end for table in chunks])
    order = np.lexsort((*origin.T[::-1], leaf))
    return Chunks(
        leaf=leaf[order],
        file=file[order],
        begin=begin[order],
        end=end[order],
        origin=origin[order],
        extent=extent[order],
    )


def _refuse(file: str, what: str, row: int | None = None) -> NoReturn:
    where = "" if row is None else f" (row {row})"
    raise CorruptCheckpointError(f"{file} {what}{where}", file=file)
