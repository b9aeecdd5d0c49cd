"""Copy a committed checkpoint between any two stores, as a new attempt there.

Every block is verified while it is copied. What names the attempt is written anew: the manifest,
the header of each data file and so the hash of its first blocks, parts, index and COMMIT. To a
bucket, a copy that was interrupted goes on: files that are complete are kept. To a directory, it
begins that step anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.checkpoint.blocks.image import Bytes, digests, whole_pages
from shoal.checkpoint.blocks.memory import reused_pages
from shoal.checkpoint.blocks.reader import read_verified
from shoal.checkpoint.format.header import header_bytes
from shoal.checkpoint.format.json_files import decode_manifest
from shoal.checkpoint.format.records import (
    BLOCK_BYTES,
    Chunks,
    Commit,
    FileRecord,
    Manifest,
    Part,
    data_name,
    manifest_name,
)
from shoal.checkpoint.format.table_files import data_metadata
from shoal.checkpoint.store.interface import OpenFile, Store
from shoal.checkpoint.store.opening import Checkpoint, deleted_meanwhile, open_checkpoint
from shoal.checkpoint.store.step_names import new_attempt
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.runtime.system.threads import in_threads

_WINDOW_BYTES = 4 << 20  # a multiple of BLOCK_BYTES
_COPIES = 8  # windows at a time
_BEAT_S, _BEATS = 4.0, 5  # least time between refreshes of the lease, and how many in it
_COPY_OF = "copy_of"  # key of an attempt's owner

Hashes = NDArray[np.uint64]
Progress = Callable[[int], None]


class Copied(NamedTuple):
    """What a copy has done."""

    commit: Commit
    copied_bytes: int  # of data files; the rest was there
    was_there: bool  # the same checkpoint was committed at the target already


def copy_checkpoint(source: Store, target: Store, progress: Progress = lambda _: None) -> Copied:
    """Copy what is committed at `source`; at `target` it is committed, or absent.

    Raises:
      NotCommittedError, CorruptCheckpointError, UnsupportedCheckpointError: of the source.
      StepAlreadyCommittedError: another checkpoint is committed at the target.
      UsageError: a file of the source was not written by shoal.
      StorageError: one of the stores failed. The attempt stays, until it is stale.
    """
    checkpoint = open_checkpoint(source)
    committed = target.committed()
    if committed is not None:
        return Copied(_same(checkpoint, target, committed), 0, was_there=True)
    manifest = _begin(checkpoint, target)
    files = _files(checkpoint, manifest)
    copy = _Copy(checkpoint, target, manifest.attempt, progress)
    try:
        hashes = [copy.file(file_index, record.name) for file_index, record in enumerate(files)]
        for process in range(manifest.num_processes):
            target.write_part(_part(checkpoint, manifest.attempt, process, files, hashes))
        return Copied(target.commit(manifest.attempt), copy.copied_bytes, was_there=False)
    except CorruptCheckpointError as error:
        raise deleted_meanwhile(source, checkpoint.commit.attempt) or error from None
    except StepAlreadyCommittedError:  # another process was faster
        with contextlib.suppress(CheckpointError):
            target.abandon(manifest.attempt)
        committed = target.committed()
        if committed is None:
            raise
        return Copied(_same(checkpoint, target, committed), 0, was_there=True)


def _same(checkpoint: Checkpoint, target: Store, committed: Commit) -> Commit:
    """Return the commit at the target if it is of the same save."""
    commit = checkpoint.commit
    if committed.attempt != commit.attempt:
        there = open_checkpoint(target)
        # Both are what one save has written, but for the attempt.
        if replace(there.manifest, attempt=commit.attempt) != checkpoint.manifest or not (
            _without_headers(there) == _without_headers(checkpoint)
        ):
            raise StepAlreadyCommittedError(
                f"{target.path}: another checkpoint is saved there, by attempt "
                f"{committed.attempt}; nothing is overwritten",
                path=target.path,
                attempt=committed.attempt,
            )
    return committed


def _without_headers(checkpoint: Checkpoint) -> list[tuple[int, int, bytes]]:
    """Return each file's size, process, and the hashes of the blocks behind its header."""
    index, rows = checkpoint.index, []
    for file, record in enumerate(index.files):
        first, last = index.first_block[file : file + 2].tolist()
        begins = index.chunks.begin[index.chunks.file == file]
        header_end = int(begins.min()) if len(begins) else record.bytes
        first += -(-header_end // BLOCK_BYTES)
        rows.append((record.bytes, record.process, index.block_hash[first:last].tobytes()))
    return rows


def _begin(checkpoint: Checkpoint, target: Store) -> Manifest:
    """Begin an attempt, or go on with that of a copy that ended before it was complete.

    Only where files appear whole: there two copies that go on with one attempt, or an old one that
    wakes, write the same bytes again, and nothing is ever removed.
    """
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": time.time(),
        _COPY_OF: checkpoint.commit.attempt,
    }
    for attempt in target.state().attempts if target.pace.writes_whole else ():
        if attempt.is_live and attempt.owner.get(_COPY_OF) == owner[_COPY_OF]:
            is_here = attempt.owner.get("host") == owner["host"] and not _runs(
                attempt.owner.get("pid")
            )
            if is_here or attempt.idle_s >= target.pace.lease_s:
                name = manifest_name(attempt.id)
                with contextlib.suppress(FileNotFoundError, CheckpointError):
                    manifest = decode_manifest(target.read(name), name)
                    if manifest == replace(checkpoint.manifest, attempt=attempt.id):
                        return manifest
    manifest = replace(checkpoint.manifest, attempt=new_attempt())
    target.begin(manifest, owner)
    return manifest


def _runs(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def _files(checkpoint: Checkpoint, manifest: Manifest) -> list[FileRecord]:
    """Return the files of the copy, in the order of those of the source."""
    files: list[FileRecord] = []
    places: Counter[int] = Counter()  # of a file among those of its process
    for record in checkpoint.index.files:
        place = places[record.process]
        name = data_name(manifest.attempt, record.process, manifest.num_processes, place)
        files.append(replace(record, name=name))
        places[record.process] += 1
    return files


def _part(
    checkpoint: Checkpoint,
    attempt: str,
    process: int,
    files: list[FileRecord],
    hashes: list[Hashes],
) -> Part:
    """Return the part of a process, with the files of the copy."""
    chunks = checkpoint.index.chunks
    numbers = [n for n, record in enumerate(files) if record.process == process]
    rows = np.flatnonzero(np.isin(chunks.file, numbers))
    own = Chunks(
        leaf=chunks.leaf[rows],
        file=np.searchsorted(np.array(numbers, np.int64), chunks.file[rows]),
        begin=chunks.begin[rows],
        end=chunks.end[rows],
        origin=chunks.origin[rows],
        extent=chunks.extent[rows],
    )
    blocks = [np.zeros(0, np.uint64), *(hashes[index] for index in numbers)]
    return Part(
        attempt,
        process,
        files=tuple(files[n] for n in numbers),
        chunks=own,
        block_hash=np.concatenate(blocks),
    )


class _Copy:
    """The files of one copy."""

    def __init__(
        self, checkpoint: Checkpoint, target: Store, attempt: str, progress: Progress
    ) -> None:
        self._checkpoint, self._target, self._attempt = checkpoint, target, attempt
        self._progress = progress
        self._lock = threading.Lock()
        self._next = 0.0  # when the lease is due
        self.copied_bytes = 0

    def file(self, file_index: int, name: str) -> Hashes:
        """Copy a file to one of this name, unless it is there; return the hashes of its blocks."""
        record, index = self._checkpoint.index.files[file_index], self._checkpoint.index
        first, last = index.first_block[file_index : file_index + 2].tolist()
        hashes = index.block_hash[first:last].copy()
        header, own = self._header(file_index)
        hashes[: len(own)] = own
        windows = [
            (begin, min(begin + _WINDOW_BYTES, record.bytes))
            for begin in range(0, record.bytes, _WINDOW_BYTES)
        ]
        if self._target.pace.writes_whole and self._is_there(name, record.bytes, hashes, windows):
            self._progress(record.bytes)
            return hashes
        file = self._target.open_new(name, record.bytes)
        try:
            in_threads(lambda own: self._write(file, file_index, header, own), windows, _COPIES)
            file.finish(record.bytes)
        except BaseException:
            file.discard()
            raise
        self.copied_bytes += record.bytes
        return hashes

    def _header(self, file_index: int) -> tuple[bytes, list[int]]:
        """Return a file's header as it is at the target, and the hashes of the blocks it is in.

        It names the attempt; what follows it in the last of these blocks stays.
        """
        checkpoint, record = self._checkpoint, self._checkpoint.index.files[file_index]
        blocks = np.empty(min(BLOCK_BYTES, record.bytes), np.uint8)
        read_verified(checkpoint, file_index, 0, blocks)
        size = header_bytes(bytes(blocks[:8]), record.bytes, record.name)
        if size > len(blocks):
            reach = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            blocks = np.empty(min(reach, record.bytes), np.uint8)
            read_verified(checkpoint, file_index, 0, blocks)
        header = blocks[:size].tobytes()
        old, new = (
            json.dumps(data_metadata(attempt), ensure_ascii=False).encode()
            for attempt in (checkpoint.commit.attempt, self._attempt)
        )
        if header.count(old) != 1:
            raise UsageError(
                f"{checkpoint.store.path}: {record.name} has a header that shoal has not written: "
                "restore the checkpoint, and save it"
            )
        header = header.replace(old, new)
        blocks[:size] = np.frombuffer(header, np.uint8)
        return header, list(digests([blocks]))

    def _fill(self, file_index: int, header: bytes, begin: int, memory: Bytes) -> None:
        """Read a range of a file, verified, with the header of the target."""
        read_verified(self._checkpoint, file_index, begin, memory)
        if begin < len(header):
            own = np.frombuffer(header[begin : begin + len(memory)], np.uint8)
            memory[: len(own)] = own

    def _write(
        self, file: OpenFile, file_index: int, header: bytes, windows: Iterator[tuple[int, int]]
    ) -> None:
        for begin, end in windows:
            # The last page is written whole, and truncated when the file is finished.
            memory = reused_pages(whole_pages(end - begin))
            self._fill(file_index, header, begin, memory[: end - begin])
            file.write(memory.data, begin)
            self._keep_lease()
            self._progress(end - begin)

    def _is_there(
        self, name: str, num_bytes: int, hashes: Hashes, windows: list[tuple[int, int]]
    ) -> bool:
        """Is this file whole at the target, from a copy before?"""
        try:
            if self._target.size(name) != num_bytes:
                return False
        except FileNotFoundError:
            return False
        differing: list[int] = []

        def look(own: Iterator[tuple[int, int]]) -> None:
            memory = reused_pages(_WINDOW_BYTES)
            for begin, end in own:
                buffer = memory[: end - begin]
                got = self._target.read_at(name, begin, [buffer.data])
                wanted = hashes[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)].tolist()
                if got.num_bytes < end - begin or list(digests([buffer])) != wanted:
                    differing.append(begin)
                self._keep_lease()

        in_threads(look, windows, _COPIES)
        return not differing

    def _keep_lease(self) -> None:
        with self._lock:
            if time.monotonic() < self._next:
                return
            pace = self._target.pace
            every_s = min(max(pace.beat_s, _BEAT_S), pace.lease_s / _BEATS)
            self._next = time.monotonic() + every_s
        self._target.refresh(self._attempt)
