"""The losses known to this process, and whether its program has seen them.

A loss is *reported* once an error about it was raised in the main thread, and *acknowledged* once
the survivors have agreed on who is left. Written by the watcher and by calls, in any order: a call
may learn of a loss before the watcher does. There is no lock, because a signal handler may
interrupt at any point; readers copy first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.errors import PeerFailedError, ProcessLostError, ShoalError, StalledError
from shoal.runtime.client.outcomes import ThisProcess, gone_error, service_error
from shoal.runtime.rules.point import Departure

TICK_S = 0.25  # how often a process that knows of a loss is checked


class PeerLoss(NamedTuple):
    """The loss of a process, or of a service that all processes need."""

    process: int | None  # None: a service that all processes need
    name: str  # "process 3 (host)", "JAX's service"
    departure: Departure  # its state may also be "stalled", as is the whole job
    since: float  # when this process heard of it, on its monotonic clock

    @property
    def state(self) -> str:
        """ "lost", "failed" or "stalled"."""
        return self.departure.state

    @property
    def words(self) -> str:
        """The reason, or a traceback."""
        return self.departure.words

    @property
    def fate(self) -> str:
        """The loss as a predicate: "is lost", "has failed"."""
        return "has failed" if self.state == "failed" else f"is {self.state}"

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends because of it."""
        if self.state == "stalled":
            return StalledError.exit_code
        kind = ProcessLostError if self.state == "lost" else PeerFailedError
        return kind.exit_code


class PeerLosses:
    """All known losses, in the order in which they became known."""

    def __init__(self, me: ThisProcess, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._known: dict[int | str, PeerLoss] = {}
        self._reported: set[int | str] = set()
        self._acknowledged: set[int | str] = set()

    def receive(self, process: int | None, name: str, departure: Departure) -> None:
        """Record a loss. Only the first report of each counts."""
        key = name if process is None else process
        if process is not None:
            name = self._me.name(process)
        self._known.setdefault(key, PeerLoss(process, name, departure, self._clock()))

    def acknowledge(self, gone: Iterable[int | str]) -> None:
        """Record that the program continues without these processes and services, including losses
        that the watcher has yet to hear of."""
        self._acknowledged.update(gone)

    def are_acknowledged(self, gone: Iterable[int | str]) -> bool:
        """Return whether the program continues without all of these."""
        return self._acknowledged.issuperset(gone)

    def survivors(self, num_processes: int) -> tuple[int, ...]:
        """Return the processes with which the program continues, by the last `live_processes`."""
        gone = set(self._acknowledged)
        return tuple(process for process in range(num_processes) if process not in gone)

    def mark_reported(self, gone: Iterable[int | str]) -> None:
        """Record that an error naming these is about to be raised in the main thread."""
        self._reported.update(gone)

    def mark_all_reported(self) -> None:
        """Record that an error naming all losses is about to be raised in the main thread."""
        self._reported.update(tuple(self._known))

    def any(self) -> bool:
        """Return whether any loss is known, acknowledged or not. Cheap, for use in loops."""
        return bool(self._known)

    def open(self) -> list[PeerLoss]:
        """Return the losses that are not acknowledged, oldest first."""
        known = tuple(self._known.items())
        return [loss for key, loss in known if key not in self._acknowledged]

    def has_open(self) -> bool:
        """Return whether there is a loss that is not acknowledged, perhaps known from a call alone,
        before the watcher has heard of it."""
        return bool((self._known.keys() | self._reported) - self._acknowledged)

    def unreported(self) -> list[PeerLoss]:
        """Return the losses that no error has named yet, oldest first."""
        known = tuple(self._known.items())
        named = self._acknowledged | self._reported
        return [loss for key, loss in known if key not in named]

    def check(self, caller: str) -> None:
        """Raise if there is a loss that is not acknowledged.

        Raises:
          ProcessLostError, PeerFailedError, StalledError: by the kind of the first loss.
        """
        if not self._known:  # nearly always
            return
        losses = self.open()
        if not losses:
            return
        self.mark_all_reported()
        raise self._error_of(caller, losses)

    def _error_of(self, caller: str, losses: list[PeerLoss]) -> ShoalError:
        first = losses[0]
        what = f"{self._me}: {caller} cannot continue" if caller else f"{self._me} cannot continue"
        if first.state == "stalled":
            return StalledError(f"{what}: {first.words}")
        if first.process is None:
            services = [(loss.name, loss.words) for loss in losses if loss.process is None]
            return service_error(services, what)
        alike = {
            loss.process: loss.departure
            for loss in losses
            if loss.process is not None and loss.state == first.state
        }
        return gone_error(first.state, alike, self._me, what)
