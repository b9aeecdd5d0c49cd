"""Run work on devices under a deadline, and find out which process is at fault if it fails.

Work on devices blocks in native code, for ever if a peer is frozen. So it runs in a thread of its
own, while the caller's thread watches the clock and the liveness of peers. At the end all meet:
either all have succeeded, or all survivors get an error.

Before the work all agree on the earliest of their deadlines, since working processes cannot be
notified: it ends the work of all. Shortly before it, each process reports its activity,
one-way, so that this is known even if it is frozen at the deadline.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Generic, NamedTuple, TypeVar

import jax

from shoal import settings
from shoal.errors import DeadlineError, PeerFailedError, ShoalError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.exit.guard import DEVICE_WORK
from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.rules.deadline import Allowance, ends_at, given_s, left_of
from shoal.runtime.system.callsite import line_of
from shoal.runtime.system.foreign_text import headline_of

_LOG = logging.getLogger("shoal")
_LOOK_S = 0.05  # interval of liveness checks
_TURN_S = 0.1  # time to meet at the deadline, when all arrive and name the late
_KNOWN_S = 2.0  # beyond SHOAL_LOST_AFTER_S, when losses are known
_LEAD_S = 0.15  # how long before the deadline a process reports its activity
_LIMIT = struct.Struct("<dd")  # seconds left, original time-out
_LATE, _FAILED = "late: ", "failed: "
_MOST_WORDS = 4096  # of an error message sent to others

T = TypeVar("T")


class _Outcome(NamedTuple, Generic[T]):
    """How this process's work ended: with a value, or with a message for the others."""

    value: T | None = None
    words: str = ""
    error: Exception | None = None


class DeviceTransfer:
    """A collective's group, call, deadline and progress."""

    def __init__(
        self,
        client: JobClient,
        call: Call,
        timeout_s: float,
        *,
        group: tuple[int, ...] | None = None,
        lane: str = "main",
    ) -> None:
        self.client, self.call, self.lane = client, call, lane
        self.me = ThisProcess(client.process, client.hosts)
        self.moved_bytes = 0
        self.group = group  # None: all of the job
        self.members = group or tuple(range(client.num_processes))
        self._began, self._timeout_s = time.monotonic(), given_s(timeout_s)
        self._deadline = ends_at(timeout_s)
        self._whose = client.process  # the process whose deadline that is
        self._is_settled = False  # whether `_deadline` is the earliest of all processes
        self._every_s = settings.seconds("SHOAL_WARN_AFTER_S")
        self._report_at = self._began + self._every_s

    @property
    def name(self) -> str:
        """The call as named in messages: `broadcast 'params' (train.py:31)`."""
        named = f" {self.call.name!r}" if self.call.name else ""
        return f"{self.call.operation}{named} ({line_of(self.call.site)})"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return left_of(self._deadline)

    def settle(self) -> None:
        """Adopt the earliest deadline of all processes, which are here or arrive soon.

        Clocks of hosts differ, so the processes exchange the time left: as exact as their arrivals
        are simultaneous.
        """
        answers = self.meet("until when", _LIMIT.pack(self.left_s, self._timeout_s))
        now, self._is_settled = time.monotonic(), True
        for process, payload in sorted(answers.items()):
            left_s, timeout_s = _LIMIT.unpack(payload)
            if process != self.client.process and now + left_s < self._deadline:
                self._deadline, self._timeout_s = Allowance(now + left_s, timeout_s), timeout_s
                self._whose = process

    def meet(
        self, stage: str, payload: bytes = b"", timeout_s: float | None = None
    ) -> Mapping[int, bytes]:
        """Meet the other processes at this stage; return their payloads."""
        call = self.call._replace(spec=(*self.call.spec, stage))
        return self.agree(call, payload, timeout_s)

    def agree(
        self, call: Call, payload: bytes, timeout_s: float | None = None
    ) -> Mapping[int, bytes]:
        """Meet the other processes at a separate call; return their payloads."""
        limit_s = self.left_s if timeout_s is None else timeout_s
        return agree(
            self.client, call, payload, timeout_s=limit_s, group=self.group, lane=self.lane
        )

    def together(
        self,
        stage: str,
        work: Callable[[], T],
        still: Callable[[], str],
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> T:
        """Run `work` while the others run theirs, then meet them; return its result.

        `still` describes what is unfinished at the deadline. `meanwhile` runs in the caller's
        thread, which would otherwise only wait.

        Raises, on all survivors:
          DeadlineError: a process was not done in time.
          ProcessLostError, PeerFailedError: a process was lost, or failed.
        Errors of `work` itself, other than the runtime's, are raised here at once.
        """
        if not self._is_settled:
            self.settle()
        outcome = self._watched(work, still, meanwhile)
        # a late process arrives at the deadline, and reports its activity
        limit_s: float = Allowance(self.left_s + _TURN_S, self._timeout_s)
        if outcome.error is not None:
            limit_s = min(limit_s, settings.seconds("SHOAL_LOST_AFTER_S") + _KNOWN_S)
        payload = outcome.words[:_MOST_WORDS].encode(errors="replace")
        try:
            answers = self.meet(stage, payload, limit_s)
        except DeadlineError as error:
            if outcome.error is not None:  # no process is lost: only the runtime's message is known
                raise outcome.error from None
            self._judge_missing(error, outcome.words)
            raise
        if any(answers.values()):
            self._judge({p: text.decode() for p, text in answers.items() if text}, outcome.error)
        return outcome.value  # type: ignore[return-value]  # no words: there is a value

    def _watched(
        self,
        work: Callable[[], T],
        still: Callable[[], str],
        meanwhile: Callable[[], object] | None,
    ) -> _Outcome[T]:
        """Run `work` in a thread of its own; watch the clock and liveness meanwhile."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                with jax.transfer_guard("allow"), own_programs():
                    done.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                done.set_exception(error)

        if jax.config.jax_thread_guard:  # a debugging aid that permits only one thread
            run()
        else:
            threading.Thread(target=run, name=DEVICE_WORK, daemon=True).start()
        if meanwhile is not None:
            meanwhile()
        has_reported = False
        while wait([done], min(_LOOK_S, self.left_s)).not_done:
            self.client.check(self.name)
            now = time.monotonic()
            if now >= self._deadline:
                return _Outcome(words=_LATE + still())
            if not has_reported and now >= self._deadline - _LEAD_S:
                has_reported = True
                self.client.report("doing", f"{self.name}: {_LATE}{still()}")
            self.log_progress()
        error = done.exception()
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, ShoalError):
            return _Outcome(words=_FAILED + failure_of(error, self.call.site).words, error=error)
        return _Outcome(done.result())

    def _judge_missing(self, error: DeadlineError, own_words: str) -> None:
        """Raise for the processes that did not arrive, if they reported their activity."""
        known = {p: text[text.find(_LATE) :] for p, text in error.last_words.items()}
        messages = {p: text for p, text in known.items() if text.startswith(_LATE)}
        if own_words:
            messages[self.client.process] = own_words
        if {*error.missing} <= messages.keys():
            self._judge(messages, None)

    def _judge(self, messages: Mapping[int, str], own: Exception | None) -> None:
        heads = {process: headline_of(text) for process, text in messages.items()}
        detail = "; ".join(f"process {process} {head}" for process, head in sorted(heads.items()))
        late = [process for process in sorted(messages) if messages[process].startswith(_LATE)]
        if late:
            is_own = self._whose == self.client.process
            whose = "its deadline" if is_own else f"the deadline of process {self._whose}"
            raise DeadlineError(
                f"{self.me}: {self.name}: not done by {whose} ({self._timeout_s:g} s): {detail}\n"
                "raise timeout_s=, or find out why the devices are busy",
                name=self.call.name or self.call.operation,
                waited_s=time.monotonic() - self._began,
                missing=late,
                last_words={process: messages[process] for process in late},
            ) from own
        if own is not None:
            raise own
        raise PeerFailedError(f"{self.me}: {self.name}: {detail}", failed=messages)

    def log_progress(self) -> None:
        """Log the progress, at intervals."""
        now = time.monotonic()
        if now < self._report_at or not self.moved_bytes:
            return
        self._report_at = now + self._every_s
        seconds, megabytes = now - self._began, self.moved_bytes / 1e6
        detail = f"{megabytes:.0f} MB moved in {seconds:.0f} s, {megabytes / seconds:.1f} MB/s"
        _LOG.info("%s: %s: %s", self.me, self.name, detail)
