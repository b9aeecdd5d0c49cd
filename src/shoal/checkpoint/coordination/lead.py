"""Run a function on process 0; its result, or its error, is that of all.

Among a group of processes, the lowest of them takes the place of process 0.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from shoal import errors
from shoal.errors import PeerFailedError, ShoalError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_delivered


@interrupts_delivered
def run_on_lead(
    client: JobClient,
    operation: str,
    spec: tuple[str, ...],
    act: Callable[[], Any],
    *,
    group: Group,
    timeout_s: float,
    name: str | None = None,
    site: str | None = None,
    lane: str = "main",
) -> Any:
    """Call `act` on the lead; return its result (JSON), or raise its error, on all.

    Args:
      group: the processes that call it; the lead is the lowest of them.
      spec: lines that must be equal on all processes.
      name: identifies calls at different places as the same call.
      site: the user's call site; None: the caller's.

    Also raises what `agree` raises.
    """
    options: dict[str, Any] = {"name": name, "site": site, "lane": lane}
    options |= {"group": group, "timeout_s": timeout_s}
    return meet_lead(client, operation, spec, act, brought=b"", **options)[0]


def raise_together(
    client: JobClient,
    operation: str,
    work: Callable[[], None],
    *,
    group: Group,
    timeout_s: float,
) -> None:
    """Call `work` on every process; if it fails on any, raise on all: the own error, or a peer's.

    Also raises what `agree` raises.
    """
    raised = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
        raised = error
    call = Call(operation, None, callsite(), ("checked",))
    brought = b"" if raised is None else encode_error(raised)
    answers = agree(client, call, brought, timeout_s=timeout_s, group=group.named)
    if raised is not None:
        raise raised
    who = failed_processes(answers)
    if who:
        me = ThisProcess(client.process, client.hosts)
        raise decode_error(answers[who[0]], who[0], me)


def meet_lead(
    client: JobClient,
    operation: str,
    spec: tuple[str, ...],
    act: Callable[[], Any],
    brought: bytes,
    *,
    group: Group,
    timeout_s: float,
    name: str | None = None,
    site: str | None = None,
    lane: str = "main",
) -> tuple[Any, Mapping[int, bytes]]:
    """Like `run_on_lead`; return also the payloads that the processes `brought`."""
    payload, raised = brought, None
    if client.process == group.lead:
        try:
            payload = json.dumps(act()).encode()
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
            payload, raised = encode_error(error), error
    call = Call(operation, name, site or callsite(), spec)
    answers = agree(client, call, payload, timeout_s=timeout_s, group=group.named, lane=lane)
    if raised is not None:
        raise raised
    if group.lead in failed_processes(answers):
        me = ThisProcess(client.process, client.hosts)
        raise decode_error(answers[group.lead], group.lead, me)
    return json.loads(answers[group.lead]), answers


# ---- Serialize an exception so that other processes can raise the same type.


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
    record = json.loads(payload.removeprefix(_MARK))
    who = f"process {process} of {len(me.hosts)} ({me.hosts[process]})"
    message = f"{who}: {record['message']}"
    kind = _KNOWN.get(record.get("type", ""))
    if kind is None:
        return PeerFailedError(message, failed={process: record["trace"]})
    error = kind(message)
    for key, value in record["fields"].items():
        setattr(error, key, tuple(value) if isinstance(value, list) else value)
    return error


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
