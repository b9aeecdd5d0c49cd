"""The messages between launchers, as frames of `runtime.wire.frames`.

::

    to node 0    node (card)  beat  failure  signal  done (exits)
    from node 0  heard (limits)  later  refused  beat (clock)  start  news  failure  signal  verdict

Times are on the monotonic clock of node 0: a sender converts its own (`shifted`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.launch.conclusion import Conclusion
from shoal.launch.environment import Addresses, HostShare, JobStart
from shoal.launch.launchers import JobExit
from shoal.launch.nodes.joining import NodeCard
from shoal.runtime.exit.first_failure import Gone, ProcessExit
from shoal.runtime.failures.facts import (
    UNREADABLE,
    JobFailure,
    Memory,
    StackFrame,
    of_json,
    to_json,
)
from shoal.runtime.failures.last_record import LastRecord
from shoal.runtime.system.progress_file import StepProgress
from shoal.runtime.wire.frames import Frame, FrameError, pack_frame, text_field, whole_field
from shoal.runtime.wire.proof import derived

_MOST = 1 << 20  # processes of a node, attempts
_LETTERS = 400  # of an untrusted text
MAX_BODY_BYTES = 256 << 20  # the last words of all processes of a host


class NodeExit(NamedTuple):
    """How the job ended on another node."""

    exits: list[ProcessExit]
    problem: str = ""  # why it failed, if no process was the cause
    progress: StepProgress = StepProgress()
    remaining: str = ""  # the processes that exist in spite of SIGKILL


def first_card(card: NodeCard) -> dict[str, Any]:
    """Return the first frame of a launcher, without its proof."""
    return {"do": "node", **card._asdict()}


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
        node=whole_field(header, "node"),
        nodes=whole_field(header, "nodes"),
        processes=_whole(header, "processes", 1),
        host=_printable(header, "host"),
        program=_printable(header, "program"),
        fingerprint=text_field(header, "fingerprint"),
        devices=devices,
        versions=_printable(header, "versions"),
        highest_shown=shown,
        token=_printable(header, "token"),
        restarts=_printable(header, "restarts"),
        attempt=_whole(header, "attempt", 0),
    )


def _whole(header: Mapping[str, Any], name: str, least: int) -> int:
    """Return a number that a stranger may have sent."""
    value = whole_field(header, name)
    if not least <= value <= _MOST:
        raise FrameError(f"field {name!r} is not within {least} to {_MOST}")
    return value


def _printable(header: Mapping[str, Any], name: str) -> str:
    """Return an untrusted text in printable form."""
    text = text_field(header, name)[:_LETTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def attempt_token(secret: str, seed: str) -> str:
    """Return the token of the processes of one attempt: each attempt has its own seed."""
    return derived(secret, f"attempt {seed}")


def pack_start(start: JobStart, seed: str) -> bytes:
    """Return the frame that lets a node's processes start; its launcher derives the token."""
    return pack_frame(
        {
            "is": "start",
            "share": list(start.share),
            "total": start.total,
            "addresses": list(start.addresses),
            "seed": seed,
            "attempt": start.attempt,
        }
    )


def start_of(header: Mapping[str, Any], secret: str) -> JobStart:
    """Parse a start.

    Args:
      secret: of the launchers.
    """
    try:
        share, addresses = HostShare(*header["share"]), Addresses(*header["addresses"])
        total, attempt = int(header["total"]), int(header["attempt"])
        token = attempt_token(secret, str(header["seed"]))
        return JobStart(share, total, addresses, token, attempt)
    except (KeyError, TypeError, ValueError):
        raise FrameError("the start is incomplete") from None


def process_of(line: Mapping[str, Any]) -> int | None:
    """Return the process that a line of news is about, or None."""
    processes = [line[name] for name in ("joined", "gone", "dismissed") if name in line]
    return int(processes[0]) if processes else None


def pack_signal(number: signal.Signals, source: str) -> bytes:
    """Return the frame that passes a signal on; `source`: the node that got it."""
    return pack_frame({"is": "signal", "number": int(number), "source": source})


def pack_refused(reason: str) -> bytes:
    """Return the frame for a launcher that cannot join."""
    return pack_frame({"is": "refused", "words": reason})


def pack_news(line: Mapping[str, Any], gone: Gone | None = None) -> bytes:
    """Return the frame of a line of news; `gone`: node 0's facts about a process that is gone."""
    line = dict(line)
    if gone and "gone" in line:
        line["is_missed"] = gone.is_missed
    return pack_frame({"is": "news", "line": line})


def pack_end(end: JobExit, shift_s: float) -> bytes:
    """Return the frame of how the job ended on a host."""
    rows = [
        {
            **process_exit._asdict(),
            "failed_s": _shifted(process_exit.failed_s, shift_s),
            "ended_s": process_exit.ended_s + shift_s,
            "sent_s": None if process_exit.sent_s == math.inf else process_exit.sent_s + shift_s,
            "sent": [int(number) for number in process_exit.sent],
            "asked_s": None if process_exit.asked_s == math.inf else process_exit.asked_s + shift_s,
            "left": None,
            "gone": None,
            "record": process_exit.record and to_json(process_exit.record),
            "threads": [to_json(_moved(record, shift_s)) for record in process_exit.threads],
            "memory": process_exit.memory and to_json(process_exit.memory),
            "crashed_at": to_json(process_exit.crashed_at),
        }
        for process_exit in end.exits
    ]
    of_host = {"trouble": end.problem, "reached": end.progress, "remaining": end.remaining}
    text = json.dumps({"endings": rows, **of_host})
    return pack_frame({"do": "done"}, text.encode(errors="replace"))


def end_of(body: bytes, host: str) -> NodeExit:
    """Parse how the job ended on the node on `host`.

    Raises:
      FrameError: it is malformed.
    """
    try:
        done = json.loads(body)
        step, saved, ended = map(int, done["reached"])
        exits = [_exit_of(row, host) for row in done["endings"]]
        progress, remaining = StepProgress(step, saved, ended), str(done["remaining"])
        return NodeExit(exits, str(done["trouble"]), progress, remaining)
    except UNREADABLE:
        raise FrameError("the endings are incomplete") from None


def _exit_of(row: Mapping[str, Any], host: str) -> ProcessExit:
    return ProcessExit(
        process=int(row["process"]),
        code=int(row["code"]),
        failed_s=None if row["failed_s"] is None else float(row["failed_s"]),
        sent=tuple(signal.Signals(number) for number in row["sent"]),
        output=str(row["output"]),
        log=str(row["log"]),
        was_frozen=bool(row["was_frozen"]),
        is_lost=bool(row["is_lost"]),
        joined_by_jax=bool(row["joined_by_jax"]),
        sent_s=math.inf if row["sent_s"] is None else float(row["sent_s"]),
        host=host,
        step=int(row["step"]),
        record=None if row["record"] is None else of_json(LastRecord, row["record"]),
        threads=tuple(of_json(LastRecord, record) for record in row["threads"]),
        memory=None if row["memory"] is None else of_json(Memory, row["memory"]),
        ended_s=float(row["ended_s"]),
        crashed_at=tuple(of_json(StackFrame, frame) for frame in row["crashed_at"]),
        asked_s=math.inf if row["asked_s"] is None else float(row["asked_s"]),
        is_python=bool(row["is_python"]),
        has_input=bool(row["has_input"]),
        ran_loaded=bool(row["ran_loaded"]),
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
