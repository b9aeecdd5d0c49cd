"""Check that every process holds equal values, or show where they first differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from shoal.collectives.arguments import Deadline, deadline_of
from shoal.collectives.hashes import Digests, digest_of, digest_of_all, hashing_pool
from shoal.collectives.replicas import Holders, SharedPart, parts_of
from shoal.collectives.versions import groups_of, representatives_of, version_rows
from shoal.collectives.wire import flatten
from shoal.colour import collective
from shoal.errors import DivergenceError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group, group_in
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.failures.comparison import Kind, Said, compared, headline, needs
from shoal.runtime.rules.first_difference import Meet, find_first
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.verb import verb


@collective("processes")
@verb
@one_call("assert_same")
def assert_same(
    coordinator: Coordinator,
    tree: Any,
    *,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Check that all `processes` hold equal values; else raise on all of them.

    Collective over processes.

    Equality is bitwise: a NaN equals a NaN of the same bits, and -0.0 differs from 0.0. It is
    impossible that it returns on one process and raises on another, unless the answer could not
    reach that one. The probability of missing a difference is 2^-128.

    Of a sharded array that spans processes each region is compared among its holders; regions with
    one holder are not compared. Replicas on the devices of one process are compared, too. Any other
    array is compared as a whole. An array on devices of one process alone is a local value there,
    and not elsewhere: its layouts differ.

    One round trip carries a digest (two to three where sharded arrays are held by a subset of the
    processes), so equal values cost no traffic. If they differ, a few more round trips find the
    first difference. Memory: blocks of 4 MiB; data contiguous in this host's memory are not copied.
    Pending computations of the values are awaited first, without a deadline.

    Args:
      tree: arrays of NumPy and JAX of any dtype (also of ml_dtypes), PRNG keys, NumPy and Python
        scalars of any size, str, bytes, None.
      processes: the processes that call it, the caller among them; equal on all. Others are not
        compared. None: all of the job.
      name: identifies calls at different places as the same call; None: the call site does.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the line of execution; see `barrier`.

    Raises:
      DivergenceError: on all that arrived: values differ; `sides` maps each version of the first
        differing item to the processes that hold it. Or trees, shapes, dtypes, layouts or the
        calls differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, a leaf cannot be compared (all such are
        named by path). The others get PeerFailedError.

    >>> import numpy as np
    >>> assert_same({"seed": 7, "w": np.zeros(3)}, name="start")
    """
    deadline = deadline_of("assert_same", name, timeout_s, lane)
    group = group_in(coordinator, "assert_same", processes)
    spec, values = flatten(tree, "assert_same")
    with jax.transfer_guard("allow"), hashing_pool() as pool:
        placed = parts_of(spec.leaves, values, "assert_same", pool)
        where = [leaf.line for leaf in placed if leaf.line]
        words = next((leaf.words for leaf in placed if leaf.words), "")
        parts = [part for leaf in placed for part in leaf.parts]
        here = jax.process_index() if where else coordinator.process
        is_alone = group.count == 1
        compared = [] if is_alone else _compared(parts, coordinator.num_processes)
        mine = _hashed(compared, here, pool)
        brought: dict[str, Any] = {}
        brought["digests"] = [digest_of_all(one.digests).hex() for one in mine if one.digests]
        brought |= {"words": words} if words else {}
        brought |= {"process": here} if here != coordinator.process else {}
        site = callsite()
        call = Call("assert_same", name, site, (*spec.lines, *where))
        fault_points.reach("assert_same.before_arrive", coordinator.process)
        payload = json.dumps(brought).encode()
        answers = agree(
            coordinator, call, payload, timeout_s=deadline.left_s, group=group.named, lane=lane
        )
        fault_points.reach("assert_same.after_arrive", coordinator.process)
        if words or len({*answers.values()}) > 1:
            read = {text: json.loads(text) for text in {*answers.values()}}
            reports = {process: read[text] for process, text in answers.items()}
            _judge(
                coordinator, call, mine, reports, _rounds(coordinator, call, deadline, lane, group)
            )


class _Shared(NamedTuple):
    """All parts held by the same processes."""

    holders: Holders
    parts: list[SharedPart]
    digests: tuple[bytes, ...] = ()  # of each part; empty if this process holds none

    def has(self, process: int) -> bool:
        """Does a process (JAX index) hold these?"""
        return self.holders is None or process in self.holders


def _compared(parts: Sequence[SharedPart], num_processes: int) -> list[_Shared]:
    """Group the parts by their holders; parts with one holder are left out."""
    shared: dict[Holders, _Shared] = {}
    for part in parts:
        is_all = part.holders is None or len(part.holders) == num_processes
        holders = None if is_all else part.holders
        if num_processes > 1 and (holders is None or len(holders) > 1):
            shared.setdefault(holders, _Shared(holders, [])).parts.append(part)
    return sorted(shared.values(), key=lambda one: (one.holders is not None, one.holders or ()))


def _hashed(shared: Sequence[_Shared], here: int, pool: ThreadPoolExecutor) -> list[_Shared]:
    """Hash the parts that this process holds, one at a time, so that few are in memory at once."""

    def digests(parts: Sequence[SharedPart]) -> tuple[bytes, ...]:
        return tuple(digest_of(part.open(), pool) for part in parts if part.open is not None)

    return [one._replace(digests=digests(one.parts)) if one.has(here) else one for one in shared]


def _rounds(
    coordinator: Coordinator, call: Call, deadline: Deadline, lane: str, group: Group
) -> Meet:
    """Return a function for further meetings, once all know that something differs."""
    again = call._replace(spec=("where the values differ",))

    def meet(payload: bytes) -> Mapping[int, bytes]:
        limit_s = deadline.left_s
        return agree(coordinator, again, payload, timeout_s=limit_s, group=group.named, lane=lane)

    return meet


def _judge(
    coordinator: Coordinator,
    call: Call,
    shared: Sequence[_Shared],
    reports: Mapping[int, Mapping[str, Any]],
    meet: Meet,
) -> None:
    """Raise if something differs; deterministic, so all processes end alike."""
    me = ThisProcess(coordinator.process, coordinator.hosts)
    here = Said((), call="assert_same", name=call.name or "", site=call.site)
    heading = f"{me}: {headline(Kind(), here.call, here.name)}"
    words = {process: one["words"] for process, one in reports.items() if "words" in one}
    if words:
        groups = groups_of(words)
        shown = [words[process] for process in representatives_of(groups)]
        rows = version_rows(shown, groups, here)
        raise compared(heading, rows, intro="replicas differ within a process:")
    digests = {process: iter(one["digests"]) for process, one in reports.items()}
    for one in shared:
        holds = [p for p, answer in reports.items() if one.has(answer.get("process", p))]
        groups = groups_of({p: next(digests[p]) for p in holds})
        if len(groups) > 1:
            raise _difference(heading, here, one, groups, coordinator.process, meet)


def _difference(
    heading: str, call: Said, shared: _Shared, groups: list[list[int]], process: int, meet: Meet
) -> DivergenceError:
    """Find the first differing item, together with all processes; return the error."""
    representatives = representatives_of(groups)
    is_first = process in representatives
    index = find_first(meet, Digests(shared.digests) if is_first else None, representatives)
    part = None if index is None else shared.parts[index]
    items = part.open() if part is not None and part.open is not None and is_first else None
    item = None if part is None else find_first(meet, items, representatives)
    if part is None or item is None:
        rows = version_rows(["a version"] * len(representatives), groups, call)
        return compared(heading, rows, intro="the values change while they are compared:")
    shown = meet(items.show(item).encode(errors="replace") if items is not None else b"")
    values = _values([shown[process].decode() for process in representatives])
    texts = [f"{part.place(item)} = {value}" for value in values]
    return compared(
        heading,
        version_rows(texts, groups, call),
        kind=Kind("value", part.place(item)),
        intro=f"first difference, in {part.leaf.line}:",
        advice=needs("assert_same", "value"),
    )


def _values(shown: Sequence[str]) -> list[str]:
    """Format values, with their bits if different ones print alike."""
    pairs = [text.rpartition("\t")[::2] for text in shown]
    values = [value for value, _ in pairs]
    if len({*values}) == len({*shown}):
        return values
    return [f"{value} ({bits})" for value, bits in pairs]
