"""Results of a bench's processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.errors import PeerFailedError
from shoal.testing.child import result_path
from shoal.testing.running import Running
from shoal.testing.values import decoded

__all__ = ["Ended", "ended_of", "first_failed", "raise_first"]

_ECHOES = ("ProcessLostError", "PeerFailedError")  # consequences of another process's failure
_TAIL_LINES = 12


class Ended(NamedTuple):
    """Exit status, output and result of one process."""

    process: int
    code: int | None  # -n: by signal n; None: known only to the launcher
    out: str
    err: str
    ended_s: float  # seconds after it was started
    ended_at: float  # on the monotonic clock; under a launcher, the end of the job
    value: object = None  # result of its function
    error: str = ""  # traceback of its function's error
    kind: str = ""  # class of that error

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but 0, or raised."""
        return bool(self.code or self.error)


def ended_of(running: Running, process: int, folder: str, *, log: bool = False) -> Ended:
    """Return a process's result; `log`: under a launcher, the file with its output."""
    out, err = (output.decode(errors="replace") for output in (running.out, running.err))
    code = running.code
    if log:
        path = Path(folder) / "logs" / f"p{process:04d}.log"
        out = path.read_text(errors="replace") if path.exists() else ""
        code = None if code else 0
    result = {}
    path = result_path(folder, process)
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
    value = decoded(result["value"]) if "value" in result else None
    error, kind = result.get("error", ""), result.get("kind", "")
    ended_at = running.began + running.ended_s
    return Ended(process, code, out, err, running.ended_s, ended_at, value, error, kind)


def first_failed(ended: Sequence[Ended]) -> Ended | None:
    """Return the process that failed first; consequences of another's failure come last."""
    failed = [process for process in ended if process.failed]
    return min(failed, key=lambda process: (process.kind in _ECHOES, process.ended_s), default=None)


def raise_first(ended: Sequence[Ended]) -> None:
    """Raise PeerFailedError if a process failed; the message describes the first."""
    first = first_failed(ended)
    if first is None:
        return
    failed = {process.process: _failure_text(process) for process in ended if process.failed}
    others = [process for process in failed if process != first.process]
    also = f"; so did {others} after it" if others else ""
    raise PeerFailedError(
        f"process {first.process} of {len(ended)} failed{also}\n{failed[first.process]}",
        failed=failed,
    )


def _failure_text(ended: Ended) -> str:
    """Return its traceback, or else its last output."""
    code = "" if ended.code is None else f" (exit code {ended.code})"
    if ended.error:
        return f"{ended.error.rstrip()}{code}"
    output = "\n".join((ended.out + ended.err).splitlines()[-_TAIL_LINES:])
    return f"it ended{code or ' badly'}; its last lines:\n{output}"
