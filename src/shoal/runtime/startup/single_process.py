"""A job of one process, and its reports to its launcher when it stops.

Such a job needs no coordinator. But its launcher runs one, where it learns that the process takes
SIGTERM as a notice, and that it has saved: so the process sends HELLO when it receives a notice.
"""

from __future__ import annotations

import atexit
import logging
import threading

from shoal import settings
from shoal.errors import ShoalError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.over_tcp import TcpJobClient, join
from shoal.runtime.rules.messages import notice_header
from shoal.runtime.rules.stopping import ReceivedNotice, StopReport

_LOG = logging.getLogger("shoal")
_JOIN_S = 2.0


def alone() -> JobClient:
    """Return the job client of a job of one process.

    >>> from shoal.runtime.rules.point import Point
    >>> alone().arrive(Point("start"), b"hello", timeout_s=1)
    {0: b'hello'}
    """
    job = LocalJob(1)
    address = settings.text("SHOAL_COORDINATOR")
    if address and settings.number("SHOAL_NUM_PROCESSES") == 1:
        job.report_to_launcher = _Launcher(address, settings.text("SHOAL_TOKEN")).report
    return job.clients[0]


class _Launcher:
    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token
        self._client: TcpJobClient | None = None
        self._lock = threading.RLock()  # a signal handler may report a save

    def report(self, message: ReceivedNotice | StopReport) -> None:
        """Report a notice, or this process's answer to one."""
        with self._lock:
            if isinstance(message, StopReport):
                if self._client is not None:
                    self._client.report_stop(message)
                    if message.highest is None:  # all notices are closed; drop those echoed
                        self._client.stop.rearm(self._client.stop.known)
                return
            if self._client is None:
                self._client = self._join()
            if self._client is not None:
                self._client.send({"do": "notice", **notice_header(message)})

    def _join(self) -> TcpJobClient | None:
        try:
            client = join(
                self._address, process=0, num_processes=1, token=self._token, timeout_s=_JOIN_S
            )
        except ShoalError as error:
            _LOG.warning("cannot report a notice to the launcher: %s", error)
            return None
        client.abandon_in_forked_children()
        atexit.register(client.close)
        return client
