"""Turn requests into reads, and the data read into values on the host. Without JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.blocks.memory import empty
from shoal.checkpoint.blocks.reader import Progress, Want, read_boxes
from shoal.checkpoint.format.blobs import decode_tree
from shoal.checkpoint.format.records import BLOCK_BYTES, LeafRecord
from shoal.checkpoint.planning.casting import array_of
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.store.opening import Checkpoint
from shoal.checkpoint.tree import plain_values
from shoal.checkpoint.tree.dtypes import dtype_of
from shoal.checkpoint.tree.flatten import Nodes, PerProcess
from shoal.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError

Array = np.ndarray[Any, Any]
_LEAST_BYTES = 8 << 20  # left for reading, if the limit allows


class Filling(NamedTuple):
    """The reads that together make one value."""

    wants: list[Want]  # of another dtype than stored: cast after reading
    finish: Callable[[], Any]  # called once, after all reads
    extra_bytes: int = 0  # temporary memory, freed by `finish`


class Restorer(NamedTuple):
    """The process that restores."""

    process: int
    num_processes: int
    merge: Callable[[list[Any]], Any] | None = None
    nodes: Nodes | None = None  # of per-process values


def fill(
    checkpoint: Checkpoint,
    fillings: Sequence[Filling],
    max_host_bytes: int,
    progress: Progress = lambda _: None,
) -> tuple[list[Any], int]:
    """Read everything; return the values, and the number of bytes read.

    Values that need temporary memory are read in several rounds.
    """
    values: dict[int, Any] = {}
    read_bytes = 0
    for numbers in _rounds(fillings, max_host_bytes):
        wants, casts = _sorted(checkpoint, [w for n in numbers for w in fillings[n].wants])
        extra = sum(fillings[index].extra_bytes for index in numbers)
        left = max(max_host_bytes - extra, min(max_host_bytes, _LEAST_BYTES))
        read_bytes += read_boxes(checkpoint, wants, most_bytes=left, progress=progress)
        read_bytes += _read_casts(checkpoint, casts, left, progress)
        for index in numbers:
            values[index] = fillings[index].finish()
            fillings[index].wants.clear()
        if extra:  # a transfer to a device holds its source until it is done
            for index in numbers:
                getattr(values[index], "block_until_ready", int)()
    return [values[index] for index in range(len(fillings))], read_bytes


def _sorted(checkpoint: Checkpoint, wants: list[Want]) -> tuple[list[Want], list[Want]]:
    """Split into reads of the stored dtype and reads that are cast."""
    leaves = checkpoint.manifest.leaves
    casts = [want for want in wants if want.out.dtype != dtype_of(leaves[want.leaf].dtype)]
    if not casts:
        return wants, []
    return [want for want in wants if want.out.dtype == dtype_of(leaves[want.leaf].dtype)], casts


def _read_casts(
    checkpoint: Checkpoint, casts: Sequence[Want], max_host_bytes: int, progress: Progress
) -> int:
    """Read and cast boxes, in batches that take half of the memory; return the bytes read."""
    half = max(max_host_bytes // 2, BLOCK_BYTES)
    read_bytes, held = 0, 0
    parts: list[tuple[Want, Want]] = []
    for cast in casts:
        stored = dtype_of(checkpoint.manifest.leaves[cast.leaf].dtype)
        for part in _cut(cast, half // stored.itemsize):
            num_bytes = part.out.size * stored.itemsize
            if held + num_bytes > half:
                read_bytes += _read_and_cast(checkpoint, parts, half, progress)
                held = 0
            parts.append((part, Want(part.leaf, part.origin, np.empty(part.out.shape, stored))))
            held += num_bytes
    return read_bytes + _read_and_cast(checkpoint, parts, half, progress)


def _read_and_cast(
    checkpoint: Checkpoint, parts: list[tuple[Want, Want]], max_host_bytes: int, progress: Progress
) -> int:
    wants = [want for _, want in parts]
    read_bytes = read_boxes(checkpoint, wants, most_bytes=max_host_bytes, progress=progress)
    for cast, want in parts:
        cast.out[...] = want.out  # NumPy warns of overflow
    parts.clear()
    return read_bytes


def _cut(want: Want, most: int) -> Iterator[Want]:
    """Cut a box into boxes of at most `most` elements, in storage order.

    [4, 100] and most 250: rows 0..2, 2..4; and most 60: columns 0..60, 60..100 of each row.
    """
    leaf, origin, out = want
    if out.size <= most:
        yield want
        return
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
    rows = max(most // (out.size // out.shape[dim]), 1)
    for first in range(0, out.shape[dim], rows):
        part = out[(slice(None),) * dim + (slice(first, first + rows),)]
        begin = (*origin[:dim], origin[dim] + first, *origin[dim + 1 :])
        yield from _cut(Want(leaf, begin, part), most)


def _rounds(fillings: Sequence[Filling], max_host_bytes: int) -> Iterator[list[int]]:
    """Group the reads into rounds, in storage order."""
    order = sorted(range(len(fillings)), key=lambda n: bool(fillings[n].extra_bytes))
    numbers: list[int] = []
    extra = 0
    for index in order:
        more = fillings[index].extra_bytes
        if numbers and more and extra + more > max_host_bytes * 3 // 4:
            yield numbers
            numbers, extra = [], 0
        numbers.append(index)
        extra += more
    if numbers:
        yield numbers


def on_host(checkpoint: Checkpoint, request: LeafRequest, job: Restorer) -> Filling:
    """Return how to restore a leaf to a value on the host."""
    record = checkpoint.manifest.leaves[request.leaf]
    if not record.has_data:
        dtype = request.dtype
        if dtype is not None:
            return Filling([], lambda: array_of(record, dtype))
        return Filling([], lambda: plain_values.decode_value(record.kind, record.value))
    if record.kind == "per_process":
        return _own_value(checkpoint, request, job)
    if request.dtype is not None:
        shape = record.stored_shape
        cast = Want(request.leaf, (0,) * len(shape), empty(shape, request.dtype))
        return Filling([cast], lambda: cast.out)
    wants = [whole(checkpoint, request.leaf)]
    num_bytes = wants[0].out.nbytes
    if record.kind == "key":
        return Filling(wants, lambda: _host_keys(checkpoint, record, wants[0].out))
    if record.kind in ("str", "bytes"):
        return Filling(wants, lambda: _text(checkpoint, record, wants[0].out), num_bytes)
    return Filling(wants, lambda: wants[0].out)


def whole(checkpoint: Checkpoint, leaf: int) -> Want:
    """Return the want of a whole leaf, with memory for it."""
    record = checkpoint.manifest.leaves[leaf]
    shape = record.stored_shape
    return Want(leaf, (0,) * len(shape), empty(shape, dtype_of(record.dtype)))


def keys_of(checkpoint: Checkpoint, record: LeafRecord, wrap: Callable[[], Any]) -> Any:
    """Wrap words into PRNG keys with `wrap`.

    Raises:
      UnsupportedCheckpointError: this JAX has no keys of that kind.
    """
    return _keys(
        checkpoint.store.path, record.name, record.impl, key_words=list(record.words), wrap=wrap
    )


def _keys(
    path: str, name: str, impl: str, key_words: Sequence[int], wrap: Callable[[], Any]
) -> Any:
    try:
        return wrap()
    except (ValueError, TypeError, LookupError) as why:
        kind = f"key<{impl}>"
        detail = f"{path}: {name}: this JAX makes no {kind} of {key_words} words"
        raise UnsupportedCheckpointError(f"{detail}: {why}", path=path, features=(kind,)) from None


def _host_keys(checkpoint: Checkpoint, record: LeafRecord, key_words: Array) -> Any:
    """Return PRNG keys; without JAX, their words."""
    try:
        from shoal.collectives.leaves import wrap_key
    except ImportError:
        return key_words
    return keys_of(checkpoint, record, lambda: wrap_key(key_words, record.impl))


def _text(checkpoint: Checkpoint, record: LeafRecord, data: Array) -> str | bytes:
    try:
        return plain_values.value_of_bulk(record.kind, data)
    except UsageError as why:
        path = checkpoint.store.path
        detail = f"{path}: {record.name}: {why}"
        raise CorruptCheckpointError(detail, path=path, leaf=record.name) from None


def _own_value(checkpoint: Checkpoint, request: LeafRequest, job: Restorer) -> Filling:
    """Return how a process gets its per-process value, or the merge of all of them."""
    record = checkpoint.manifest.leaves[request.leaf]
    places = checkpoint.values_of(request.leaf)
    is_same = len(places) == job.num_processes
    if not is_same and job.merge is None:
        raise UsageError(
            f"restore: {record.name} has a value of each of {len(places)} processes, and there "
            f"are {job.num_processes} now; merge= combines the list of them into one"
        )
    chosen = [job.process] if is_same else sorted(places)
    wants = []
    for process in chosen:
        first, size = places[process]
        wants.append(Want(request.leaf, (first,), np.empty(size, np.uint8)))

    def finish() -> Any:
        values = [
            own_value(want.out.data, job.nodes, request.like, record.name, checkpoint.store.path)
            for want in wants
        ]
        if is_same or job.merge is None:
            return values[0]
        return PerProcess(job.merge([own.value for own in values]))

    return Filling(wants, finish, sum(want.out.nbytes for want in wants))


def own_value(
    blob: memoryview, nodes: Nodes | None, like: PerProcess | None, name: str, path: str = ""
) -> PerProcess:
    """Return a per-process value of its bytes; without JAX, the words of its PRNG keys.

    Raises:
      UsageError: with `like`: it has a class that neither that has, nor the program.
      UnsupportedCheckpointError: this JAX has no keys of a kind that it has.
    """

    def wrap(key_words: Array, impl: str) -> Any:
        try:
            from shoal.collectives.leaves import wrap_key
        except ImportError:
            return key_words
        return _keys(
            path,
            name,
            impl,
            key_words=list(key_words.shape[-1:]),
            wrap=lambda: wrap_key(key_words, impl),
        )

    try:
        return PerProcess(decode_tree(blob, nodes, wrap=wrap, like=like, file=f"{path}: {name}"))
    except UsageError as error:
        raise UsageError(f"restore: {name} has {error}") from None
