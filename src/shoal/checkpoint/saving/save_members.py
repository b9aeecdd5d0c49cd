"""The processes of one save, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.checkpoint.saving import settling
from shoal.checkpoint.saving.request import Request
from shoal.checkpoint.together.errors_between import tellers, told, untold
from shoal.checkpoint.together.one_folder import different_folders
from shoal.errors import (
    DeadlineError,
    NotShared,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.outcomes import ThisProcess, listed
from shoal.runtime.rules.point import Point

_SHOWN_HOSTS = 8


@dataclass(frozen=True)
class SaveMembers:
    """The processes that save, as one of them knows them."""

    coordinator: Coordinator
    request: Request
    group: Group
    attempt: str  # from the agreement on, that of all
    paths: Mapping[int, str] = field(
        default_factory=dict
    )  # what each calls the folder, once agreed
    lane: str = "main"

    @property
    def scene(self) -> settling.SaveScene:
        """What the end of the save is about."""
        return settling.SaveScene(self.coordinator, self.request, self.attempt, self.group.members)

    @property
    def process(self) -> int:
        """This process."""
        return self.coordinator.process

    @property
    def is_lead(self) -> bool:
        """Is this the process that opens and commits?"""
        return self.process == self.group.lead

    def agree(self, lines: tuple[str, ...], payload: bytes) -> Mapping[int, bytes]:
        """Return what all bring, if they say these lines alike.

        Raises:
          DivergenceError: they do not.
          SaveAborted: a process was lost, failed or late.
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
        """Meet all, and return what they bring; raise what any of them met with.

        Raises:
          MeetingFailed: the point could not be met.
        """
        problem = brought if isinstance(brought, Exception) else None
        payload = told(brought) if isinstance(brought, Exception) else brought or b""
        mark, group = f"save {self.attempt}", self.group.named
        point = Point(f"save: {name}", group, self.lane, mark, self.request.site)
        try:
            answers = self.coordinator.arrive(point, payload, timeout_s=self.request.waits.left_s)
        except ShoalError as error:
            raise MeetingFailed(error) from problem
        if tellers(answers) and self.is_lead and phase != "commit":
            settling.abandon(self.scene)
        self.raise_told(phase, answers, problem)
        return answers

    def raise_told(
        self, phase: str, answers: Mapping[int, bytes], problem: Exception | None
    ) -> None:
        """Raise, on all alike, the error of the lowest process that has one."""
        who = tellers(answers)
        if not who:
            return
        me = ThisProcess(self.process, self.coordinator.hosts)
        error = untold(answers[who[0]], who[0], me)
        if isinstance(error, NotShared):
            is_one = len({*self.paths.values()}) == 1
            paths = (self.coordinator, self.request.asked, self.paths)
            error = self.not_shared(who) if is_one else different_folders(*paths)
        if problem is not None and who[0] == self.process:
            if len(answers) == 1 or isinstance(error, PeerFailedError):
                raise problem
        if isinstance(error, PeerFailedError):
            raise settling.aborted(self.scene, phase, error) from error
        raise error from problem

    def not_shared(self, who: Sequence[int]) -> NotShared:
        """Return the error that says who does not see what the lead wrote."""
        path, hosts, lead = self.request.folder.path, self.coordinator.hosts, self.group.lead
        on = ", ".join(sorted({hosts[process] for process in who})[:_SHOWN_HOSTS])
        return NotShared(
            f"{path}: what process {lead} ({hosts[lead]}) wrote there is not seen by "
            f"{listed(who)} ({on})\n"
            "save to a path that all processes share",
            path=path,
            processes=who,
        )


class MeetingFailed(Exception):
    """A point could not be met."""

    def __init__(self, cause: ShoalError) -> None:
        super().__init__(str(cause))
        self.cause = cause
