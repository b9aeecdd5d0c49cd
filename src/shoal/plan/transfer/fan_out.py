"""Fan-out: each piece enters a host once, and is then passed on inside it.

Deliveries are made in *waves*: what a device receives in one wave it can send in the next. If many
devices need the same piece, those that have it pass it on, so the number of senders grows from wave
to wave. The order and the senders follow Y. Zhuang et al., "On optimizing the communication of
model parallelism", MLSys 2023 (arXiv 2211.05322): a slice of the array crosses to a host once, and
among the replicas that can send it the least loaded does. Pieces with the fewest senders come
first, and among those the largest (R. L. Graham: see `writers`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple


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
    order = sorted(parcels, key=lambda one: (one.num_holders, -one.num_bytes, one.number))
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
            for device in (one for own in parcel.needers.values() for one in own):
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
            if self._may_wait(parcel, least := queue.least()):
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
