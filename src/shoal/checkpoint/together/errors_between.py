"""Serialise an exception so that other processes can raise the same type."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from shoal import errors
from shoal.errors import PeerFailedError, ShoalError
from shoal.runtime.rules.outcomes import ThisProcess

_KNOWN: Mapping[str, type[ShoalError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError,
        errors.UsageTypeError,
        errors.RestoreMismatchError,
        errors.NotCommittedError,
        errors.StepAlreadyCommittedError,
        errors.SaveAbortedError,
        errors.CorruptCheckpointError,
        errors.UnsupportedCheckpointError,
        errors.StorageError,
        errors.StorageFullError,
        errors.NotSharedError,
    )
}
_MARK = b"\0"
_MOST_CHARACTERS = 8_000  # per message or traceback


def encode_error(error: Exception) -> bytes:
    """Encode an error as a payload with a prefix that no other payload has."""
    kind = type(error).__name__
    if _KNOWN.get(kind) is not type(error):
        message = f"{kind}: {error}"[:_MOST_CHARACTERS]
        trace = "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]
        return _MARK + json.dumps({"message": message, "trace": trace}).encode()
    fields = {key: value for key, value in vars(error).items() if _is_plain(value)}
    if isinstance(error, OSError) and error.errno is not None:
        fields["errno"] = error.errno
    message = str(error)[:_MOST_CHARACTERS]
    return _MARK + json.dumps({"type": kind, "message": message, "fields": fields}).encode()


def failed_processes(answers: Mapping[int, bytes]) -> tuple[int, ...]:
    """Return the processes whose payloads are encoded errors, in order."""
    return tuple(sorted(p for p, payload in answers.items() if payload.startswith(_MARK)))


def decode_error(payload: bytes, process: int, me: ThisProcess) -> ShoalError:
    """Decode the error of `process`; one that is not shoal's becomes a PeerFailedError."""
    said = json.loads(payload.removeprefix(_MARK))
    who = f"process {process} of {len(me.hosts)} ({me.hosts[process]})"
    message = f"{who}: {said['message']}"
    kind = _KNOWN.get(said.get("type", ""))
    if kind is None:
        return PeerFailedError(message, failed={process: said["trace"]})
    error = kind(message)
    for key, value in said["fields"].items():
        setattr(error, key, tuple(value) if isinstance(value, list) else value)
    return error


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
