"""Report the progress of a save or restore, and renew the lease of a save."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shoal.checkpoint.store.interface import Store
from shoal.errors import ShoalError
from shoal.runtime.client.interface import JobClient

_LOG = logging.getLogger("shoal")
_BEAT_S = 4.0  # upper bound
_BEATS = 5  # per lease
_LOG_EVERY = 3  # beats


class ProgressReporter:
    """Context manager that reports the progress of a long operation from a thread of its own."""

    def __init__(
        self,
        client: JobClient,
        doing: str,
        num_bytes: int,
        every_s: float = _BEAT_S,
        lane: str = "main",
    ) -> None:
        """`doing` describes it: "saving /run/step_000000000010"."""
        self._client, self._doing = client, doing
        self._is_main = lane == "main"
        self.num_bytes = num_bytes  # may be set once it is known
        self._every_s = every_s
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shoal beat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def add(self, num_bytes: int) -> None:
        """Count further bytes as done. Thread-safe."""
        with self._lock:
            self._done_bytes += num_bytes
            self._work()

    def _work(self) -> None:
        """Report as working: a process that makes progress must not be ended as hung.

        A save in the background says nothing of the main thread after a loss; but a job in which
        one goes on is not stalled.
        """
        if self._is_main:
            self._client.progress.worked += 1
        else:
            self._client.progress.saved += 1

    def progress_text(self) -> str:
        """Return the progress: `40 % of 1.5 GB, 870 MB/s`."""
        took_s = max(time.monotonic() - self._began, 1e-9)
        share = self._done_bytes / self.num_bytes if self.num_bytes else 1.0
        rate = f"{self._done_bytes / took_s / 1e6:.0f} MB/s"
        return f"{min(share, 1.0):.0%} of {self.num_bytes / 1e9:.2f} GB, {rate}"

    def keep(self) -> None:
        """Hook for subclasses, called at each beat."""

    def _run(self) -> None:
        beats = 0
        while not self._is_over.wait(self._every_s):
            beats += 1
            self.keep()
            message = f"{self._doing}: {self.progress_text()}"
            with contextlib.suppress(ShoalError, OSError):
                self._client.report("doing", message)
            if beats % _LOG_EVERY == 1:
                _LOG.info("%s", message)


class LeaseKeeper(ProgressReporter):
    """Also touches PENDING, on one process: the lowest saving process not known to be lost."""

    def __init__(
        self,
        client: JobClient,
        store: Store,
        attempt: str,
        num_bytes: int = 0,
        lease_s: float = 60.0,
        lane: str = "main",
        members: Sequence[int] | None = None,
    ) -> None:
        """`members`: the processes that save, in order; None: all of the job."""
        every_s = min(_BEAT_S, lease_s / _BEATS)
        self._refresh_s = min(store.pace.beat_s, lease_s / _BEATS)
        self._next = time.monotonic() + self._refresh_s
        super().__init__(
            client,
            doing=f"saving {store.path}",
            num_bytes=num_bytes,
            every_s=every_s,
            lane=lane,
        )
        self._store, self._attempt = store, attempt
        self.is_opening = True  # the attempt: only the disk is outstanding
        members = range(client.num_processes) if members is None else members
        self._before = [process for process in members if process < client.process]

    def keep(self) -> None:
        """Touch PENDING, if this is the process to do it."""
        with self._lock:
            is_written = self._done_bytes >= self.num_bytes
            if self.is_opening or is_written:  # only the disk is outstanding
                self._work()
        # The lowest survivor does it. Processes learn of a loss at different times: for a while two
        # may touch the file, which harms nothing, or none, until the loss is known; a lease is
        # longer than that takes.
        gone = {loss.process for loss in self._client.peer_losses.open()}
        now = time.monotonic()
        if now >= self._next and all(process in gone for process in self._before):
            self._next = now + self._refresh_s
            with contextlib.suppress(ShoalError, OSError):  # committed or ended by now
                self._store.refresh(self._attempt)
