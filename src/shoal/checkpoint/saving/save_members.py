"""The processes of one save, and the messages between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.checkpoint.saving import settling
from shoal.checkpoint.saving.request import Request
from shoal.checkpoint.together.errors_between import decode_error, encode_error, failed_processes
from shoal.checkpoint.together.one_folder import different_folders
from shoal.errors import (
    DeadlineError,
    NotSharedError,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.rules.point import Point
from shoal.runtime.system.failure_words import listed

_SHOWN_HOSTS = 8


@dataclass(frozen=True)
class SaveMembers:
    """The processes of one save, as seen by one of them."""

    coordinator: Coordinator
    request: Request
    group: Group
    attempt: str  # once agreed, the lead's
    # The folder's path on each process; known once agreed.
    paths: Mapping[int, str] = field(default_factory=dict)
    lane: str = "main"

    @property
    def scene(self) -> settling.SaveScene:
        """The attempt, for settling it."""
        return settling.SaveScene(self.coordinator, self.request, self.attempt, self.group.members)

    @property
    def process(self) -> int:
        """The number of this process."""
        return self.coordinator.process

    @property
    def is_lead(self) -> bool:
        """Is this the process that begins and commits the attempt?"""
        return self.process == self.group.lead

    def agree(self, lines: tuple[str, ...], payload: bytes) -> Mapping[int, bytes]:
        """Exchange payloads with all processes, provided that their lines are equal.

        Raises:
          DivergenceError: the lines differ.
          SaveAbortedError: a process was lost, failed or late.
        """
        request = self.request
        call = Call("save", request.name, request.site, lines)
        try:
            return agree(
                self.coordinator,
                call,
                payload,
                timeout_s=request.waits.left_s,
                group=self.group.named,
            )
        except (ProcessLostError, PeerFailedError, DeadlineError) as error:
            raise settling.aborted(self.scene, "agree", error) from error

    def meet(self, phase: str, name: str, brought: bytes | Exception | None) -> Mapping[int, bytes]:
        """Exchange payloads with all processes; raise, on all, the error of any that failed.

        Raises:
          MeetingFailed: the rendezvous failed.
        """
        problem = brought if isinstance(brought, Exception) else None
        payload = encode_error(brought) if isinstance(brought, Exception) else brought or b""
        mark, group = f"save {self.attempt}", self.group.named
        point = Point(f"save: {name}", group, self.lane, mark, self.request.site)
        try:
            answers = self.coordinator.arrive(point, payload, timeout_s=self.request.waits.left_s)
        except ShoalError as error:
            raise MeetingFailed(error) from problem
        if failed_processes(answers) and self.is_lead and phase != "commit":
            settling.try_abandon(self.scene)
        self.raise_failure(phase, answers, problem)
        return answers

    def raise_failure(
        self, phase: str, answers: Mapping[int, bytes], problem: Exception | None
    ) -> None:
        """Raise, on all alike, the error of the lowest failed process."""
        who = failed_processes(answers)
        if not who:
            return
        me = ThisProcess(self.process, self.coordinator.hosts)
        error = decode_error(answers[who[0]], who[0], me)
        if isinstance(error, NotSharedError):
            is_one = len({*self.paths.values()}) == 1
            paths = (self.coordinator, self.request.operation, self.paths)
            error = self.not_shared(who) if is_one else different_folders(*paths)
        if problem is not None and who[0] == self.process:
            if len(answers) == 1 or isinstance(error, PeerFailedError):
                raise problem
        if isinstance(error, PeerFailedError):
            raise settling.aborted(self.scene, phase, error) from error
        raise error from problem

    def not_shared(self, who: Sequence[int]) -> NotSharedError:
        """Return the error that names the processes that do not see the lead's files."""
        path, hosts, lead = self.request.folder.path, self.coordinator.hosts, self.group.lead
        on = ", ".join(sorted({hosts[process] for process in who})[:_SHOWN_HOSTS])
        return NotSharedError(
            f"{path}: what process {lead} ({hosts[lead]}) wrote there is not seen by "
            f"{listed(who)} ({on})\n"
            "save to a path that all processes share",
            path=path,
            processes=who,
        )


class MeetingFailed(Exception):
    """A rendezvous failed."""

    def __init__(self, cause: ShoalError) -> None:
        super().__init__(str(cause))
        self.cause = cause
