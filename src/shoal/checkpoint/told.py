"""An error of one process, told to the others, who raise one of the same type."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from shoal import errors
from shoal.errors import PeerFailedError, SaveAborted, ShoalError
from shoal.runtime.verdicts import Self

__all__ = ["first_told", "told", "untold"]

_KNOWN: Mapping[str, type[ShoalError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError,
        errors.UsageTypeError,
        errors.RestoreMismatch,
        errors.NotCommitted,
        errors.StepAlreadyCommitted,
        errors.SaveAborted,
        errors.CorruptCheckpoint,
        errors.UnsupportedCheckpoint,
        errors.StorageError,
        errors.StorageFull,
        errors.NotShared,
    )
}
_MOST_CHARACTERS = 8_000  # of a message, or of a traceback


def told(error: Exception) -> dict[str, Any]:
    """Return what the others are told of an error, as JSON."""
    kind = type(error).__name__
    if kind not in _KNOWN or type(error) is not _KNOWN[kind]:
        lines = traceback.format_exception(error)
        message = f"{kind}: {error}"
        return {"message": message[:_MOST_CHARACTERS], "trace": "".join(lines)[-_MOST_CHARACTERS:]}
    fields = {key: value for key, value in vars(error).items() if _is_plain(value)}
    if isinstance(error, OSError) and error.errno is not None:
        fields["errno"] = error.errno
    return {"type": kind, "message": str(error)[:_MOST_CHARACTERS], "fields": fields}


def untold(said: Mapping[str, Any], process: int, me: Self) -> ShoalError:
    """Return the error that `process` told of; what no process of shoal raises, as that it failed."""
    who = f"process {process} of {len(me.hosts)} ({me.hosts[process]})"
    message = f"{who}: {said['message']}"
    kind = _KNOWN.get(said.get("type", ""))
    if kind is None:
        return PeerFailedError(message, failed={process: said.get("trace", "")})
    fields = {key: _untupled(value) for key, value in said["fields"].items()}
    exit_code = fields.pop("exit_code", 1)
    error = kind(message, **fields)
    if isinstance(error, SaveAborted):
        error.exit_code = exit_code
    return error


def first_told(answers: Mapping[int, bytes]) -> tuple[int, Mapping[str, Any]] | None:
    """Return the lowest process whose payload (JSON) tells of an "error", and what it tells."""
    for process in sorted(answers):
        if answers[process]:
            said = json.loads(answers[process]).get("error")
            if said:
                return process, said
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _untupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
