"""The seam between what processes agree on and how the words travel.

A coordinator lets the processes of a job meet. Two exist: `coordinator_tcp` (the client of the
meeting place, for real processes) and `coordinator_local` (inside one process: a job of one, or N
threads of a test). Everything above takes a coordinator as an argument and knows only this file.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from shoal.errors import UsageTypeError, raise_all

__all__ = ["MAX_PAYLOAD_BYTES", "Coordinator", "Member", "Point", "checked"]

MAX_PAYLOAD_BYTES = 16 << 20  # of one process at one point; larger values travel between devices
_MAX_TEXT = 32_768  # characters of all texts of a point


class Point(NamedTuple):
    """One point where processes meet, as one of them sees it.

    The points of a group in a lane are counted, for each process, and processes meet by that
    count: the n-th arrival of each is one meeting. `name` and `fingerprint` must then be equal, or
    all of them are told that they diverged. A lane is one line of execution: "main", or a name of
    its own for a background thread.
    """

    name: str
    group: tuple[int, ...] | None = None  # the processes that meet here; None: all of the job
    lane: str = "main"
    fingerprint: str = ""  # whatever else must be equal: operation, shapes, dtypes, options
    site: str = ""  # where the caller stands, "train.py:31 (main)"; shown, never compared
    survivors: bool = False  # who is gone is not waited for; else their loss is everybody's error


class Member(NamedTuple):
    """What is known of one process of the job."""

    process: int
    host: str
    state: str  # "here" | "silent" (it runs, but says nothing) | "left" | "lost" | "failed"
    said: str  # its last words: where it waits or what it last did; or why it is gone
    step: int | None = None  # the last `step` that it began
    place: str = ""  # its last call of shoal: what, and file:line (function)
    since_s: float = 0.0  # seconds since it came there, or since it went
    is_waiting: bool = False  # does it wait for others there?
    step_s: float | None = None  # median time of its last steps, seconds
    memory_bytes: int = 0  # resident
    pid: int = 0


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

    def arrive(
        self, point: Point, payload: bytes = b"", *, timeout_s: float
    ) -> Mapping[int, bytes]:
        """Meet the group of `point` in one round trip; return everybody's payload by process.

        Everybody comes back, or everybody that is alive gets the same error. The earliest deadline
        of all that wait ends the wait for all. The point is then spent: a late arriver gets the
        same error at once, and the next points stay aligned. A payload may have
        MAX_PAYLOAD_BYTES.

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


def checked(
    point: Point, payload: bytes, timeout_s: float, *, process: int, num_processes: int
) -> Point:
    """Return `point` as coordinators compare it: its group sorted, and None if that is everybody.

    Raises:
      UsageError: a process of the group does not exist, comes twice, or the caller is not in it;
        `timeout_s` is not positive; a text or the payload is too long. All offences at once.
    """
    offences = []
    name, group, lane, fingerprint, site, _ = point
    if len(name) + len(lane) + len(fingerprint) + len(site) > _MAX_TEXT:
        lengths = f"name {len(name)}, lane {len(lane)}, fingerprint {len(fingerprint)}"
        told = f"{lengths}, site {len(site)} characters; {_MAX_TEXT} together are allowed"
        offences.append(told)
    if not timeout_s > 0:
        offences.append(f"timeout_s={timeout_s!r} must be a positive number of seconds")
    if len(payload) > MAX_PAYLOAD_BYTES:
        offences.append(f"the payload has {len(payload)} bytes; {MAX_PAYLOAD_BYTES} are allowed")
    if group is not None:
        group = tuple(sorted(_index(member) for member in group))
        offences += _group_offences(group, process, num_processes)
    if offences:
        raise_all(f"point {point.name[:200]!r}", offences)
    if group is None:
        return point
    return point._replace(group=None if len(group) == num_processes else group)


def _index(member: object) -> int:
    try:
        return operator.index(member)  # type: ignore[arg-type]
    except TypeError:
        raise UsageTypeError(f"processes are whole numbers, not {member!r}") from None


def _group_offences(group: tuple[int, ...], process: int, num_processes: int) -> list[str]:
    offences = []
    if outside := [member for member in group if not 0 <= member < num_processes]:
        offences.append(f"the job has processes 0..{num_processes - 1}, not {outside}")
    if twice := sorted(member for member, count in Counter(group).items() if count > 1):
        offences.append(f"named more than once: {twice}")
    if process not in group:
        offences.append(f"process {process} (this one) is not among the processes {list(group)}")
    return offences
