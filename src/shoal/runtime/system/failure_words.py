"""Failures as text: a headline of one line, and the traceback after it.

The text sent to other processes is `Failure.words`: the headline, then the traceback as Python
prints it. `headline_of` finds the headline of any text, including a bare traceback and a text from
a hostile or older process: it is always one printable line of bounded length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import NamedTuple

from shoal.errors import PeerFailedError, ProcessLostError, ShoalError
from shoal.runtime.system.callsite import site_of
from shoal.tracebacks import is_installed, is_ours

_MAX_LINE = 800  # characters of a headline
_MOST_WORD = 40  # characters of a word that is not cut
_MAX_SAID = 200  # of the message in it
_MAX_PLACE = 160
_MAX_TEXT = 32 << 10  # characters of a traceback
_MAX_DEPTH = 100  # of groups within groups
_ANNOUNCES = "Traceback (most recent call last):"
_HEADS = ("Traceback", "+ Exception Group Traceback")
# Of errors of JAX's runtime and its transports, which may follow the end of another process.
_RUNTIME_TYPES = ("JaxRuntimeError", "XlaRuntimeError")
_RUNTIME_WORDS = ("Connection closed by peer", "Gloo", "NCCL", "Socket closed", "Broken pipe")
# Of those that no other process can cause.
_TORN_STATUS = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
_OWN_STATUS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE")
_LINKS = (  # printed by Python between two exceptions of a chain, with blank lines around
    ["The above exception was the direct cause of the following exception:"],
    ["During handling of the above exception, another exception occurred:"],
)


class Failure(NamedTuple):
    """An exception as text."""

    headline: str  # "ValueError: rate must be positive (train.py:31 (main))", one line
    text: str  # the traceback, as Python prints it; both ends of a long one

    @property
    def words(self) -> str:
        """The text for other processes."""
        return f"{self.headline}\n{self.text}"


class Departure(NamedTuple):
    """How a process has left its job, as the other processes know it."""

    words: str  # what it reported; of a lost one, why it is lost and where it was last
    state: str = "failed"  # "left" | "failed" | "lost"
    how: str = ""  # "raised" | "found" (an error of all that met) | "exited"; empty: unknown
    # Why it is lost, if `words` say more: "its connection closed"; of one that left in order by
    # `sys.exit`, the call site.
    why: str = ""
    follows: bool = False  # others have led to it, as it reported

    @property
    def is_in_order(self) -> bool:
        """Whether it left the job without a failure."""
        return self.state == "left" and self.how != "exited"

    @property
    def fate(self) -> str:
        """The fate of the process, as the predicate of a sentence.

        >>> Departure("left the job", "left").fate, Departure("its disk is full").fate
        ('left the job', 'is gone: its disk is full')
        """
        if self.state == "lost":
            return f"is lost: {self.words}"
        headline = headline_of(self.words)
        if self.state == "left" or self.how == "exited":
            return headline
        if not headline:
            return "is gone"
        has_raised = self.how in ("raised", "found") or any(map(_is_head, self.words.splitlines()))
        return f"raised {headline}" if has_raised else f"is gone: {headline}"


class Refusal(NamedTuple):
    """Why a job cannot be joined, as facts: see `InitializeError.refusal`."""

    # "late": others have not come in time. "unreachable": nothing answers at the address. "token":
    # that of this process is wrong. "lacks-token": process 0 has none. Empty: as the message says.
    reason: str = ""
    strangers: str = ""  # a clause: the processes that were refused for their tokens
    remedy: str = ""  # the last lines of the message, to be printed as they are


def refusal_of(error: BaseException) -> Refusal:
    """Return why a job cannot be joined, as far as it is known."""
    found = getattr(error, "refusal", None)
    return found if isinstance(found, Refusal) else Refusal()


def failure_of(error: BaseException, called_at: str = "") -> Failure:
    """Return the headline and text of `error`: its type, the first line of its message, its place.

    The place is the innermost frame of the program itself: not of the standard library, of an
    installed package, or of shoal; if there is none, `called_at`, the program's line that made the
    failed call. For a chain of exceptions it is the last one, for a group the group and its first
    exception; if the message is itself a traceback (of a callback of JAX), the exception in that.
    Never raises, whatever the exception's own methods do.

    >>> failure_of(ValueError("rate must be positive\\nrate=0")).headline
    'ValueError: rate must be positive'
    """
    headline = _headline(error, called_at)
    try:
        import traceback  # 4 ms, and a service that has no failure needs none of it

        text = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 (its own methods may raise anything)
        text = ""
    if not text.lstrip().startswith(_HEADS):
        text = f"Traceback (no frames are known):\n{text or headline}"
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 4]}\n...\n{text[-_MAX_TEXT * 3 // 4 :]}"
    return Failure(headline, text)


def exit_words(status: object, place: str = "", handled: BaseException | None = None) -> str:
    """Return the report of a process that ends by `sys.exit(status)` at `place`.

    `handled` is the exception that the program was handling there: usually the reason.

    >>> exit_words("no such file", "train.py:31 (main)")
    'exited: no such file (train.py:31 (main))'
    >>> exit_words(3)
    'exited with code 3'
    """
    where = f" ({one_line(place, _MAX_PLACE)})" if place else ""
    text = ""
    if status is None or isinstance(status, int):
        report = f"exited with code {int(status or 0)}{where}"
    else:
        text = text_of(status).strip()
        report = f"exited: {one_line((text.splitlines() or [''])[0], _MAX_SAID)}{where}"
    if handled is not None and not isinstance(handled, SystemExit):
        headline, text = failure_of(handled)
        report = f"{report} while handling {headline}"
    return f"{report}\n{text[:_MAX_TEXT]}" if len(text.splitlines()) > 1 else report


def exit_of(error: SystemExit) -> str:
    """Return `exit_words` of a SystemExit that was raised."""
    place, other = _places(error.__traceback__)
    return exit_words(error.code, place or other, error.__context__)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the last one first.

    >>> [type(one).__name__ for one in causes_of(ValueError("no data"))]
    ['ValueError']
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        yield at
        seen.add(id(at))
        at = at.__cause__ or at.__context__


def peers_named(error: BaseException) -> Mapping[int, Departure] | None:
    """Return the processes whose end an error names; None: it is this process's own.

    >>> peers_named(PeerFailedError("barrier", failed={3: "ValueError: no data"}))[3].words
    'ValueError: no data'
    """
    for at in causes_of(error):
        if isinstance(at, PeerFailedError):
            return departures_of(at.failed, "failed", at.ends)
        if isinstance(at, ProcessLostError):
            return departures_of(at.lost, "lost", at.ends)
    return None


def departures_of(
    words: Mapping[int, str], state: str, ends: Mapping[int, object]
) -> dict[int, Departure]:
    """Return the ends of processes, of which some may be known by their words alone."""
    found = {}
    for process, text in words.items():
        end = ends.get(process)
        found[process] = end if isinstance(end, Departure) else Departure(text, state)
    return found


def headline_of(words: str) -> str:
    """Return the one line that explains why a process is gone.

    >>> headline_of("Traceback (most recent call last):\\n  File ...\\nValueError: no\\ndata")
    'ValueError: no'
    """
    lines = words.strip().splitlines() or [""]
    if not _is_head(lines[0]):
        return one_line(lines[0]).strip()
    # Take the last of a chain; a message may quote yet another traceback.
    begin = max(i for i in range(len(lines)) if lines[i - 2 : i - 1] in _LINKS or i == 0)
    found = (line for line in map(_without_bar, lines[begin + 1 :]) if line.strip())
    return one_line(next((line for line in found if line[0] not in " \t+"), lines[-1])).strip()


def is_of_runtime(error: BaseException) -> bool:
    """Return whether an error is from XLA or a transport, which do not name the lost peer.

    Also true if the program caught such an error, and raised another or exited because of it.
    """
    for at in _causes_before_ours(error):
        is_xla = type(at).__name__ in _RUNTIME_TYPES
        if is_xla and text_of(at).startswith(_OWN_STATUS):
            return False
        if is_xla or _is_of_transport(at):
            return True
    return False


def is_torn(error: BaseException) -> bool:
    """Return whether an error of JAX's runtime says that a connection ended, or that it was given
    up: most likely another process has ended. `is_of_runtime` is true of more."""
    for at in _causes_before_ours(error):
        is_xla = type(at).__name__ in _RUNTIME_TYPES
        if _is_of_transport(at) or (is_xla and text_of(at).startswith(_TORN_STATUS)):
            return True
    return False


def _causes_before_ours(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, up to one of shoal, which says more."""
    return itertools.takewhile(lambda at: not isinstance(at, ShoalError), causes_of(error))


def _is_of_transport(error: BaseException) -> bool:
    """Return whether an error is JAX's, and about a connection: not the program's own, as to a
    store or a data base."""
    is_jaxs = type(error).__name__ in _RUNTIME_TYPES or type(error) in (ValueError, RuntimeError)
    return is_jaxs and any(words in text_of(error) for words in _RUNTIME_WORDS)


def particulars_of(words: str) -> str:
    """Return the text after the headline: the traceback, or nothing."""
    words = words.strip("\n")
    first, _, rest = words.partition("\n")
    if not rest or (_is_head(rest) and not _is_head(first)):
        return rest
    return words


def one_line(text: str, limit: int = _MAX_LINE) -> str:
    """Return an untrusted text as one printable line of bounded length; short words stay whole.

    >>> one_line("no space left on the device", 20)
    'no space left on...'
    """
    line = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    if len(text) <= limit:
        return line.rstrip()
    end = limit - 3
    space = line.rfind(" ", 0, end + 1)
    if max(0, end - _MOST_WORD - 1) < space and line[:space].strip():
        end = space
    return line[:end].rstrip() + "..."


def listed(processes: Iterable[int], most: int | None = None) -> str:
    """Return processes as text; after `most` ranges, how many more there are.

    >>> listed([7]), listed([0, 2, 3, 4]), listed([0, 2, 4, 6], most=3)
    ('process 7', 'processes 0, 2-4', 'processes 0, 2, 4 and 1 more')
    """
    numbers = sorted(processes)
    if not numbers:
        return "no process"
    noun = "process" if len(numbers) == 1 else "processes"
    return f"{noun} {numbers_of(numbers, most)}"


def numbers_of(processes: Iterable[int], most: int | None = None) -> str:
    """Return `listed` without its noun: `0, 2-4`."""
    numbers = sorted(processes)
    ranges = ranges_of(numbers)
    shown = ranges if most is None else ranges[:most]
    left = len(numbers) - sum(last - first + 1 for first, last in shown)
    return ", ".join(map(range_text, shown)) + (f" and {left} more" if left else "")


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the inclusive ranges of consecutive numbers in sorted ones.

    >>> ranges_of([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def range_text(ends: tuple[int, int]) -> str:
    """Return `0-2`, or `5` if both ends are the same."""
    first, last = ends
    return f"{first}" if first == last else f"{first}-{last}"


def stands(frame: FrameType | None) -> str:
    """Return the position of the program itself, above a frame that it called; "" if none."""
    at = frame
    while at is not None and not is_of_program(at):
        at = at.f_back
    return "" if at is None else site_of(at, at.f_lineno)


def _headline(error: BaseException, called_at: str) -> str:
    if isinstance(error, SystemExit):
        return headline_of(exit_of(error))
    text, leaf = _text_of(error), error
    for _ in range(_MAX_DEPTH):
        if not isinstance(leaf, BaseExceptionGroup):
            break
        leaf = leaf.exceptions[0]
    if leaf is not error:
        text = f"{text}: {_text_of(leaf)}"
    (at, other), (at_all, other_of_all) = map(_places, (leaf.__traceback__, error.__traceback__))
    place = at or at_all or called_at or other or other_of_all
    return text + (f" ({one_line(place, _MAX_PLACE)})" if place else "")


def _text_of(error: BaseException) -> str:
    """Return the type and the first line of the message."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    lines = text_of(error).strip().splitlines() or [""]
    first = lines[0].strip()
    if first.endswith(_ANNOUNCES) and len(lines) > 1:
        lines[0] = _ANNOUNCES
        first = first.removesuffix(_ANNOUNCES) + headline_of("\n".join(lines))
    return one_line(f"{name}: {first}" if first else name, _MAX_SAID)


def text_of(value: object) -> str:
    """Return `str(value)`; never raises."""
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 (it may raise anything)
        kind = "exception str()" if isinstance(value, BaseException) else "str()"
        return f"<{kind} failed>"


def _places(trace: TracebackType | None) -> tuple[str, str]:
    """Return the innermost place in the program itself, and the innermost outside shoal."""
    place = other = ""
    while trace is not None:
        frame = trace.tb_frame
        if is_of_program(frame):
            place = site_of(frame, trace.tb_lineno)
        elif not is_ours(frame) and not frame.f_code.co_filename.startswith("<"):
            other = site_of(frame, trace.tb_lineno)
        trace = trace.tb_next
    return place, other


def is_of_program(frame: FrameType) -> bool:
    """Return whether a frame is of the program itself, not Python, a package or shoal."""
    file = frame.f_code.co_filename
    if file.startswith("<"):  # generated or interactive code
        return frame.f_globals.get("__name__") == "__main__"
    return not is_installed(file) and not is_ours(frame)


def _is_head(line: str) -> bool:
    return line.strip().startswith(_HEADS)


def _without_bar(line: str) -> str:
    """Return a line of a group's traceback without the bar that marks it."""
    return line.lstrip().removeprefix("| ") if line.lstrip().startswith("| ") else line
