"""The processes of a job that make one call together: all of them, or those that the call names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import raise_all
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.point import group_of, group_offences, index_of


@dataclass(frozen=True)
class Group:
    """Some processes of a job, as one of them sees them."""

    process: int  # this one, as the job counts
    members: tuple[int, ...]  # as the job counts, in order
    is_all: bool  # are these all processes of the job?

    @property
    def named(self) -> tuple[int, ...] | None:
        """The processes as a `Point` names them."""
        return None if self.is_all else self.members

    @property
    def count(self) -> int:
        """How many processes these are."""
        return len(self.members)

    @property
    def place(self) -> int:
        """Where this process is among the members: 0 ≤ place < count."""
        return self.members.index(self.process)

    @property
    def lead(self) -> int:
        """The lowest of them, which does what one process does for all."""
        return self.members[0]


def group_in(coordinator: Coordinator, asked: str, processes: Iterable[int] | None) -> Group:
    """Return the processes that an argument `processes` names; None: all of the job.

    Raises:
      UsageError: one does not exist or comes twice, or this process is not among them; what is
        given lists no processes. All offences at once.

    >>> from shoal.runtime.client.in_process import LocalJob
    >>> group_in(LocalJob(4).coordinators[2], "save", [3, 2]).members
    (2, 3)
    """
    process, count = coordinator.process, coordinator.num_processes
    named = group_of(asked, processes)
    if named is None:
        return Group(process, tuple(range(count)), True)
    members = tuple(sorted(map(index_of, named)))
    raise_all(asked, group_offences(members, process, count))
    return Group(process, members, len(members) == count)
