"""The interface between the public functions and the transport of messages.

Through a job client a process meets the others of its job. There are two: `over_tcp` (speaks to
the coordinator, for real processes) and `in_process` (a job of one process, or N threads of a
test). Everything above takes a job client as an argument and knows only this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shoal.runtime.client.known_losses import PeerLosses
from shoal.runtime.client.programs import ProgramNotes
from shoal.runtime.client.progress import Progress
from shoal.runtime.failures.last_record import LastRecord
from shoal.runtime.rules.call_record import CallRecords
from shoal.runtime.rules.meeting_answers import MembersKnown
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.rules.requested_saves import SaveReport
from shoal.runtime.rules.stalls import Stall
from shoal.runtime.rules.stopping import PreemptionState, ReceivedNotice, StopReport


class JobClient(Protocol):
    """The operations of the control plane. Safe to call from several threads, one lane each."""

    kept: dict[str, Any]
    """What higher floors keep while this process is in the job, each by a name of its own."""

    stall: Stall | None
    """The stall that has ended the job."""

    @property
    def process(self) -> int:
        """This process's index, 0 ≤ process < num_processes."""

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each process, in order."""

    @property
    def jax_service(self) -> str:
        """host:port of JAX's service, if any process gave it when the job was joined, else ""."""

    @property
    def progress(self) -> Progress:
        """The progress of this process's main thread; reported to the other processes."""

    @property
    def peer_losses(self) -> PeerLosses:
        """The known losses, and whether this process's program has seen them."""

    @property
    def stop(self) -> PreemptionState:
        """The open notices, and the step from which on all processes stop."""

    @property
    def programs(self) -> ProgramNotes:
        """The programs that this process has compiled for devices of several."""

    @property
    def call_records(self) -> CallRecords:
        """The call records: what must be equal about the calls that send nothing."""

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """Meet the group of `point` in one round trip; return each process's payload.

        Every member returns, or every living member gets the same error. The earliest deadline of
        the waiting members ends the wait for all. The point is then spent: a late arrival gets the
        same error at once, and later points stay aligned. A payload may have up to
        MAX_PAYLOAD_BYTES.

        Raises, on all that arrived or on none:
          DivergenceError: names or fingerprints differ, or the call records of the calls before, or
            members wait for each other in a cycle.
          DeadlineError: a member did not arrive in time.
          ProcessLostError: a process is dead or unreachable.
          PeerFailedError: a process raised, or left before arriving; or left this call by an
            exception, such as an interrupt.
        """

    def call(
        self,
        operation: str,
        lane: object = "main",
        processes: object = None,
        *,
        survivors: bool = False,
        ends_lane: bool = False,
    ) -> AbstractContextManager[object]:
        """Return a context that is one collective call, of one point or of several.

        It begins before the arguments are checked and ends after the last point. If an exception
        that not all members get (an interrupt, a wrong argument) leaves it, the members that are in
        the call or arrive later get PeerFailedError, and the next calls of all members match again.
        Within another call of its lane it is a part of that one. See `lanes.collective_scope`.

        Args:
          operation: the name of the call in messages.
          lane: the lane of its points; an invalid one counts as "main".
          processes: the processes that take part; None or an invalid value counts as all. If it
            lists only other processes, none of them waits for this one.
          survivors: whether survivors of a loss meet there.
          ends_lane: whether this is the process's last call in the lane, which is then forgotten.

        Raises:
          UsageError: another thread of this process is in a call of the lane.
        """

    def check(self, caller: str = "") -> None:
        """Raise if a process is known to be gone, or this process cannot continue. Sends nothing.

        It raises again and again until a point with `survivors` was passed: its members have then
        agreed on who is left, and those losses are no longer errors.

        Args:
          caller: the operation that this process is about to start, for the message.

        Raises:
          ProcessLostError: a process is dead or unreachable, or the coordinator or JAX's service
            is; or this process itself was declared lost.
          PeerFailedError: a process raised.
        """

    def stacks(
        self, processes: Iterable[int] | None = None, *, timeout_s: float
    ) -> Mapping[int, str]:
        """Return the Python stacks of all threads of `processes` (None: all), innermost first.

        Works for a main thread that hangs in native code. Processes that do not answer are absent.
        """

    def end_stalled(self, reason: str) -> None:
        """Make the waits of this process, and its next step, raise StalledError."""

    def report(self, kind: str, words: str, end: LastRecord | None = None) -> None:
        """Report a state one way, without waiting: "failed", "followed" (failed because of
        others), "doing", or "ending" (its program has ended, and it waits for its devices).

        The text of a failure begins with a headline, see `exception_text`; a traceback may follow.
        `end` holds the same as facts.
        """

    def ask_report(
        self, sharing: Iterable[int], *, waits: bool, timeout_s: float
    ) -> Mapping[str, Any] | None:
        """Query whether this process, which ends, is to report the failure of its job.

        Return None if another one does; else what the coordinator knows: see
        `meeting_answers.ReportAsked`.

        Args:
          sharing: the processes that may have the same failure.
          waits: whether to wait until another one has confirmed that it is there to report.
        """

    def explain(self, key: str, text: str) -> None:
        """Leave what is known of a difference for processes that arrive later, one way: see
        `explanations`."""

    def explanation(self, key: str, process: int, *, timeout_s: float) -> str | None:
        """Query what a process has left of a difference; None: nothing yet, "": it found none."""

    def give_notice(self, given: ReceivedNotice) -> bool:
        """Report a preemption notice one way: all processes will stop at one step.

        Return False if the same notice of this process is open already; nothing is sent then.
        """

    def report_stop(self, report: StopReport) -> None:
        """Send an answer of `stop`, one way."""

    def report_save(self, report: SaveReport) -> None:
        """Send an answer of `stop.saves`, one way."""

    def awaited(self, *, timeout_s: float) -> tuple[int, ...]:
        """Query the processes that have not answered the open notice or request to save, in
        order."""

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """Query the state of all processes: one `Member` for each, in order."""

    def job_state(self, *, timeout_s: float) -> MembersKnown:
        """Query the same, the services, and the programs that only some have compiled."""

    def close(self, words: str = "") -> None:
        """Leave the job in order. Processes that still wait for this one see "left". Idempotent.

        Args:
          words: how, for processes that wait: "left the job by …"; empty: "left the job".
        """
