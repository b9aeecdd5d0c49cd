"""The processes that take part in a call: all of the job, or those that the call names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import raise_all
from shoal.runtime.client.interface import JobClient
from shoal.runtime.rules.point import group_of, group_problems, index_of


@dataclass(frozen=True)
class Group:
    """A subset of the job's processes, seen from one of its members."""

    process: int  # this process, by its index in the job
    members: tuple[int, ...]  # their indices in the job, in order
    is_all: bool  # whether these are all processes of the job

    @property
    def named(self) -> tuple[int, ...] | None:
        """The group of a `Point`: None for all processes."""
        return None if self.is_all else self.members

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def place(self) -> int:
        """The position of this process among the members, 0 ≤ place < count."""
        return self.members.index(self.process)

    @property
    def lead(self) -> int:
        """The lowest member, which acts for all."""
        return self.members[0]


def group_in(client: JobClient, caller: str, processes: Iterable[int] | None) -> Group:
    """Return the group given by an argument `processes`; None: all of the job.

    Raises:
      UsageError: an index does not exist or is given twice, this process is not a member, or the
        argument is not a list of processes. All problems at once.

    >>> from shoal.runtime.client.in_process import LocalJob
    >>> group_in(LocalJob(4).clients[2], "save", [3, 2]).members
    (2, 3)
    """
    process, count = client.process, client.num_processes
    named = group_of(caller, processes)
    if named is None:
        return Group(process, tuple(range(count)), True)
    members = tuple(sorted(map(index_of, named)))
    raise_all(caller, group_problems(members, process, count))
    return Group(process, members, len(members) == count)
