"""Read committed data: every block is verified before any value is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.blocks.image import digests
from shoal.checkpoint.format import header
from shoal.checkpoint.format.records import BLOCK_BYTES, PAGE_BYTES
from shoal.checkpoint.format.table_files import data_metadata
from shoal.checkpoint.planning.read_plan import Boxes, ReadPlan, plan_reads, suffixes
from shoal.checkpoint.store.interface import Store, confirmed
from shoal.checkpoint.store.opening import Checkpoint, absent, open_checkpoint
from shoal.checkpoint.tree import names
from shoal.checkpoint.tree.dtypes import dtype_of, entry_shape, storage_of, unpack_elements
from shoal.errors import CorruptCheckpointError, NotCommittedError, UsageError
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.threads import in_threads

Array = np.ndarray[Any, Any]
Bytes = NDArray[np.uint8]
Progress = Callable[[int], None]

_MOST_THREADS = 8
_SHOWN = 3  # leaves per file, and files, named in an error
_LEAST_RUN_BYTES = 64 << 10  # below this, a read into a buffer and a copy are cheaper


class DamagedPart(NamedTuple):
    """What was found damaged: a file of a step, or a block of it."""

    file: str  # "": not known
    offset: int | None  # of the block; None: the file as a whole


class Want(NamedTuple):
    """A box of a leaf, and the memory to read it into."""

    leaf: int
    origin: tuple[int, ...]
    out: Array  # its shape is the box's extent; dtype as stored, unpacked; need not be contiguous


def plan_boxes(
    checkpoint: Checkpoint, boxes: Boxes, most_request_bytes: int | None = None
) -> ReadPlan:
    """Plan the reads for boxes of a checkpoint."""
    pace = checkpoint.store.pace
    sizes = np.array([record.bytes for record in checkpoint.index.files], dtype=np.int64)
    return plan_reads(
        checkpoint.chunks,
        sizes,
        checkpoint.items,
        boxes,
        most_request_bytes=most_request_bytes or pace.request_bytes,
        gap_bytes=pace.gap_bytes,
    )


def read_boxes(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    *,
    most_bytes: int,
    progress: Progress = lambda _: None,
) -> int:
    """Fill the memory of all wants; return the number of bytes read.

    A block is read once, even if several wants need it.

    Args:
      most_bytes: limit of temporary memory; wants that are not contiguous need their own
        size in addition.

    Raises:
      CorruptCheckpointError: names the file, leaf and offset.
    """
    wants = [want for want in wants if want.out.nbytes]
    threads, request_bytes = _sizes(checkpoint, wants, most_bytes)
    boxes = _boxes(checkpoint, wants)
    plan = plan_boxes(checkpoint, boxes, request_bytes)
    _check_filled(checkpoint, boxes, plan)
    if checkpoint.store.pace.sizes_first:
        _check_sizes(checkpoint, plan.files)
    outs = [_contiguous(want.out) for want in wants]
    reading = _ReadCall(checkpoint, plan, boxes, outs, progress)
    in_threads(reading.serve, range(plan.num_requests), threads)
    for want, out in zip(wants, outs, strict=True):
        if out is not want.out:
            want.out[...] = out
    return plan.read_bytes


def verify_files(checkpoint: Checkpoint, progress: Progress = lambda _: None) -> list[str]:
    """Read every byte of every file; return what is wrong, in words, instead of raising it.

    Where the hashes are right, the header of the file is also compared with manifest and index.
    """
    damage: list[tuple[int, int, str]] = []
    parts: list[tuple[int, int, int]] = []
    request_bytes = checkpoint.store.pace.request_bytes
    for file, record in enumerate(checkpoint.index.files):
        try:
            confirmed(partial(_check_sizes, checkpoint, [file]))
        except CorruptCheckpointError as why:
            damage.append((file, -1, str(why)))
        for begin in range(0, record.bytes, request_bytes):
            parts.append((file, begin, min(begin + request_bytes, record.bytes)))
    silent = {file for file, _, _ in damage}

    def look(share: Iterable[tuple[int, int, int]]) -> None:
        memory = np.empty(request_bytes, np.uint8)
        for file, begin, end in share:
            for why in _wrong(checkpoint, file, begin, [memory[: end - begin]]):
                damage.append((file, why.offset or 0, str(why)))
            progress(end - begin)

    in_threads(look, [part for part in parts if part[0] not in silent], _threads(checkpoint))
    damaged = {file for file, _, _ in damage}
    for file in range(len(checkpoint.index.files)):
        try:
            if file not in damaged:
                check_header(checkpoint, file)
        except CorruptCheckpointError as why:
            damage.append((file, -1, str(why)))
    return [problem for _, _, problem in sorted(damage)]


class _ReadCall:
    """State of one call of `read_boxes`, shared by its threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ReadPlan,
        boxes: Boxes,
        outs: Sequence[Array],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.plan, self.progress = checkpoint, plan, progress
        self.targets: list[Bytes] = [out.reshape(-1).view(np.uint8) for out in outs]
        self.dtypes = [out.dtype for out in outs]
        chunks = checkpoint.chunks
        row, starts = plan.pieces_of_requests(chunks.file)
        self.row, self.starts = row.tolist(), starts.tolist()
        self._lay_out(boxes)

    def _lay_out(self, boxes: Boxes) -> None:
        """Find where each piece lies in its chunk and in the memory of its want."""
        plan, chunks, items = self.plan, self.checkpoint.chunks, self.checkpoint.items
        leaf = boxes.leaf[plan.box]
        item, per_byte = items.num_bytes[leaf], items.per_byte[leaf]
        from_ = suffixes(chunks.extent[plan.chunk], item)
        to = suffixes(boxes.extent[plan.box], item)
        begin = ((plan.origin - chunks.origin[plan.chunk]) * from_).sum(axis=1)
        into = ((plan.origin - boxes.origin[plan.box]) * to).sum(axis=1)
        num_bytes = plan.extent.prod(axis=1) * item
        span = ((plan.extent - 1) * from_).sum(axis=1) + item
        spread = ((plan.extent - 1) * to).sum(axis=1) + item
        is_flat = (span == num_bytes) & (spread == num_bytes)
        self.is_plain = (is_flat & (per_byte == 1)).tolist()
        self.want, self.into = plan.box.tolist(), into.tolist()
        self.first, self.last = plan.first.tolist(), plan.last.tolist()
        self.per_byte, self.item = per_byte.tolist(), item.tolist()
        self.chunk_begin = chunks.begin[plan.chunk].tolist()
        self.inner = begin.tolist()  # first byte of the piece in its chunk, as in memory
        self.from_, self.to = from_, to

    def serve(self, requests: Iterable[int]) -> None:
        """Read, verify and distribute some of the requests, through one reused buffer."""
        memory = np.empty(int((self.plan.end - self.plan.begin).max(initial=0)), np.uint8)
        for request in requests:
            self._serve(request, memory)

    def _serve(self, request: int, memory: Bytes) -> None:
        plan = self.plan
        file, begin, end = int(plan.file[request]), int(plan.begin[request]), int(plan.end[request])
        buffer = memory[: end - begin]
        pieces = self.row[self.starts[request] : self.starts[request + 1]]
        parts = self._parts_in_place(pieces, begin, buffer)
        for why in _wrong(self.checkpoint, file, begin, parts or [buffer]):
            raise why
        for piece in () if parts else pieces:
            if self.is_plain[piece]:
                low, high, target = self._run(piece, begin, end)
                target[:] = buffer[low - begin : high - begin]
            else:
                self._scatter(piece, begin, buffer)
        self.progress(end - begin)

    def _run(self, piece: int, begin: int, end: int) -> tuple[int, int, Bytes]:
        """Return a contiguous piece's bytes between two offsets of the file, and their memory."""
        first = self.first[piece]
        low, high = max(first, begin), min(self.last[piece], end)
        into = self.into[piece] - first
        return low, high, self.targets[self.want[piece]][into + low : into + high]

    def _parts_in_place(self, pieces: Iterable[int], begin: int, buffer: Bytes) -> list[Bytes]:
        """Return destination buffers that cover a request, with gaps from `buffer`.

        Empty if it cannot be read in place: strided, small or duplicate destinations are copied.
        """
        filled, end = begin, begin + len(buffer)
        parts = []
        for piece in sorted(pieces, key=self.first.__getitem__):
            if not self.is_plain[piece]:
                return []
            low, high, target = self._run(piece, begin, end)
            if low < filled or high - low < _LEAST_RUN_BYTES:
                return []
            parts += [buffer[filled - begin : low - begin], target]
            filled = high
        return [part for part in (*parts, buffer[filled - begin :]) if len(part)]

    def _scatter(self, piece: int, begin: int, buffer: Bytes) -> None:
        """Copy out pieces that are strided or packed."""
        per_byte, chunk = self.per_byte[piece], self.chunk_begin[piece]
        target = self.targets[self.want[piece]]
        extent = self.plan.extent[piece].tolist()
        from_, to = self.from_[piece].tolist(), self.to[piece].tolist()
        box = box_of(extent, from_, to, self.item[piece])
        if per_byte == 1:
            scatter(
                box,
                source=buffer,
                begin=chunk + self.inner[piece] - begin,
                target=target,
                into=self.into[piece],
            )
            return
        low = max(self.first[piece], begin)
        high = min(self.last[piece], begin + len(buffer))
        dtype = self.dtypes[self.want[piece]]
        elements = unpack_elements(
            buffer[low - begin : high - begin], dtype, ((high - low) * per_byte,)
        )
        inner = self.inner[piece] - (low - chunk) * per_byte
        scatter(
            box, source=elements.view(np.uint8), begin=inner, target=target, into=self.into[piece]
        )


def _contiguous(out: Array) -> Array:
    """Return the array itself if contiguous, else temporary memory of its shape."""
    return out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)


def _boxes(checkpoint: Checkpoint, wants: Sequence[Want]) -> Boxes:
    """Return the boxes of wants as arrays.

    Raises:
      UsageError: a want is not a box of its leaf.
    """
    rank = checkpoint.chunks.origin.shape[1]
    leaf = np.array([want.leaf for want in wants], dtype=np.int64)
    origin = np.zeros((len(wants), rank), dtype=np.int64)
    extent = np.ones((len(wants), rank), dtype=np.int64)
    for row, want in enumerate(wants):
        record = checkpoint.manifest.leaves[want.leaf]
        shape = want.out.shape
        if want.out.dtype != dtype_of(record.dtype) or len(shape) != len(want.origin):
            raise UsageError(f"{record.name}: {want.out.dtype}{shape} is not a box of it")
        origin[row, : len(shape)] = want.origin
        extent[row, : len(shape)] = shape
    return Boxes(leaf, origin, extent)


def _check_filled(checkpoint: Checkpoint, boxes: Boxes, plan: ReadPlan) -> None:
    """Raise if a box exceeds its leaf: some of its memory would stay uninitialised."""
    filled = np.zeros(len(boxes.leaf), dtype=np.int64)
    np.add.at(filled, plan.box, plan.extent.prod(axis=1))
    outside = np.flatnonzero(filled != boxes.extent.prod(axis=1))
    if outside.size:
        record = checkpoint.manifest.leaves[int(boxes.leaf[outside[0]])]
        raise UsageError(f"{record.name}: a box reaches out of {record.stored_shape}")


def _wrong(
    checkpoint: Checkpoint, file: int, begin: int, parts: Sequence[Bytes]
) -> list[CorruptCheckpointError]:
    """Read a byte range of a file into buffers; return what is wrong at a second look, too."""
    errors = list(_look(checkpoint, file, begin, parts))
    return errors and list(_look(checkpoint, file, begin, parts))


def _look(
    checkpoint: Checkpoint, file: int, begin: int, parts: Sequence[Bytes]
) -> Iterator[CorruptCheckpointError]:
    """Read a byte range of a file into buffers; yield the blocks whose hash differs."""
    record = checkpoint.index.files[file]
    try:
        got = checkpoint.store.read_at(record.name, begin, [part.data for part in parts])
    except FileNotFoundError:
        yield _damaged(checkpoint, file, None, absent(checkpoint.store, record.name))
        return
    if got.size not in (None, record.bytes):
        yield _resized(checkpoint, file, got.size)
        return
    if got.num_bytes < sum(map(len, parts)):
        offset = begin + got.num_bytes
        yield _damaged(checkpoint, file, offset, f"ends at byte {offset:,}", to_end=True)
        return
    hashes = checkpoint.index.block_hash
    first = int(checkpoint.index.first_block[file]) + begin // BLOCK_BYTES
    for index, digest in enumerate(digests(parts)):
        if digest != int(hashes[first + index]):
            offset = begin + index * BLOCK_BYTES
            detail = (
                f"the block at byte {offset:,} has changed since it was saved: its hash differs"
            )
            yield _damaged(checkpoint, file, offset, detail)


def read_verified(checkpoint: Checkpoint, file: int, begin: int, into: Bytes) -> None:
    """Read a byte range of a file that begins with a block, and ends with one or the file.

    Raises:
      CorruptCheckpointError: names the file, leaf and offset.
    """
    for why in _wrong(checkpoint, file, begin, [into]):
        raise why


def is_intact(store: Store, piece: DamagedPart) -> bool:
    """Read what was found damaged again: is it intact?"""
    try:
        checkpoint = open_checkpoint(store)  # reads COMMIT, manifest and index
        files = {record.name: index for index, record in enumerate(checkpoint.index.files)}
        file = files.get(piece.file)
        if file is not None:
            _check_sizes(checkpoint, [file])
            check_header(checkpoint, file)
            begin = (piece.offset or 0) // BLOCK_BYTES * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, checkpoint.index.files[file].bytes)
            read_verified(checkpoint, file, begin, np.empty(max(0, end - begin), np.uint8))
    except (CorruptCheckpointError, NotCommittedError):
        return False
    return piece.file != ""


def _damaged(
    checkpoint: Checkpoint, file: int, offset: int | None, what: str, *, to_end: bool = False
) -> CorruptCheckpointError:
    """Return the error for a file, for a block of it, or for everything from there `to_end`."""
    record, path = checkpoint.index.files[file], checkpoint.store.path
    leaves = _leaves_at(checkpoint, file, offset, to_end)
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    held = f" (it holds {', '.join(leaves[:_SHOWN])}{more})" if leaves else ""
    return CorruptCheckpointError(
        f"{path}: {record.name}: {what}{held}\n"
        "nothing of it was returned; restore another step, or put an undamaged copy in place",
        path=path,
        file=record.name,
        leaf=leaves[0] if leaves else "",
        offset=offset,
    )


def _leaves_at(checkpoint: Checkpoint, file: int, offset: int | None, to_end: bool) -> list[str]:
    """Return the names of the leaves in a block, or without an offset, in the file."""
    chunks = checkpoint.chunks
    inside = chunks.file == file
    if offset is not None:
        block = offset // BLOCK_BYTES * BLOCK_BYTES
        inside &= (chunks.end > block) & (to_end | (chunks.begin < block + BLOCK_BYTES))
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(chunks.begin[rows], kind="stable")]
    numbers = dict.fromkeys(chunks.leaf[rows].tolist())
    return [checkpoint.manifest.leaves[leaf].name for leaf in numbers]


def _check_sizes(checkpoint: Checkpoint, numbers: Iterable[int]) -> None:
    """Raise one error that names all files whose size has changed."""
    errors: list[CorruptCheckpointError] = []
    for file in numbers:
        record = checkpoint.index.files[file]
        try:
            size = checkpoint.store.size(record.name)
        except FileNotFoundError:
            problem = absent(checkpoint.store, record.name)
            errors.append(_damaged(checkpoint, file, None, problem))
            continue
        if size != record.bytes:
            errors.append(_resized(checkpoint, file, size))
    if len(errors) > 1:
        others = [f"{error.file}: {_message_of(error)}" for error in errors[1 : _SHOWN + 1]]
        others += [f"and {len(errors) - 1 - _SHOWN} more files"] if errors[_SHOWN + 1 :] else []
        errors[0].args = ("\n".join([str(errors[0]), *others]),)
    if errors:
        raise errors[0]


def _resized(checkpoint: Checkpoint, file: int, size: int) -> CorruptCheckpointError:
    """Return the error for a file that has another size now."""
    saved = checkpoint.index.files[file].bytes
    detail = f"has {size:,} bytes, {saved:,} were saved"
    return _damaged(checkpoint, file, min(size, saved), detail, to_end=True)


def _message_of(error: CorruptCheckpointError) -> str:
    """Return the message of an error about a file."""
    return str(error).partition("\n")[0].partition(f"{error.file}: ")[2]


def _sizes(checkpoint: Checkpoint, wants: Sequence[Want], most_bytes: int) -> tuple[int, int]:
    """Return the number of reader threads and the buffer size of each."""
    dtypes = {checkpoint.manifest.leaves[want.leaf].dtype for want in wants}
    packed = max((storage_of(dtype_of(dtype)).per_byte for dtype in dtypes), default=1)
    cost = 1 if packed == 1 else 2 + 2 * packed  # unpacking needs several temporary arrays
    threads = max(min(_threads(checkpoint), most_bytes // (cost * BLOCK_BYTES)), 1)
    return threads, min(checkpoint.store.pace.request_bytes, most_bytes // (threads * cost))


def _threads(checkpoint: Checkpoint) -> int:
    return checkpoint.store.pace.reads or min(max(num_cores(), 2), _MOST_THREADS)


# ---- Check that headers of data files agree with manifest and index: other readers trust them.


_SHOWN_CHARACTERS = 100  # characters of a name


class _EntryRecord(NamedTuple):
    """The dtype, shape and byte range of an entry; offsets count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} at bytes {self.begin:,} to {self.end:,}"


def check_header(checkpoint: Checkpoint, file: int) -> None:
    """Reject a data file whose header contradicts manifest and index, whatever its hashes.

    Raises:
      CorruptCheckpointError: names the file and the first leaf that differs.
    """
    confirmed(partial(_check_header, checkpoint, file))


def _check_header(checkpoint: Checkpoint, file: int) -> None:
    record, path = checkpoint.index.files[file], checkpoint.store.path
    try:
        entries_here = header.parse_header(_read(checkpoint, file), record.bytes, record.name)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}", path=path, file=record.name) from None
    except FileNotFoundError:
        detail = f"{path}: {record.name}: {absent(checkpoint.store, record.name)}"
        raise CorruptCheckpointError(detail, path=path, file=record.name) from None
    leaf, detail = "", ""
    entries = {
        entry.name: _EntryRecord(
            entry.dtype,
            entry.shape,
            entries_here.num_bytes + entry.begin,
            entries_here.num_bytes + entry.end,
        )
        for entry in entries_here.entries
    }
    if entries_here.num_bytes % PAGE_BYTES:
        detail = f"has {entries_here.num_bytes:,} bytes, no multiple of {PAGE_BYTES}"
    elif entries_here.metadata != data_metadata(checkpoint.commit.attempt):
        detail = f"is not of attempt {checkpoint.commit.attempt}"
    else:
        leaf, detail = _difference(entries, _expected(checkpoint, file))
    if detail:
        raise CorruptCheckpointError(
            f"{path}: {record.name}: its header {detail}\n"
            "its bytes are as written, but other readers would misread them; "
            "restore another step",
            path=path,
            file=record.name,
            leaf=leaf,
        )


def _read(checkpoint: Checkpoint, file: int) -> memoryview:
    """Read a file from its beginning, as far as its header may reach."""
    record = checkpoint.index.files[file]
    first = memoryview(bytearray(8))
    checkpoint.store.read_at(record.name, 0, [first])
    whole = memoryview(bytearray(header.header_bytes(first, record.bytes, record.name)))
    checkpoint.store.read_at(record.name, 0, [whole])
    return whole


def _expected(checkpoint: Checkpoint, file: int) -> dict[str, tuple[str, _EntryRecord]]:
    """Return, by entry name, the leaf and what manifest and index say of it."""
    chunks, expected = checkpoint.index.chunks, {}
    for row in np.flatnonzero(chunks.file == file).tolist():
        leaf = checkpoint.manifest.leaves[int(chunks.leaf[row])]
        dtype, shape = dtype_of(leaf.dtype), leaf.stored_shape
        origin, extent = chunks.origin[row].tolist(), chunks.extent[row].tolist()
        if leaf.kind == "per_process":
            name, box = names.entry_of_process(leaf.name, origin[0]), tuple(extent[:1])
        else:
            box = tuple(extent[: len(shape)])
            name = names.entry(leaf.name, None if box == shape else origin[: len(shape)])
        places = int(chunks.begin[row]), int(chunks.end[row])
        written = _EntryRecord(storage_of(dtype).entry, entry_shape(dtype, box), *places)
        expected[name] = leaf.name, written
    return expected


def _difference(
    entries: dict[str, _EntryRecord], expected: dict[str, tuple[str, _EntryRecord]]
) -> tuple[str, str]:
    """Describe the first leaf that differs; empty if none does."""
    for name, (leaf, written) in expected.items():
        if name not in entries:
            return leaf, f"lacks the entry {name[:_SHOWN_CHARACTERS]!r}, which the index has there"
        if entries[name] != written:
            detail = f"says that {name[:_SHOWN_CHARACTERS]!r} is {entries[name]}"
            return leaf, f"{detail}; by manifest and index it is {written}"
    more = entries.keys() - expected.keys()
    if more:
        return "", f"has an entry {min(more)[:_SHOWN_CHARACTERS]!r}, which the index lacks"
    return "", ""


# ---- Scatter bytes of a file into a strided box in memory, some of the bytes at a time.


_WIDE_BYTES = 64  # shorter rows are copied by elements wider than a byte


class ByteBox(NamedTuple):
    """A box of bytes with source and target strides; the last dim is contiguous in both."""

    shape: tuple[int, ...]
    source: tuple[int, ...]  # source strides
    target: tuple[int, ...]  # target strides


def box_of(
    extent: Sequence[int], source: Sequence[int], target: Sequence[int], item_bytes: int
) -> ByteBox:
    """Return the box of elements with these strides (bytes), in as few dims as possible.

    A box of [4, 8] float32 that is contiguous in both is one row of 128 bytes.
    """
    shape, outer_source, outer_target = [item_bytes], [1], [1]
    dims = zip(reversed(extent), reversed(source), reversed(target), strict=True)
    for size, from_, to in dims:
        if size == 1:
            continue
        if from_ == shape[0] * outer_source[0] and to == shape[0] * outer_target[0]:
            shape[0] *= size
        else:
            shape.insert(0, size)
            outer_source.insert(0, from_)
            outer_target.insert(0, to)
    return ByteBox(tuple(shape), tuple(outer_source), tuple(outer_target))


def scatter(box: ByteBox, source: Bytes, begin: int, target: Bytes, into: int) -> None:
    """Copy the bytes of `source` that belong to a box whose first byte is at offset `begin`.

    `begin` may be negative. Bytes of the box outside `source` are left alone. `into`: offset of the
    box's first byte in the target.
    """
    size, step = box.shape[0], box.source[0]
    if len(box.shape) == 1:
        low, high = max(0, -begin), min(size, len(source) - begin)
        if low < high:
            target[into + low : into + high] = source[begin + low : begin + high]
        return
    inner = sum((n - 1) * stride for n, stride in zip(box.shape[1:], box.source[1:], strict=True))
    inner += 1  # one past its last byte, from its first
    whole = max(0, -(begin // step))  # the first row that begins inside `source`
    past = min(size, (len(source) - inner - begin) // step + 1)  # rows past it end outside
    if whole < past:
        part = ByteBox((past - whole, *box.shape[1:]), box.source, box.target)
        _copy(
            box=part,
            source=source,
            begin=begin + whole * step,
            target=target,
            into=into + whole * box.target[0],
        )
    else:
        past = whole  # at most one partial row on each side, or one longer than `source`
    first = max(0, (-begin - inner) // step + 1)
    last = min(size, -((begin - len(source)) // step))
    rest = ByteBox(box.shape[1:], box.source[1:], box.target[1:])
    for row in (*range(first, min(whole, last)), *range(max(past, first), last)):
        scatter(
            box=rest,
            source=source,
            begin=begin + row * step,
            target=target,
            into=into + row * box.target[0],
        )


def _copy(box: ByteBox, source: Bytes, begin: int, target: Bytes, into: int) -> None:
    """Copy a box that lies inside both buffers."""
    wide = _width(box, begin, into) if box.shape[-1] < _WIDE_BYTES else 1
    shape = (*box.shape[:-1], box.shape[-1] // wide)
    dtype = f"u{wide}"
    from_ = np.ndarray(shape, dtype, source.data, offset=begin, strides=(*box.source[:-1], wide))
    to = np.ndarray(shape, dtype, target.data, offset=into, strides=(*box.target[:-1], wide))
    to[...] = from_


def _width(box: ByteBox, begin: int, into: int) -> int:
    """Return the widest element that divides all row lengths and offsets."""
    places = [box.shape[-1], begin, into, *box.source[:-1], *box.target[:-1]]
    return next(wide for wide in (8, 4, 2, 1) if all(place % wide == 0 for place in places))
