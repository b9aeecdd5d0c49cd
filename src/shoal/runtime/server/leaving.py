"""Preemption notices of one job, passed between its processes and the rules of stopping."""

from __future__ import annotations

from collections.abc import Callable

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import StepsAwaited
from shoal.runtime.rules.messages import notice_header, step_text
from shoal.runtime.rules.stopping import ReceivedNotice, Rounds, StopAgreement, StopReport
from shoal.runtime.server.mail import JobMail
from shoal.runtime.wire.frames import pack_frame
from shoal.runtime.wire.server_sockets import Connection


class Leaving:
    """The rounds in which the processes of a job agree on the step after which they stop."""

    def __init__(self, num_processes: int, mail: JobMail) -> None:
        self.rounds = Rounds(num_processes)
        self.on_change: Callable[[], None] = lambda: None  # `rounds` has changed
        self._mail = mail

    def give_notice(self, process: int, given: ReceivedNotice) -> None:
        """Push a preemption notice of one process to all."""
        number = self.rounds.give()
        header = {"is": "notice", "number": number, "process": process, **notice_header(given)}
        self._mail.push(self._mail.lives, pack_frame(header))
        self.on_change()

    def take_stop_report(self, process: int, report: StopReport) -> None:
        """Take a process's answer about stopping, or its report of a save."""
        self._push_stop(self.rounds.receive(process, report))
        self.on_change()

    def depart(self, process: int) -> None:
        """Record that a process is gone and is not waited for."""
        self._push_stop(self.rounds.depart(process))

    def answer_awaited(self, to: Connection, ticket: int) -> None:
        """Answer a query for the processes that have not answered the open notice."""
        self._mail.answer([Reply(to, ticket, StepsAwaited(self.rounds.awaited))])

    def _push_stop(self, settled: StopAgreement | None) -> None:
        if settled is not None:
            header = {"is": "stop", "round": settled.round}
            if settled.save_step:
                header["save_step"] = settled.save_step
            self._mail.push(self._mail.lives, pack_frame(header, step_text(settled.step)))
