"""Frames from the meeting place to the processes of one job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from shoal.runtime.rules.gathering import Reply
from shoal.runtime.rules.meeting_answers import AllMet, Answer, SurvivorsMet
from shoal.runtime.wire.frames import join_payloads, pack_answer, pack_frame
from shoal.runtime.wire.server_sockets import Connection, Connections

# All processes are notified of this many losses until survivors meet; more are one disaster, in
# which notifying all of all would be a flood. Survivors learn of each when they meet.
_MOST_GONE = 64


class Life:
    """A process that sent HELLO: the connection whose end is its end, and those of its lanes."""

    def __init__(self, process: int, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.lanes: set[Connection] = set()
        # By connection: a lane and the callback of its arrival, held until earlier messages arrive.
        self.held: dict[Connection, tuple[str, Callable[[], None]]] = {}

    def release(self, lane: str) -> list[Callable[[], None]]:
        """Return the callbacks for the held arrivals of a lane."""
        released = [connection for connection, (held, _) in self.held.items() if held == lane]
        return [self.held.pop(connection)[1] for connection in released]


class JobMail:
    """The connections of a job's processes: frames to one process, and to all living ones."""

    def __init__(self, connections: Connections, is_member: Callable[[int], bool]) -> None:
        """`is_member`: whether all have joined and this process is not gone."""
        self.lives: dict[int, Life] = {}
        self._connections = connections
        self._is_member = is_member
        self._reported_gone = 0

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send one frame."""
        self._connections.send(connection, frame)

    def send_all(self, connections: Iterable[Connection], frame: bytes) -> None:
        """Send one frame to each of these."""
        self._connections.send_all(connections, frame)

    def send_last(self, connection: Connection, frame: bytes) -> None:
        """Send a frame, then close the connection."""
        self._connections.send(connection, frame, then_close=True)

    def push(self, processes: Iterable[int], frame: bytes) -> None:
        """Send a frame to the living ones of these processes."""
        lives = (self.lives.get(process) for process in processes if self._is_member(process))
        self._connections.send_all([life.connection for life in lives if life is not None], frame)

    def push_gone(self, process: int | None, name: str, state: str, words: str) -> None:
        """Notify all living processes of a loss."""
        self._reported_gone += 1
        if self._reported_gone <= _MOST_GONE or process is None:
            header = {"is": "gone", "process": process, "name": name, "state": state}
            self.push(self.lives, pack_frame(header, words.encode(errors="replace")))

    def request_stacks(self, requests: Iterable[tuple[int, int]]) -> None:
        """Request the stacks of (ticket, process)."""
        for ticket, process in requests:
            life = self.lives.get(process)
            if life is not None and not life.connection.is_blocked:  # it would not answer
                self.push((process,), pack_frame({"is": "stacks", "ticket": ticket}))

    def answer(self, replies: Iterable[Reply[Connection]]) -> None:
        """Send the answers; a frame for many is packed once, and so is each body."""
        bodies: dict[int, bytes] = {}
        packed: tuple[Answer | None, int] = None, 0
        frame = b""
        for to, ticket, answer in replies:
            if packed[0] is not answer or packed[1] != ticket:
                body = bodies.get(id(answer))
                if body is None:
                    body = bodies[id(answer)] = _body_of(answer)
                    if isinstance(answer, SurvivorsMet):
                        self._reported_gone = 0
                packed, frame = (answer, ticket), pack_answer(ticket, answer.kind, body)
            self._connections.send(to, frame)

    def forget(self, life: Life) -> None:
        """Stop sending to a process, and close the connections of its lanes."""
        self.lives.pop(life.process, None)
        for lane in life.lanes:
            self._connections.close(lane)


def _body_of(answer: Answer) -> bytes:
    if isinstance(answer, AllMet):
        return join_payloads(list(answer.payloads.values()))
    return json.dumps(answer.facts).encode()
