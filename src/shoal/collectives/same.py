"""Check that every process holds equal values, or show where they first differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shoal.collectives.arguments import Deadline, deadline_of
from shoal.collectives.hashes import (
    Digests,
    FlatItems,
    digest_of,
    digest_of_all,
    items_of,
)
from shoal.collectives.leaves import LeafSpec, box_of, require_values, words_of
from shoal.collectives.versions import groups_of, representatives_of, version_rows
from shoal.collectives.wire import flatten
from shoal.colour import collective
from shoal.errors import DivergenceError
from shoal.hashing import quick_digest
from shoal.plan.shards import Box
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group, group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.comparison import (
    Kind,
    ShownSide,
    divergence_error,
    headline,
    needs,
    shown_line,
)
from shoal.runtime.rules.first_difference import ItemsInOrder, Meet, find_first
from shoal.runtime.rules.spec_lines import with_layouts
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client


@collective("processes")
@uses_client
@collective_scope("assert_same")
def assert_same(
    client: JobClient,
    tree: Any,
    *,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Check that all `processes` hold equal values; else raise on all of them.

    Collective over processes.

    Equality is bitwise: a NaN equals a NaN of the same bits, and -0.0 differs from 0.0. The call
    either returns on all processes or raises on all, except on one that the answer could not reach.
    The probability of missing a difference is 2^-128.

    If an array is sharded over several processes, each region is compared among its holders.
    Regions with one holder are not compared. Replicas on the devices of one process are also
    compared. Any other array is compared as a whole. An array on devices of one process alone is a
    local value there, and its layouts differ elsewhere.

    One round trip carries a digest (two to three where sharded arrays are held by a subset of the
    processes), so equal values cost no traffic. If they differ, a few more round trips find the
    first difference. Memory: blocks of 4 MiB; data contiguous in this host's memory are not copied.
    Pending computations of the values are awaited first, without a deadline.

    Args:
      tree: arrays of NumPy and JAX of any dtype (also of ml_dtypes), PRNG keys, NumPy and Python
        scalars of any size, str, bytes, None.
      processes: the processes that make the call, including the caller; equal on all. Others are
        not compared. None: all of the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`.

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
    group = group_in(client, "assert_same", processes)
    spec, values = flatten(tree, "assert_same")
    with jax.transfer_guard("allow"):
        placed = parts_of(spec.leaves, values, "assert_same")
        layouts = [leaf.layout for leaf in placed]
        problem = next((leaf.words for leaf in placed if leaf.words), "")
        parts = [part for leaf in placed for part in leaf.parts]
        here = jax.process_index() if any(layouts) else client.process
        is_alone = group.count == 1
        shared_parts = [] if is_alone else _compared(parts, client.num_processes)
        mine = _hashed(shared_parts, here)
        brought: dict[str, Any] = {}
        brought["digests"] = [
            digest_of_all(shared.digests).hex() for shared in mine if shared.digests
        ]
        brought |= {"words": problem} if problem else {}
        brought |= {"process": here} if here != client.process else {}
        site = callsite()
        call = Call("assert_same", name, site, with_layouts(spec.lines, layouts))
        fault_points.reach("assert_same.before_arrive", client.process)
        payload = json.dumps(brought).encode()
        answers = agree(
            client, call, payload, timeout_s=deadline.left_s, group=group.named, lane=lane
        )
        fault_points.reach("assert_same.after_arrive", client.process)
        if problem or len({*answers.values()}) > 1:
            read = {text: json.loads(text) for text in {*answers.values()}}
            reports = {process: read[text] for process, text in answers.items()}
            _judge(
                client,
                call,
                shared=mine,
                reports=reports,
                meet=_rounds(client, call, deadline, lane, group),
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
    return sorted(
        shared.values(), key=lambda group: (group.holders is not None, group.holders or ())
    )


def _hashed(shared: Sequence[_Shared], here: int) -> list[_Shared]:
    """Hash the parts that this process holds, one at a time, so that few are in memory at once."""

    def digests(parts: Sequence[SharedPart]) -> tuple[bytes, ...]:
        return tuple(digest_of(part.open()) for part in parts if part.open is not None)

    return [
        group._replace(digests=digests(group.parts)) if group.has(here) else group
        for group in shared
    ]


def _rounds(client: JobClient, call: Call, deadline: Deadline, lane: str, group: Group) -> Meet:
    """Return a function for further meetings, once all know that something differs."""
    again = call._replace(spec=("where the values differ",))

    def meet(payload: bytes) -> Mapping[int, bytes]:
        limit_s = deadline.left_s
        return agree(client, again, payload, timeout_s=limit_s, group=group.named, lane=lane)

    return meet


def _judge(
    client: JobClient,
    call: Call,
    shared: Sequence[_Shared],
    reports: Mapping[int, Mapping[str, Any]],
    meet: Meet,
) -> None:
    """Raise if something differs; deterministic, so all processes end alike."""
    me = ThisProcess(client.process, client.hosts)
    here = ShownSide((), call="assert_same", name=call.name or "", site=call.site)
    heading = f"{me}: {headline(Kind(), here.call, here.name)}"
    problems = {
        process: report["words"] for process, report in reports.items() if "words" in report
    }
    if problems:
        groups = groups_of(problems)
        shown = [problems[process] for process in representatives_of(groups)]
        rows = version_rows(shown, groups, here)
        raise divergence_error(heading, rows, intro="replicas differ within a process:")
    digests = {process: iter(report["digests"]) for process, report in reports.items()}
    for part in shared:
        holds = [p for p, answer in reports.items() if part.has(answer.get("process", p))]
        groups = groups_of({p: next(digests[p]) for p in holds})
        if len(groups) > 1:
            raise _difference(heading, here, part, groups, client.process, meet)


def _difference(
    heading: str,
    call: ShownSide,
    shared: _Shared,
    groups: list[list[int]],
    process: int,
    meet: Meet,
) -> DivergenceError:
    """Find the first differing item, together with all processes; return the error."""
    representatives = representatives_of(groups)
    is_first = process in representatives
    index = find_first(meet, Digests(shared.digests) if is_first else None, representatives)
    part = items = item = None
    if index is not None:
        part = shared.parts[index]
        if is_first and part.open is not None:
            items = part.open()
        item = find_first(meet, items, representatives)
    if part is None or item is None:
        rows = version_rows(["a version"] * len(representatives), groups, call)
        return divergence_error(heading, rows, intro="the values change while they are compared:")
    shown = meet(items.show(item).encode(errors="replace") if items is not None else b"")
    values = _values([shown[process].decode() for process in representatives])
    texts = [f"{part.leaf.place_of(item, part.box)} = {value}" for value in values]
    return divergence_error(
        heading,
        version_rows(texts, groups, call._replace(leaf=part.leaf.line)),
        kind=Kind("value", part.leaf.place_of(item, part.box)),
        intro=f"first difference, in {shown_line(part.leaf.line)}:",
        advice=needs("assert_same", "value"),
    )


def _values(shown: Sequence[str]) -> list[str]:
    """Format values, with their bits if different ones print alike."""
    pairs = [text.rpartition("\t")[::2] for text in shown]
    values = [value for value, _ in pairs]
    if len({*values}) == len({*shown}):
        return values
    return [f"{value} ({bits})" for value, bits in pairs]


# Which parts of a tree's values should be equal on which processes.

Holders: TypeAlias = tuple[int, ...] | None  # JAX process indices; None: all of the job
_ITEMS = 1 << 20  # compared at a time to locate a difference


class SharedPart(NamedTuple):
    """A leaf, or a region of a sharded one, held by some processes."""

    leaf: LeafSpec
    box: Box | None  # None: the whole
    holders: Holders
    open: Callable[[], ItemsInOrder] | None  # None: not here


class Compared(NamedTuple):
    """The parts of a leaf that are compared."""

    layout: str  # its distribution over devices, if global; else empty
    parts: list[SharedPart]
    words: str  # difference between replicas of this process, or empty


def parts_of(leaves: Sequence[LeafSpec], values: Sequence[Any], operation: str) -> list[Compared]:
    """Return the parts of each leaf, in the same order on all processes.

    Raises:
      UsageError: a leaf has no value.
    """
    require_values(operation, leaves, values)
    return [_placed(leaf, value) for leaf, value in zip(leaves, values, strict=True)]


def _placed(leaf: LeafSpec, value: Any) -> Compared:
    dtype = leaf.dtype
    if dtype is None:
        return Compared("", [SharedPart(leaf, None, None, lambda: items_of(leaf, value))], "")
    if not isinstance(value, jax.Array):
        host = np.asarray(value)
        whole = FlatItems(host.shape, dtype, [((0,) * host.ndim, host)])
        return Compared("", [SharedPart(leaf, None, None, lambda: whole)], "")
    shards = [_Shard(box_of(shard.index, leaf), shard) for shard in value.addressable_shards]
    difference = _local_difference(leaf, shards)
    here = {shard.box: shard for shard in shards}
    if value.is_fully_addressable:
        return Compared("", [SharedPart(leaf, None, None, lambda: _whole(leaf, here))], difference)
    regions = _regions(value.sharding, leaf._replace(path=""))
    parts = [
        SharedPart(leaf, box, holders, here[box].read if box in here else None)
        for box, holders in regions
    ]
    spread = _distribution(value.sharding, regions)
    return Compared(spread, parts, difference)


class _Shard(NamedTuple):
    """The data of one of this process's devices."""

    box: Box
    shard: Any  # a JAX shard

    def read(self) -> FlatItems:
        """Return its words as items."""
        array = words_of(self.shard.data)
        return FlatItems(array.shape, array.dtype, [((0,) * array.ndim, array)])


def _whole(leaf: LeafSpec, here: Mapping[Box, _Shard]) -> FlatItems:
    """Read an array on this process's devices, however it is sharded."""
    pieces = [
        ([first for first, _ in box], words_of(shard.shard.data)) for box, shard in here.items()
    ]
    dtype = pieces[0][1].dtype
    return FlatItems((*leaf.shape, *leaf.words), dtype, pieces)


def _local_difference(leaf: LeafSpec, shards: Sequence[_Shard]) -> str:
    """Compare the replicas on this process's devices; return the first difference."""
    if len({shard.box for shard in shards}) == len(shards):
        return ""
    firsts: dict[Box, tuple[_Shard, bytes]] = {}
    for shard in shards:
        digest = digest_of(shard.read())
        other, expected = firsts.setdefault(shard.box, (shard, digest))
        if digest != expected:
            index = first_item(other.read(), shard.read())
            place = leaf.place_of(index, shard.box)
            return f"{place}: {_held(other, index)}, {_held(shard, index)}"
    return ""


def _held(shard: _Shard, index: int) -> str:
    value, _, bits = shard.read().show(index).partition("\t")
    return f"device {shard.shard.device.id} holds {value} ({bits})"


def first_item(one: FlatItems, other: FlatItems) -> int:
    """Return the first item that differs; compares the bits."""
    for low in range(0, len(one), _ITEMS):
        here, there = one.read(low, low + _ITEMS), other.read(low, low + _ITEMS)
        apart = np.flatnonzero(here != there)
        if apart.size:
            return low + int(apart[0]) // one.dtype.itemsize
    return 0  # changed since the comparison


def _distribution(sharding: Any, regions: Any) -> str:
    """Describe an array's distribution over devices, with a digest of the holders."""
    spec = getattr(sharding, "spec", type(sharding).__name__)
    digest = quick_digest(repr(regions).encode()).hex()
    return f"{spec} (digest of the holders: {digest})"


@lru_cache(maxsize=512)
def _regions(sharding: Any, leaf: LeafSpec) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Return each region of a sharded array and the processes (JAX indices) that hold it."""
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(box_of(index, leaf), set()).add(device.process_index)
    return tuple((box, tuple(sorted(holders[box]))) for box in sorted(holders))
