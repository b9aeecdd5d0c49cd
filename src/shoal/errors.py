"""Every exception of shoal, named by who must act.

::

    ShoalError
    ├── UsageError            you: an argument has a wrong value      (also a ValueError)
    │   └── UsageTypeError    you: an argument has the wrong type            (also a TypeError)
    ├── DivergenceError       you: different calls or values on different processes
    ├── ProcessLostError      the cluster: a process is dead or unreachable
    ├── PeerFailedError       the peer: another process raised; carries its traceback
    ├── DeadlineError         a process is late, not dead            (also a TimeoutError)
    ├── StalledError          the program: no process made progress for the limit
    ├── NonFiniteError        the numbers: a NaN or an infinity (also a FloatingPointError)
    ├── InitializeError       the launch: the job could not be joined
    │   └── DeviceStartError      devices failed to start: a likely hardware fault
    │       └── NoDevicesError        no devices of the requested kind
    └── CheckpointError       the storage: a checkpoint on disk
        ├── NotCommittedError          no checkpoint at this path       (also a FileNotFoundError)
        ├── StepAlreadyCommittedError  there is one; it is kept        (also a FileExistsError)
        ├── SaveAbortedError           this save failed; earlier checkpoints are unaffected
        ├── CorruptCheckpointError     bytes on disk differ from those saved
        ├── UnsupportedCheckpointError written by a newer shoal
        └── StorageError          the file system failed          (also an OSError)
            ├── StorageFullError           no space left
            └── NotSharedError             processes do not see each other's files
    RestoreMismatchError, a UsageError: the requested tree does not match the saved one.

A message has one to three lines: the call with its arguments, what is wrong, what to do. The facts
behind it are attributes. ``exit_code`` is the exit code of a program that dies of the error under
``shoal run``. Every error can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "DeadlineError",
    "DeviceStartError",
    "DivergenceError",
    "DtypeWarning",
    "InitializeError",
    "NoDevicesError",
    "NonFiniteError",
    "NotCommittedError",
    "NotSharedError",
    "PeerFailedError",
    "ProcessLostError",
    "RestoreMismatchError",
    "SaveAbortedError",
    "ShoalError",
    "StalledError",
    "StepAlreadyCommittedError",
    "StorageError",
    "StorageFullError",
    "UnsupportedCheckpointError",
    "UsageError",
    "UsageTypeError",
    "WrongType",
    "closest",
    "nearest",
    "raise_all",
    "with_article",
]


class ShoalError(Exception):
    """The root: `except ShoalError` catches whatever shoal raises on purpose."""

    exit_code = 1


class DtypeWarning(UserWarning):
    """Floats of a host value were rounded, since arrays on devices cannot have their dtype."""


class UsageError(ShoalError, ValueError):
    """An argument has a wrong value. Nothing was changed.

    `problems` lists everything that is wrong; the message lists it too.
    """

    exit_code = 2

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class UsageTypeError(UsageError, TypeError):
    """An argument has the wrong type. Nothing was changed."""


class DivergenceError(ShoalError):
    """Processes have made different calls, or hold different values. Raised on every one of them.

    `sides` maps each version, as text, to the processes that hold it. `difference` holds the same
    as facts for a report: what differs, and each group's call, place and source line; or None.
    """

    exit_code = 70

    def __init__(
        self,
        message: str,
        *,
        sides: Mapping[str, tuple[int, ...]] | None = None,
        difference: object = None,
    ) -> None:
        super().__init__(message)
        self.sides = dict(sides or {})
        self.difference = difference


class ProcessLostError(ShoalError):
    """Processes are dead or unreachable. Raised on the survivors.

    `lost` maps each lost process to the reason. It is empty if the loss is that of a service which
    all processes need: the coordinator, or JAX's service. `ends` holds the same as facts for a
    report, as far as they are known.
    """

    exit_code = 71

    def __init__(
        self,
        message: str,
        *,
        lost: Mapping[int, str] | None = None,
        ends: Mapping[int, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.lost = dict(lost or {})
        self.ends = dict(ends or {})


class PeerFailedError(ShoalError):
    """Another process raised an exception or left early. `failed` maps each such process to its
    text: the exception and its place, or the exit. `details` is the traceback of the first, also a
    note of this exception. `ends` holds the same as facts for a report, as far as they are known.
    """

    exit_code = 72

    def __init__(
        self,
        message: str,
        *,
        failed: Mapping[int, str] | None = None,
        details: str = "",
        ends: Mapping[int, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.failed = dict(failed or {})
        self.ends = dict(ends or {})
        self.details = details
        if details:
            self.add_note(details)


class DeadlineError(ShoalError, TimeoutError):
    """A process is late, but not known to be dead. Raised on every waiting process.

    `name` is the point where the others wait, `waited_s` how long (seconds), `missing` the
    processes that did not arrive, `last_words` the last report of each of them, `stacks` the Python
    stacks of their threads, as far as they answered. `places` holds their last calls as facts for a
    report, as far as they are known.
    """

    exit_code = 73

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        waited_s: float = 0.0,
        missing: Iterable[int] = (),
        last_words: Mapping[int, str] | None = None,
        stacks: Mapping[int, str] | None = None,
        places: Mapping[int, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.waited_s = waited_s
        self.missing = tuple(missing)
        self.last_words = dict(last_words or {})
        self.stacks = dict(stacks or {})
        self.places = dict(places or {})


class StalledError(ShoalError):
    """No process of the job has made progress for the limit that was asked for, and none does
    anything. Raised where a process waits in shoal, and at its next step or call; elsewhere the
    process is ended. The message names the place of each."""

    exit_code = 77

    def __init__(self, message: str) -> None:
        super().__init__(message)


class NonFiniteError(ShoalError, FloatingPointError):
    """A value is a NaN or an infinity. Raised on every process that checked it.

    It describes the first one: `path` is its leaf ("the value": the tree is one), `index` its place
    in the leaf, `value` the value as text, `process` and `device` hold it (`device` is the id, None
    for a value of the host), `step` is the step of that process, or None. `counts` maps "nan",
    "inf" and "-inf" to their numbers in that leaf, of which replicas count once; `also` has the
    paths of other such leaves, not all of them if there are many.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        index: Iterable[int] = (),
        value: str = "",
        process: int = 0,
        device: int | None = None,
        step: int | None = None,
        counts: Mapping[str, int] | None = None,
        also: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.path = path
        self.index = tuple(index)
        self.value = value
        self.process = process
        self.device = device
        self.step = step
        self.counts = dict(counts or {})
        self.also = tuple(also)


class InitializeError(ShoalError):
    """The job could not be joined. Raised on every process that is alive.

    `missing` lists the processes that never arrived. `refusal` holds the reason as facts for a
    report, or is None.
    """

    exit_code = 74

    def __init__(
        self, message: str, *, missing: Iterable[int] = (), refusal: object = None
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.refusal = refusal


class DeviceStartError(InitializeError):
    """The devices of this process failed to start: most likely a hardware fault.

    `process` and `host` say where; `platform` is "tpu", "gpu", or "" for the default.
    The other processes of the job get PeerFailedError or ProcessLostError.
    """

    def __init__(
        self, message: str, *, platform: str = "", process: int = 0, host: str = ""
    ) -> None:
        super().__init__(message)
        self.platform = platform
        self.process = process
        self.host = host


class NoDevicesError(DeviceStartError):
    """No devices of the requested kind, or no software to drive them."""


class CheckpointError(ShoalError):
    """A problem with a checkpoint on disk. `path` is its path."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotCommittedError(CheckpointError, FileNotFoundError):
    """No committed checkpoint at this path (no file COMMIT); perhaps incomplete attempts."""


class StepAlreadyCommittedError(CheckpointError, FileExistsError):
    """A checkpoint exists there, written by the save `attempt`; it was not overwritten."""

    def __init__(self, message: str, *, path: str = "", attempt: str = "") -> None:
        super().__init__(message, path=path)
        self.attempt = attempt


class SaveAbortedError(CheckpointError):
    """This save failed; earlier checkpoints are unaffected.

    It is raised on every process that saves, except the one that caused the failure.
    `phase` is the phase it reached, `processes` are those that caused the failure. Its exit code is
    that of its cause: 71 if a process was lost, 72 if one failed, 73 if one was late.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        phase: str = "",
        processes: Iterable[int] = (),
        exit_code: int = 1,
    ) -> None:
        super().__init__(message, path=path)
        self.phase = phase
        self.processes = tuple(processes)
        self.exit_code = exit_code


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk differ from those that were saved. None of their values was returned.

    `file` is the name of the file, `leaf` the name of the leaf (empty if the damage is in no leaf),
    `offset` the first byte of the damaged block (None: the file as a whole).
    """

    exit_code = 76

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        file: str = "",
        leaf: str = "",
        offset: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.file = file
        self.leaf = leaf
        self.offset = offset


class UnsupportedCheckpointError(CheckpointError):
    """Written by a later version, with `features` that this version does not support."""

    def __init__(self, message: str, *, path: str = "", features: Iterable[str] = ()) -> None:
        super().__init__(message, path=path)
        self.features = tuple(features)


class StorageError(CheckpointError, OSError):
    """The file system failed. `errno` is that of the OSError, `path` the file concerned."""

    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:  # errno is not in __dict__
        return type(self), self.args, {**self.__dict__, "errno": self.errno}


class StorageFullError(StorageError):
    """No space left. `needed_bytes` and `free_bytes` are None if unknown."""

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        errno: int | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message, path=path, errno=errno)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class NotSharedError(StorageError):
    """Processes do not see each other's files at this path. `processes` lists those that do not."""

    def __init__(self, message: str, *, path: str = "", processes: Iterable[int] = ()) -> None:
        super().__init__(message, path=path)
        self.processes = tuple(processes)


class RestoreMismatchError(UsageError):
    """The requested tree does not match the saved one; nothing was restored.

    Or a state does not match what `Checkpoints.resume` was called with; nothing was saved.

    Each attribute lists names of leaves: those `missing` from the checkpoint, `unexpected` in it,
    of a different shape (`wrong_shape`), or of a different dtype (`wrong_dtype`).
    """

    def __init__(
        self,
        message: str,
        *,
        problems: Iterable[str] = (),
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        wrong_shape: Iterable[str] = (),
        wrong_dtype: Iterable[str] = (),
    ) -> None:
        super().__init__(message, problems=problems)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong_shape = tuple(wrong_shape)
        self.wrong_dtype = tuple(wrong_dtype)


def nearest(name: object, known: Iterable[str], *, prefix: str = "") -> str:
    """Return `"; did you mean 'data'?"` if `name` is close to a known one, else "".

    What all of them begin with, the `prefix`, would make any two of them close: it is not compared.
    """
    rest = [candidate.removeprefix(prefix) for candidate in known]
    close = closest(str(name).removeprefix(prefix), rest)
    return "" if close is None else f"; did you mean {prefix + close!r}?"


def closest(text: str, known: Iterable[str]) -> str | None:
    """Return the known text that is most similar to this one, None if none is similar."""
    import difflib

    if len(text) > 100:  # no typo, and difflib is quadratic in its length
        return None
    return next(iter(difflib.get_close_matches(text, [*known], n=1, cutoff=0.5)), None)


def with_article(noun: str) -> str:
    """Return a noun, such as the name of a type, after its indefinite article.

    >>> [with_article(name) for name in ("int", "ndarray", "uint8", "list", "user", "axis")]
    ['an int', 'an ndarray', 'a uint8', 'a list', 'a user', 'an axis']
    """
    sounds_like_you = ("uni", "uint", "use", "utf", "uu")
    word = noun.lower()
    is_vowel = word.startswith(("a", "e", "i", "o", "u", "nd"))
    if is_vowel and not word.startswith(sounds_like_you):
        return f"an {noun}"
    return f"a {noun}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> [counted(1, "file"), counted(2, "file"), counted(0, "leaf", "leaves")]
    ['1 file', '2 files', '0 leaves']
    """
    return f"{count} {inflected(count, noun, plural or f'{noun}s')}"


def inflected(count: int, word: str, plural: str) -> str:
    """Return the form of a word that agrees with a number.

    >>> inflected(1, "was", "were")
    'was'
    """
    return word if count == 1 else plural


class WrongType(str):
    """A problem about a type: with one among them, `raise_all` raises a UsageTypeError."""


_MOST_PROBLEMS = 100


def raise_all(caller: str, problems: list[str], *, wrong_type: bool = False) -> None:
    """Raise one error that names all problems, or return if there are none.

    The type is UsageTypeError if `wrong_type` or if any problem is a `WrongType`. At most 100
    problems are listed: lists longer than that were not written by hand.
    """
    if not problems:
        return
    wrong_type = wrong_type or any(isinstance(problem, WrongType) for problem in problems)
    kind = UsageTypeError if wrong_type else UsageError
    if len(problems) == 1:
        raise kind(f"{caller}: {problems[0]}", problems=problems)
    lines = problems[:_MOST_PROBLEMS]
    if len(problems) > len(lines):
        lines = [*lines, f"and {len(problems) - len(lines)} more"]
    listed = "\n".join(f"  - {problem}" for problem in lines)
    raise kind(f"{caller}: {len(problems)} problems\n{listed}", problems=problems)
