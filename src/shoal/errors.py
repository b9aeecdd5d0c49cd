"""Every exception of shoal, named by who must act.

::

    ShoalError
    ├── UsageError            you: a value you passed is wrong      (also a ValueError)
    │   └── UsageTypeError    you: it has the wrong type            (also a TypeError)
    ├── DivergenceError       you: processes disagree
    ├── ProcessLostError      the cluster: a process is dead or unreachable
    ├── PeerFailedError       the peer: another process raised; carries its traceback
    ├── DeadlineError         somebody is late, not dead            (also a TimeoutError)
    ├── InitializeError       the start-up: the job could not be joined
    │   └── DeviceStartError      devices did not start: a likely hardware fault
    │       └── NoDevicesError        there are none of the kind asked for
    └── CheckpointError       what lies on disk
        ├── NotCommitted          nothing is saved there           (also a FileNotFoundError)
        ├── StepAlreadyCommitted  something is; it is kept          (also a FileExistsError)
        ├── SaveAborted           this save did not happen; earlier ones stand
        ├── CorruptCheckpoint     bytes are not those that were saved
        ├── UnsupportedCheckpoint it needs a newer shoal
        └── StorageError          the file system refused          (also an OSError)
            ├── StorageFull           no space is left
            └── NotShared             processes do not see one another's files
    RestoreMismatch, a UsageError: what you want restored is not what was saved.

A message has one to three lines: what you asked, what is true, what to do. The facts behind it
are attributes. ``exit_code`` is what a program that dies of the error exits with under
``shoal run``. Every error can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "CheckpointError",
    "CorruptCheckpoint",
    "DeadlineError",
    "DeviceStartError",
    "DivergenceError",
    "InitializeError",
    "NoDevicesError",
    "NotCommitted",
    "NotShared",
    "PeerFailedError",
    "ProcessLostError",
    "RestoreMismatch",
    "SaveAborted",
    "ShoalError",
    "StepAlreadyCommitted",
    "StorageError",
    "StorageFull",
    "UnsupportedCheckpoint",
    "UsageError",
    "UsageTypeError",
    "WrongType",
    "nearest",
    "raise_all",
]


class ShoalError(Exception):
    """The root: `except ShoalError` catches whatever shoal raises on purpose."""

    exit_code = 1


class UsageError(ShoalError, ValueError):
    """A value that you passed is wrong. Nothing was changed.

    `offences` holds each thing that is wrong, in words; the message lists them.
    """

    exit_code = 2

    def __init__(self, message: str, *, offences: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.offences = tuple(offences) or (message,)


class UsageTypeError(UsageError, TypeError):
    """A value that you passed has the wrong type. Nothing was changed."""


class DivergenceError(ShoalError):
    """Processes disagree about what they are doing. Raised on every one of them.

    `sides` maps each version of the story (its text) to the processes that told it.
    """

    exit_code = 70

    def __init__(self, message: str, *, sides: Mapping[str, tuple[int, ...]] | None = None) -> None:
        super().__init__(message)
        self.sides = dict(sides or {})


class ProcessLostError(ShoalError):
    """Processes are dead or unreachable. Raised on the survivors.

    `lost` maps each lost process to the reason, in words. It is empty when something else is lost
    that all of them need: the meeting place, or JAX's service.
    """

    exit_code = 71

    def __init__(self, message: str, *, lost: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.lost = dict(lost or {})


class PeerFailedError(ShoalError):
    """Another process raised or left early. `failed` maps each such process to how it ended: in
    one line, the exception and where, or the exit; the traceback of the first follows it."""

    exit_code = 72

    def __init__(self, message: str, *, failed: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failed = dict(failed or {})


class DeadlineError(ShoalError, TimeoutError):
    """Somebody is late, not known to be dead. Raised on everybody who waits.

    `name` is the point where the others wait, `waited_s` how long (seconds), `missing` the
    processes that did not come, `last_words` what each of them last said, `stacks` the Python
    stacks of their threads, as far as they answered.
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
    ) -> None:
        super().__init__(message)
        self.name = name
        self.waited_s = waited_s
        self.missing = tuple(missing)
        self.last_words = dict(last_words or {})
        self.stacks = dict(stacks or {})


class InitializeError(ShoalError):
    """The job could not be joined. Raised on every process that is alive.

    `missing` names the processes that never came.
    """

    exit_code = 74

    def __init__(self, message: str, *, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class DeviceStartError(InitializeError):
    """The devices of this process did not start: most likely a fault of the hardware.

    `process` and `host` say where, `platform` which devices: "tpu", "gpu", or "" for the default.
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
    """There are no devices of the kind that was asked for, or no software for them."""


class CheckpointError(ShoalError):
    """Something about what lies on disk. `path` is the checkpoint's."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotCommitted(CheckpointError, FileNotFoundError):
    """Nothing is saved there: no file COMMIT. Attempts may be, which were never completed."""


class StepAlreadyCommitted(CheckpointError, FileExistsError):
    """Something is saved there already, by the save `attempt`; nothing is ever overwritten."""

    def __init__(self, message: str, *, path: str = "", attempt: str = "") -> None:
        super().__init__(message, path=path)
        self.attempt = attempt


class SaveAborted(CheckpointError):
    """This save did not happen, and earlier ones stand. Raised on every process.

    `phase` says how far it came, `processes` on whose account it ended. Its exit code is that of
    its cause: 71 if a process was lost, 72 if one failed, 73 if one was late.
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


class CorruptCheckpoint(CheckpointError):
    """Bytes are not those that were saved. No value of them was returned.

    `file` is the name of the file, `leaf` the name of the leaf (empty if it is none's), `offset`
    the first byte of the damaged block (None: the file as a whole).
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


class UnsupportedCheckpoint(CheckpointError):
    """It was written by a later version, and needs `features` that this one does not know."""

    def __init__(self, message: str, *, path: str = "", features: Iterable[str] = ()) -> None:
        super().__init__(message, path=path)
        self.features = tuple(features)


class StorageError(CheckpointError, OSError):
    """The file system refused. `errno` says why, as in an OSError, `path` at which file."""

    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:  # errno is none of the attributes in __dict__
        return type(self), self.args, {**self.__dict__, "errno": self.errno}


class StorageFull(StorageError):
    """No space is left. `needed_bytes` and `free_bytes` as far as they are known."""

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


class NotShared(StorageError):
    """Processes do not see one another's files at this path. `processes`: those that do not."""

    def __init__(self, message: str, *, path: str = "", processes: Iterable[int] = ()) -> None:
        super().__init__(message, path=path)
        self.processes = tuple(processes)


class RestoreMismatch(UsageError):
    """What you want restored is not what was saved; nothing was restored.

    Each attribute lists names of leaves: those that are `missing` in the checkpoint, `unexpected`
    in it, of another shape (`wrong_shape`), or of another dtype (`wrong_dtype`).
    """

    def __init__(
        self,
        message: str,
        *,
        offences: Iterable[str] = (),
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        wrong_shape: Iterable[str] = (),
        wrong_dtype: Iterable[str] = (),
    ) -> None:
        super().__init__(message, offences=offences)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong_shape = tuple(wrong_shape)
        self.wrong_dtype = tuple(wrong_dtype)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return `"; did you mean 'data'?"` for a near miss, else an empty string."""
    import difflib

    asked = str(name)
    if len(asked) > 100:  # no slip of the fingers, and difflib is quadratic in its length
        return ""
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class WrongType(str):
    """An offence that is about a type: with one among them `raise_all` raises a TypeError."""


_MOST_OFFENCES = 100


def raise_all(asked: str, offences: list[str], *, wrong_type: bool = False) -> None:
    """Raise one error that names all offences, or return if there are none.

    It is a UsageTypeError if `wrong_type` or if one of the offences is a `WrongType`. Of more
    than a hundred offences, which no hand wrote, the first hundred are named.
    """
    if not offences:
        return
    wrong_type = wrong_type or any(isinstance(offence, WrongType) for offence in offences)
    kind = UsageTypeError if wrong_type else UsageError
    if len(offences) == 1:
        raise kind(f"{asked}: {offences[0]}", offences=offences)
    lines = offences[:_MOST_OFFENCES]
    if len(offences) > len(lines):
        lines = [*lines, f"and {len(offences) - len(lines)} more"]
    listed = "\n".join(f"  - {offence}" for offence in lines)
    raise kind(f"{asked}: {len(offences)} problems\n{listed}", offences=offences)
