"""Notices and saves of one job, carried between its processes and the rules of stopping."""

from __future__ import annotations

from collections.abc import Callable

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import StepsAwaited
from shoal.runtime.rules.messages import given_words, step_text
from shoal.runtime.rules.stopping import Given, Rounds, Settled, Told
from shoal.runtime.server.mail import JobMail
from shoal.runtime.wire.frames import pack_frame
from shoal.runtime.wire.server_sockets import Connection


class Leaving:
    """The rounds in which the processes of a job agree on the step after which they stop."""

    def __init__(self, num_processes: int, mail: JobMail) -> None:
        self.rounds = Rounds(num_processes)
        self.on_change: Callable[[], None] = lambda: None  # `rounds` has changed
        self._mail = mail

    def give_notice(self, process: int, given: Given) -> None:
        """A process was told that it will be ended: tell all."""
        number = self.rounds.give()
        header = {"is": "notice", "number": number, "process": process, **given_words(given)}
        self._mail.push(self._mail.lives, pack_frame(header))
        self.on_change()

    def hear_stop(self, process: int, told: Told) -> None:
        """A process says what it has answered, or that it has saved."""
        self._push_stop(self.rounds.hear(process, told))
        self.on_change()

    def depart(self, process: int) -> None:
        """A process is gone: it is not waited for."""
        self._push_stop(self.rounds.depart(process))

    def tell_awaited(self, to: Connection, ticket: int) -> None:
        """Answer who has not said yet where it stands, since a notice is open."""
        self._mail.answer([Reply(to, ticket, StepsAwaited(self.rounds.awaited))])

    def _push_stop(self, settled: Settled | None) -> None:
        if settled is not None:
            header = {"is": "stop", "round": settled.round}
            self._mail.push(self._mail.lives, pack_frame(header, step_text(settled.step)))
