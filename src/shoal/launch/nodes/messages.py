"""The messages between launchers, as frames of `runtime.wire.frames`.

::

    to node 0    node (card)  beat  failure  signal  done (endings)
    from node 0  heard (limits)  later  refused  beat (clock)  start  news  failure  signal  verdict

Times are on the monotonic clock of node 0: a sender converts its own (`shifted`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.launch.conclusion import Conclusion
from shoal.launch.crew import JobEnd
from shoal.launch.environment import Addresses, HostShare, JobStart
from shoal.launch.news import Gone
from shoal.launch.report import Ending
from shoal.runtime.failures.facts import (
    UNREADABLE,
    JobFailure,
    Memory,
    StackFrame,
    of_json,
    to_json,
)
from shoal.runtime.failures.last_record import LastRecord
from shoal.runtime.system.progress_file import Reached
from shoal.runtime.wire.frames import Frame, FrameError, pack_frame, text_field, whole_field

_MOST = 1 << 20  # processes of a node, attempts
_LETTERS = 400  # of an untrusted text
MAX_BODY_BYTES = 256 << 20  # the last words of all processes of a host


class NodeEnd(NamedTuple):
    """How the job ended on another node."""

    endings: list[Ending]
    trouble: str = ""  # why it failed, if no process was the cause
    reached: Reached = Reached()


def pack_card(card: NodeCard, token: str) -> bytes:
    """Return the first frame of a launcher."""
    return pack_frame({"do": "node", "token": token, **card._asdict()})


def card_of(header: Mapping[str, Any]) -> NodeCard:
    """Parse a card.

    Raises:
      FrameError: a field is absent or has the wrong type.
    """
    devices = header.get("devices")
    shown = header.get("highest_shown")
    if not isinstance(shown, int) or not isinstance(devices, int | None):
        raise FrameError("field 'highest_shown' or 'devices' is not an integer")
    return NodeCard(
        whole_field(header, "node"),
        whole_field(header, "nodes"),
        _whole(header, "processes", 1),
        _printable(header, "host"),
        _printable(header, "program"),
        text_field(header, "fingerprint"),
        devices,
        _printable(header, "versions"),
        shown,
        bool(header.get("has_token")),
        _printable(header, "restarts"),
        _whole(header, "attempt", 0),
    )


def _whole(header: Mapping[str, Any], name: str, least: int) -> int:
    """Return a number that a stranger may have sent."""
    number = whole_field(header, name)
    if not least <= number <= _MOST:
        raise FrameError(f"field {name!r} is not within {least} to {_MOST}")
    return number


def _printable(header: Mapping[str, Any], name: str) -> str:
    """Return an untrusted text in printable form."""
    text = text_field(header, name)[:_LETTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def pack_start(start: JobStart) -> bytes:
    """Return the frame that lets a node's processes start."""
    return pack_frame(
        {
            "is": "start",
            "share": list(start.share),
            "total": start.total,
            "addresses": list(start.addresses),
            "token": start.token,
            "attempt": start.attempt,
        }
    )


def start_of(header: Mapping[str, Any]) -> JobStart:
    """Parse a start."""
    try:
        share, addresses = HostShare(*header["share"]), Addresses(*header["addresses"])
        total, attempt = int(header["total"]), int(header["attempt"])
        return JobStart(share, total, addresses, str(header["token"]), attempt)
    except (KeyError, TypeError, ValueError):
        raise FrameError("the start is incomplete") from None


def process_of(line: Mapping[str, Any]) -> int | None:
    """Return the process that a line of news is about, or None."""
    found = [line[name] for name in ("joined", "gone", "dismissed") if name in line]
    return int(found[0]) if found else None


def pack_signal(number: signal.Signals, source: str) -> bytes:
    """Return the frame that passes a signal on; `source`: the node that got it."""
    return pack_frame({"is": "signal", "number": int(number), "source": source})


def pack_refused(words: str) -> bytes:
    """Return the frame for a launcher that cannot join."""
    return pack_frame({"is": "refused", "words": words})


def pack_news(line: Mapping[str, Any], gone: Gone | None = None) -> bytes:
    """Return the frame of a line of news; `gone`: node 0's facts about a process that is gone."""
    more = {"is_missed": gone.is_missed} if gone and "gone" in line else {}
    return pack_frame({"is": "news", "line": {**line, **more}})


def pack_end(end: JobEnd, shift_s: float) -> bytes:
    """Return the frame of how the job ended on a host."""
    rows = [
        {
            **ending._asdict(),
            "failed_s": _shifted(ending.failed_s, shift_s),
            "ended_s": ending.ended_s + shift_s,
            "sent_s": None if ending.sent_s == math.inf else ending.sent_s + shift_s,
            "sent": [int(number) for number in ending.sent],
            "gone": None,
            "record": ending.record and to_json(ending.record),
            "threads": [to_json(_moved(one, shift_s)) for one in ending.threads],
            "memory": ending.memory and to_json(ending.memory),
            "crashed_at": to_json(ending.crashed_at),
        }
        for ending in end.endings
    ]
    text = json.dumps({"endings": rows, "trouble": end.trouble, "reached": end.reached})
    return pack_frame({"do": "done"}, text.encode(errors="replace"))


def end_of(body: bytes, host: str) -> NodeEnd:
    """Parse how the job ended on the node on `host`.

    Raises:
      FrameError: it is malformed.
    """
    try:
        done = json.loads(body)
        step, saved, ended = map(int, done["reached"])
        endings = [_ending_of(row, host) for row in done["endings"]]
        return NodeEnd(endings, str(done["trouble"]), Reached(step, saved, ended))
    except UNREADABLE:
        raise FrameError("the endings are incomplete") from None


def _ending_of(row: Mapping[str, Any], host: str) -> Ending:
    return Ending(
        process=int(row["process"]),
        code=int(row["code"]),
        failed_s=None if row["failed_s"] is None else float(row["failed_s"]),
        sent=tuple(signal.Signals(number) for number in row["sent"]),
        output=str(row["output"]),
        log=str(row["log"]),
        was_frozen=bool(row["was_frozen"]),
        is_lost=bool(row["is_lost"]),
        sent_s=math.inf if row["sent_s"] is None else float(row["sent_s"]),
        host=host,
        step=int(row["step"]),
        record=None if row["record"] is None else of_json(LastRecord, row["record"]),
        threads=tuple(of_json(LastRecord, one) for one in row["threads"]),
        memory=None if row["memory"] is None else of_json(Memory, row["memory"]),
        ended_s=float(row["ended_s"]),
        crashed_at=tuple(of_json(StackFrame, one) for one in row["crashed_at"]),
    )


def pack_verdict(conclusion: Conclusion) -> bytes:
    """Return the frame of how the job ended."""
    failure = conclusion.failure and to_json(conclusion.failure)
    text = json.dumps({**conclusion._asdict(), "failure": failure}).encode(errors="replace")
    return pack_frame({"is": "verdict"}, text)


def verdict_of(body: bytes) -> Conclusion:
    """Parse a verdict.

    Raises:
      FrameError: it is malformed.
    """
    try:
        row = json.loads(body)
        failure = row["failure"] and of_json(JobFailure, row["failure"])
        return Conclusion(**{**row, "lines": tuple(row["lines"]), "failure": failure})
    except UNREADABLE:
        raise FrameError("the verdict is incomplete") from None


def signal_of(frame: Frame) -> signal.Signals:
    """Parse a signal.

    Raises:
      FrameError: it is malformed.
    """
    try:
        return signal.Signals(whole_field(frame.header, "number"))
    except ValueError:
        raise FrameError("not a signal") from None


def _moved(record: LastRecord, shift_s: float) -> LastRecord:
    return dataclasses.replace(record, at_s=record.at_s + shift_s)


def _shifted(at_s: float | None, shift_s: float) -> float | None:
    return None if at_s is None else at_s + shift_s


# ---- The rules by which the launchers of all nodes join, as a pure state machine.
#
# Node 0 collects one `NodeCard` from each node. A problem on any of them ends the start on all.


_MOST_REFUSED = 8


class NodeCard(NamedTuple):
    """The self-description of one node's launcher, sent once."""

    node: int
    nodes: int
    processes: int  # on its host
    host: str
    program: str  # as text, shortened
    fingerprint: str  # of the whole command and the script's content
    devices: int | None
    versions: str  # of Python, shoal and JAX
    highest_shown: int  # of --only; -1: all are shown
    has_token: bool = False
    restarts: str = ""  # --max-restarts and --restart-preempted, as given
    attempt: int = 0  # known to it; the highest counts

    @property
    def name(self) -> str:
        """The node and its host."""
        return f"node {self.node} ({self.host})"


class Assembly:
    """The launchers that have joined that of node 0, `own`."""

    def __init__(self, own: NodeCard) -> None:
        self._own = own
        self._here = {own.node: own}

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have joined."""
        return len(self._here) == self._own.nodes

    @property
    def missing(self) -> list[int]:
        """The nodes that have not joined."""
        return [node for node in range(self._own.nodes) if node not in self._here]

    @property
    def total(self) -> int:
        """The number of processes of the job, once complete."""
        return sum(card.processes for card in self._here.values())

    def card(self, node: int) -> NodeCard:
        """Return the card of a node that has joined."""
        return self._here[node]

    def processes_of(self, node: int) -> range:
        """Return the indices of a node's processes, once complete: node 0's come first."""
        first = sum(self._here[lower].processes for lower in range(node))
        return range(first, first + self._here[node].processes)

    def node_of_each(self) -> list[int]:
        """Return the node of each process, once complete."""
        counts = [(node, self._here[node].processes) for node in sorted(self._here)]
        return [node for node, count in counts for _ in range(count)]

    def join(self, card: NodeCard) -> str:
        """Take a node; return why no job can start with it, or an empty string."""
        own = self._own
        if card.nodes != own.nodes:
            words = f"{card.name} was started with --nnodes {card.nodes}"
            return f"{words}, {own.name} with --nnodes {own.nodes}"
        if not 0 <= card.node < own.nodes:
            return f"{card.name}: the nodes of --nnodes {own.nodes} are 0 to {own.nodes - 1}"
        if card.node in self._here:
            hosts = f"{self._here[card.node].host} and {card.host}"
            return f"--node-rank {card.node} was given on two launchers, on {hosts}"
        if difference := _difference(own, card):
            return difference
        self._here[card.node] = card
        return self._unknown_ranks() if self.is_complete else ""

    def leave(self, node: int) -> None:
        """Forget a node that left before the job began: it may join again."""
        del self._here[node]

    def _unknown_ranks(self) -> str:
        for card in self._here.values():
            if card.highest_shown >= self.total:
                ranks = f"the ranks of all {self.total} processes are 0 to {self.total - 1}"
                return f"--only {card.highest_shown} on {card.name}: {ranks}"
        return ""


class Refused:
    """The launchers that were refused, in words, for node 0 to print once each."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def note(self, words: str) -> list[str]:
        """Take a refusal; return the line about it, if it is new and not one of too many."""
        if words in self.all or len(self.all) >= _MOST_REFUSED:
            return []
        self.all.append(words)
        return [f"refused: {words}"]


def missing_words(missing: Sequence[int], nodes: int, address: str, waited_s: float) -> str:
    """Return the line that names the missing nodes and the command to start there."""
    names = ", ".join(map(str, missing))
    noun = "node" if len(missing) == 1 else "nodes"
    command = f"shoal run --nnodes {nodes} --node-rank {missing[0]} --coordinator {address} …"
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{noun} {names} of {nodes} {verb} not joined after {waited_s:.0f} s: "
        f"each host must run `{command}` with its own rank"
    )


def stranger_words(own: NodeCard, card: NodeCard) -> str:
    """Return why a launcher with another token, or none, is refused."""
    own_name, advice = f"node 0 ({own.host})", "set it to one secret on all nodes"
    if own.has_token and card.has_token:
        return f"SHOAL_TOKEN of {card.name} is not that of {own_name}: {advice}"
    has, its = ("a" if one.has_token else "no" for one in (own, card))
    return f"{card.name} has {its} SHOAL_TOKEN, and {own_name} {has} one: {advice}"


def _difference(own: NodeCard, card: NodeCard) -> str:
    if own.fingerprint != card.fingerprint:
        if own.program == card.program:
            return (
                f"`{own.program}` has another content on {card.host} (node {card.node}) than on "
                f"{own.host} (node {own.node}): all nodes must run the same program"
            )
        return (
            f"{card.name} runs `{card.program}`, but {own.name} `{own.program}`: give all nodes "
            "the same program and arguments; what differs can be a variable of the environment"
        )
    if own.devices != card.devices:
        shown = [f"--devices {c.devices}" if c.devices else "no --devices" for c in (card, own)]
        return f"{card.name} was started with {shown[0]}, {own.name} with {shown[1]}"
    if own.restarts != card.restarts:
        shown = [c.restarts or "no --max-restarts" for c in (card, own)]
        return f"{card.name} was started with {shown[0]}, {own.name} with {shown[1]}"
    if own.versions != card.versions:
        return f"{card.name} has {card.versions}, but {own.name} {own.versions}"
    return ""
