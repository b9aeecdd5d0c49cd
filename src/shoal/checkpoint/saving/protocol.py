"""The protocol of a save, from S0 to S7, run by all processes.

::

    S0  agree     all have the same step, tree and layouts; nothing is written yet
    S2  snapshot  values are copied, or kept to be read during the write
    S1  open      the lead begins an attempt; all see it
    S3  write     data, durable
    S4  part      "this process has written all of its data", durable
    S5  S6        the lead joins the parts and commits
    S7            all know

Storage, not messages, decides the outcome: a process that learns of a loss looks at the storage. If
all parts are there, it commits; else it ends the attempt. One of the two wins, for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from shoal.checkpoint.blocks.arena import Arena
from shoal.checkpoint.blocks.image import FileImage
from shoal.checkpoint.blocks.writer import write_files
from shoal.checkpoint.disk import committing, step_folder
from shoal.checkpoint.format.json_files import decode_commit, encode_commit
from shoal.checkpoint.format.records import Commit, FileRecord, Manifest, Part, data_name
from shoal.checkpoint.planning.file_layout import lay_out
from shoal.checkpoint.planning.who_writes import Own
from shoal.checkpoint.saving import preflight, settling
from shoal.checkpoint.saving.file_images import images_of, start_copies
from shoal.checkpoint.saving.lines import state_lines
from shoal.checkpoint.saving.request import Request, manifest_of
from shoal.checkpoint.saving.state import State, among, own_of
from shoal.checkpoint.together.errors_between import decode_error, encode_error, failed_processes
from shoal.checkpoint.together.lease import LeaseKeeper
from shoal.checkpoint.together.one_folder import different_folders
from shoal.errors import (
    CheckpointError,
    DeadlineError,
    NotShared,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
    StorageError,
    UsageError,
    raise_all,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group, group_in
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.preemption import saved_with
from shoal.runtime.rules.outcomes import ThisProcess, listed
from shoal.runtime.rules.point import Point
from shoal.runtime.system import fault_points

MAX_FILE_BYTES = 16 << 30  # a larger box gets a file of its own
_SHOWN_HOSTS = 8


class Save:
    """One save on one process."""

    def __init__(
        self, coordinator: Coordinator, request: Request, group: Group | None = None
    ) -> None:
        """`group`: the processes that save; None: all of the job."""
        self._coordinator, self._request = coordinator, request
        self._group = group or group_in(coordinator, request.operation, None)
        self._folder = request.folder
        self._me = ThisProcess(coordinator.process, coordinator.hosts)
        self._attempt = step_folder.new_attempt()  # the lead's is used
        self._lane = "main"
        self._phase = "agree"
        self._has_part = False
        self._committed = b""
        self._own: list[Own] = []
        self._plan = lay_out((), self._group.place, "", max_file_bytes=MAX_FILE_BYTES)
        self._problem: Exception | None = None
        self._paths: Mapping[int, str] = {}  # the folder's path on each process
        self._images: list[FileImage] = []
        self._manifest: Manifest | None = None

    @property
    def _scene(self) -> settling.SaveScene:
        members = self._group.members
        return settling.SaveScene(self._coordinator, self._request, self._attempt, members)

    @property
    def _is_lead(self) -> bool:
        return self._coordinator.process == self._group.lead

    @property
    def num_bytes(self) -> int:
        """Bytes that this process writes."""
        return self._plan.num_bytes

    def agree(self, state: State) -> None:
        """S0: check with all processes that the save is possible.

        Raises:
          DivergenceError: the processes do not save the same state.
          SaveAborted: a process was lost, failed or late.
          StepAlreadyCommitted, StorageError, …: on all, if raised on any.
        """
        process, group = self._coordinator.process, self._group
        fault_points.reach("save.preflight", process)
        said: dict[str, Any] = {"attempt": self._attempt} if self._is_lead else {}
        said["path"] = self._folder.path
        numbers = self._numbers(state)
        problem: Exception | None = None
        try:
            number = self._share(state, numbers)
            said |= {"bytes": preflight.bytes_needed(self._own)}
            said |= {"number": number} if number != process else {}
            said["free"] = preflight.check_folder(self._folder)
        except (CheckpointError, UsageError) as error:
            problem = error
        lines = state_lines(state, self._request.lines, group.count)
        payload = json.dumps(said).encode() if problem is None else encode_error(problem)
        answers = self._agreed(lines, payload)
        self._raise_told(answers, problem)
        if group.is_all:
            self._check_numbers(answers)
        self._paths = {who: json.loads(text)["path"] for who, text in answers.items()}
        preflight.check_space(self._folder, answers)
        self._attempt = json.loads(answers[group.lead])["attempt"]

    def _numbers(self, state: State) -> list[int] | None:
        """Exchange the JAX process numbers of the members; None if all of the job save."""
        group = self._group
        if group.is_all:
            return None
        number = jax.process_index() if state.is_spread else group.process
        answers = self._agreed(("the processes that save",), str(number).encode())
        numbers = [int(answers[member]) for member in group.members]
        if len({*numbers}) < len(numbers):
            self._refuse_numbers(numbers)
        return numbers

    def _share(self, state: State, numbers: Sequence[int] | None) -> int:
        """Decide what this process writes; return its number as a holder.

        Raises:
          UsageError: parts of the state are held only by processes outside the group.
        """
        group, process = self._group, self._coordinator.process
        if numbers is None:
            number = jax.process_index() if state.is_spread and group.count > 1 else process
            self._own = own_of(state, number, process, group.count)
            return number
        held, lost = among(state, numbers)
        operation = f"{self._request.operation} by {listed(group.members)}"
        raise_all(operation, [f"{what}; leave it out" for what in lost])
        self._own = own_of(held, group.place, group.place, group.count)
        return process

    def _agreed(self, lines: tuple[str, ...], payload: bytes) -> Mapping[int, bytes]:
        request = self._request
        call = Call("save", request.name, request.site, lines)
        try:
            return agree(
                self._coordinator,
                call,
                payload,
                timeout_s=request.waits.left_s,
                group=self._group.named,
            )
        except (ProcessLostError, PeerFailedError, DeadlineError) as error:
            raise settling.aborted(self._scene, self._phase, error) from error

    def _check_numbers(self, answers: Mapping[int, bytes]) -> None:
        """Check that JAX's process numbers are those of the job, in any order."""
        found = [
            json.loads(text)["number"] if b'"number"' in text else process
            for process, text in answers.items()
        ]
        if sorted(found) != list(range(len(answers))):
            self._refuse_numbers(found)

    def _refuse_numbers(self, found: Sequence[int]) -> NoReturn:
        raise UsageError(
            f"{self._request.operation}: the processes of this job have the numbers {list(found)} "
            "in JAX, so JAX's job is another one; initialize both together"
        )

    def snapshot(self, state: State, arena: Arena | None) -> None:
        """S2: copy the values, or without an arena, keep them to be read during the write.

        An error here is reported to the other processes by `complete`, which raises it.
        """
        self._phase = "snapshot"
        self._problem = _tried(lambda: self._take(state, arena))

    def _take(self, state: State, arena: Arena | None) -> None:
        place, count = self._group.place, self._group.count
        fault_points.reach("save.snapshot", self._coordinator.process)
        self._plan = lay_out(self._own, place, self._attempt, max_file_bytes=MAX_FILE_BYTES)
        self._manifest = None
        if self._is_lead:
            self._manifest = manifest_of(self._request, state, self._attempt, count)
        start_copies(state, self._own)
        images = images_of(state, self._own, self._plan, self._attempt, count)
        if arena is not None:
            arena.take(images)
            images = [image._replace(pieces=()) for image in images]
        self._images = images

    @property
    def own_lane(self) -> str:
        """A lane used only by the thread that completes this save."""
        return f"save {self._attempt}"

    def complete(self, arena: Arena | None, *, lane: str = "main") -> Commit:
        """S1, then S3 to S7: from the first file to a commit known to all processes.

        Raises:
          SaveAborted: a process was lost, failed or late, and parts are missing.
          Otherwise the error of one process: the same type on all.
        """
        self._lane = lane
        try:
            with self._beat() as beat:
                commit = self._run(arena, beat)
        except Exception:
            raise
        except BaseException:  # an interrupt: the others learn that the save cannot complete
            with contextlib.suppress(StorageError):  # already committed: it stands
                settling.try_abandon(self._scene)
            raise
        fault_points.reach("save.announced", self._coordinator.process)
        saved_with(self._coordinator, self._request.step)
        return commit

    def _beat(self) -> LeaseKeeper:
        return LeaseKeeper(
            self._coordinator,
            self._folder,
            self._attempt,
            self.num_bytes,
            self._request.lease_s,
            self._lane,
            self._group.members,
        )

    def _run(self, arena: Arena | None, beat: LeaseKeeper) -> Commit:
        try:
            self._phase = "open"
            self._meet("opened", self._problem or _tried(self._open))
            self._meet("seen", _tried(self._see))
            self._phase = "write"
            self._meet("parts", _tried(lambda: self._write(arena, beat)))
            self._phase = "commit"
            problem = _tried(self._commit) if self._is_lead else None
            said = self._meet("committed", problem, self._committed)
        except _MeetingFailed as ended:
            return settling.settle(self._scene, self._phase, ended.cause, has_part=self._has_part)
        return decode_commit(said[self._group.lead])

    def _open(self) -> None:
        process, manifest = self._coordinator.process, self._manifest
        if manifest is None:  # not the lead
            return
        fault_points.reach("save.open", process)
        owner = {"host": self._coordinator.hosts[process], "pid": os.getpid(), "began": time.time()}
        committing.begin_attempt(self._folder, manifest, owner)
        fault_points.reach("save.opened", process)

    def _see(self) -> None:
        if step_folder.see(self._folder, self._attempt):
            return
        if self._is_lead:
            raise committing.ended(self._folder, self._attempt, self._phase)
        raise self._not_shared((self._coordinator.process,))

    def _not_shared(self, who: Sequence[int]) -> NotShared:
        path, hosts, lead = self._folder.path, self._coordinator.hosts, self._group.lead
        on = ", ".join(sorted({hosts[process] for process in who})[:_SHOWN_HOSTS])
        return NotShared(
            f"{path}: what process {lead} ({hosts[lead]}) wrote there is not seen by "
            f"{listed(who)} ({on})\n"
            "save to a path that all processes share",
            path=path,
            processes=who,
        )

    def _write(self, arena: Arena | None, beat: LeaseKeeper) -> None:
        process, place, plan = self._coordinator.process, self._group.place, self._plan
        fault_points.reach("save.write", process)
        try:
            hashes = write_files(self._folder, self._images, arena, beat.add)
        except OSError as error:
            if step_folder.see(self._folder, self._attempt):
                raise
            raise committing.ended(self._folder, self._attempt, self._phase) from error
        self._images = []
        fault_points.reach("save.written", process)
        files = tuple(
            FileRecord(file_name, file.num_bytes, place)
            for file_name, file in zip(self._names, plan.files, strict=True)
        )
        blocks = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
        part = Part(self._attempt, place, files, plan.chunks, blocks)
        committing.write_part(self._folder, part)
        self._has_part = True
        fault_points.reach("save.parted", process)

    @property
    def _names(self) -> list[str]:
        place, count = self._group.place, self._group.count
        return [
            data_name(self._attempt, place, count, number)
            for number in range(len(self._plan.files))
        ]

    def _commit(self) -> None:
        try:
            commit = committing.commit(self._folder, self._attempt)
        except Exception as error:
            found = settling.ended_by(self._scene, error)
            if found is None:
                raise
            commit = found
        self._committed = encode_commit(commit)

    def _meet(
        self, name: str, problem: Exception | None, brought: bytes = b""
    ) -> Mapping[int, bytes]:
        """Exchange payloads with all processes; raise if any of them failed."""
        request = self._request
        payload = brought if problem is None else encode_error(problem)
        mark, group = f"save {self._attempt}", self._group.named
        point = Point(f"save: {name}", group, self._lane, mark, request.site)
        try:
            answers = self._coordinator.arrive(point, payload, timeout_s=request.waits.left_s)
        except ShoalError as error:
            raise _MeetingFailed(error) from problem
        if failed_processes(answers) and self._is_lead and self._phase != "commit":
            settling.try_abandon(self._scene)
        self._raise_told(answers, problem)
        return answers

    def _raise_told(self, answers: Mapping[int, bytes], problem: Exception | None) -> None:
        """Raise, on all alike, the error of the lowest failed process."""
        who = failed_processes(answers)
        if not who:
            return
        error = decode_error(answers[who[0]], who[0], self._me)
        if isinstance(error, NotShared):
            is_one = len({*self._paths.values()}) == 1
            paths = (self._coordinator, self._request.operation, self._paths)
            error = self._not_shared(who) if is_one else different_folders(*paths)
        if problem is not None and who[0] == self._coordinator.process:
            if len(answers) == 1 or isinstance(error, PeerFailedError):
                raise problem
        if isinstance(error, PeerFailedError):
            raise settling.aborted(self._scene, self._phase, error) from error
        raise error from problem


def _tried(work: Callable[[], None]) -> Exception | None:
    """Return the error, if any."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - sent to the other processes
        return error
    return None


class _MeetingFailed(Exception):
    """A rendezvous failed."""

    def __init__(self, cause: ShoalError) -> None:
        super().__init__(str(cause))
        self.cause = cause
