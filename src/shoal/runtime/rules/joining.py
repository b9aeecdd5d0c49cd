"""The rules of joining, as a pure state machine: all processes send HELLO before any proceeds.

A process that has the token and sends something wrong ends the joining for all, at once; one
without the token is refused alone, and mentioned if a process is missing at the earliest deadline.
A refusal stands for a while, or until that deadline, so that later processes receive it too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, repeat
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.rules.point import Member
from shoal.runtime.wire.frames import FrameError, number_field, text_field, whole_field

# Raise it when a message changes, by a field or by its meaning. docs/how-it-works/wire.md has a row
# for each message, and this number; tests/meta/test_tours.py compares both.
PROTOCOL = 9
# The texts in the bodies of refusals: what a client prints that knows no `Refusal`, or this reason.
WRONG_TOKEN = "the token is wrong: SHOAL_TOKEN must be the one of this job"
OTHER_VERSION = "it is another version of shoal; install the same one everywhere"
_STANDS_S = 10.0  # a refusal is sent to processes that connect within this time

To = TypeVar("To", bound=Hashable)


class Stranger(NamedTuple):
    """A connection that was refused for its token."""

    process: int  # as it claims; -1: it claims none
    origin: str  # where it comes from


class WrongHello(NamedTuple):
    """What is wrong with a HELLO."""

    what: str  # "protocol" | "count" | "index" | "twice" | "versions"
    process: str  # whose it is
    given: str = ""  # what it says
    other: str = ""  # the process that it contradicts; empty: the coordinator
    wanted: str = ""  # what that one says


class Refusal(NamedTuple):
    """Why a process, or all, cannot join."""

    # "late": the deadline has passed. "died": a process has, or gave up. "abandoned": process 0, or
    # a service, is gone. "complete": all are here. "wrong": a HELLO. "token": that of the process.
    # "version": its shoal is another. "lacks-token": process 0 has none. "given": as `words` say.
    reason: str
    words: str = ""  # of these last four
    who: str = ""  # has died, is gone or is here
    missing: tuple[int, ...] = ()
    here: tuple[int, ...] = ()
    process: int = -1  # "late": whose deadline it is; "complete": which is here
    timeout_s: float = 0.0
    num_processes: int = 0
    strangers: tuple[Stranger, ...] = ()
    problems: tuple[WrongHello, ...] = ()
    is_child: bool = False  # of the process that is here, perhaps


def refusal_of_row(row: object) -> Refusal:
    """Parse a refusal as it is sent: in JSON, a tuple is a list.

    Raises:
      FrameError: it is none.
    """
    kinds = [str, str, str, list, list, int, float, int, list, list, bool]
    if not isinstance(row, list) or [*map(type, row)] != kinds:
        raise FrameError("a message holds no refusal")
    refusal = Refusal(*row)
    return refusal._replace(
        missing=_processes(refusal.missing),
        here=_processes(refusal.here),
        strangers=strangers_of(refusal.strangers),
        problems=tuple(map(_problem_of, refusal.problems)),
    )


def strangers_of(rows: object) -> tuple[Stranger, ...]:
    """Parse the connections that were refused."""
    if not isinstance(rows, list):
        raise FrameError("field 'strangers' is not a list")
    for row in rows:
        if not isinstance(row, list) or [*map(type, row)] != [int, str]:
            raise FrameError("field 'strangers' holds an invalid one")
    return tuple(Stranger(*row) for row in rows)


def _problem_of(row: object) -> WrongHello:
    if not isinstance(row, list) or [*map(type, row)] != [str] * len(WrongHello._fields):
        raise FrameError("a refusal holds an invalid problem")
    return WrongHello(*row)


def _processes(row: Iterable[int]) -> tuple[int, ...]:
    processes = tuple(row)
    if not all(type(process) is int for process in processes):
        raise FrameError("a refusal lists invalid processes")
    return processes


class Hello(NamedTuple):
    """The identity that a process presents once. Later protocols must not remove a field.

    A new field is read only from its protocol on, as `host_id` is: the HELLO of an older process
    must still be read, so that it is refused for its version.
    """

    protocol: int
    process: int
    num_processes: int
    host: str
    pid: int
    incarnation: str  # a random text: distinguishes this process from a restarted one
    versions: str  # of shoal and JAX, as text; all must be equal
    jax_service: str  # host:port of JAX's service, if this process knows it
    timeout_s: float
    host_id: str = ""  # equal for processes that one host agent can watch; empty: unknown
    given_s: float = 0.0  # of which `timeout_s` was left after connecting; 0: unknown

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


class JoinReply(NamedTuple, Generic[To]):
    """`refusal` is None for a welcome, else why this process (or all) cannot join."""

    to: To
    refusal: Refusal | None


def parse_hello(header: Mapping[str, Any]) -> Hello:
    """Parse a HELLO.

    Raises:
      FrameError: a field is absent or has the wrong type.
    """
    protocol = whole_field(header, "protocol")
    hello = Hello(
        protocol=protocol,
        process=whole_field(header, "process"),
        num_processes=whole_field(header, "processes"),
        host=text_field(header, "host"),
        pid=whole_field(header, "pid"),
        incarnation=text_field(header, "incarnation"),
        versions=text_field(header, "versions"),
        jax_service=text_field(header, "jax_service"),
        timeout_s=number_field(header, "timeout_s"),
        host_id=text_field(header, "host_id") if protocol >= 2 else "",
        given_s=number_field(header, "given_s") if "given_s" in header else 0.0,
    )
    if not hello.timeout_s > 0:
        raise FrameError("field 'timeout_s' is not positive")
    return hello


class Joining(Generic[To]):
    """Collects `num_processes` HELLOs, then welcomes all."""

    def __init__(
        self,
        num_processes: int,
        *,
        jax_service: str = "",
        refusal: Refusal | None = None,
    ) -> None:
        """Prepare.

        Args:
          refusal: why no process can join, ever; None: they can.
        """
        self.num_processes = num_processes
        self.jax_service = jax_service
        self.deadline = math.inf
        self.stands_until = math.inf
        self.refusal = refusal
        self.is_complete = False
        self._limit = (-1, math.inf)
        self._here: dict[int, Hello] = {}
        self._to: dict[int, To] = {}
        self._arrived: set[int] = set()
        self._strangers: list[Stranger] = []

    @property
    def next_deadline(self) -> float:
        """The time at which `tick` must be called."""
        if self.is_complete or self.refusal:
            return math.inf
        return self.deadline

    @cached_property
    def hosts(self) -> list[str]:
        """The host of each process, in order, once complete."""
        return [self._here[process].host for process in range(self.num_processes)]

    @property
    def pids(self) -> list[int]:
        """The process id of each process on its host, in order, once complete."""
        return [self._here[process].pid for process in range(self.num_processes)]

    @cached_property
    def shared_hosts(self) -> dict[str, dict[int, int]]:
        """Return {process: pid} for each known host_id, in order, once complete."""
        shared: dict[str, dict[int, int]] = {}
        for process in range(self.num_processes):
            hello = self._here[process]
            if hello.host_id:
                shared.setdefault(hello.host_id, {})[process] = hello.pid
        return shared

    @property
    def is_on_one_host(self) -> bool:
        """Return whether all processes are known to be on one host, once complete."""
        return [self.num_processes] == [len(pids) for pids in self.shared_hosts.values()]

    def host_id(self, process: int) -> str:
        """Return the host_id of a process that joined, empty if it is unknown."""
        return self._here[process].host_id

    def members(self) -> tuple[Member, ...]:
        """Return the state of each process."""
        states = [
            Member(process, "", "absent", "has not joined yet")
            for process in range(self.num_processes)
        ]
        for process, hello in self._here.items():
            activity = "waits for all to join"
            states[process] = Member(process, hello.host, "here", activity, pid=hello.pid)
        return tuple(states)

    def is_finished(self, now: float) -> bool:
        """Return whether the joining was refused, and no process has yet to receive the refusal."""
        all_arrived = len(self._arrived) >= self.num_processes
        return self.refusal is not None and (all_arrived or now >= self.stands_until)

    def was_refused(self, process: int) -> bool:
        """Return whether this process received the refusal; its next HELLO is another attempt."""
        return self.refusal is not None and process in self._arrived

    def knows(self, process: int, incarnation: str) -> bool:
        """Return whether this process joined."""
        hello = self._here.get(process)
        return hello is not None and hello.incarnation == incarnation

    def refuse_stranger(self, header: Mapping[str, Any], origin: str, to: To) -> JoinReply[To]:
        """Return the refusal of a connection that did not prove that it has the token."""
        stranger = Stranger(_claim(header), origin)
        self._strangers = [*self._strangers[-3:], stranger]
        if isinstance(header.get("nonce"), str):
            return JoinReply(to, Refusal("token", words=WRONG_TOKEN))
        return JoinReply(to, Refusal("version", words=OTHER_VERSION))

    def hello(self, now: float, hello: Hello, to: To) -> list[JoinReply[To]]:
        """Take a HELLO; return the replies now due: to none, to this process, or to all."""
        if self.is_complete:
            return [JoinReply(to, self._why_complete(hello))]
        if 0 <= hello.process < self.num_processes:
            self._arrived.add(hello.process)
        if self.refusal is not None:
            return [JoinReply(to, self.refusal)]
        if now + hello.timeout_s < self.deadline:
            self.deadline = now + hello.timeout_s
            self._limit = (hello.process, hello.given_s or hello.timeout_s)
        problems = self._problems(hello)
        if problems:
            refusal = Refusal("wrong", problems=tuple(problems))
            return [*self._refuse(now, refusal), JoinReply(to, refusal)]
        self._here[hello.process], self._to[hello.process] = hello, to
        self.jax_service = self.jax_service or hello.jax_service
        if len(self._here) < self.num_processes:
            return []
        self.is_complete = True
        return [JoinReply(to, None) for to in self._to.values()]

    def depart(self, now: float, process: int) -> list[JoinReply[To]]:
        """Handle a process that died or gave up before all had joined."""
        if self.is_complete or self.refusal is not None:
            return []
        gone = self._here[process]
        del self._to[process]
        return self._refuse(now, Refusal("died", who=str(gone), missing=(process,)))

    def abandon(self, now: float, who: str = "") -> list[JoinReply[To]]:
        """End the joining, because what every job needs is gone; `who`: empty: process 0."""
        if self.is_complete or self.refusal is not None:
            return []
        return self._refuse(now, Refusal("abandoned", who=who, missing=self.absent()))

    def tick(self, now: float) -> list[JoinReply[To]]:
        """End the joining at the earliest deadline of the waiting processes."""
        if now < self.next_deadline:
            return []
        by, timeout_s = self._limit
        refusal = Refusal(
            "late",
            missing=self.absent(),
            here=tuple(sorted(self._here)),
            process=by,
            timeout_s=float(timeout_s),
            num_processes=self.num_processes,
            strangers=self.strangers,
        )
        return self._refuse(now, refusal)

    @property
    def strangers(self) -> tuple[Stranger, ...]:
        """The last processes that were refused for their token."""
        return tuple(dict.fromkeys(self._strangers))

    def absent(self) -> tuple[int, ...]:
        """Return the processes that have not joined."""
        return tuple(p for p in range(self.num_processes) if p not in self._here)

    def _refuse(self, now: float, refusal: Refusal) -> list[JoinReply[To]]:
        self.stands_until = min(self.deadline, now + _STANDS_S)
        self.refusal = refusal
        return [JoinReply(to, refusal) for to in self._to.values()]

    def _why_complete(self, hello: Hello) -> Refusal:
        there = self._here.get(hello.process)
        if there is None:
            return Refusal("complete")
        is_child = there.host_id != "" and there.host_id == hello.host_id
        return Refusal("complete", who=str(there), process=hello.process, is_child=is_child)

    def _problems(self, hello: Hello) -> list[WrongHello]:
        """Return everything that is wrong with a HELLO, with both sides."""
        name, count = str(hello), self.num_processes
        problems = []
        if hello.protocol != PROTOCOL:
            wanted = str(PROTOCOL)
            problems.append(WrongHello("protocol", name, str(hello.protocol), wanted=wanted))
        if hello.num_processes != count:
            problems.append(WrongHello("count", name, str(hello.num_processes), wanted=str(count)))
        if not 0 <= hello.process < count:
            problems.append(WrongHello("index", name, str(hello.process), wanted=str(count - 1)))
        there = self._here.get(hello.process)
        if there:
            problems.append(WrongHello("twice", name, str(hello.process), other=str(there)))
        first = next(iter(self._here.values()), hello)  # the others run the same versions
        if first.versions != hello.versions:
            problems.append(
                WrongHello(
                    "versions", name, hello.versions, other=str(first), wanted=first.versions
                )
            )
        return problems


def host_runs(hosts: Iterable[str]) -> list[tuple[str, int]]:
    """Return the host of each process as runs, which is how all are sent to all.

    >>> host_runs(["a", "a", "b"])
    [('a', 2), ('b', 1)]
    """
    return [(host, len([*run])) for host, run in groupby(hosts)]


def hosts_of(runs: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    """Inverse of `host_runs`."""
    return tuple(chain.from_iterable(repeat(host, count) for host, count in runs))


def _claim(header: Mapping[str, Any]) -> int:
    """Return the index that an untrusted connection claims, if it is a short number; else -1."""
    process = header.get("process")
    if isinstance(process, int) and not isinstance(process, bool) and 0 <= process < 10**6:
        return process
    return -1
