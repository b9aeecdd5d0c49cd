"""A move as single sends in rounds: received bytes are at the lower bound.

In a round each device sends at most once and receives at most once, so a round is one permute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.errors import UsageError, counted
from shoal.plan.hardware.wiring import Topology
from shoal.plan.layout import Layout
from shoal.plan.shards import Box
from shoal.plan.transfer.checks import checked_move
from shoal.plan.transfer.edge_colours import edge_colours
from shoal.plan.transfer.places import Places, places
from shoal.plan.transfer.regions import Region, Regions, regions_of

__all__ = ["KeptBox", "PointToPoint", "Send", "point_to_point"]
IntArray = NDArray[np.int64]
_MOST_SENDS = 1 << 20
_MOST_ROWS = 32  # rounds shown in a table


class Send(NamedTuple):
    """A box that goes from one device to another."""

    sender: int
    receiver: int
    box: Box
    num_bytes: int


class KeptBox(NamedTuple):
    """A box that a device holds in the source and needs in the target."""

    device: int
    box: Box
    num_bytes: int


@dataclass(frozen=True, repr=False)
class PointToPoint:
    """A plan of single sends. A plain value: hashable, equal by content; `print` shows it.

    It is impossible that a device sends data that it does not hold before the round, that it sends
    or receives twice in a round, that it receives data that it has or does not need, or that a
    byte enters a host or a slice twice. So the bytes received equal the lower bounds of
    `bounds`.
    """

    keeps: tuple[KeptBox, ...]
    """The boxes that devices copy from their own shards, by ascending id."""
    rounds: tuple[tuple[Send, ...], ...]
    """The sends of each round, by ascending sender."""
    hosts: tuple[tuple[int, int], ...]
    """Every device of either layout and its host, by ascending id."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @property
    def num_sends(self) -> int:
        """Number of sends in all rounds."""
        return sum(map(len, self.rounds))

    @property
    def received_bytes(self) -> dict[int, int]:
        """Device id → bytes it receives."""
        return self._bytes_by("receiver")

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Device id → bytes it sends."""
        return self._bytes_by("sender")

    @property
    def host_bytes(self) -> dict[int, int]:
        """Host → bytes that enter it from other hosts."""
        host_of = dict(self.hosts)
        by_host = dict.fromkeys(sorted(host_of.values()), 0)
        for send in self._sends():
            if host_of[send.sender] != host_of[send.receiver]:
                by_host[host_of[send.receiver]] += send.num_bytes
        return by_host

    @property
    def total_bytes(self) -> int:
        """Bytes that all devices receive."""
        return sum(send.num_bytes for send in self._sends())

    @property
    def largest_bytes(self) -> int:
        """The most bytes that one device receives."""
        return max(self.received_bytes.values())

    def _bytes_by(self, end: str) -> dict[int, int]:
        by_device = {device: 0 for device, _ in self.hosts}
        for send in self._sends():
            by_device[getattr(send, end)] += send.num_bytes
        return by_device

    def _sends(self) -> Iterator[Send]:
        return (send for sends in self.rounds for send in sends)

    def __repr__(self) -> str:
        return (
            f"PointToPoint({counted(self.num_sends, 'send')} in "
            f"{counted(self.num_rounds, 'round')}, {self.total_bytes:,} B; "
            f"{counted(len(self.hosts), 'device')} on "
            f"{counted(len(self.host_bytes), 'process', 'processes')})"
        )

    def __str__(self) -> str:
        host_of = dict(self.hosts)
        rows = [("round", "sends", "between processes", "bytes", "largest")]
        for index, sends in enumerate(self.rounds[:_MOST_ROWS]):
            sizes = [send.num_bytes for send in sends]
            across = sum(host_of[send.sender] != host_of[send.receiver] for send in sends)
            rows.append((f"{index}", f"{len(sends)}", f"{across}", f"{sum(sizes):,}",
                         f"{max(sizes):,}"))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        if self.num_rounds > _MOST_ROWS:
            lines.append(f"and {counted(self.num_rounds - _MOST_ROWS, 'round')} more")
        return "\n".join([repr(self), *(lines if self.rounds else ())])


@local
def point_to_point(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    item_bytes: int,
    *,
    topology: Topology | None = None,
) -> PointToPoint:
    """Return a plan of single sends that receives no byte more than it must.

    Local.

    Each byte that a host needs and lacks enters it once, at a device that needs it, which passes it
    on to the others inside; slices likewise. A sender is chosen by place (same host, then same
    slice or switch, then any), then by the bytes that have left its host, then by those that
    it has sent. Sends are grouped in waves; each wave sends data held before it, in as many
    rounds as its busiest device has sends or receives, which is the minimum. So a plan that
    passes nothing on has as many rounds as its busiest device has sends or receives; one of
    several waves has at most that number per wave.

    Args:
      source: the layout of the array, with nothing pending.
      target: the layout to move it to.
      shape: the shape of the whole array [rank].
      item_bytes: bytes of one element.
      topology: says the host and the slice of each device. None: a host for each process of the
        meshes, and one slice.

    Raises:
      UsageError: as for `bounds`; the source is partial; or the plan would have more than
        2^20 sends.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"x": 4}, processes=[0, 0, 1, 1])
      >>> print(point_to_point(Layout(mesh, "x"), Layout(mesh, None), (4,), 2))
      PointToPoint(12 sends in 3 rounds, 24 B; 4 devices on 2 processes)
      round  sends  between processes  bytes  largest
          0      4                  4      8        2
          1      4                  0      8        2
          2      4                  0      8        2

    Source: Y. Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023
    (arXiv 2211.05322), for senders by load and for passing on inside hosts. Where they send
    along chains in chunks, a wave doubles the senders.
    """
    move = checked_move(
        operation="point_to_point",
        source=source,
        target=target,
        shape=shape,
        item_bytes=item_bytes,
        reduces=False,
    )
    where = places("point_to_point", source.mesh, target.mesh, topology)
    return sends_of(regions_of(move), where, move.item_bytes)


def sends_of(regions: Regions, where: Places, item_bytes: int) -> PointToPoint:
    """Return the sends of a move that reduces nothing, given its regions and its devices."""
    _refuse_many(regions)
    moved = list(regions)
    hosts = where.hosts.tolist()
    parcels = [
        _parcel(index, region, item_bytes, where, hosts) for index, region in enumerate(moved)
    ]
    rounds: list[list[ParcelSend]] = []
    for wave in waves(parcels, hosts, where.slices.tolist()):
        rounds += _rounds(wave)
    devices = where.devices.tolist()
    return PointToPoint(
        _keeps(regions, item_bytes),
        tuple(
            tuple(_send(edge, moved[edge.parcel], item_bytes, devices) for edge in edges)
            for edges in rounds
        ),
        tuple(zip(devices, hosts, strict=True)),
    )


def _refuse_many(regions: Regions) -> None:
    needers = (regions.kept[regions.target_shards] != regions.cells[:, None]).sum()
    if needers > _MOST_SENDS:
        raise UsageError(
            f"point_to_point: this move takes {needers:,} sends, and a plan of single sends may "
            f"have {_MOST_SENDS:,}: move so many pieces by collectives"
        )


def _parcel(
    index: int, region: Region, item_bytes: int, where: Places, hosts: Sequence[int]
) -> Parcel:
    parcel = Parcel(index, region.num_elements * item_bytes, {}, {})
    for device in where.at(np.array(region.terms[0])).tolist():
        parcel.holders.setdefault(hosts[device], []).append(device)
    for device in where.at(np.array(region.needers)).tolist():
        parcel.needers.setdefault(hosts[device], {})[device] = None
    return parcel


def _rounds(wave: Sequence[ParcelSend]) -> list[list[ParcelSend]]:
    """Divide a wave into rounds, by ascending sender."""
    colours = edge_colours([(edge.sender, edge.receiver) for edge in wave])
    rounds: list[list[ParcelSend]] = [[] for _ in range(max(colours) + 1)]
    for edge, colour in zip(wave, colours, strict=True):
        rounds[colour].append(edge)
    return [sorted(edges, key=lambda edge: edge.sender) for edges in rounds]


def _send(edge: ParcelSend, region: Region, item_bytes: int, devices: Sequence[int]) -> Send:
    num_bytes = region.num_elements * item_bytes
    return Send(devices[edge.sender], devices[edge.receiver], region.box, num_bytes)


def _keeps(regions: Regions, item_bytes: int) -> tuple[KeptBox, ...]:
    """Return what each device of the target holds already, by ascending device."""
    is_kept = regions.kept >= 0
    devices, cells = regions.wanted[is_kept], regions.kept[is_kept]
    order = np.argsort(devices)
    devices, cells = devices[order], cells[order]
    sizes = (regions.elements_of(cells) * item_bytes).tolist()
    return tuple(map(KeptBox, devices.tolist(), map(regions.box_of, cells.tolist()), sizes))


# Fan-out: each piece enters a host once, and is then passed on inside it.
#
# Deliveries are made in *waves*: what a device receives in one wave it can send in the next. If
# many devices need the same piece, those that have it pass it on, so the number of senders grows
# from wave to wave. The order and the senders follow Y. Zhuang et al., "On optimizing the
# communication of model parallelism", MLSys 2023 (arXiv 2211.05322): a slice of the array crosses
# to a host once, and among the replicas that can send it the least loaded does. Pieces with the
# fewest senders come first, and among those the largest (R. L. Graham: see `writers`).


class ParcelSend(NamedTuple):
    """One send of one parcel."""

    parcel: int
    sender: int
    receiver: int


@dataclass
class Parcel:
    """A box that moves: by host, the devices that have it now, and those that still need it."""

    number: int
    num_bytes: int
    holders: dict[int, list[int]]
    needers: dict[int, dict[int, None]]  # devices in order; a set has none

    @property
    def num_holders(self) -> int:
        """Number of devices that have it."""
        return sum(map(len, self.holders.values()))


def waves(
    parcels: Sequence[Parcel], hosts: Sequence[int], slices: Sequence[int]
) -> Iterator[list[ParcelSend]]:
    """Yield the sends of each wave, until all parcels are delivered. Changes the parcels.

    It is impossible that a device is sent a parcel that it has or does not need, that a parcel
    crosses to a host or a slice twice, or that a device sends a parcel in the wave in which it
    received it.

    Args:
      parcels: the boxes to move, with devices as numbers 0..n-1.
      hosts: the host of each device [n].
      slices: the slice of each device [n].
    """
    order = sorted(
        parcels, key=lambda parcel: (parcel.num_holders, -parcel.num_bytes, parcel.number)
    )
    state = _Loads(hosts, slices, parcels)
    while order := [parcel for parcel in order if parcel.needers]:
        yield state.wave(order)


class _Load(NamedTuple):
    """The load of a sender; the least loaded of several sends."""

    is_busy: bool  # at its limit of parcels in this wave
    left_bytes: int  # bytes sent to other hosts
    sent_bytes: int
    device: int


class _Queue:
    """The senders of one parcel. Other queues change their loads too, so these are re-read."""

    def __init__(self, load_of: Callable[[int], _Load], devices: Iterable[int]) -> None:
        self.load_of = load_of
        self.heap = sorted(map(load_of, devices))  # a sorted list is a heap

    def least(self) -> _Load:
        """Return the load of the least loaded sender."""
        while (now := self.load_of(self.heap[0].device)) != self.heap[0]:
            heapq.heapreplace(self.heap, now)
        return now


class _Loads:
    """The bytes sent and received so far by the devices."""

    def __init__(
        self, hosts: Sequence[int], slices: Sequence[int], parcels: Sequence[Parcel]
    ) -> None:
        self.hosts = hosts
        self.slice_of = dict(zip(hosts, slices, strict=True))
        self.sent_bytes = [0] * len(hosts)
        self.entered_bytes = [0] * len(hosts)  # bytes that a device received for its host
        self.left_bytes = dict.fromkeys(hosts, 0)  # bytes that left a host
        self.missing = [0] * len(hosts)  # parcels that a device still needs
        for parcel in parcels:
            for device in (needer for own in parcel.needers.values() for needer in own):
                self.missing[device] += 1

    def wave(self, parcels: Sequence[Parcel]) -> list[ParcelSend]:
        """Make one wave: first the parcels that cross to hosts, then those that stay in their host.

        No device sends more parcels than the neediest device receives, which would lengthen the
        plan. Beyond that a parcel waits for the next wave, when other devices have it too,
        unless this wave has not sent it at all.
        """
        self.most = max(self.missing)
        self.sends = [0] * len(self.hosts)
        self.is_sent: set[int] = set()
        edges: list[ParcelSend] = []
        for parcel in parcels:
            edges += self._enter(parcel)
        for parcel in parcels:
            for host in [host for host in parcel.needers if host in parcel.holders]:
                edges += self._spread(parcel, host)
        by_number = {parcel.number: parcel for parcel in parcels}
        for edge in edges:
            self._arrive(by_number[edge.parcel], edge.receiver)
        return edges

    def _enter(self, parcel: Parcel) -> Iterator[ParcelSend]:
        """Send a parcel to one device of each host that lacks it, to a slice without it once."""
        lacking = [host for host in parcel.needers if host not in parcel.holders]
        if not lacking:
            return
        near: dict[int, list[int]] = {}
        for host, devices in parcel.holders.items():
            near.setdefault(self.slice_of[host], []).extend(devices)
        queues = {there: _Queue(self._load, devices) for there, devices in near.items()}
        anywhere = _Queue(self._load, chain(*near.values()))
        entered: set[int] = set()
        for host in lacking:
            own = self.slice_of[host]
            least = queues.get(own, anywhere).least()
            if own in entered or self._may_wait(parcel, least):
                continue
            if own not in queues:
                entered.add(own)
            receiver = min(parcel.needers[host], key=self.entered_bytes.__getitem__)
            self.left_bytes[self.hosts[least.device]] += parcel.num_bytes
            self.entered_bytes[receiver] += parcel.num_bytes
            yield self._send(parcel, least.device, receiver)

    def _spread(self, parcel: Parcel, host: int) -> Iterator[ParcelSend]:
        """Send a parcel to the devices of a host that has it."""
        queue = _Queue(self._load, parcel.holders[host])
        for receiver in parcel.needers[host]:
            least = queue.least()
            if self._may_wait(parcel, least):
                return
            yield self._send(parcel, least.device, receiver)

    def _load(self, device: int) -> _Load:
        is_busy = self.sends[device] >= self.most
        return _Load(is_busy, self.left_bytes[self.hosts[device]], self.sent_bytes[device], device)

    def _may_wait(self, parcel: Parcel, least: _Load) -> bool:
        return least.is_busy and parcel.number in self.is_sent

    def _send(self, parcel: Parcel, sender: int, receiver: int) -> ParcelSend:
        self.sends[sender] += 1
        self.sent_bytes[sender] += parcel.num_bytes
        self.is_sent.add(parcel.number)
        return ParcelSend(parcel.number, sender, receiver)

    def _arrive(self, parcel: Parcel, device: int) -> None:
        host = self.hosts[device]
        self.missing[device] -= 1
        del parcel.needers[host][device]
        if not parcel.needers[host]:
            del parcel.needers[host]
        parcel.holders.setdefault(host, []).append(device)
