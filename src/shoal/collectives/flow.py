"""One movement of values, watched: who takes part, until when, and who is to blame if it fails.

Work on devices blocks in native code, for ever if a peer is frozen. So it runs in a thread of its
own, while the caller's thread looks at the clock and at who is alive. At its end all meet once
more: all have the value then, or all that are alive get an error.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import jax

from shoal import settings
from shoal.collectives.ring import Ring, find_ring, has_devices
from shoal.errors import DeadlineError, PeerFailedError, ShoalError
from shoal.runtime.callsite import callsite
from shoal.runtime.coordinator import Coordinator, Point
from shoal.runtime.verdicts import Self

__all__ = ["Flow"]

_LOG = logging.getLogger("shoal")
_LOOK_S = 0.05  # between two looks at who is alive, while chunks move
_GRACE_S = 2.0  # how much later than the deadline the others may come to say so
_LATE, _FAILED = b"late", b"failed: "
_MOST_WORDS = 4096  # of an error, told to the others

T = TypeVar("T")


class Flow:
    """One movement: its name and place in messages, its deadline, how far it has come."""

    def __init__(self, coordinator: Coordinator, name: str, lane: str, timeout_s: float) -> None:
        self.coordinator, self.name, self.lane, self.site = coordinator, name, lane, callsite()
        self.moved_bytes = 0
        self._began, self._timeout_s = time.monotonic(), timeout_s

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return max(0.001, self._began + self._timeout_s - time.monotonic())

    def move(self, over: Callable[[Ring], object], relay: Callable[[], object]) -> None:
        """Move chunks over the devices if there are any, else through the meeting place.

        Raises, on all that are alive:
          DeadlineError, ProcessLostError, PeerFailedError.
        """

        def go() -> bool:
            limit_s = self.left_s
            ring = find_ring(self.coordinator, site=self.site, timeout_s=limit_s, lane=self.lane)
            if ring is not None:
                over(ring)
            return ring is not None

        if has_devices(self.coordinator) and self._watched(go):
            self._part(b"", self.left_s)
        else:
            relay()

    def meet(self, what: str, payload: bytes = b"", timeout_s: float = math.inf) -> Sequence[bytes]:
        """Meet all others here; return what each brings."""
        point = Point(self.name, None, self.lane, f"{self.name}: {what}", self.site)
        answers = self.coordinator.arrive(point, payload, timeout_s=min(timeout_s, self.left_s))
        return [answers[process] for process in range(self.coordinator.num_processes)]

    def _watched(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread of its own; return or raise what it does.

        Raises:
          ProcessLostError, PeerFailedError: somebody is gone, so it may never end.
          DeadlineError: it did not end in time.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                with jax.transfer_guard("allow"):  # a guard is for the program, not for this
                    done.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                done.set_exception(error)

        threading.Thread(target=run, name="shoal moves values", daemon=True).start()
        every_s = settings.seconds("SHOAL_WARN_AFTER_S")
        tell_at = self._began + every_s
        while wait([done], min(_LOOK_S, self.left_s)).not_done:
            self.coordinator.check(repr(self.name))
            now = time.monotonic()
            if now >= self._began + self._timeout_s:
                self._part(_LATE, _GRACE_S)
            if now >= tell_at:
                self._tell(now - self._began)
                tell_at = now + every_s
        error = done.exception()
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, ShoalError):
            self._blame(error)
        return done.result()

    def _blame(self, error: Exception) -> None:
        """Return if nobody is gone: then the runtime's own words are all that is known.

        Raises:
          ProcessLostError, PeerFailedError: somebody is, who explains what the runtime said.
        """
        known_s = settings.seconds("SHOAL_LOST_AFTER_S") + _GRACE_S
        words = str(error)[:_MOST_WORDS].encode(errors="replace")
        try:
            self._part(_FAILED + words, min(known_s, self.left_s))
        except DeadlineError:
            return

    def _part(self, failure: bytes, timeout_s: float) -> None:
        """Meet after the last chunk, or instead of it; raise if it did not go well somewhere.

        A process whose own work failed raises what happened there, if nobody else explains it.
        """
        point = Point(self.name, None, self.lane, f"{self.name}: done", self.site)
        answers = self.coordinator.arrive(point, failure, timeout_s=timeout_s)
        late = [process for process in sorted(answers) if answers[process] == _LATE]
        me = Self(self.coordinator.process, self.coordinator.hosts)
        if late:
            told = f"{me}: {point.place}: values still moved after {self._timeout_s:g} s"
            raise DeadlineError(
                f"{told} on processes {late} ({self.moved_bytes} bytes here); give timeout_s= more",
                name=self.name, waited_s=self._timeout_s, missing=late,
            )  # fmt: skip
        failed = {p: text.decode(errors="replace") for p, text in answers.items() if text}
        if failed and not failure:
            told = "; ".join(f"process {p} {words}" for p, words in sorted(failed.items()))
            raise PeerFailedError(f"{me}: {point.place}: {told}", failed=failed)

    def _tell(self, seconds: float) -> None:
        rate = self.moved_bytes / 1e6 / seconds
        _LOG.info(
            "%s: %r (%s): %.0f MB moved in %.0f s, %.1f MB/s",
            Self(self.coordinator.process, self.coordinator.hosts),
            self.name, self.site, self.moved_bytes / 1e6, seconds, rate,
        )  # fmt: skip
