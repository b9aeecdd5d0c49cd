"""Label a block as a step of the program, and time it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from shoal import settings
from shoal.arguments import integer
from shoal.colour import local
from shoal.errors import UsageError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.record_search import raise_found
from shoal.runtime.exit.idle import watch_alone
from shoal.runtime.rules.point import STEP, Point
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite, line_of
from shoal.runtime.system.progress_file import note_ended, note_step
from shoal.runtime.uses_client import uses_client
from shoal.tracebacks import at_caller

_LIMIT = 1 << 63


@local
@uses_client
def step(
    client: JobClient, number: int, *, within_s: float | None = None
) -> AbstractContextManager[None]:
    """Mark a block as one step of the program, so that its progress and pace are visible.

    Local.

    Nothing is sent and nothing is waited for. The number appears in every message about this
    process, in `job_status` and in `shoal watch`. The step time there is the median of the last 64
    blocks; time spent waiting for other processes in shoal calls is counted separately. If all
    processes synchronize in each step, their step times are equal, and the slow process is the one
    that waits least. Exceptions propagate, and their step is not timed. While a nested step is
    active, it is the one reported. Only steps without nested steps are timed. Mark steps in the
    main thread of the program, not in background threads.

    It also reports failures to a program that makes no waiting calls: the beginning of a block
    raises once a process of the job is gone, and again at every step until the survivors have
    called `live_processes`; and once if processes have made different calls that send nothing
    (`put`, `pack`), as their heartbeats have shown.

    Args:
      number: an integer, 0 ≤ number < 2**63; it need not increase.
      within_s: seconds after which the job is stalled if no process makes progress in this block;
        inf: never, for an evaluation on the host or a foreign restore. It replaces the limit of
        SHOAL_STALLED_AFTER_S; that of a nested step applies within it. None: as outside.

    Returns:
      A reusable context manager.

    Raises:
      ProcessLostError: on this process, at the beginning of the block: a process is dead or
        unreachable, or the coordinator is, or the others have continued without this process.
      PeerFailedError: on this process, at the beginning of the block: another process raised.
      DivergenceError: on each process, at the beginning of the next block: they have made
        different calls.
      StalledError: on this process, at the beginning of the block: the job was found stalled.
      UsageError: on this process: `number` is not such an integer, `within_s` not positive.

    >>> for i in range(3):
    ...     with step(i):
    ...         pass
    """
    index = integer("step", "number", number, least=0)
    if index >= _LIMIT:
        raise UsageError(f"step({number!r}): the number must have no more than 64 bits")
    if within_s is not None:
        within_s = settings.timeout("step", within_s, "", "within_s")
        if not client.progress.is_watched:  # without `initialize`
            watch_alone(client)
    return _Step(client, index, within_s)


class _Step:
    """The context manager of one step; it may be reused and nested."""

    __slots__ = ("_client", "_entered", "_number", "_within_s")

    def __init__(self, client: JobClient, number: int, within_s: float | None) -> None:
        self._client = client
        self._number = number
        self._within_s = within_s
        self._entered: list[tuple[tuple[float, float], int | None, int, Point, float | None]] = []

    @at_caller
    def __enter__(self) -> None:
        client, number = self._client, self._number
        progress = client.progress
        site = callsite()
        place = Point(STEP, operation=STEP, site=site)
        before, ended = progress.outer, progress.ended
        note_step(number)
        began = progress.begin(number, place)
        if client.peer_losses.any():
            client.check(f"step {number} ({line_of(site)})")
        if client.call_records.found is not None:
            raise_found(client, f"step {number}", site)
        progress.outer = number
        self._entered.append((began, before, ended, place, progress.within_s))
        if self._within_s is not None:
            progress.limit(self._within_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began, before, ended, place, within_s = self._entered.pop()
        if kind is None:
            fault_points.reach("step.end", self._client.process)
            note_ended(self._number)
        progress = self._client.progress
        timed = kind is None and progress.ended == ended  # no nested step has ended
        # Where it exited, for the report.
        progress.end(began if timed else None, None if kind is SystemExit else place)
        if self._within_s is not None:
            progress.limit(within_s)
        progress.outer = before
        if before is not None:
            progress.step = before
