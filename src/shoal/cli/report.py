"""Which process failed first, how, and the words for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.errors import (
    DeadlineError,
    DivergenceError,
    InitializeError,
    PeerFailedError,
    ProcessLostError,
)

__all__ = ["Ending", "describe_failure", "exit_code", "first_failure", "how"]

# What a process exits with because another one failed: never the culprit while there is another.
_CONSEQUENCES = {
    ProcessLostError.exit_code: "lost a process",
    PeerFailedError.exit_code: "another process failed",
    DeadlineError.exit_code: "waited in vain",
}
_ENDED_BY_US, _CONSEQUENCE = 1, 2  # ranks; 0: a failure of its own
_MEANINGS = _CONSEQUENCES | {
    DivergenceError.exit_code: "processes disagree",
    InitializeError.exit_code: "could not join the job",
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Not one that is quoted in a message: of another process, behind a bar.
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_FRAME_LINES = 16
_MESSAGE_LINES = 8
_PLAIN_LINES = 10


class Ending(NamedTuple):
    """How one process ended."""

    process: int
    code: int  # as subprocess says it: negative for a signal
    failed_s: float | None  # when it failed by itself; None: it did not, or we ended it before
    sent: tuple[signal.Signals, ...] = ()  # what we sent to end it
    stderr: str = ""  # the last part
    log: str = ""
    was_frozen: bool = False  # it stood still, stopped by a signal, when we began to end it


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return the root: the earliest failure that is neither our doing nor another's consequence.

    A process that learns of a failure may be gone before the one that failed, whose own exit takes
    its time: so a code that says "another failed" counts only if there is no other, and one that
    raised and that we had to end counts if those that ended by themselves only say so. So does one
    that was frozen: it is the one that they lost.
    """
    endings = list(endings)
    own = [(_rank(e), e.failed_s, e) for e in endings if e.code and e.failed_s is not None]
    if own and min(own)[0] == _CONSEQUENCE:
        frozen = [ending for ending in endings if ending.was_frozen]
        return min(frozen) if frozen else min(own)[-1]
    # If all were ended by us, somebody asked us to.
    return min(own)[-1] if any(rank != _ENDED_BY_US for rank, _, _ in own) else None


def exit_code(ending: Ending) -> int:
    """Return the code of a process as a shell says it: 128 + n for signal n.

    One that raised and could not end by itself, so that we had to, has that of an exception; one
    that was frozen, that of a loss.
    """
    if ending.was_frozen:
        return ProcessLostError.exit_code
    if -ending.code in ending.sent:
        return 1
    return ending.code if ending.code >= 0 else 128 - ending.code


def how(ending: Ending) -> str:
    """Return in words how a process ended."""
    if ending.was_frozen:
        return f"frozen (by SIGSTOP?), then {how(ending._replace(was_frozen=False))}"
    if ending.code - 128 in ending.sent:  # it watches that signal, and ended as if it did not
        return f"ended by shoal run with {_signal_name(ending.code - 128)}"
    if ending.code >= 0:
        meaning = _MEANINGS.get(ending.code)
        return f"exit code {ending.code}" + (f" ({meaning})" if meaning else "")
    name = _signal_name(-ending.code)
    if -ending.code in ending.sent:
        return f"ended by shoal run with {name}"
    if -ending.code == signal.SIGKILL:
        return "killed by SIGKILL, which shoal run did not send (the out-of-memory killer?)"
    return f"killed by {name}"


def describe_failure(
    root: Ending, endings: Sequence[Ending], start_s: float
) -> tuple[list[str], str]:
    """Return the particulars, line by line, and the one sentence that comes last."""
    words = _last_words(root.stderr)
    lines = []
    if words:
        lines.append(f"the end of what process {root.process} wrote to stderr:")
        lines.extend(f"    {line}" for line in words)
    others: dict[str, list[int]] = {}
    for ending in sorted(endings):
        if ending.process != root.process:
            others.setdefault(how(ending), []).append(ending.process)
    lines.extend(f"{_names(group)}: {way}" for way, group in others.items())
    if root.log:
        lines.append(f"log of process {root.process}: {root.log}")
    reason = words[_reason_at(words)].strip() if _has_traceback(words) else ""
    if root.was_frozen:
        return (
            lines,
            f"process {root.process} of {len(endings)} is what the others lost: {how(root)}",
        )
    way = f"could not end by itself, {how(root)}" if root.sent else how(root)
    sentence = (
        f"process {root.process} of {len(endings)} failed first, "
        f"{(root.failed_s or start_s) - start_s:.1f} s after the start: {way}"
    )
    return lines, f"{sentence}: {reason}" if reason else sentence


def _rank(ending: Ending) -> int:
    if ending.sent:
        return _ENDED_BY_US
    return _CONSEQUENCE if ending.code in _CONSEQUENCES else 0


def _last_words(stderr: str) -> list[str]:
    """Return the last traceback, its frames shortened from the top, or else the last lines."""
    lines = _ESCAPE.sub("", stderr).splitlines()
    starts = [i for i, line in enumerate(lines) if _opens_traceback(line)]
    if not starts:
        return [line for line in lines if line.strip()][-_PLAIN_LINES:]
    lines = lines[starts[-1] :]
    reason = _reason_at(lines)
    frames = lines[1:reason]
    if len(frames) > _FRAME_LINES:
        frames = [f"  … {len(frames) - _FRAME_LINES} lines", *frames[-_FRAME_LINES:]]
    return [lines[0], *frames, *lines[reason : reason + _MESSAGE_LINES]]


def _opens_traceback(line: str) -> bool:
    return _TRACEBACK.match(line) is not None or line.startswith("Fatal Python")


def _has_traceback(words: list[str]) -> bool:
    return bool(words) and _opens_traceback(words[0])


def _reason_at(lines: list[str]) -> int:
    """Return the index of the line that names the exception: the first that is not indented."""
    if lines[0].startswith("Fatal Python"):
        return 0
    indented = (i for i, line in enumerate(lines) if i and line.strip() and line[0] not in " \t")
    return next(indented, len(lines) - 1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _names(processes: Sequence[int]) -> str:
    """Return `p0, p2-p5` for sorted processes."""
    runs: list[list[int]] = []
    for process in processes:
        if runs and runs[-1][-1] == process - 1:
            runs[-1][1:] = [process]
        else:
            runs.append([process])
    return ", ".join("-".join(f"p{process}" for process in run) for run in runs)
