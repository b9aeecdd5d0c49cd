"""While a save or a restore goes on: people are told how far it is; a save keeps its lease."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shoal.checkpoint.disk.step_folder import pending_name
from shoal.checkpoint.disk.storage import Folder
from shoal.errors import ShoalError
from shoal.runtime.client.interface import Coordinator

_LOG = logging.getLogger("shoal")
_BEAT_S = 4.0  # at most
_BEATS = 5  # in the time after which others take an attempt for dead
_LOG_EVERY = 3  # beats


class Telling:
    """Tells how far something is that takes long, from a thread of its own. A context manager."""

    def __init__(
        self,
        coordinator: Coordinator,
        doing: str,
        num_bytes: int,
        every_s: float = _BEAT_S,
        lane: str = "main",
    ) -> None:
        """`doing` is in words: "saving /run/step_000000000010"."""
        self._coordinator, self._doing = coordinator, doing
        self._is_main = lane == "main"
        self._num_bytes, self._every_s = num_bytes, every_s
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
        """So many more bytes are done. From any thread."""
        with self._lock:
            self._done_bytes += num_bytes
            self._work()

    def _work(self) -> None:
        """Who gets on does not hang, though somebody may be lost: it is not to be ended for it."""
        if self._is_main:
            self._coordinator.progress.worked += 1

    def tell(self) -> str:
        """Return how far it is: `40 % of 1.5 GB, 870 MB/s`."""
        took_s = max(time.monotonic() - self._began, 1e-9)
        share = self._done_bytes / self._num_bytes if self._num_bytes else 1.0
        rate = f"{self._done_bytes / took_s / 1e6:.0f} MB/s"
        return f"{min(share, 1.0):.0%} of {self._num_bytes / 1e9:.2f} GB, {rate}"

    def keep(self) -> None:
        """Do what else has to be done at each beat."""

    def _run(self) -> None:
        beats = 0
        while not self._is_over.wait(self._every_s):
            beats += 1
            self.keep()
            words = f"{self._doing}: {self.tell()}"
            with contextlib.suppress(ShoalError, OSError):
                self._coordinator.tell("doing", words)
            if beats % _LOG_EVERY == 1:
                _LOG.info("%s", words)


class LeaseKeeper(Telling):
    """Touches PENDING, too. One process does: the lowest that is not known to be gone of those that
    save."""

    def __init__(
        self,
        coordinator: Coordinator,
        folder: Folder,
        attempt: str,
        num_bytes: int,
        lease_s: float = 60.0,
        lane: str = "main",
        members: Sequence[int] | None = None,
    ) -> None:
        """`members`: the processes that save, in order; None: all of the job."""
        every_s = min(_BEAT_S, lease_s / _BEATS)
        super().__init__(coordinator, f"saving {folder.path}", num_bytes, every_s, lane)
        self._folder, self._attempt = folder, attempt
        members = range(coordinator.num_processes) if members is None else members
        self._before = [process for process in members if process < coordinator.process]

    def keep(self) -> None:
        """Touch PENDING, if that is this process's business."""
        with self._lock:
            if self._done_bytes >= self._num_bytes:  # only the disk is waited for now
                self._work()
        gone = {trouble.process for trouble in self._coordinator.troubles.open()}
        if all(process in gone for process in self._before):
            with contextlib.suppress(ShoalError, OSError):  # it is committed, or was ended
                self._folder.touch(pending_name(self._attempt))
