"""Failures as text: a headline of one line, and the traceback after it.

The text sent to other processes is `Failure.words`: the headline, then the traceback as Python
prints it. `foreign_text.headline_of` finds the headline in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import NamedTuple

from shoal.errors import PeerFailedError, ProcessLostError, ShoalError
from shoal.runtime.rules.point import Departure
from shoal.runtime.system.callsite import site_of
from shoal.runtime.system.foreign_text import (
    ANNOUNCES,
    headline_of,
    is_traceback,
    one_line,
    text_of,
)
from shoal.tracebacks import is_installed, is_ours

_MAX_SAID = 200  # of the message in it
_MAX_PLACE = 160
_MAX_TEXT = 32 << 10  # characters of a traceback
_MAX_DEPTH = 100  # of groups within groups
# Of errors of JAX's runtime and its transports, which may follow the end of another process.
_RUNTIME_TYPES = ("JaxRuntimeError", "XlaRuntimeError")
_RUNTIME_WORDS = ("Connection closed by peer", "Gloo", "NCCL", "Socket closed", "Broken pipe")
# Of those that no other process can cause.
_TORN_STATUS = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
_OWN_STATUS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE")


class Failure(NamedTuple):
    """An exception as text."""

    headline: str  # "ValueError: rate must be positive (train.py:31 (main))", one line
    text: str  # the traceback, as Python prints it; both ends of a long one

    @property
    def words(self) -> str:
        """The text for other processes."""
        return f"{self.headline}\n{self.text}"


def fate_of(departure: Departure) -> str:
    """Return the fate of a process, as the predicate of a sentence.

    >>> fate_of(Departure("left the job", "left")), fate_of(Departure("its disk is full"))
    ('left the job', 'is gone: its disk is full')
    """
    if departure.state == "lost":
        return f"is lost: {departure.words}"
    headline = headline_of(departure.words)
    if departure.state == "left" or departure.how == "exited":
        return headline
    if not headline:
        return "is gone"
    has_raised = departure.how in ("raised", "found") or any(
        map(is_traceback, departure.words.splitlines())
    )
    return f"raised {headline}" if has_raised else f"is gone: {headline}"


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
    if not is_traceback(text):
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
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def peers_named(error: BaseException) -> Mapping[int, Departure] | None:
    """Return the processes whose end an error names; None: it is this process's own.

    >>> peers_named(PeerFailedError("barrier", failed={3: "ValueError: no data"}))[3].words
    'ValueError: no data'
    """
    for cause in causes_of(error):
        if isinstance(cause, PeerFailedError):
            return departures_of(cause.failed, "failed", cause.ends)
        if isinstance(cause, ProcessLostError):
            return departures_of(cause.lost, "lost", cause.ends)
    return None


def departures_of(
    words: Mapping[int, str], state: str, ends: Mapping[int, object]
) -> dict[int, Departure]:
    """Return the ends of processes, of which some may be known by their words alone."""
    departures = {}
    for process, text in words.items():
        end = ends.get(process)
        departures[process] = end if isinstance(end, Departure) else Departure(text, state)
    return departures


def is_of_runtime(error: BaseException) -> bool:
    """Return whether an error is from XLA or a transport, which do not name the lost peer.

    Also true if the program caught such an error, and raised another or exited because of it.
    """
    for cause in _causes_before_ours(error):
        is_xla = type(cause).__name__ in _RUNTIME_TYPES
        if is_xla and text_of(cause).startswith(_OWN_STATUS):
            return False
        if is_xla or _is_of_transport(cause):
            return True
    return False


def is_torn(error: BaseException) -> bool:
    """Return whether an error of JAX's runtime says that a connection ended, or that it was given
    up: most likely another process has ended. `is_of_runtime` is true of more."""
    for cause in _causes_before_ours(error):
        is_xla = type(cause).__name__ in _RUNTIME_TYPES
        if _is_of_transport(cause) or (is_xla and text_of(cause).startswith(_TORN_STATUS)):
            return True
    return False


def _causes_before_ours(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, up to one of shoal, which says more."""
    return itertools.takewhile(lambda cause: not isinstance(cause, ShoalError), causes_of(error))


def _is_of_transport(error: BaseException) -> bool:
    """Return whether an error is JAX's, and about a connection: not the program's own, as to a
    store or a data base."""
    is_jaxs = type(error).__name__ in _RUNTIME_TYPES or type(error) in (ValueError, RuntimeError)
    return is_jaxs and any(phrase in text_of(error) for phrase in _RUNTIME_WORDS)


def position_in_program(frame: FrameType | None) -> str:
    """Return the position of the program itself, above a frame that it called; "" if none."""
    program_frame = frame
    while program_frame is not None and not is_of_program(program_frame):
        program_frame = program_frame.f_back
    return "" if program_frame is None else site_of(program_frame, program_frame.f_lineno)


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
    (own, other), (own_of_all, other_of_all) = map(
        _places, (leaf.__traceback__, error.__traceback__)
    )
    place = own or own_of_all or called_at or other or other_of_all
    return text + (f" ({one_line(place, _MAX_PLACE)})" if place else "")


def _text_of(error: BaseException) -> str:
    """Return the type and the first line of the message."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    lines = text_of(error).strip().splitlines() or [""]
    first = lines[0].strip()
    if first.endswith(ANNOUNCES) and len(lines) > 1:
        lines[0] = ANNOUNCES
        first = first.removesuffix(ANNOUNCES) + headline_of("\n".join(lines))
    return one_line(f"{name}: {first}" if first else name, _MAX_SAID)


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
