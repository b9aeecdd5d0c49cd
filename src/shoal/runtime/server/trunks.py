"""A trunk: the connection through which a gatherer carries those of its host's processes.

Each is a *branch* here, with a listener like any other connection, so that nothing else of the
meeting place need know of gatherers. Three frames are for several branches at once: equal arrivals
and signs of life from them, and whatever is sent to several.

::

    {"do": "branch", "number": n}  bytes        whole frames of a branch; a higher number opens one
    {"do": "end", "number": n}  reason          it ended at the other side
    {"do": "arrive", "branches": [...], ...}    equal arrivals: their limits if "limits", payloads
    {"do": "beats"}  [[n, ...], ...]            signs of life; without rows the gatherer's own
    {"do": "bye"}                               no branch is left
    {"is": "branches", "numbers": [...]}  bytes for each of these
    {"is": "close", "number": n}                after these bytes
    {"is": "beat"}                              answers "beats"
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from shoal.runtime.rules.deadline import JointLimits, given_s, limit_of
from shoal.runtime.rules.messages import split_limits
from shoal.runtime.server.callers import ECHO, LaneCaller, ProcessCaller
from shoal.runtime.wire.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    numbers_field,
    split_payloads,
    text_field,
    whole_field,
)
from shoal.runtime.wire.server_sockets import (
    BranchConnection,
    Connection,
    Connections,
    JointBranches,
    Listener,
)

MOST_BRANCHES = 1 << 14  # of one host, at a time
MOST_UNSENT_BYTES = 32 << 20  # to one gatherer; until it reads, it is not read

_MOST_JOINT = 64  # remembered sets of branches
_MORE_BYTES = 2 << 20  # of a frame with a whole frame in it
_MOST_WORDS = 1000  # bytes of a reason


class BranchNumbers:
    """Reads the branches of joint arrivals. All hosts at one point send equal headers, of which
    `FrameReader` makes one object: it is read once."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[str, Any], tuple[int, ...]] = {}, ()

    def read(self, header: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the numbers of the branches."""
        if header is not self._last[0]:
            self._last = header, tuple(numbers_field(header, "branches"))
        return self._last[1]


class TrunkCaller:
    """The gatherer of one host."""

    max_body_bytes = MAX_PAYLOAD_BYTES + _MORE_BYTES

    def __init__(
        self,
        trunk: Connection,
        connections: Connections,
        strangers: Listener,
        numbers: BranchNumbers,
        *,
        on_gone: Callable[[TrunkCaller], None],
    ) -> None:
        """`strangers` handles the first frame of each branch; all trunks share `numbers`."""
        self.connection = trunk
        self._connections = connections
        self._strangers = strangers
        self._on_gone = on_gone
        self._branches: dict[int, BranchConnection] = {}
        self._opened = -1  # the highest number of a branch so far
        self._numbers = numbers
        self._joint: dict[
            tuple[int, ...], _JointLanes
        ] = {}  # by their branches, none of them ended
        self._num_ended = 0  # branches, when that was last true

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See `server_sockets.Listener`."""
        verb = text_field(frame.header, "do")
        if (take := self.VERBS.get(verb)) is None:
            raise FrameError(f"unknown verb {verb[:40]!r}")
        take(self, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`. All that it carried has ended."""
        self._on_gone(self)
        branches, self._branches = self._branches, {}
        for branch in branches.values():
            words = f"the gatherer of its host is lost: {reason}"
            self._connections.end_branch(branch, words)

    def _branch(self, frame: Frame) -> None:
        number = whole_field(frame.header, "number")
        if number > self._opened:
            self._open(number)
        if (branch := self._branches.get(number)) is not None:
            self._connections.feed(branch, frame.body)

    def _open(self, number: int) -> None:
        self._opened = number
        since = self.connection.since
        branch = BranchConnection(self.connection, number, since, self._strangers)
        if len(self._branches) < MOST_BRANCHES:
            self._branches[number] = branch
        else:
            self._connections.close(branch)

    def _end(self, frame: Frame) -> None:
        branch = self._branches.pop(whole_field(frame.header, "number"), None)
        if branch is not None:
            reason = frame.body[:_MOST_WORDS].decode(errors="replace")
            self._connections.end_branch(branch, reason)

    def _arrive(self, frame: Frame) -> None:
        header = frame.header
        numbers = self._numbers.read(header)
        limits, body = None, frame.body
        if header.get("limits"):
            limits, body = split_limits(body, len(numbers))
        payloads = split_payloads(body, len(numbers))
        if self._num_ended != self.connection.num_ended:
            self._joint.clear()
            self._num_ended = self.connection.num_ended
        lanes = self._joint.get(numbers) or self._lanes_at(numbers)
        if lanes is not None and lanes.arrive(header, limits, payloads):
            return
        for index, (number, payload) in enumerate(zip(numbers, payloads, strict=True)):
            if (branch := self._branches.get(number)) is not None:
                own = header if limits is None else _with_limit(header, limit_of(limits, index))
                one = Frame(own, payload)
                self._connections.deliver(branch, branch.listener.on_frame, branch, one)

    def _lanes_at(self, numbers: tuple[int, ...]) -> _JointLanes | None:
        """Return the lanes at these branches; None if they must be taken one by one."""
        if not numbers or any(one >= other for one, other in pairwise(numbers)):
            raise FrameError("the branches of an arrival are not ascending")
        branches = [self._branches.get(number) for number in numbers]
        known = [branch for branch in branches if branch is not None and not branch.is_closed]
        lanes = _JointLanes.of(known) if len(known) == len(numbers) else None
        if lanes is not None:
            if len(self._joint) >= _MOST_JOINT:
                self._joint.clear()
            self._joint[numbers] = lanes
        return lanes

    def _beats(self, frame: Frame) -> None:
        for number, *row in _rows_of(frame.body):
            branch = self._branches.get(number)
            if branch is not None and isinstance(branch.listener, ProcessCaller):
                self._connections.deliver(branch, branch.listener.take_beat, row)
        self._connections.send(self.connection, ECHO)

    def _bye(self, _frame: Frame) -> None:
        self._connections.close(self.connection)
        self.on_end(self.connection, "it left")

    VERBS: ClassVar[Mapping[str, Callable[[TrunkCaller, Frame], None]]] = {
        "branch": _branch,
        "end": _end,
        "arrive": _arrive,
        "beats": _beats,
        "bye": _bye,
    }


def _rows_of(body: bytes) -> list[list[Any]]:
    """Return signs of life: of each, the number of its branch and what is to be parsed."""
    try:
        rows: Any = json.loads(body) if body else []
    except (ValueError, RecursionError):
        raise FrameError("the signs of life are not JSON") from None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise FrameError("the signs of life are not rows of branches")
    return rows


def _is_row(row: object) -> bool:
    return isinstance(row, list) and bool(row) and type(row[0]) is int


def _with_limit(header: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
    """Return the header of one of several arrivals, with its own limit."""
    limits = {"timeout_s": float(limit_s), "given_s": given_s(limit_s)}
    texts = {name: None if limit == math.inf else limit for name, limit in limits.items()}
    return {**header, **texts}


class _JointLanes:
    """Lanes of several processes of one job that arrive at one point together."""

    def __init__(self, branches: Sequence[BranchConnection], callers: Sequence[LaneCaller]) -> None:
        self._bundle = JointBranches(branches)
        self._job = callers[0].job
        self._processes = tuple(caller.process for caller in callers)
        self._members = {*self._processes}

    @classmethod
    def of(cls, branches: Sequence[BranchConnection]) -> _JointLanes | None:
        """Return the lanes at these branches; None if they are not lanes of different processes of
        one job."""
        callers = [one.listener for one in branches if isinstance(one.listener, LaneCaller)]
        if not callers or len(callers) < len(branches):
            return None
        job, processes = callers[0].job, {caller.process for caller in callers}
        if len(processes) < len(callers) or any(caller.job is not job for caller in callers):
            return None
        return cls(branches, callers)

    def arrive(
        self, header: Mapping[str, Any], limits: JointLimits | None, payloads: Sequence[bytes]
    ) -> bool:
        """Take their arrivals; return False if each must be taken by itself, or refused.

        Args:
          limits: the time-out of each; None: all have that of the header.
        """
        job, processes = self._job, self._processes
        meeting = job.meeting
        if meeting is None:
            return False
        try:
            arrival = job.arrival_headers.read(header, processes[0], job.num_processes)
        except FrameError:
            return False
        group = arrival.point.group
        if arrival.ticket or (group is not None and not self._members.issubset(group)):
            return False
        if not meeting.have_abandoned(processes, arrival.point.lane, arrival.after):
            return False
        replies = meeting.arrive_together(
            job.now(),
            processes,
            arrival.point,
            payloads,
            limits=arrival.timeout_s if limits is None else limits,
            to=self._bundle,
            each=self._bundle.branches,
            step=arrival.step,
        )
        if replies:
            job.mail.answer(replies)
        return True
