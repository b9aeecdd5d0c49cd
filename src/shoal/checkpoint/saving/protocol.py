"""The phases of a save, in their order, run by all processes.

::

    agree     all have the same step, tree and layouts; nothing is written yet
    snapshot  values are copied, or kept to be read during the write
    open      the lead begins an attempt; all see it
    write     data, durable; then "this process has written all of its data", durable
    commit    the lead joins the parts and commits; all know

Each takes the result of the one before: `agree_on` → `SaveAttempt` → `snapshot` → `Snapshot` →
`complete` → `Commit`. Each but `snapshot` ends with a rendezvous, to which every process brings
its result or its error; an error in `snapshot` is brought to the next one.

Storage, not messages, decides the outcome: a process that learns of a loss looks at the storage. If
all parts are there, it commits; else it ends the attempt. One of the two wins, for all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from shoal.checkpoint.blocks.image import FileImage
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.coordination.lease import LeaseKeeper
from shoal.checkpoint.format.json_files import decode_commit, encode_commit
from shoal.checkpoint.format.records import Chunks, Commit, FileRecord, Manifest, Part
from shoal.checkpoint.planning.file_layout import lay_out
from shoal.checkpoint.planning.who_writes import WriteBox
from shoal.checkpoint.saving import save_members
from shoal.checkpoint.saving.file_images import images_of, start_copies
from shoal.checkpoint.saving.request import manifest_of
from shoal.checkpoint.saving.save_members import MeetingFailed, SaveAttempt
from shoal.checkpoint.saving.state import State
from shoal.checkpoint.store.interface import ended_error
from shoal.errors import StorageError
from shoal.runtime.preemption import note_commit
from shoal.runtime.system import fault_points, progress_file

MAX_FILE_BYTES = 16 << 30  # a larger box gets a file of its own, as docs/buckets.md says


class Snapshot(NamedTuple):
    """What this process writes."""

    images: list[FileImage]  # of its data files; emptied once written
    chunks: Chunks  # in these files
    manifest: Manifest | None  # None except on the lead, which writes it
    arena: Arena | None  # the memory that holds the images; None: the arrays do


def snapshot(
    attempt: SaveAttempt, state: State, own: Sequence[WriteBox], arena: Arena | None
) -> Future[Snapshot]:
    """Copy the values, or without an arena, keep them to be read during the write.

    If that fails, `complete` raises why, on all processes.
    """
    taken: Future[Snapshot] = Future()
    try:
        taken.set_result(_take(attempt, state, own, arena))
    except Exception as error:  # noqa: BLE001 - raised by `complete`
        taken.set_exception(error)
    return taken


def _take(
    attempt: SaveAttempt, state: State, own: Sequence[WriteBox], arena: Arena | None
) -> Snapshot:
    members, group = attempt.members, attempt.members.group
    fault_points.reach("save.snapshot", members.process)
    plan = lay_out(
        own,
        attempt.id,
        process=group.place,
        num_processes=group.count,
        max_file_bytes=MAX_FILE_BYTES,
    )
    manifest = None
    if members.is_lead:
        manifest = manifest_of(members.request, state, attempt.id, group.count)
    start_copies(state, own)
    images = images_of(state, own, plan)
    if arena is not None:
        arena.take(images)
        images = [image._replace(pieces=()) for image in images]
    return Snapshot(images, plan.chunks, manifest, arena)


def complete(attempt: SaveAttempt, taken: Future[Snapshot]) -> Commit:
    """Write and commit: from the first file to a commit known to all processes.

    Raises:
      SaveAbortedError: a process was lost, failed or late, and parts are missing.
      Otherwise the error of one process: the same type on all.
    """
    members = attempt.members
    try:
        with progress_file.saving(), _beat(attempt) as beat:
            commit = _run(attempt, taken, beat)
    except Exception:
        raise
    except BaseException:  # an interrupt: the others learn that the save cannot complete
        with contextlib.suppress(StorageError):  # already committed: it stands
            save_members.try_abandon(attempt)
        raise
    fault_points.reach("save.announced", members.process)
    note_commit(members.client, members.request.options.step)
    return commit


def _beat(attempt: SaveAttempt) -> LeaseKeeper:
    members = attempt.members
    return LeaseKeeper(
        members.client,
        attempt.store,
        attempt.id,
        lease_s=members.request.lease_s,
        lane=attempt.lane,
        members=members.group.members,
    )


def _run(attempt: SaveAttempt, taken: Future[Snapshot], beat: LeaseKeeper) -> Commit:
    members, has_part = attempt.members, False
    try:
        with attempt.phase("open", "opened"):
            files = taken.result()
            beat.num_bytes = sum(image.num_bytes for image in files.images)
            if files.manifest is not None:  # on the lead
                _open(attempt, files.manifest)
        with attempt.phase("open", "seen"):
            _see(attempt)
        beat.is_opening = False
        with attempt.phase("write", "parts"):
            _write(attempt, files, beat)
            has_part = True
            fault_points.reach("save.parted", members.process)
        with attempt.phase("commit", "committed") as exchange:
            if members.is_lead:
                exchange.payload = encode_commit(_commit(attempt))
    except MeetingFailed as failed:
        return save_members.settle(attempt, failed, has_part=has_part)
    return decode_commit(exchange.answers[members.group.lead])


def _open(attempt: SaveAttempt, manifest: Manifest) -> None:
    client, process = attempt.members.client, attempt.members.process
    fault_points.reach("save.open", process)
    owner = {"host": client.hosts[process], "pid": os.getpid(), "began": time.time()}
    if attempt.replaces:
        owner["replaces"] = attempt.replaces
    attempt.store.begin(manifest, owner)
    fault_points.reach("save.opened", process)


def _see(attempt: SaveAttempt) -> None:
    if attempt.store.is_open(attempt.id):
        return
    if attempt.members.is_lead:
        raise ended_error(attempt.store.path, attempt.id, "open")
    raise attempt.not_shared((attempt.members.process,))


def _write(attempt: SaveAttempt, files: Snapshot, beat: LeaseKeeper) -> None:
    process, group, store = attempt.members.process, attempt.members.group, attempt.store
    fault_points.reach("save.write", process)
    try:
        hashes = write_files(store, files.images, files.arena, beat.add)
    except OSError as error:
        if store.is_open(attempt.id):
            raise
        raise ended_error(store.path, attempt.id, "write") from error
    records = tuple(FileRecord(image.name, image.num_bytes, group.place) for image in files.images)
    files.images.clear()
    fault_points.reach("save.written", process)
    blocks = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    store.write_part(Part(attempt.id, group.place, records, files.chunks, blocks))


def _commit(attempt: SaveAttempt) -> Commit:
    try:
        return attempt.store.commit(attempt.id, attempt.replaces)
    except Exception as error:
        end = save_members.ended_by(attempt, error)
        if end.commit is None:
            raise
        return end.commit
