"""The record of a process that fails: written before anything is printed, read by its launcher.

One line of JSON for each event, appended with one write; a torn last line is ignored. What a
process prints is no evidence: a traceback on stderr may be of an exception that it handled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import linecache
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from shoal import settings
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DeadlineError,
    DeviceStartError,
    DivergenceError,
    InitializeError,
    ProcessLostError,
    ShoalError,
    StalledError,
)
from shoal.paths import open_no_link
from shoal.runtime.failures.exception_text import is_of_program, is_torn, peers_named
from shoal.runtime.failures.facts import (
    MESSAGE_CHARACTERS,
    UNREADABLE,
    CallPlace,
    Cause,
    CheckpointFacts,
    Difference,
    ErrorFacts,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
    of_json,
    to_json,
)
from shoal.runtime.failures.joining_text import not_joined_of
from shoal.runtime.failures.shortening import capital
from shoal.runtime.failures.stack_text import threads_of, without_packages
from shoal.runtime.system.callsite import site_of, source_at, split_site
from shoal.runtime.system.foreign_text import text_of
from shoal.tracebacks import is_bug, is_ours

VARIABLE = "SHOAL_RECORD_FILE"
BEGIN, END = b"\x1e[shoal: for the log]\x1e\n", b"\x1e[shoal: for all]\x1e\n"
_BYTES = 64 << 10  # of a record
_READ_BYTES = 1 << 20  # of its file
_MOST = (MESSAGE_CHARACTERS, 1000, 100)  # characters of each text, until it fits
_FRAMES = 40  # the outermost and the innermost of them
_CHAIN = 3
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_OF_JAX = "For simplicity, JAX has removed its internal frames"  # the note on a traceback
_LEAVES = 20
_SOURCE = 200  # characters of a line of source
FOUND = ("diverged", "deadline", "stalled")  # kinds of errors that processes find together
_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (DivergenceError, "diverged"),
    (DeadlineError, "deadline"),
    (StalledError, "stalled"),
    (DeviceStartError, "exception"),  # of this host: it has met the others
    (InitializeError, "not_joined"),
    (CorruptCheckpointError, "checkpoint"),
    (ProcessLostError, "lost"),
    (SystemExit, "exit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRecord:
    """What a process has recorded of its own end."""

    pid: int
    at_s: float  # on the monotonic clock
    cause: Cause
    because_of: ProcessSet | None = None  # whose end led to it; empty: a service's. None: its own
    is_torn: bool = False  # an error of JAX's runtime, which may follow another process's end


def record(
    error: BaseException,
    *,
    process: int | None = None,
    step: int | None = None,
    point: CalledAt | None = None,
    because_of: Iterable[int] | None = None,
    speakers: Sequence[str] = (),
    thread: str = "",
    record_file: tuple[str, int] = ("", -1),
) -> bool:
    """Record an uncaught exception; return whether a launcher can read it.

    Args:
      process: this one, in its job.
      point: where it has waited last.
      because_of: the processes whose end led to it; None: those that it names, if any.
      speakers: what messages of shoal begin with: each process of the job. One that all were given
        begins with the process that made it.
      thread: the name of the thread that it ended, if not the main one.
      record_file: its path, and a descriptor for a process that can open no more files; as the
        environment says, if not given.

    Never raises: the end of the process is more important.
    """
    path = record_file[0] or _path()
    if not path:
        return False
    try:
        records = _records(error, process, step, point, because_of, speakers, thread)
        texts = (json.dumps(to_json(record)) for record in records)
        text = next((text for text in texts if len(text) < _BYTES), None)
        if text is None:
            return False
        data = text.encode() + b"\n"
        try:
            file = open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            if not os.path.samestat(os.fstat(record_file[1]), os.stat(path)):
                raise  # the program has closed it, and has another file there
            return os.write(record_file[1], data) == len(data)
        try:
            return os.write(file, data) == len(data)
        finally:
            os.close(file)
    except Exception:  # noqa: BLE001 (methods of the exception may raise anything)
        return False


def record_of(
    error: BaseException,
    *,
    process: int | None = None,
    step: int | None = None,
    point: CalledAt | None = None,
    because_of: Iterable[int] | None = None,
    speakers: Sequence[str] = (),
    most_bytes: int = _BYTES - 1,
) -> LastRecord | None:
    """Return what a process records of an uncaught exception: see `record`. None: it is too long,
    whatever is left out of it.

    Args:
      most_bytes: of its JSON.
    """
    records = _records(error, process, step, point, because_of, speakers)
    return next(
        (record for record in records if len(json.dumps(to_json(record))) <= most_bytes), None
    )


def _records(
    error: BaseException,
    process: int | None,
    step: int | None,
    point: CalledAt | None,
    because_of: Iterable[int] | None,
    speakers: Sequence[str],
    thread: str = "",
) -> Iterator[LastRecord]:
    """Yield the record of an exception, each time with less of its texts."""
    at_s = time.monotonic()
    if because_of is None:
        because_of = peers_named(error)
    peers = _process_set(because_of)
    for most in _MOST:
        cause = cause_of(
            error, process=process, step=step, point=point, speakers=speakers, most=most
        )
        yield LastRecord(
            pid=os.getpid(),
            at_s=at_s,
            cause=dataclasses.replace(cause, thread=thread),
            because_of=peers,
            is_torn=peers is None and is_torn(error),
        )


def record_of_exit(
    code: int, headline: str, because_of: Iterable[int] | None, process: int
) -> LastRecord:
    """Return the record of a process that ends without an exception: by `sys.exit`, or in a hang.

    Args:
      headline: why it ends, as one line.
      because_of: the processes whose end led to this one; empty: a service's. None: its own.
    """
    text = f"{capital(headline)}."
    cause = Cause(processes=ProcessSet([process]), kind="exit", exit_code=code, words=(text,))
    return LastRecord(
        pid=os.getpid(),
        at_s=time.monotonic(),
        cause=cause,
        because_of=_process_set(because_of),
    )


def _process_set(processes: Iterable[int] | None) -> ProcessSet | None:
    if processes is None:
        return None
    return ProcessSet(processes)


def record_in(text: str) -> LastRecord | None:
    """Return the record that a process has sent, as JSON; None: none, or something else."""
    with contextlib.suppress(*UNREADABLE):
        return of_json(LastRecord, json.loads(text))
    return None


def how_of(end: LastRecord | None) -> str:
    """Return how a process that sent this has failed: see `Departure.how`."""
    if end is None:
        return ""
    if end.cause.kind in FOUND:
        return "found"
    if end.cause.kind == "exit":
        return "exited"
    return "raised"


def _path() -> str:
    """Return the file of this process, "" if no launcher reads it."""
    pid, _, path = settings.text(VARIABLE).partition(":")
    if pid != str(os.getpid()):
        return ""
    return path


class Taken(NamedTuple):
    """What a process has recorded."""

    last: LastRecord | None = None  # of its own end
    threads: tuple[LastRecord, ...] = ()  # of threads that exceptions have ended


def claim() -> None:
    """Let this process record how it ends, if a command that `shoal run` has started started it."""
    path = settings.text(VARIABLE)
    if os.path.isabs(path):  # else with the pid of a process, whose children record nothing
        os.environ[VARIABLE] = f"{os.getpid()}:{path}"


def take(path: str, pid: int | None) -> Taken:
    """Return the records of a process (None: of any), and remove the file."""
    last, threads = None, []
    with contextlib.suppress(OSError):
        with open(open_no_link(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            lines = file.read(_READ_BYTES).splitlines()
        os.unlink(path)
        for line in lines:
            with contextlib.suppress(*UNREADABLE):
                taken = of_json(LastRecord, json.loads(line))
                if pid not in (None, taken.pid):
                    continue
                if taken.cause.thread:
                    threads.append(taken)
                else:
                    last = taken
    return Taken(last, tuple(threads))


def take_fault(path: str) -> tuple[StackFrame, ...]:
    """Return where a process stood when a fault of native code ended it, and remove the file.

    The program's own lines, the outermost first; none if it did not end so.

    Args:
      path: of its record.
    """
    try:
        file = open_no_link(fault_file(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(file, errors="replace") as stream:
            text = stream.read(_READ_BYTES)
        os.unlink(fault_file(path))
    except OSError:
        return ()
    _, _, stack = text.rpartition("(most recent call first):")
    return _frames_of(f"Thread '':\n{stack}")


def fault_file(path: str) -> str:
    """Return the file in which faulthandler writes, beside that of the record."""
    return f"{path}.fault"


def has_launcher() -> bool:
    """Return whether a launcher reads what this process records, and reports the failure."""
    return bool(_path())


def for_launcher() -> contextlib.AbstractContextManager[None]:
    """Mark what is printed in the block, as `for_the_log`, where a launcher reports failures."""
    return for_the_log(has_launcher())


@contextlib.contextmanager
def for_the_log(is_recorded: bool) -> Iterator[None]:
    """Mark what is printed to stderr in the block: `shoal run` writes it to the log only.

    Args:
      is_recorded: False: nothing is marked, since no report would show it.
    """
    if not is_recorded:
        yield
        return
    _mark(BEGIN)
    try:
        yield
    finally:
        _mark(END)


def _mark(mark: bytes) -> None:
    with contextlib.suppress(Exception):  # the program may have closed or replaced the stream
        sys.stderr.flush()
        file = sys.stderr.fileno()
        if file in (1, 2):
            os.write(file, mark)


def cause_of(
    error: BaseException,
    *,
    process: int | None = None,
    step: int | None = None,
    point: CalledAt | None = None,
    speakers: Sequence[str] = (),
    most: int = MESSAGE_CHARACTERS,
) -> Cause:
    """Return the facts of an exception of this process, with `most` characters of each text."""
    frames, left_out, repeats = _stack(error)
    facts = dataclasses.replace(_facts(error, _CHAIN, most), repeats=repeats)
    speaker = next((name for name in speakers if facts.message.startswith(name)), "")
    facts = dataclasses.replace(facts, speaker=speaker)
    shown = frames
    if len(frames) > _FRAMES:
        shown = (*frames[: _FRAMES // 2], *frames[-_FRAMES // 2 :])
    processes, place = ProcessSet(), None
    if process is not None:
        processes = ProcessSet([process])
    if point is not None:
        place = place_of(point)
    return Cause(
        processes=processes,
        kind=next((kind for of, kind in _KINDS if isinstance(error, of)), "exception"),
        exit_code=exit_code_of(error),
        error=facts,
        is_bug=is_bug(error),
        frames=shown,
        more_frames=len(frames) - len(shown),
        left_out=left_out,
        step=step,
        place=place,
        difference=_difference(error),
        wait=_wait(error),
        checkpoint=_checkpoint(error),
    )


class CalledAt(Protocol):
    """A call and its place, such as a point where processes meet."""

    @property
    def call(self) -> str:
        """The call: "barrier"."""

    @property
    def name(self) -> str:
        """Its name; that of the call if it has none."""

    @property
    def site(self) -> str:
        """The call site: "train.py:6 (main)"."""


def place_of(point: CalledAt) -> CallPlace:
    """Return the facts of a point."""
    return place_at(point.call, point.name, point.site)


def place_at(call: str, name: str, site: str) -> CallPlace:
    """Return the facts of a call and its call site.

    >>> place = place_at("barrier", "step", "train.py:6 (main)")
    >>> place.call, place.name, place.file, place.line
    ('barrier', 'step', 'train.py', 6)
    """
    file, line = split_site(site)
    if name == call:
        name = ""
    return CallPlace(call=call, name=name, file=file, line=line, source=source_at(site))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that an exception ends."""
    if isinstance(error, ShoalError):
        return error.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code & 0xFF
        return int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return 1


def _facts(error: BaseException, depth: int, most: int) -> ErrorFacts:
    """Return an exception, and those that led to it."""
    kind = type(error)
    if isinstance(error, SyntaxError) and error.msg:
        message = text_of(error.msg)  # the place is the last frame
    elif isinstance(error, SystemExit):
        message = without_packages(text_of(error.code))
    else:
        message = without_packages(text_of(error))
    inner = error.__cause__
    if inner is None and not error.__suppress_context__:
        inner = error.__context__
    while type(inner) is kind and text_of(inner) in message:  # said of this process, once more
        inner = inner.__cause__
    leaves: Sequence[BaseException] = ()
    if isinstance(error, BaseExceptionGroup):
        leaves = error.exceptions
    place, trace = "", error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        place = _short(trace.tb_frame, trace.tb_lineno)
    notes = [note for note in getattr(error, "__notes__", ()) if _OF_JAX not in text_of(note)]
    shown: tuple[ErrorFacts, ...] = ()
    caused_by: tuple[ErrorFacts, ...] = ()
    if depth:
        shown = tuple(_facts(leaf, 0, most) for leaf in leaves[:_LEAVES])
        if inner is not None:
            caused_by = (_facts(inner, depth - 1, most),)
    return ErrorFacts(
        type=kind.__qualname__,
        module=kind.__module__,
        message=message[:most],
        message_characters=len(message) if len(message) > most else None,
        notes=tuple(text_of(note)[:most] for note in notes[:_CHAIN]),
        caused_by=caused_by,
        place=place,
        leaves=shown,
        more_leaves=max(0, len(leaves) - _LEAVES),
    )


def _short(frame: FrameType, line: int | None) -> str:
    return site_of(frame, line).rpartition(" (")[0]


def _stack(error: BaseException) -> tuple[tuple[StackFrame, ...], dict[str, int], int]:
    """Return the program's own frames, how many of each package stand below the last of them, and
    how many are left out since recursion repeats them.

    All frames if the user asks for them, or if the error is a bug; the innermost three if none is
    the program's.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        place = StackFrame(
            file=_from_import_root(error.filename),
            line=error.lineno,
            function="<module>",
            source=(error.text or "").strip()[:_SOURCE],
        )
        return (*_own(error), place), {}, 0
    entries = [*_entries(error.__traceback__)]
    shows_all = settings.text("SHOAL_TRACEBACK") == "full" or is_bug(error)
    own = [i for i, entry in enumerate(entries) if shows_all or is_of_program(entry.tb_frame)]
    is_exit = isinstance(error, SystemExit)  # raised by the hook of `sys.exit`
    if not own:
        shown = [entry for entry in entries if not (is_exit and _is_of_start(entry.tb_frame))]
        return tuple(map(_frame, shown[-3:])), {}, 0
    if is_exit:
        entries = entries[: own[-1] + 1]
    below = Counter(_owner(entry.tb_frame) for entry in entries[own[-1] + 1 :])
    chosen, repeats = _unrepeated([entries[i] for i in own])
    return tuple(map(_frame, chosen)), dict(below), repeats


def _is_of_start(frame: FrameType) -> bool:
    """Return whether a frame is shoal's, or of what starts a module for `-m`."""
    return is_ours(frame) or frame.f_code.co_filename == "<frozen runpy>"


def _from_import_root(file: str) -> str:
    """Return the path of a file from the directory where Python would find it; else its name."""
    roots = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    root = max(filter(file.startswith, roots), key=len, default="")
    if not root:
        return os.path.basename(file)
    return file.removeprefix(root).replace(os.sep, "/")


def _unrepeated(entries: list[TracebackType]) -> tuple[list[TracebackType], int]:
    """Return entries without the longest run of one line, and its length, if that is recursion."""
    runs = [
        [*run]
        for _, run in itertools.groupby(
            entries, lambda entry: (entry.tb_frame.f_code, entry.tb_lineno)
        )
    ]
    longest = max(runs, key=len)
    if len(longest) <= _FRAMES:
        return entries, 0
    repeats = len(longest) - 1
    del longest[1:]
    return [entry for run in runs for entry in run], repeats


def _own(error: BaseException) -> Sequence[StackFrame]:
    entries = _entries(error.__traceback__)
    return [_frame(entry) for entry in entries if is_of_program(entry.tb_frame)]


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _owner(frame: FrameType) -> str:
    """Return the package that a frame belongs to."""
    if is_ours(frame):
        return "shoal"
    name = frame.f_globals.get("__name__")
    return str(name or "?").partition(".")[0]


def _frame(trace: TracebackType) -> StackFrame:
    frame, line = trace.tb_frame, trace.tb_lineno or 0
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()[:_SOURCE]
    file = _short(frame, line).rpartition(":")[0]
    return StackFrame(file=file, line=line, function=code.co_qualname, source=source)


def _difference(error: BaseException) -> Difference | None:
    difference: Any = getattr(error, "difference", None)
    if isinstance(difference, Mapping):
        return of_json(Difference, difference)
    if isinstance(difference, Difference):
        return difference
    return None


def _wait(error: BaseException) -> Wait | None:
    """Return the wait that ended; the launcher adds those that had arrived."""
    if isinstance(error, DeadlineError) and error.missing:
        missing = [_missing(process, error) for process in error.missing]
        limit_s = round(error.waited_s, 1)
        return Wait(call="", name=error.name, limit_s=limit_s, missing=tuple(missing))
    if isinstance(error, InitializeError) and error.missing:
        phrase = "has not called initialize"
        if not_joined_of(error).strangers:
            phrase = "has not joined"
        missing = [Waiting(processes=ProcessSet(error.missing), words=phrase)]
        return Wait(call="initialize", missing=tuple(missing))
    return None


def _missing(process: int, error: DeadlineError) -> Waiting:
    """Return where a process was: where it met the others last, or its last words; its stack."""
    frames = _frames_of(error.stacks.get(process, ""))
    last_met = _last_met(error.places.get(process))
    last_words = ""
    if last_met is None:
        last_words = error.last_words.get(process, "")
    return Waiting(
        processes=ProcessSet([process]), frames=frames, last_met=last_met, words=last_words
    )


def _last_met(met: object) -> CallPlace | None:
    """Return where a process met the others last: see `Record.last_call`."""
    if not (isinstance(met, Mapping) and met.get("met") and met["call"]):
        return None
    # Another process has other modules: a file of that name may be another here.
    place = place_at(met["call"], met["name"], met["site"])
    return dataclasses.replace(place, source="", age_s=round(float(met["age_s"]), 1))


def _frames_of(stack: str) -> tuple[StackFrame, ...]:
    """Return the program's frames of the first thread of some stacks, the outermost first; the
    innermost three if none is the program's."""
    threads = threads_of(stack)
    if not threads:
        return ()
    return tuple(
        StackFrame(
            file=os.path.basename(frame.file),
            line=frame.line,
            function=frame.function,
            source=frame.source or linecache.getline(frame.file, frame.line).strip()[:_SOURCE],
        )
        for frame in threads[0].of_program
    )


def _checkpoint(error: BaseException) -> CheckpointFacts | None:
    if not isinstance(error, CheckpointError) or not error.path:
        return None
    return CheckpointFacts(
        path=str(error.path),
        file=str(getattr(error, "file", "") or ""),
        leaf=str(getattr(error, "leaf", "") or ""),
        offset_bytes=getattr(error, "offset", None),
    )
