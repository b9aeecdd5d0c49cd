"""One save on one process: what all of them do together, from S0 to S7.

::

    S0  agree     all bring the same step, tree and layouts; nothing was written yet
    S2  snapshot  values are copied, or will be read while they are written
    S1  open      the lead begins an attempt; all see it
    S3  write     data, durable
    S4  part      "this process has written all of its data", durable
    S5  S6        the lead joins the parts and commits
    S7            all know

Storage is the truth, not what others say: whoever is told of a loss looks there. If all parts are
there, it commits; else it ends the attempt. One of the two wins, for all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal import settings
from shoal.checkpoint import attempts, preflight
from shoal.checkpoint.beat import Beat
from shoal.checkpoint.chunks import PartPlan, lay_out
from shoal.checkpoint.format import Commit, FileRecord, Manifest, Part, data_name
from shoal.checkpoint.images import images_of, start_copies
from shoal.checkpoint.lines import lines_of, shown
from shoal.checkpoint.shares import Box, Held, Own, own_boxes
from shoal.checkpoint.state import State, held_of
from shoal.checkpoint.step_folder import missing_parts
from shoal.checkpoint.storage import Folder
from shoal.checkpoint.told import first_told, told, untold
from shoal.checkpoint.writer import Arena, FileImage, write_files
from shoal.errors import (
    CheckpointError,
    DeadlineError,
    DivergenceError,
    NotShared,
    PeerFailedError,
    ProcessLostError,
    SaveAborted,
    ShoalError,
    UsageError,
)
from shoal.runtime import fault_points
from shoal.runtime.agreement import Call, agree
from shoal.runtime.coordinator import Coordinator, Point
from shoal.runtime.preemption import saved_with
from shoal.runtime.verdicts import Self, listed

__all__ = ["Request", "Save", "Waits"]

_LOG = logging.getLogger("shoal")
MAX_FILE_BYTES = 16 << 30
_LOOK_S = 0.05


class Waits(NamedTuple):
    """How long others are waited for: each time, or until a moment on the monotonic clock."""

    each_s: float
    until: float | None

    @classmethod
    def of(cls, asked: str, timeout_s: float | None) -> Waits:
        """Without a time-out, each wait of a save may take SHOAL_TIMEOUT_S."""
        limit_s = settings.timeout(asked, timeout_s, "SHOAL_TIMEOUT_S")
        if not limit_s > 0:
            told = f"timeout_s={timeout_s!r} must be a positive number of seconds"
            raise UsageError(f"{asked}: {told}")
        return cls(limit_s, None if timeout_s is None else time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Until then; always positive."""
        if self.until is None:
            return self.each_s
        return max(self.until - time.monotonic(), 0.001)


class Request(NamedTuple):
    """What is to be saved, and where."""

    folder: Folder
    step: int | None
    user: Mapping[str, Any]
    metrics: Mapping[str, float]
    name: str | None
    site: str
    waits: Waits

    @property
    def asked(self) -> str:
        """What messages call it."""
        return f"save({self.folder.path!r})"

    @property
    def lines(self) -> tuple[str, ...]:
        """What of it must be equal on all processes."""
        options = {"path": self.folder.path, "step": self.step}
        options |= {"user": self.user, "metrics": self.metrics}
        return tuple(f"{key}: {shown(value)}" for key, value in options.items())


class Save:
    """One save of one process."""

    def __init__(self, coordinator: Coordinator, request: Request) -> None:
        self._coordinator, self._request = coordinator, request
        self._folder = request.folder
        self._me = Self(coordinator.process, coordinator.hosts)
        self._attempt = attempts.new_attempt()  # the lead's counts
        self._lane = "main"
        self._phase = "agree"
        self._has_part = False
        self._own: list[Own] = []
        self._plan: PartPlan | None = None
        self._images: list[FileImage] = []
        self._manifest: Manifest | None = None

    @property
    def _is_lead(self) -> bool:
        return self._coordinator.process == 0

    @property
    def num_bytes(self) -> int:
        """What this process writes."""
        return self._plan.num_bytes if self._plan else 0

    def agree(self, state: State) -> None:
        """S0: find out, with all others, that the save can be done.

        Raises:
          DivergenceError: the processes do not save the same.
          SaveAborted: a process was lost, failed or late.
          StepAlreadyCommitted, StorageError, …: on all alike, what one of them found.
        """
        process, count = self._coordinator.process, self._coordinator.num_processes
        fault_points.reach("save.preflight", process)
        number = jax.process_index() if state.is_spread and count > 1 else process
        held = held_of(state, count)
        self._own = own_boxes(held, number)
        blobs = [
            Own(
                Held(leaf, state.leaves[leaf].record.name, "uint8", (), _NONE, _NONE, (), True),
                Box((process,), (blob.size,)),
            )
            for leaf, blob in state.blobs.items()
        ]
        if blobs:
            self._own = sorted([*self._own, *blobs], key=lambda one: one.held.leaf)
        self._plan = lay_out(self._own, process, self._attempt, max_file_bytes=MAX_FILE_BYTES)
        said: dict[str, Any] = {"bytes": self._plan.num_bytes, "free": 0}
        problem: Exception | None = None
        try:
            said["free"] = preflight.check_folder(self._folder)
        except CheckpointError as error:
            problem, said["error"] = error, told(error)
        if self._is_lead:
            said["attempt"] = self._attempt
        if number != process:
            said["number"] = number
        lines = lines_of(state, self._request.lines, count)
        answers = self._agreed(lines, json.dumps(said).encode())
        self._raise_told(answers, problem)
        self._check_numbers(answers)
        preflight.check_space(self._folder, answers)
        self._attempt = json.loads(answers[0])["attempt"]

    def _agreed(self, lines: tuple[str, ...], payload: bytes) -> Mapping[int, bytes]:
        request = self._request
        call = Call("save", request.name, request.site, lines)
        try:
            return agree(self._coordinator, call, payload, timeout_s=request.waits.left_s)
        except (ProcessLostError, PeerFailedError, DeadlineError) as error:
            raise self._aborted(error) from error

    def _check_numbers(self, answers: Mapping[int, bytes]) -> None:
        """JAX's numbers of processes must be those of the job, in whatever order."""
        if len({*answers.values()}) < len(answers):  # equal payloads name no numbers
            return
        found = [json.loads(text).get("number", process) for process, text in answers.items()]
        if sorted(found) != list(range(len(answers))):
            raise UsageError(
                f"{self._request.asked}: the processes of this job have the numbers {found} in "
                "JAX, so JAX's job is another one; initialize both together"
            )

    def snapshot(self, state: State, arena: Arena | None) -> None:
        """S2: copy the values, or without an arena, keep them to be read while they are written."""
        self._phase = "snapshot"
        process, count = self._coordinator.process, self._coordinator.num_processes
        fault_points.reach("save.snapshot", process)
        self._plan = lay_out(self._own, process, self._attempt, max_file_bytes=MAX_FILE_BYTES)
        self._manifest = self._described(state) if self._is_lead else None
        start_copies(state, self._own)
        images = images_of(state, self._own, self._plan, self._attempt, count)
        if arena is not None:
            arena.take(images)
            images = [image._replace(pieces=()) for image in images]
        self._images = images

    def _described(self, state: State) -> Manifest:
        request = self._request
        import shoal

        return Manifest(
            attempt=self._attempt,
            step=request.step,
            created_ns=time.time_ns(),
            num_processes=self._coordinator.num_processes,
            tree=state.structure,
            leaves=tuple(leaf.record for leaf in state.leaves),
            writer={"shoal": shoal.__version__, "numpy": np.__version__, "jax": jax.__version__},
            mesh=state.mesh,
            user=request.user,
            metrics=request.metrics,
        )

    def complete(self, arena: Arena | None, *, lane: str = "main") -> None:
        """S1, then S3 to S7: from the first file to a commit that all know of.

        Raises:
          SaveAborted: a process was lost, failed or late, and the parts are not all there.
          Else what one process met with: the same type on all.
        """
        self._lane = lane
        try:
            with Beat(self._coordinator, self._folder, self._attempt, self.num_bytes) as beat:
                self._run(arena, beat)
        except Exception:
            raise
        except BaseException:  # an interrupt: what the others are told is that it cannot complete
            with contextlib.suppress(ShoalError, OSError):
                attempts.abandon(self._folder, self._attempt)
            raise
        fault_points.reach("save.announced", self._coordinator.process)
        saved_with(self._coordinator, self._request.step)

    def _run(self, arena: Arena | None, beat: Beat) -> None:
        try:
            self._phase = "open"
            self._meet("opened", self._tried(self._open) if self._is_lead else None)
            self._meet("seen", self._tried(self._see))
            self._phase = "write"
            self._meet("parts", self._tried(lambda: self._write(arena, beat)))
            self._phase = "commit"
            self._meet("committed", self._tried(self._commit) if self._is_lead else None)
        except _Ended as ended:
            self._settle(ended.cause)

    def _tried(self, work: Callable[[], None]) -> Exception | None:
        try:
            work()
        except Exception as error:
            return error
        return None

    def _open(self) -> None:
        process = self._coordinator.process
        fault_points.reach("save.open", process)
        assert self._manifest is not None  # noqa: S101
        owner = {"host": self._coordinator.hosts[process], "pid": os.getpid(), "began": time.time()}
        attempts.begin(self._folder, self._manifest, owner)
        fault_points.reach("save.opened", process)

    def _see(self) -> None:
        if not attempts.see(self._folder, self._attempt):
            raise NotShared(
                f"{self._folder.path}: this process does not see what process 0 wrote there\n"
                "save to a path that all processes share",
                path=self._folder.path,
                processes=[self._coordinator.process],
            )

    def _write(self, arena: Arena | None, beat: Beat) -> None:
        process, plan = self._coordinator.process, self._plan
        assert plan is not None  # noqa: S101
        fault_points.reach("save.write", process)
        hashes = write_files(self._folder, self._images, arena, beat.wrote)
        self._images = []
        fault_points.reach("save.written", process)
        files = tuple(
            FileRecord(file_name, file.num_bytes, process)
            for file_name, file in zip(self._names, plan.files, strict=True)
        )
        blocks = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
        part = Part(self._attempt, process, files, plan.chunks, blocks)
        attempts.write_part(self._folder, part)
        self._has_part = True
        fault_points.reach("save.parted", process)

    @property
    def _names(self) -> list[str]:
        assert self._plan is not None  # noqa: S101
        count = self._coordinator.num_processes
        return [
            data_name(self._attempt, self._coordinator.process, count, number)
            for number in range(len(self._plan.files))
        ]

    def _commit(self) -> None:
        try:
            attempts.commit(self._folder, self._attempt)
        except Exception:
            if self._abandon() is None:
                raise

    def _abandon(self) -> Commit | None:
        """End the attempt, if the storage lets us; return the commit if it was one already."""
        try:
            return attempts.abandon(self._folder, self._attempt)
        except (ShoalError, OSError) as error:
            _LOG.warning("%s: attempt %s: %s", self._request.asked, self._attempt, error)
            return None

    def _meet(self, name: str, problem: Exception | None) -> None:
        """Meet all; raise what any of them met with."""
        request = self._request
        payload = b"" if problem is None else json.dumps({"error": told(problem)}).encode()
        point = Point(
            f"save: {name}", lane=self._lane, fingerprint=f"save {self._attempt}", site=request.site
        )
        try:
            answers = self._coordinator.arrive(point, payload, timeout_s=request.waits.left_s)
        except ShoalError as error:
            raise _Ended(error) from problem
        if any(answers.values()):
            if self._is_lead:
                self._abandon()
            self._raise_told(answers, problem)

    def _raise_told(self, answers: Mapping[int, bytes], problem: Exception | None) -> None:
        """Raise, on all alike, the error of the lowest process that has one."""
        found = first_told(answers)
        if found is None:
            return
        process, said = found
        if problem is not None and (len(answers) == 1 or "type" not in said):
            raise problem
        error = untold(said, process, self._me)
        if isinstance(error, NotShared):
            wrong = [p for p, text in answers.items() if text and json.loads(text).get("error")]
            error.processes = tuple(wrong)
        if isinstance(error, PeerFailedError):
            raise self._aborted(error) from error
        raise error from problem

    def _settle(self, cause: ShoalError) -> None:
        """Others cannot be asked any more: let the storage decide. Returns if it is committed."""
        if self._has_part and not isinstance(cause, DeadlineError | DivergenceError):
            self._wait_for_parts(cause)
        with contextlib.suppress(CheckpointError, OSError):
            if self._has_part and attempts.is_complete(self._folder, self._attempt):
                attempts.commit(self._folder, self._attempt)
                return
        if self._abandon() is None:
            raise self._aborted(cause) from cause

    def _wait_for_parts(self, cause: ShoalError) -> None:
        """Wait until those who live have written what they have, by what the storage shows."""
        limit = time.monotonic() + min(
            self._request.waits.left_s, settings.seconds("SHOAL_LOST_AFTER_S")
        )
        pause = threading.Event()  # nobody sets it: a sleep that a clock of tests can do without
        while time.monotonic() < limit and attempts.see(self._folder, self._attempt):
            try:
                missing = missing_parts(self._folder, self._attempt, self._folder.names())
            except (FileNotFoundError, CheckpointError):
                return
            gone = {*_gone(cause), *(one.process for one in self._coordinator.troubles.open())}
            if {*missing} <= gone:
                return
            pause.wait(_LOOK_S)

    def _aborted(self, cause: ShoalError) -> SaveAborted:
        processes = _gone(cause)
        who = f" on account of {listed(processes)}" if processes else ""
        return SaveAborted(
            f"{self._me}: {self._request.asked} was ended{who}: nothing of it is kept, and what "
            f"was saved before stands\n{cause}",
            path=self._folder.path,
            phase=self._phase,
            processes=processes,
            exit_code=cause.exit_code,
        )


_NONE = np.zeros((0, 0), np.int64)


class _Ended(Exception):
    """A point could not be met."""

    def __init__(self, cause: ShoalError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _gone(cause: ShoalError) -> tuple[int, ...]:
    """Return on whose account an error was raised."""
    for field in ("lost", "failed", "missing"):
        if found := getattr(cause, field, ()):
            return tuple(sorted(found))
    return ()
