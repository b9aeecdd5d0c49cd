"""Frames from the meeting place to the processes of one job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import AllMet, Answer, SurvivorsMet
from shoal.runtime.wire.frames import join_payloads, pack_answer, pack_frame
from shoal.runtime.wire.server_sockets import Connection, Connections

# Everybody is told of this many losses until survivors meet; more are one disaster, in which words
# to all about all would be a flood. Survivors are told of each when they meet.
_MOST_GONE = 64


class Life:
    """A process that said HELLO: the connection whose end is its end, and those of its lanes."""

    def __init__(self, process: int, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.lanes: set[Connection] = set()
        # By connection, a lane and what takes an arrival there, until a word before it came.
        self.held: dict[Connection, tuple[str, Callable[[], None]]] = {}

    def release(self, lane: str) -> list[Callable[[], None]]:
        """Return what takes the arrivals of a lane that were held."""
        released = [connection for connection, (held, _) in self.held.items() if held == lane]
        return [self.held.pop(connection)[1] for connection in released]


class JobMail:
    """The connections of a job's processes: what is sent to one, and what to all that live."""

    def __init__(self, connections: Connections, is_member: Callable[[int], bool]) -> None:
        """`is_member`: have all joined, and has this process not gone?"""
        self.lives: dict[int, Life] = {}
        self._connections = connections
        self._is_member = is_member
        self._told_gone = 0

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send one frame."""
        self._connections.send(connection, frame)

    def send_last(self, connection: Connection, frame: bytes) -> None:
        """Send a frame, then close the connection."""
        self._connections.send(connection, frame, then_close=True)

    def push(self, processes: Iterable[int], frame: bytes) -> None:
        """Send a frame to those of these processes that live."""
        for process in processes:
            life = self.lives.get(process)
            if life is not None and self._is_member(process):
                self._connections.send(life.connection, frame)

    def push_gone(self, process: int | None, name: str, state: str, words: str) -> None:
        """Tell all who live that somebody is gone."""
        self._told_gone += 1
        if self._told_gone <= _MOST_GONE or process is None:
            header = {"is": "gone", "process": process, "name": name, "state": state}
            self.push(self.lives, pack_frame(header, words.encode(errors="replace")))

    def ask_stacks(self, questions: Iterable[tuple[int, int]]) -> None:
        """Ask (ticket, process) where its threads are."""
        for ticket, process in questions:
            life = self.lives.get(process)
            if life is not None and not life.connection.is_blocked:  # it will not answer
                self.push((process,), pack_frame({"is": "stacks", "ticket": ticket}))

    def answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send each its answer; the body of an answer is packed once for all."""
        bodies: dict[int, bytes] = {}
        for to, ticket, answer in replies:
            body = bodies.get(id(answer))
            if body is None:
                body = bodies[id(answer)] = _body_of(answer)
                if isinstance(answer, SurvivorsMet):
                    self._told_gone = 0
            self._connections.send(to, pack_answer(ticket, answer.kind, body))

    def forget(self, life: Life) -> None:
        """Send nothing more to a process, and close the connections of its lanes."""
        self.lives.pop(life.process, None)
        for lane in life.lanes:
            self._connections.close(lane)


def _body_of(answer: Answer) -> bytes:
    if isinstance(answer, AllMet):
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()
