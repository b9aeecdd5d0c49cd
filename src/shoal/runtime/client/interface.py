"""The seam between what processes agree on and how the words travel.

A coordinator lets the processes of a job meet. Two exist: `coordinator_tcp` (the client of the
meeting place, for real processes) and `coordinator_local` (inside one process: a job of one, or N
threads of a test). Everything above takes a coordinator as an argument and knows only this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from shoal.runtime.client.known_losses import Troubles
from shoal.runtime.client.progress import Progress
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.rules.stopping import Given, Stop, Told
from shoal.runtime.rules.trail import Trails


class Coordinator(Protocol):
    """What the upper floors may ask for. Safe to call from several threads, one lane each."""

    @property
    def process(self) -> int:
        """This process's index, 0 ≤ process < num_processes."""

    @property
    def num_processes(self) -> int:
        """How many processes the job has."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each process, in order."""

    @property
    def jax_service(self) -> str:
        """host:port of JAX's service, if somebody told it when the job was joined, else empty."""

    @property
    def progress(self) -> Progress:
        """How far the main line of this process has come; the others are told."""

    @property
    def troubles(self) -> Troubles:
        """Who is known to be gone, and whether the program of this process knows."""

    @property
    def stop(self) -> Stop:
        """Which notices are open, and from which step on all processes stop."""

    @property
    def trails(self) -> Trails:
        """What the calls of this process that send nothing said must be equal."""

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """Meet the group of `point` in one round trip; return everybody's payload by process.

        Everybody comes back, or everybody that is alive gets the same error. The earliest deadline
        of all that wait ends the wait for all. The point is then spent: a late arriver gets the
        same error at once, and the next points stay aligned. A payload may have
        MAX_PAYLOAD_BYTES.

        Raises, on all that arrived or on none:
          DivergenceError: names or fingerprints differ, or the trails of the calls before, or
            members wait for each other in a cycle.
          DeadlineError: somebody did not come in time.
          ProcessLostError: somebody is dead or unreachable.
          PeerFailedError: a process raised, or left before coming here; or left this call by an
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

        It begins before the arguments are looked at and ends after the last point. If an exception
        leaves it that not all members get (an interrupt, a wrong argument), the members that are
        in the call or come to it get PeerFailedError, and the next call of each is the same one.
        Within another call of its lane it is a part of that one. See `lanes.one_call`.

        Args:
          operation: what the call is named in messages.
          lane: the lane of its points; one that is wrong counts as "main".
          processes: who takes part; what is wrong, or None, counts as all processes. If it lists
            others alone, none of them waits for this one.
          survivors: do those who are left meet there?
          ends_lane: is it this process's last call in the lane, which is then forgotten?

        Raises:
          UsageError: another thread of this process is in a call of the lane.
        """

    def check(self, asked: str = "") -> None:
        """Raise if somebody is known to be gone, or this process cannot go on. Asks nobody.

        It raises again and again, until a point with `survivors` was passed: then its members have
        agreed on who is left, and who is gone of them is nobody's error any more.

        Args:
          asked: what this process is about to do, for the message.

        Raises:
          ProcessLostError: a process is dead or unreachable; so is the meeting place, or JAX's
            service; or this process itself was declared lost.
          PeerFailedError: a process raised.
        """

    def stacks(
        self, processes: Iterable[int] | None = None, *, timeout_s: float
    ) -> Mapping[int, str]:
        """Return the Python stacks of all threads of `processes` (None: all), innermost first.

        Also of those whose main thread hangs in native code. Who does not answer is left out.
        """

    def tell(self, kind: str, words: str) -> None:
        """Say something one way, without waiting: kind "failed" or "doing".

        The words of a failure begin with a headline, see `failure_words`; a traceback may follow.
        """

    def give_notice(self, given: Given) -> bool:
        """Say one way that this process was told of its end: all will stop at one step.

        False: nothing was said, for the same notice of this process is open.
        """

    def tell_stop(self, told: Told) -> None:
        """Say one way what `stop` has this process tell."""

    def awaited(self, *, timeout_s: float) -> tuple[int, ...]:
        """Ask who has not answered yet since a notice is open, in order."""

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """Ask who is here, one `Member` for each process of the job, in order."""

    def close(self, words: str = "") -> None:
        """Leave in peace. Others are told "left" if they still wait for it. Idempotent.

        Args:
          words: how, for those who wait: "left the job by …"; empty: "left the job".
        """
