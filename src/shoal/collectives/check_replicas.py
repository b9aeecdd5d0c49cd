"""Check that the replicas of each shard are equal, or show which device's differs.

A process knows the digests of its own replicas alone. Let a region be held by devices 0..k-1, with
digests d[0..k-1]. Each digest gets the coefficient c[i] = h(i) - h(i + 1 mod k), where h are hashes
of the leaf, the region and i, as numbers modulo a prime. The coefficients add up to zero, so if all
d are equal, so does the sum of c[i] d[i]. Else it is zero with a chance of 2^-127. Each process
sends the sum over its own devices and all regions, 16 bytes, and all compare the total with zero.

    device  digest  coefficient          device  digest  coefficient
    0       7       h0 - h1              0       7       h0 - h1
    1       7       h1 - h2              1       9       h1 - h2
    2       7       h2 - h0              2       7       h2 - h0
                    total: 0                             total: 2 (h1 - h2)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.collectives.arguments import Deadline, deadline_of, meet_callers
from shoal.collectives.device_shards import (
    DeviceShard,
    is_on_host,
    layout_text,
    on_each,
    shards_here,
)
from shoal.collectives.hashes import FlatItems, digest_of
from shoal.collectives.leaves import LeafSpec, require_values
from shoal.collectives.same import first_item
from shoal.collectives.wire import flatten
from shoal.colour import collective
from shoal.errors import DivergenceError
from shoal.hashing import call_digest
from shoal.runtime.agreement import Call
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
from shoal.runtime.failures.process_text import range_text
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.rules.first_difference import MAX_GROUPS_SHOWN, Meet, find_first, highest
from shoal.runtime.rules.point import ranges_of
from shoal.runtime.rules.spec_lines import with_layouts
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client

_PRIME = (1 << 127) - 1
_SUM_BYTES = 16
_PIECES = 64  # of the leaves, that a round compares
_MOST_RANGES = 5  # of devices, in a row of a message
_U32 = np.uint32


@collective("processes")
@uses_client
@collective_scope("check_replicas")
def check_replicas(
    client: JobClient,
    tree: Any,
    *,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Check that all devices that hold the same shard hold the same bits; else raise on all.

    Collective over processes.

    JAX never compares replicas: after a flipped bit, a forgotten `psum` or `pmean` under
    `check_vma=False`, or programs that were compiled differently, each device computes with its own
    values, and a save stores those of one of them. The call either returns on all processes or
    raises on all, except on one that the answer could not reach. If most devices agree, the error
    names the odd ones; of two sides of equal size, it shows both.

    Each process hashes the shards of its own devices, and no program runs over several processes.
    On accelerators the devices hash them, in one program for each shape of a shard; in host memory
    the host does. The probability of missing a difference is 2^-64 on accelerators, 2^-127 in host
    memory; one that is confined to one element is never missed. One round trip carries 16 bytes per
    process (two round trips with `processes`). If replicas differ, a few more find where. Pending
    computations of the values are awaited first, without a deadline.

    Values that are not on devices, and shards with one holder, are not compared; see `assert_same`.

    Args:
      tree: arrays of JAX of any dtype, sharded in any way, and PRNG keys; other leaves as for
        `assert_same`.
      processes: the processes that make the call, including the caller; equal on all. The devices
        of others are not compared. None: all of the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`.

    Raises:
      DivergenceError: on all that arrived: replicas differ; `sides` maps each version of the first
        value that differs, with its devices, to the processes that hold it. Or trees, shapes,
        dtypes, layouts or the calls differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, a leaf cannot be compared (all such are
        named by path), or it is called inside `jit`, `grad`, `vmap` or `shard_map` and accelerators
        hold values. The others get PeerFailedError.

    >>> import numpy as np
    >>> from shoal import make_mesh, put
    >>> state = put({"w": np.zeros(8, np.float32)}, make_mesh({"data": -1}))
    >>> check_replicas(state, name="state")
    """
    deadline = deadline_of("check_replicas", name, timeout_s, lane)
    group = group_in(client, "check_replicas", processes)
    spec, values = flatten(tree, "check_replicas")
    require_values("check_replicas", spec.leaves, values)
    call = Call("check_replicas", name, callsite(), spec.lines)
    compare_replicas(client, call, spec.leaves, values, deadline, lane, group)


def compare_replicas(
    client: JobClient,
    call: Call,
    leaves: Sequence[LeafSpec],
    values: Sequence[Any],
    deadline: Deadline,
    lane: str,
    group: Group,
) -> None:
    """Meet all processes that make the call, and compare their replicas; see `check_replicas`.

    Args:
      call: its specification begins with the leaves' lines.
      leaves, values: the same leaves on all processes; those that are no JAX arrays are skipped.
    """
    layouts = [layout_text(leaf, value) for leaf, value in zip(leaves, values, strict=True)]
    call = call._replace(spec=with_layouts(call.spec, layouts))

    def meet(payload: bytes, *, spec: tuple[str, ...] = call.spec) -> Mapping[int, bytes]:
        return meet_callers(
            client,
            call=call._replace(spec=spec),
            payload=payload,
            deadline=deadline,
            lane=lane,
            group=group,
        )

    present = None
    if group.named is not None:
        numbers = meet(b"%d" % jax.process_index())
        present = {int(answer) for answer in numbers.values()}
    with jax.transfer_guard("allow"), own_programs():
        replicas = _hashed([
            _replicas(leaf, value, present) if isinstance(value, jax.Array) else []
            for leaf, value in zip(leaves, values, strict=True)
        ])  # fmt: skip
    sums = [_sum(index, of_leaf) for index, of_leaf in enumerate(replicas)]
    if not _total(meet(_as_bytes(sum(sums)))):
        return
    again = ("where the replicas differ",)
    me = ThisProcess(client.process, client.hosts)
    leaf_index = _first_leaf(sums, lambda payload: meet(payload, spec=again))
    raise _difference(
        me, call, leaf=leaves[leaf_index], is_global=bool(layouts[leaf_index]),
        replicas=replicas[leaf_index],
        meet=lambda payload: meet(payload, spec=again),
    )  # fmt: skip


class _Replica(NamedTuple):
    """A shard of one of this process's devices that other devices hold, too."""

    shard: DeviceShard
    place: int  # of its device among the holders that are compared
    among: int  # the number of these
    digest: bytes = b""


def _replicas(leaf: LeafSpec, array: jax.Array, present: Collection[int] | None) -> list[_Replica]:
    """Return the replicas of a leaf on this process's devices; those without another are left out.

    Args:
      present: the processes (in JAX) whose devices are compared; None: all.
    """
    replicas = []
    for shard in shards_here(leaf, array):
        holders = [
            holder for holder in shard.holders if present is None or holder.process in present
        ]
        if len(holders) > 1 and shard.data.size:
            place = next(n for n, holder in enumerate(holders) if holder.device == shard.device)
            replicas.append(_Replica(shard, place, len(holders)))
    return replicas


# ---- Digests: of the devices, or of the host.


def _hashed(replicas: Sequence[Sequence[_Replica]]) -> list[list[_Replica]]:
    """Return the replicas of each leaf with their digests."""
    started = [
        on_each(
            _digest,
            [replica.shard.data for replica in of_leaf if not is_on_host(replica.shard.data)],
        )
        for of_leaf in replicas
    ]
    hashed: list[list[_Replica]] = []
    for of_leaf, results in zip(replicas, started, strict=True):
        of_devices = iter(results)
        hashed.append([])
        for replica in of_leaf:
            if is_on_host(replica.shard.data):
                digest = digest_of(_items(replica))
            else:
                digest = np.asarray(next(of_devices)).tobytes()
            hashed[-1].append(replica._replace(digest=digest))
    return hashed


def _items(replica: _Replica) -> FlatItems:
    array = replica.shard.read()
    return FlatItems(array.shape, array.dtype, [((0,) * array.ndim, array)])


def _digest(x: jax.Array) -> jax.Array:
    """Traced: return a digest of the bits of an array, uint32[2].

    Each word is mixed with its place, as MurmurHash3 mixes a block
    (https://github.com/aappleby/smhasher); the digest is the sum of the results, and their sum with
    weights that depend on the place. For one place the mixing is a bijection, so that a word that
    differs changes the first sum. No word moves, and nothing but the sums is stored.
    """
    sums = jnp.zeros(2, _U32)
    for index, words in enumerate(_words(x)):
        place, stride = jnp.full(words.shape, _U32(index), _U32), 1
        for dim in reversed(range(words.ndim)):
            place += jax.lax.broadcasted_iota(_U32, words.shape, dim) * _U32(stride & 0xFFFFFFFF)
            stride *= words.shape[dim]
        key = place * _U32(0x9E3779B9) + _U32(index)
        mixed = (words ^ key) * _U32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> _U32(15))) * _U32(0xC2B2AE35)
        mixed = mixed ^ (mixed >> _U32(13))
        weighted = mixed * (key | _U32(1))
        sums += jnp.stack([jnp.sum(mixed, dtype=_U32), jnp.sum(weighted, dtype=_U32)])
    return sums


def _words(x: jax.Array) -> list[jax.Array]:
    """Return the bits of an array as arrays of uint32: one, or one for each half of its values."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(jnp.real(x)), *_words(jnp.imag(x))]
    bits = int(jax.dtypes.itemsize_bits(x.dtype))
    if x.dtype == jnp.bool_ or (bits < 8 and jnp.issubdtype(x.dtype, jnp.integer)):
        return [x.astype(jnp.int32).astype(_U32)]
    if bits < 8:  # their values, none of which is NaN, have distinct float32s
        x, bits = x.astype(jnp.float32), 32
    words = jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")
    return [words.astype(_U32)]


# ---- Sums that are zero if replicas are equal.


def _sum(leaf: int, replicas: Iterable[_Replica]) -> int:
    """Return what this process's replicas of a leaf contribute."""
    total = sum(
        int.from_bytes(replica.digest, "little")
        * _coefficient(replica.shard.region, replica.place, replica.among)
        for replica in replicas
    )
    return total * (_number(b"leaf %d" % leaf) + 1) % _PRIME


@lru_cache(maxsize=1 << 14)
def _coefficient(region: int, place: int, count: int) -> int:
    here, after = (
        _number(b"%d %d" % (region, position)) for position in (place, (place + 1) % count)
    )
    return here - after


def _number(text: bytes) -> int:
    return int.from_bytes(call_digest(text), "little") % (_PRIME - 1)


def _as_bytes(total: int) -> bytes:
    return (total % _PRIME).to_bytes(_SUM_BYTES, "little")


def _total(answers: Mapping[int, bytes], position: int = 0) -> int:
    """Return the total of the processes' sums, the one at a position if they sent several."""
    place = slice(position * _SUM_BYTES, (position + 1) * _SUM_BYTES)
    return sum(int.from_bytes(answer[place], "little") for answer in answers.values()) % _PRIME


# ---- The first difference, which all processes find together.


def _first_leaf(sums: Sequence[int], meet: Meet) -> int:
    """Return the number of the first leaf whose replicas differ: the total of `sums` is not zero.

    Each round compares the totals of up to `_PIECES` pieces, and continues in the first that is
    not zero. There is one, because the totals of the pieces add up to that of the whole.
    """
    low, high = 0, len(sums)
    while high - low > 1:
        pieces = min(_PIECES, high - low)
        cuts = [low + (high - low) * n // pieces for n in range(pieces + 1)]
        parts = [sums[first:end] for first, end in pairwise(cuts)]
        answers = meet(b"".join(_as_bytes(sum(part)) for part in parts))
        piece = next(n for n in range(pieces) if _total(answers, n))
        low, high = cuts[piece], cuts[piece + 1]
    return low


class _Digested(NamedTuple):
    """A replica of the region that differs."""

    process: int
    device: int
    digest: str


def _difference(
    me: ThisProcess,
    call: Call,
    leaf: LeafSpec,
    is_global: bool,
    replicas: Sequence[_Replica],
    meet: Meet,
) -> DivergenceError:
    """Find the first region that differs and the first item in it; return the error."""
    rows = [
        (replica.shard.region, replica.shard.device, replica.digest.hex()) for replica in replicas
    ]
    regions: dict[tuple[int, int], list[_Digested]] = {}
    for process, answer in meet(json.dumps(rows).encode()).items():
        for region, device, digest in json.loads(answer):
            # Of an array on one process's devices each process has one of its own.
            key = region, -1 if is_global else process
            regions.setdefault(key, []).append(_Digested(process, device, digest))
    (region, _), held = next(
        (key, held)
        for key, held in sorted(regions.items())
        if len({replica.digest for replica in held}) > 1
    )
    versions: dict[str, list[_Digested]] = {}
    for replica in sorted(held):
        versions.setdefault(replica.digest, []).append(replica)
    groups = sorted(versions.values(), key=lambda group: (len(group), group))
    own = {replica.shard.device: replica for replica in replicas if replica.shard.region == region}
    index = _first_apart(me.process, _nearest(groups[0], groups[-1]), own, meet)
    shown = [*groups[: MAX_GROUPS_SHOWN - 1], *groups[MAX_GROUPS_SHOWN - 1 :][-1:]]
    place, values = _values(
        leaf, index, shown=[group[0] for group in shown], process=me.process, own=own, meet=meet
    )
    here = ShownSide((), call=call.operation, name=call.name or "", site=call.site, leaf=leaf.line)
    sides = [_side(here, group, value) for group, value in zip(shown, values, strict=True)]
    rest = groups[len(shown) - 1 : -1]
    if rest:
        processes = sorted({replica.process for group in rest for replica in group})
        said = f"{sum(map(len, rest))} devices hold other values"
        sides.append(here._replace(processes=processes, said=said, groups=len(rest)))
    kind = Kind("replica", place)
    return divergence_error(
        f"{me}: {headline(kind, here.call, here.name)}",
        sides,
        kind=kind,
        intro=f"first difference, at {place}, in {shown_line(leaf.line)}:",
        advice=needs(call.operation, kind.what),
    )


def _nearest(group: Sequence[_Digested], other: Sequence[_Digested]) -> tuple[_Digested, _Digested]:
    """Return a replica of each version; of one process, if any holds both."""
    by_process = {replica.process: replica for replica in reversed(other)}
    pairs = [
        (replica, by_process[replica.process]) for replica in group if replica.process in by_process
    ]
    return pairs[0] if pairs else (group[0], other[0])


def _first_apart(
    process: int, two: tuple[_Digested, _Digested], own: Mapping[int, _Replica], meet: Meet
) -> int:
    """Return the first item in which two replicas differ; all processes get the same."""
    processes = [replica.process for replica in two]
    items = [_items(own[replica.device]) for replica in two if replica.process == process]
    if processes[0] == processes[1]:
        answers = meet(b"%d" % first_item(*items) if items else b"")
        return highest(answers, processes)
    return find_first(meet, items[0] if items else None, processes) or 0


def _values(
    leaf: LeafSpec,
    index: int,
    shown: Sequence[_Digested],
    process: int,
    own: Mapping[int, _Replica],
    meet: Meet,
) -> tuple[str, list[str]]:
    """Return the place of an item in the leaf, and what each of some replicas holds there."""
    mine = {}
    for device in (replica.device for replica in shown if replica.process == process):
        value, _, bits = _items(own[device]).show(index).partition("\t")
        place = leaf.place_of(index, own[device].shard.box)
        mine[str(device)] = [place, f"{value} ({bits})"]
    answers = meet(json.dumps(mine).encode())
    rows = [json.loads(answers[replica.process])[str(replica.device)] for replica in shown]
    return rows[0][0], [value for _, value in rows]


def _side(call: ShownSide, group: Sequence[_Digested], value: str) -> ShownSide:
    """Return what the devices of a version hold."""
    ranges = ranges_of(sorted(replica.device for replica in group))
    listed = ", ".join(map(range_text, ranges[:_MOST_RANGES]))
    listed += ", …" if len(ranges) > _MOST_RANGES else ""
    one_device = f"device {listed} holds {value}"
    devices = one_device if len(group) == 1 else f"{len(group)} devices ({listed}) hold {value}"
    return call._replace(processes=sorted({replica.process for replica in group}), said=devices)
