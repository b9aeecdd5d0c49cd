"""The protocol of a save, from S0 to S7, run by all processes.

::

    S0  agree     all have the same step, tree and layouts; nothing is written yet
    S2  snapshot  values are copied, or kept to be read during the write
    S1  open      the lead begins an attempt; all see it
    S3  write     data, durable
    S4  part      "this process has written all of its data", durable
    S5  S6        the lead joins the parts and commits
    S7            all know

Each phase takes the result of the one before: `agree_on` → `Agreed` → `snapshot` → `Snapshot` →
`complete` → `Commit`.

Storage, not messages, decides the outcome: a process that learns of a loss looks at the storage. If
all parts are there, it commits; else it ends the attempt. One of the two wins, for all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from shoal.checkpoint.blocks.image import FileImage
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.format.json_files import decode_commit, encode_commit
from shoal.checkpoint.format.records import Commit, FileRecord, Manifest, Part, data_name
from shoal.checkpoint.planning.file_layout import PartPlan, lay_out
from shoal.checkpoint.saving import save_members
from shoal.checkpoint.saving.agreeing import Agreed
from shoal.checkpoint.saving.file_images import images_of, start_copies
from shoal.checkpoint.saving.request import manifest_of
from shoal.checkpoint.saving.save_members import MeetingFailed, SaveMembers
from shoal.checkpoint.saving.state import State
from shoal.checkpoint.store.interface import ended
from shoal.checkpoint.together.lease import LeaseKeeper
from shoal.errors import StorageError
from shoal.runtime.preemption import note_commit
from shoal.runtime.system import fault_points, progress_file

Value = TypeVar("Value")

MAX_FILE_BYTES = 16 << 30  # a larger box gets a file of its own


class Snapshot(NamedTuple):
    """The files that this process writes, and the lead's manifest."""

    plan: PartPlan
    images: list[FileImage]  # emptied once written
    manifest: Manifest | None  # None except on the lead, which writes it


def snapshot(agreed: Agreed, state: State, arena: Arena | None) -> Snapshot | Exception:
    """S2: copy the values, or without an arena, keep them to be read during the write.

    An error is returned: `complete` reports it to the other processes, and raises it.
    """
    return _tried(lambda: _take(agreed, state, arena))


def _take(agreed: Agreed, state: State, arena: Arena | None) -> Snapshot:
    members, own = agreed
    place, count, attempt = members.group.place, members.group.count, members.attempt
    fault_points.reach("save.snapshot", members.process)
    plan = lay_out(own, place, attempt, max_file_bytes=MAX_FILE_BYTES)
    manifest = None
    if members.is_lead:
        manifest = manifest_of(members.request, state, attempt, count)
    start_copies(state, own)
    images = images_of(state, own, plan, attempt, count)
    if arena is not None:
        arena.take(images)
        images = [image._replace(pieces=()) for image in images]
    return Snapshot(plan, images, manifest)


def complete(
    agreed: Agreed, taken: Snapshot | Exception, arena: Arena | None, *, lane: str | None = None
) -> Commit:
    """S1, then S3 to S7: from the first file to a commit known to all processes.

    Args:
      lane: of these phases; None: that of the agreement.

    Raises:
      SaveAbortedError: a process was lost, failed or late, and parts are missing.
      Otherwise the error of one process: the same type on all.
    """
    members = replace(agreed.members, lane=lane or agreed.members.lane)
    try:
        num_bytes = 0 if isinstance(taken, Exception) else taken.plan.num_bytes
        with progress_file.saving(), _beat(members, num_bytes) as beat:
            commit = _run(members, taken, arena, beat)
    except Exception:
        raise
    except BaseException:  # an interrupt: the others learn that the save cannot complete
        with contextlib.suppress(StorageError):  # already committed: it stands
            save_members.try_abandon(members.scene)
        raise
    fault_points.reach("save.announced", members.process)
    note_commit(members.coordinator, members.request.options.step)
    return commit


def _beat(members: SaveMembers, num_bytes: int) -> LeaseKeeper:
    return LeaseKeeper(
        members.coordinator,
        members.request.store,
        members.attempt,
        num_bytes,
        members.request.lease_s,
        members.lane,
        members.group.members,
    )


def _run(
    members: SaveMembers, taken: Snapshot | Exception, arena: Arena | None, beat: LeaseKeeper
) -> Commit:
    phase, has_part = "open", False
    try:
        if isinstance(taken, Exception):
            members.meet(phase, "opened", taken)
            raise taken  # not reached: `meet` raises the error that it is given
        members.meet(phase, "opened", _tried(lambda: _open(members, taken.manifest)))
        members.meet(phase, "seen", _tried(lambda: _see(members)))
        phase, beat.is_opening = "write", False
        problem = _tried(lambda: _write(members, taken, arena, beat))
        if has_part := problem is None:
            problem = _tried(lambda: fault_points.reach("save.parted", members.process))
        members.meet(phase, "parts", problem)
        phase = "commit"
        committed = _tried(lambda: _commit(members)) if members.is_lead else None
        answers = members.meet(phase, "committed", committed)
    except MeetingFailed as ended:
        return save_members.settle(members.scene, phase, ended.cause, has_part=has_part)
    return decode_commit(answers[members.group.lead])


def _open(members: SaveMembers, manifest: Manifest | None) -> None:
    process = members.process
    if manifest is None:  # not the lead
        return
    fault_points.reach("save.open", process)
    host = members.coordinator.hosts[process]
    owner = {"host": host, "pid": os.getpid(), "began": time.time()}
    owner |= {"replaces": members.request.replaces} if members.request.replaces else {}
    members.request.store.begin(manifest, owner)
    fault_points.reach("save.opened", process)


def _see(members: SaveMembers) -> None:
    store, attempt = members.request.store, members.attempt
    if store.is_open(attempt):
        return
    if members.is_lead:
        raise ended(store.path, attempt, "open")
    raise members.not_shared((members.process,))


def _write(members: SaveMembers, taken: Snapshot, arena: Arena | None, beat: LeaseKeeper) -> None:
    process, group, attempt = members.process, members.group, members.attempt
    store = members.request.store
    fault_points.reach("save.write", process)
    try:
        hashes = write_files(store, taken.images, arena, beat.add)
    except OSError as error:
        if store.is_open(attempt):
            raise
        raise ended(store.path, attempt, "write") from error
    taken.images.clear()
    fault_points.reach("save.written", process)
    files = tuple(
        FileRecord(data_name(attempt, group.place, group.count, n), file.num_bytes, group.place)
        for n, file in enumerate(taken.plan.files)
    )
    blocks = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    store.write_part(Part(attempt, group.place, files, taken.plan.chunks, blocks))


def _commit(members: SaveMembers) -> bytes:
    try:
        commit = members.request.store.commit(members.attempt, members.request.replaces)
    except Exception as error:
        end = save_members.ended_by(members.scene, error)
        if end.commit is None:
            raise
        commit = end.commit
    return encode_commit(commit)


def _tried(work: Callable[[], Value]) -> Value | Exception:
    """Return the result, or the error."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - sent to the other processes
        return error
