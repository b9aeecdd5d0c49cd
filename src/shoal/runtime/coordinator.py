"""The seam between what processes agree on and how the words travel.

A coordinator lets the processes of a job meet. Two exist: `coordinator_tcp` (the client of the
meeting place, for real processes) and `coordinator_local` (inside one process: a job of one, or N
threads of a test). Everything above takes a coordinator as an argument and knows only this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

__all__ = ["Coordinator", "Member", "Point"]


class Point(NamedTuple):
    """One point where processes meet, as one of them sees it.

    Processes count the points of a lane and meet by that count: the n-th arrival of each in a lane
    is one meeting. `name` and `fingerprint` must then be equal, or all of them are told that they
    diverged. A lane is one line of execution: "main", or a name of its own for a background thread.
    """

    name: str
    group: tuple[int, ...] | None = None  # the processes that meet here; None: all of the job
    lane: str = "main"
    fingerprint: str = ""  # whatever else must be equal: operation, shapes, dtypes, options
    site: str = ""  # where the caller stands, "train.py:31 (main)"; shown, never compared


class Member(NamedTuple):
    """What is known of one process of the job."""

    process: int
    host: str
    state: str  # "absent" | "here" | "left" | "lost" | "failed"
    said: str  # its last words: where it waits or what it last did; or why it is gone


class Coordinator(Protocol):
    """What the upper floors may ask for. Safe to call from several threads, one lane each."""

    @property
    def process(self) -> int:
        """This process's index, 0 ≤ process < num_processes."""

    @property
    def num_processes(self) -> int:
        """How many processes the job has."""

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """Meet the group of `point` in one round trip; return everybody's payload by process.

        The earliest deadline of all that wait ends the wait for all. The point is then spent: a
        late arriver gets the same error at once, and the next points stay aligned.

        Raises, on all that arrived or on none:
          DivergenceError: names or fingerprints differ, or members wait for each other in a cycle.
          DeadlineError: somebody did not come in time.
          ProcessLostError: somebody is dead or unreachable.
          PeerFailedError: somebody raised, or left before coming here.
        """

    def tell(self, kind: str, words: str) -> None:
        """Say something one way, without waiting: kind "failed" (words: a traceback) or "doing"."""

    def members(self, *, timeout_s: float) -> tuple[Member, ...]:
        """Ask who is here, one `Member` for each process of the job, in order."""

    def close(self) -> None:
        """Leave in peace. Others are told "left" if they still wait for it. Idempotent."""
