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
from shoal.runtime.system.failure_words import Refusal, listed
from shoal.runtime.wire.frames import FrameError, number_field, text_field, whole_field
from shoal.runtime.wire.proof import WRONG_TOKEN

PROTOCOL = 9
# The indented lines are printed as they are, for people to paste.
REMEDY = """\
set SHOAL_TOKEN to one secret for all processes; make it once, and use it on every host:
  (umask 077; openssl rand -hex 16 > token)   # once; copy it to all hosts
  export SHOAL_TOKEN=$(cat token)             # on every host
  sbatch --export=ALL train.sbatch            # Slurm; Open MPI: mpirun -x SHOAL_TOKEN …
  kubectl create secret generic job \\
    --from-literal=SHOAL_TOKEN=$(openssl rand -hex 16)
pods take it by envFrom (docs/clusters/kubernetes.md); to let anyone join, set SHOAL_INSECURE=1 on \
all processes"""
OLD_CLIENT = "it is another version of shoal; install the same one everywhere"
_NO_FACTS = Refusal()
_STANDS_S = 10.0  # a refusal is sent to processes that connect within this time

To = TypeVar("To", bound=Hashable)


class Hello(NamedTuple):
    """The identity that a process presents once. Later protocols must not remove a field."""

    protocol: int
    process: int
    num_processes: int
    host: str
    pid: int
    incarnation: str  # a random text: distinguishes this process from a restarted one
    versions: str  # of shoal and JAX, as text; all must be equal
    jax_service: str  # host:port of JAX's service, if this process knows it
    timeout_s: float
    host_id: str = ""  # equal for processes that one keeper can watch; empty: unknown
    given_s: float = 0.0  # of which `timeout_s` was left after connecting; 0: unknown

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


class JoinReply(NamedTuple, Generic[To]):
    """`refusal` is None for a welcome, else why this process (or all) cannot join."""

    to: To
    refusal: str | None
    missing: tuple[int, ...] = ()
    why: Refusal = Refusal()


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
        refusal: str = "",
        why: Refusal = _NO_FACTS,
    ) -> None:
        """Prepare.

        Args:
          refusal: why no process can join, ever; "": they can.
          why: the same as facts.
        """
        self.num_processes = num_processes
        self.jax_service = jax_service
        self.deadline = math.inf
        self.stands_until = math.inf
        self.refusal: str | None = refusal or None
        self.is_complete = False
        self._limit = (-1, math.inf)
        self._here: dict[int, Hello] = {}
        self._to: dict[int, To] = {}
        self._arrived: set[int] = set()
        self._missing: tuple[int, ...] = ()
        self._why = why
        self._strangers: list[str] = []

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
            words = "waits for all to join"
            states[process] = Member(process, hello.host, "here", words, pid=hello.pid)
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
        self._strangers = [*self._strangers[-3:], f"{_claim(header)} from {origin}"]
        if isinstance(header.get("nonce"), str):
            return JoinReply(to, WRONG_TOKEN, why=Refusal("token"))
        return JoinReply(to, OLD_CLIENT)

    def hello(self, now: float, hello: Hello, to: To) -> list[JoinReply[To]]:
        """Take a HELLO; return the replies now due: to none, to this process, or to all."""
        if self.is_complete:
            return [JoinReply(to, self._why_complete(hello))]
        if 0 <= hello.process < self.num_processes:
            self._arrived.add(hello.process)
        if self.refusal is not None:
            return [JoinReply(to, self.refusal, self._missing, self._why)]
        if now + hello.timeout_s < self.deadline:
            self.deadline = now + hello.timeout_s
            self._limit = (hello.process, hello.given_s or hello.timeout_s)
        problems = self._problems(hello)
        if problems:
            return [*self._refuse(now, "; ".join(problems)), JoinReply(to, self.refusal)]
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
        return self._refuse(now, f"{gone} died or gave up before all had joined", (process,))

    def abandon(
        self, now: float, reason: str = "the process that started the coordinator died or gave up"
    ) -> list[JoinReply[To]]:
        """End the joining, because what every job needs is gone."""
        if self.is_complete or self.refusal is not None:
            return []
        words = f"{reason} before all had joined; {listed(self.absent())} never joined"
        return self._refuse(now, words, self.absent())

    def tick(self, now: float) -> list[JoinReply[To]]:
        """End the joining at the earliest deadline of the waiting processes."""
        if now < self.next_deadline:
            return []
        missing = self.absent()
        by, timeout_s = self._limit
        reason = f"{listed(missing)} of {self.num_processes} did not join within {timeout_s:g} s"
        reason += f" (the deadline of process {by}); here: {listed(self._here)}"
        strangers = self.refused_words()
        reason += f"; {strangers}" if strangers else ""
        return self._refuse(now, reason, missing, Refusal("late", strangers))

    def refused_words(self) -> str:
        """Return a clause about processes that were refused for their token; "" if none were."""
        claims = ", ".join(dict.fromkeys(self._strangers))
        return f"refused because its token is wrong: {claims}" if claims else ""

    def absent(self) -> tuple[int, ...]:
        """Return the processes that have not joined."""
        return tuple(p for p in range(self.num_processes) if p not in self._here)

    def _refuse(
        self, now: float, reason: str, missing: tuple[int, ...] = (), why: Refusal = _NO_FACTS
    ) -> list[JoinReply[To]]:
        self.stands_until = min(self.deadline, now + _STANDS_S)
        self.refusal, self._missing, self._why = reason, missing, why
        return [JoinReply(to, reason, missing, why) for to in self._to.values()]

    def _why_complete(self, hello: Hello) -> str:
        there = self._here.get(hello.process)
        words = "the job is complete" + (f": {there} is process {hello.process}" if there else "")
        if there and there.host_id and there.host_id == hello.host_id:
            words += (
                "; if this is a child of it, put initialize() below `if __name__ == '__main__':`, "
                "or pass num_processes=1"
            )
        return words

    def _problems(self, hello: Hello) -> list[str]:
        """Return everything that is wrong with a HELLO, with both sides."""
        count = self.num_processes
        problems = []
        if hello.protocol != PROTOCOL:
            problems.append(
                f"{hello} speaks protocol {hello.protocol}, the coordinator {PROTOCOL}:"
                " install the same shoal everywhere"
            )
        if hello.num_processes != count:
            problems.append(
                f"{hello} says that the job has {hello.num_processes} processes,"
                f" the coordinator was started for {count}"
            )
        if not 0 <= hello.process < count:
            problems.append(f"{hello} does not exist: the job has processes 0..{count - 1}")
        there = self._here.get(hello.process)
        if there:
            problems.append(f"two processes have the index {hello.process}: {there} and {hello}")
        first = next(iter(self._here.values()), hello)  # the others run the same versions
        if first.versions != hello.versions:
            problems.append(
                f"{first} runs {first.versions}, but {hello} runs {hello.versions}:"
                " install the same versions everywhere"
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


def _claim(header: Mapping[str, Any]) -> str:
    """Return the index that an untrusted connection claims, if it is a short number."""
    process = header.get("process")
    known = isinstance(process, int) and not isinstance(process, bool) and 0 <= process < 10**6
    return f"process {process}" if known else "a process without an index"
