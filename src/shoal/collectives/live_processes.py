"""Agree on which processes are alive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from shoal import settings
from shoal.collectives.arguments import Deadline, deadline_of
from shoal.colour import collective
from shoal.errors import (
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess, gone_error
from shoal.runtime.failures.exception_text import departures_of, failure_of
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client
from shoal.tracebacks import at_caller


@collective("processes")
@uses_client
@collective_scope("live_processes", survivors=True)
def live_processes(
    client: JobClient,
    *,
    processes: Iterable[int] | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> tuple[int, ...]:
    """Return which of `processes` are alive, as agreed by all that are.

    Collective over processes.

    All living processes among `processes` synchronize. Processes that are dead, have failed or have
    left are not waited for, even if that happens during the call. All processes that return from
    the same call return the same result, and it never names a process that did not take part. When
    it returns, the next calls of these processes in this lane meet each other, also if one of them
    had made a call more or less than the others.

    Nothing is reported about processes outside `processes`. Afterwards the loss of the missing ones
    is acknowledged: `step` no longer raises for it, and calls with `processes=` set to the result
    work. A later loss is reported again.

    Args:
      processes: the candidates, including the caller; equal on all. None: all of the job.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`.

    Returns:
      The living processes, in order.

    Raises:
      DeadlineError: on all that arrived, and at once on one that is late: a process is alive and
        did not arrive in time. Call it again.
      DivergenceError: on all that arrived: others arrived at another point, or calls that send
        nothing differed before. Call it again.
      ProcessLostError: on all that arrived: the coordinator or JAX's service is lost; on this
        process: the others have continued without it.
      PeerFailedError: on all that arrived: an exception (such as an interrupt) took a process out
        of this call, and it is alive. Call it again.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError.

    >>> live_processes()
    (0,)
    """
    if not isinstance(lane, str):
        raise UsageTypeError(f"live_processes: lane={lane!r} must be a string")
    if not lane:
        raise UsageError("live_processes: lane must not be empty")
    timeout_s = settings.timeout("live_processes()", timeout_s, "SHOAL_TIMEOUT_S")
    group = group_of("live_processes", processes)
    point = Point(
        "live_processes", group, lane, operation="live_processes", site=callsite(), survivors=True
    )
    return tuple(sorted(client.arrive(point, timeout_s=timeout_s)))


# A block that the living processes enter together and leave alike: all return, or all raise.


class LiveBlock:
    """A context manager over the living `processes`; yields them as `live_processes` returns them.

    At its end they synchronize again. If one of them dies inside the block, or leaves it with an
    exception, all the others raise.

    Args:
      name: a label for messages.
      processes: as in `live_processes`.
      timeout_s: deadline in seconds of entry, and of exit; None: SHOAL_TIMEOUT_S (600).

    Raises (besides the errors of `live_processes`, at both ends):
      ProcessLostError: on all survivors: processes died inside; `lost` names them.
      PeerFailedError: on processes whose own code did not raise: another's did.
    """

    def __init__(
        self,
        client: JobClient,
        name: str,
        processes: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._client = client
        self._name = name
        self._processes = None if processes is None else tuple(processes)
        self._timeout_s = deadline_of(name, name, timeout_s, "main").timeout_s
        self._living: tuple[int, ...] = ()

    @at_caller
    def __enter__(self) -> tuple[int, ...]:
        self._living = live_processes.on(
            self._client, processes=self._processes, timeout_s=self._timeout_s
        )
        return self._living

    @at_caller
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        message = "" if error is None else failure_of(error, callsite()).text
        reports = self._meet(message.encode(errors="replace"))
        me = ThisProcess(self._client.process, self._client.hosts)
        what = f"{me}: {self._name} ({callsite()}) has failed"
        lost = [process for process in self._living if process not in reports]
        if lost:
            names = f"{listed(lost)} died or left inside"
            raise ProcessLostError(f"{what}: {names}", lost=dict.fromkeys(lost, names)) from error
        failed = {process: text.decode() for process, text in reports.items() if text}
        if error is None and failed:
            raise gone_error("failed", departures_of(failed, "failed", {}), me, what)

    def _meet(self, payload: bytes) -> Mapping[int, bytes]:
        """Return each survivor's report of its exception.

        A process that is waiting elsewhere inside the block gets an error there, and then arrives
        here; so does this process, once more, also if a process dies between the two meetings.
        """
        deadline = Deadline(time.monotonic(), self._timeout_s)
        while True:
            try:
                left = live_processes.on(
                    self._client, processes=self._living, timeout_s=deadline.left_s
                )
            except (DivergenceError, PeerFailedError):
                if deadline.is_over:
                    raise
                continue
            if left != self._living:
                return dict.fromkeys(left, b"")
            with contextlib.suppress(ProcessLostError, DivergenceError, PeerFailedError):
                return self._report(payload, deadline.left_s)

    def _report(self, payload: bytes, timeout_s: float) -> Mapping[int, bytes]:
        name = f"{self._name}, its end"
        with self._client.call(name, "main", self._living):
            point = Point(name, self._living, operation=name, site=callsite())
            return self._client.arrive(point, payload, timeout_s=timeout_s)
