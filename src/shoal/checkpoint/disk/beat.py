"""While a save goes on: its lease is kept fresh, and people are told how far it is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import Self

from shoal.checkpoint.disk.step_folder import pending_name
from shoal.checkpoint.disk.storage import Folder
from shoal.errors import ShoalError
from shoal.runtime.coordinator import Coordinator

__all__ = ["Beat"]

_LOG = logging.getLogger("shoal")
_BEAT_S = 4.0  # far shorter than what others wait before they take an attempt for dead
_LOG_EVERY = 3  # beats


class Beat:
    """Touches PENDING and tells of progress, from a thread of its own. A context manager.

    One process touches: the lowest that is not known to be gone.
    """

    def __init__(
        self, coordinator: Coordinator, folder: Folder, attempt: str, num_bytes: int
    ) -> None:
        self._coordinator, self._folder, self._attempt = coordinator, folder, attempt
        self._num_bytes = num_bytes
        self._written = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shoal-save-beat", daemon=True)

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

    def wrote(self, num_bytes: int) -> None:
        """So many more bytes are on disk. From any thread."""
        with self._lock:
            self._written += num_bytes

    def tell(self) -> str:
        """Return how far it is: `40 % of 1.5 GB, 870 MB/s`."""
        took_s = max(time.monotonic() - self._began, 1e-9)
        share = self._written / self._num_bytes if self._num_bytes else 1.0
        rate = f"{self._written / took_s / 1e6:.0f} MB/s"
        return f"{min(share, 1.0):.0%} of {self._num_bytes / 1e9:.2f} GB, {rate}"

    def _run(self) -> None:
        beats = 0
        while not self._is_over.wait(_BEAT_S):
            beats += 1
            self.keep()
            words = f"saving {self._folder.path}: {self.tell()}"
            with contextlib.suppress(ShoalError, OSError):
                self._coordinator.tell("doing", words)
            if beats % _LOG_EVERY == 1:
                _LOG.info("%s", words)

    def keep(self) -> None:
        """Touch PENDING, if that is this process's business."""
        gone = {trouble.process for trouble in self._coordinator.troubles.open()}
        if all(process in gone for process in range(self._coordinator.process)):
            with contextlib.suppress(ShoalError, OSError):  # it is committed, or was ended
                self._folder.touch(pending_name(self._attempt))
