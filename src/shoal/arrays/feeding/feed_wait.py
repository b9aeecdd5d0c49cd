"""Wait for a batch: which process is late, and when lateness becomes an error."""

from __future__ import annotations

import logging
import time

from shoal import settings
from shoal.arrays.feeding.feed_steps import FedBatch, FeedMeeting
from shoal.arrays.feeding.prefetch import MEETING, Prefetch
from shoal.errors import DeadlineError
from shoal.runtime.system.callsite import line_of

_LOG = logging.getLogger("shoal")


class BatchWait:
    """One wait for a batch. The meeting names other processes that are late; this concerns the
    reader of this process.
    """

    def __init__(self, meeting: FeedMeeting, line: Prefetch[FedBatch], number: int) -> None:
        self._meeting = meeting
        self._line = line
        self._batch = f"{meeting.batch(number)} ({line_of(meeting.site)})"
        self._has_logged = False

    def look(self, since: float) -> None:
        """Called periodically while the program waits, with the time since it began.

        Raises:
          DeadlineError: the reader of this process took too long.
          ProcessLostError, PeerFailedError: a process was lost or failed meanwhile.
        """
        here = self._meeting.coordinator
        if here.troubles.any():
            here.check(self._batch)
        phase, began = self._line.phase
        if phase == MEETING:
            return
        waited_s = time.monotonic() - max(since, began)
        text = f"{self._meeting.me}: {self._batch}: its own reader has returned no batch"
        if waited_s >= self._meeting.timeout_s:
            raise DeadlineError(
                f"{text} within {self._meeting.timeout_s:g} s\n"
                "if it is only slow, give timeout_s= more, or set SHOAL_TIMEOUT_S",
                name=self._batch,
                waited_s=waited_s,
                missing=[here.process],
            )
        if not self._has_logged and waited_s >= settings.seconds("SHOAL_WARN_AFTER_S"):
            self._has_logged = True
            _LOG.warning("%s for %.0f s", text, waited_s)
