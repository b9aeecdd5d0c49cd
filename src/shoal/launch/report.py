"""Find the process that failed first, and describe its failure."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.errors import (
    CorruptCheckpoint,
    DeadlineError,
    DivergenceError,
    InitializeError,
    PeerFailedError,
    ProcessLostError,
    StalledError,
)
from shoal.launch.news import Gone, KeeperNews
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.failure_words import is_exit, listed, raised_at

# Exit codes for failures of other processes: never the root if a process failed by itself.
_CONSEQUENCES = {
    DivergenceError.exit_code: "processes disagree",
    ProcessLostError.exit_code: "lost a process",
    PeerFailedError.exit_code: "another process failed",
    DeadlineError.exit_code: "deadline exceeded",
    InitializeError.exit_code: "could not join the job",
    StalledError.exit_code: "the job was stalled",
}
# Exit codes of a program that died of an exception of its own. Not of those that another process,
# host or service may have caused; others are of programs that chose their code, after an exception
# that they may have survived.
_RAISED = (1, DivergenceError.exit_code, CorruptCheckpoint.exit_code)
# A program that ends itself by a fault gets others: SIGSEGV, SIGABRT, SIGBUS, …
_FROM_OUTSIDE = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
# Ranks of failures, the likeliest root first: of its own; known only from what the process wrote or
# reported before its end; the consequence of another failure.
_OWN, _TOLD, _CONSEQUENCE = range(3)
# Of errors of JAX's runtime and its transports, which may follow the end of another process.
_OF_RUNTIME = re.compile(r"JaxRuntimeError|XlaRuntimeError|Gloo|NCCL|[Cc]onnection|Socket closed")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Not one quoted in a message, which has a bar before each line.
_GROUP_BAR = re.compile(r"  [+|] ")
_TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_PLACE = re.compile(r'  File "(.*)", line (\d+)')
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError)\b")
# Of the interpreter; of C++, as printed by absl and the standard library.
_FATAL = re.compile(r"Fatal Python|F\d{4} \d\d:\d\d:\d\d|terminate called ")
_FRAME_LINES = 16
_MESSAGE_LINES = 8
_PLAIN_LINES = 10
_REASON_LETTERS = 300


class Ending(NamedTuple):
    """How one process ended."""

    process: int
    code: int  # as in subprocess: negative for a signal
    failed_s: float | None  # when it failed by itself; None: it did not, or was ended first
    sent: tuple[signal.Signals, ...] = ()  # the signals sent to end it
    stderr: str = ""  # the last part
    log: str = ""
    was_frozen: bool = False  # it was stopped by a signal when the first one was sent
    gone: Gone | None = None  # the meeting place's report before any signal was sent; not "left"
    is_lost: bool = False  # lost to the others while alive
    sent_s: float = math.inf  # the time of the first signal
    host: str = ""  # in a job on several hosts
    is_oom: bool = False  # killed while the cgroup counted a kill for want of memory
    step: int = -1  # the highest that it began
    has_exited: bool = False  # a SystemExit ended its program

    def if_out_of_memory(self) -> Ending:
        """Return it as of a host that counted an out-of-memory kill."""
        is_killed = self.code == -signal.SIGKILL and signal.SIGKILL not in self.sent
        return self._replace(is_oom=is_killed)

    def with_report(self, gone: Gone | None) -> Ending:
        """Return it with the meeting place's report.

        A report after the first signal is ignored: the launcher was the cause.
        """
        left = gone is not None and gone.state == "left" and is_exit(gone.words)
        has_exited = self.has_exited or left
        if gone is not None and (gone.state == "left" or gone.at_s >= self.sent_s):
            gone = None
        is_lost = gone is not None and gone.is_dismissed and gone.is_missed and self.code != 0
        is_lost |= self.is_lost
        return self._replace(gone=gone, is_lost=is_lost, has_exited=has_exited)

    @property
    def name(self) -> str:
        """The process, and its host in a job on several."""
        return f"{self.process} ({self.host})" if self.host else str(self.process)

    @property
    def known_failed_s(self) -> float | None:
        """When it failed, by the best available source: its report to the others, if there is one.

        A traceback on its stderr may be one that it handled.
        """
        if self.gone is not None and self.gone.state == "failed":
            return self.gone.at_s
        times_s = [self.gone.at_s] if self.gone else []
        return min([*times_s, *([] if self.failed_s is None else [self.failed_s])], default=None)


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return the root: the earliest failure that is neither the launcher's nor a consequence.

    The meeting place determines the order: a process that learns of a failure may exit before the
    one that failed, and one that has reported an exception of its own has failed then, however it
    ended. A process that the others lost while it was alive has failed whatever its exit code. If
    all other failures are consequences, the root is a process that failed before and had to be
    ended by the launcher, or ended with 0 before it left the job; or else one that was frozen.
    """
    endings = list(endings)
    claims = [
        (_rank(e), e.known_failed_s, e)
        for e in endings
        if _failed(e) and e.known_failed_s is not None
    ]
    ended_s = [known_failed_s for rank, known_failed_s, _ in claims if rank != _TOLD]
    if not ended_s:
        return None  # all were ended by the launcher, on request
    claims = [claim for claim in claims if claim[2].code or claim[1] <= min(ended_s)]
    rank, _, root = min(claims, key=lambda claim: claim[:2])
    frozen = [ending for ending in endings if ending.was_frozen]
    return frozen[0] if rank == _CONSEQUENCE and frozen else root


def exit_code(root: Ending, endings: Iterable[Ending]) -> int:
    """Return the exit code of the root as in a shell: 128 + n for signal n.

    A process that raised and had to be ended by the launcher counts as an exception; one that was
    frozen or lost, or ended with 0 before it left the job, as a loss.
    """
    if root.was_frozen or root.is_lost or root.code == 0:
        return ProcessLostError.exit_code
    if root.code == REQUEUE:  # without a notice: it would be started again for ever
        return PeerFailedError.exit_code
    if -root.code in root.sent:
        return 1
    return root.code if root.code >= 0 else 128 - root.code


def describe_end(ending: Ending) -> str:
    """Describe how a process ended."""
    if ending.was_frozen:
        return f"frozen (by SIGSTOP?), then {describe_end(ending._replace(was_frozen=False))}"
    if ending.code - 128 in ending.sent:  # it watches that signal, and ended as if it did not
        return f"ended by shoal run with {_signal_name(ending.code - 128)}"
    if -ending.code in ending.sent:
        return f"ended by shoal run with {_signal_name(-ending.code)}"
    if ending.is_oom:
        return "killed by SIGKILL: out of memory, by the count of its cgroup"
    if ending.code == REQUEUE:
        return f"exited with {REQUEUE} without a notice"
    if ending.code == 0 and ending.gone is not None:
        return "ended with code 0 before it left the job"
    words = ending.gone.words if ending.gone is not None else ""
    if words.startswith(f"exited with code {ending.code}"):  # of its own choice
        return f"exit code {ending.code}"
    return _ended(ending.code)


def _ended(code: int) -> str:
    if code >= 0:
        meaning = _CONSEQUENCES.get(code)
        return f"exit code {code}" + (f" ({meaning})" if meaning else "")
    if -code == signal.SIGKILL:
        return "killed by SIGKILL, which shoal run did not send (the out-of-memory killer?)"
    return f"killed by {_signal_name(-code)}"


def describe_failure(
    root: Ending, endings: Sequence[Ending], start_s: float
) -> tuple[list[str], str]:
    """Return the details, line by line, and the final sentence."""
    words = _last_words(root.stderr)
    lines = []
    if words:
        lines.append(f"the end of what process {root.name} wrote to stderr:")
        lines.extend(f"    {line}" for line in words)
    lines += describe_others(ending for ending in endings if ending.process != root.process)
    if root.log:
        lines.append(f"log of process {root.name}: {root.log}")
    if root.was_frozen or root.is_lost:
        return (
            lines,
            f"{_of_all(root, endings)} was lost to the others: {_lost(root)}",
        )
    way = f"could not end by itself, {describe_end(root)}" if root.sent else describe_end(root)
    sentence = (
        f"{_of_all(root, endings)} failed first, "
        f"{(root.known_failed_s or start_s) - start_s:.1f} s after the start: {way}"
        f"{_reported_before(root)}"
    )
    reason = _reason(root, words)
    return lines, f"{sentence}{reason}"


def is_from_outside(root: Ending) -> bool:
    """Return whether something outside of the program ended or stopped it: it may do well again.

    An out-of-memory kill is the program's own; so are the signals of its own faults.
    """
    by_signal = is_signal_from_outside(root.code) and not root.sent
    return root.was_frozen or root.is_lost or (by_signal and not root.is_oom)


def is_signal_from_outside(code: int) -> bool:
    """Return whether a process ended by a signal that is not one of its own faults."""
    return -code in _FROM_OUTSIDE


def cause_of(root: Ending) -> str:
    """Return the exception of a failure and its place in the program, "" if unknown.

    As reported by the process. A traceback on stderr may be of an exception that the program has
    handled: it is the source only for a process whose report says neither.
    Losses, late processes and jobs that could not be joined have their cause elsewhere.
    """
    if root.has_exited or not (root.sent or root.code in _RAISED):
        return ""
    if root.gone is not None and root.gone.state == "failed":
        kind, place = raised_at(root.gone.words)
        if kind or is_exit(root.gone.words):
            return kind and f"{kind} at {os.path.basename(place)}"
    words = _without_bars(_last_traceback(root.stderr))
    if not words:
        return ""
    reason = _reason_at(words)
    places = [match for line in words[:reason] if (match := _PLACE.match(line))]
    own = [place for place in places if not _is_library(place[1])] or places
    kind = re.split(r"[:(\s]", words[reason].strip(), maxsplit=1)[0]
    return f"{kind} at {os.path.basename(own[-1][1])}:{own[-1][2]}" if own else ""


def _is_library(path: str) -> bool:
    """Return whether code is of Python, of an installed package, or of shoal."""
    folders = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
    is_within = any(path.startswith(folder + os.sep) for folder in folders)
    return is_within or path.startswith("<") or "site-packages" in path or "dist-packages" in path


def describe_others(endings: Iterable[Ending]) -> list[str]:
    """Return how processes ended, a line for each way."""
    groups: dict[str, list[int]] = {}
    for ending in sorted(endings):
        groups.setdefault(describe_end(ending), []).append(ending.process)
    return [f"{_names(group)}: {way}" for way, group in groups.items()]


def fails_by_itself(root: Ending) -> bool:
    """Return whether its failure is its own: not of another process, nor by the launcher."""
    return _rank(root) == _OWN


def describe_host_keeper(
    keeper: KeeperNews, root: Ending, endings: Sequence[Ending], start_s: float
) -> tuple[list[str], str]:
    """Describe the death of a host's keeper, upon which JAX aborts processes."""
    lines, _ = describe_failure(root, endings, start_s)
    died = "died"
    if keeper.code is not None:
        died = f"was {_ended(keeper.code)}" if keeper.code < 0 else f"ended, {_ended(keeper.code)}"
    at_s = f", {keeper.gone_s - start_s:.1f} s after the start" if keeper.gone_s else ""
    aborted = [e.process for e in endings if e.code == -signal.SIGABRT and not e.sent]
    return lines, (
        f"the keeper of host {keeper.host} (pid {keeper.pid}), through which its processes reach "
        f"JAX's service, {died}{at_s}: without it JAX aborted {listed(aborted)}"
    )


def dead_host_keeper(root: Ending, keepers: Iterable[KeeperNews]) -> KeeperNews | None:
    """Return the keeper whose death made JAX abort the root, or None."""
    if root.code != -signal.SIGABRT or root.sent:
        return None
    for keeper in keepers:
        died_first = keeper.gone_s is not None and keeper.gone_s <= (root.known_failed_s or 0.0)
        is_dead = keeper.code != 0 if keeper.code is not None else died_first
        if root.process in keeper.processes and is_dead:
            return keeper
    return None


def _of_all(root: Ending, endings: Sequence[Ending]) -> str:
    where = f" ({root.host})" if root.host else ""
    return f"process {root.process} of {len(endings)}{where}"


def _failed(ending: Ending) -> bool:
    return bool(ending.code or ending.is_lost or ending.gone)


def _rank(ending: Ending) -> int:
    if ending.is_lost:
        return _OWN
    words = ending.gone.words if ending.gone is not None and ending.gone.state == "failed" else ""
    if ending.gone is not None and ending.gone.follows:
        return _TOLD if ending.sent or not ending.code else _CONSEQUENCE
    if ending.sent or not ending.code:
        return _OWN if words and ending.code and not _OF_RUNTIME.search(words) else _TOLD
    if ending.code in _CONSEQUENCES:
        return _OWN if words.startswith(f"exited with code {ending.code}") else _CONSEQUENCE
    return _OWN


def _lost(ending: Ending) -> str:
    """Describe how a process was lost, and how it ended."""
    if ending.was_frozen or ending.gone is None:
        return describe_end(ending)
    words = ending.gone.words
    if not ending.gone.is_dismissed:
        words = f"{words.removesuffix(' (killed?)')}, but it lived on"
    return f"{words}, then {describe_end(ending)}"


def _reported_before(ending: Ending) -> str:
    """Describe the report of a process that exited with 0."""
    if ending.code or ending.gone is None or ending.gone.state == "lost":
        return ""
    return f", after it had reported to the others: {ending.gone.words}"


def _reason(root: Ending, words: Sequence[str]) -> str:
    """Return the reason, as given by the process, with its separator.

    Its report to the others contains the place in the program; stderr is the only source for a
    process that never joined.
    """
    has_reported = root.gone is not None and root.gone.state == "failed"
    if root.gone is not None and has_reported and (root.code > 0 or root.sent):
        return _reported(root.gone.words, root.code)
    if _has_traceback(words):
        whole = _without_bars(_last_traceback(root.stderr))
        at = _reason_at(whole)
        return f": {whole[at].strip()[:_REASON_LETTERS]}" + _syntax_at(whole[: at + 1])
    if root.code > 0 and words:
        return f"; its last line on stderr: {words[-1].strip()[:_REASON_LETTERS]}"
    return ""


def _reported(headline: str, code: int) -> str:
    """Return a headline, to follow an exit code, without repeating the code."""
    bare = headline.removeprefix(f"exited with code {code}")
    return bare if bare != headline else f": {headline.removeprefix('exited: ')}"


def _syntax_at(words: Sequence[str]) -> str:
    """Return the place of a syntax error, which is not in a traceback's last frame."""
    if not words or not _SYNTAX.match(words[-1]):
        return ""
    places = [match for line in words if (match := _PLACE.match(line))]
    return f" ({os.path.basename(places[-1][1])}, line {places[-1][2]})" if places else ""


def _last_words(stderr: str) -> list[str]:
    """Return the last traceback, with its outermost frames cut, or else the last lines."""
    lines = _last_traceback(stderr)
    if not lines:
        lines = _ESCAPE.sub("", stderr).splitlines()
        return [line for line in lines if line.strip()][-_PLAIN_LINES:]
    reason = _reason_at(lines)
    if reason == 0:
        return lines[:_FRAME_LINES]
    frames = lines[1:reason]
    if len(frames) > _FRAME_LINES:
        frames = [f"  … {len(frames) - _FRAME_LINES} lines", *frames[-_FRAME_LINES:]]
    return [lines[0], *frames, *lines[reason : reason + _MESSAGE_LINES]]


def _last_traceback(stderr: str) -> list[str]:
    """Return the lines from the beginning of the last traceback; none if there is none."""
    lines = _ESCAPE.sub("", stderr).splitlines()
    starts = [i for i, line in enumerate(lines) if _opens_traceback(line)]
    starts += _bare_syntax_error(lines)
    return lines[max(starts) :] if starts else []


def _without_bars(lines: list[str]) -> list[str]:
    """Return the lines of a group's traceback without the bars of its drawing; others as is."""
    if lines and _GROUP_BAR.match(lines[0]):
        return [_GROUP_BAR.sub("", line, count=1) for line in lines]
    return lines


def _opens_traceback(line: str) -> bool:
    return _TRACEBACK.match(line) is not None or _FATAL.match(line) is not None


def _bare_syntax_error(lines: Sequence[str]) -> list[int]:
    """Return where the last error in the script's own syntax begins, which has no traceback
    heading, because nothing was called."""
    last = max((i for i, line in enumerate(lines) if _SYNTAX.match(line)), default=0)
    first = last
    while first and lines[first - 1].startswith(" "):
        first -= 1
    is_bare = not (first and _opens_traceback(lines[first - 1]))
    return [first] if first < last and is_bare and _PLACE.match(lines[first]) else []


def _has_traceback(words: Sequence[str]) -> bool:
    return bool(words) and (_opens_traceback(words[0]) or _PLACE.match(words[0]) is not None)


def _reason_at(lines: Sequence[str]) -> int:
    """Return the index of the line that names the exception: the first that is not indented."""
    if _FATAL.match(lines[0]):
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
