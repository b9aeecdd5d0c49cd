"""The shards of an array per device, under torch_xla's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.host.host_values import native
from shoal.arrays.placing.pack import pack, unpack
from shoal.colour import local
from shoal.compat.torch_xla.mesh import numbered_devices
from shoal.errors import UsageError

__all__ = ["XLAShard", "packed", "shards_of"]


@local
@dataclass
class XLAShard:
    """The shard of one device of this process, as a host copy.

    Local.

    `data` [shape of a shard]; `indices`: a slice for each dim of the whole array, never past its
    end, or `...` for all of it; `shard_device`: platform and number; `replica_id`: its number
    among the replicas of the shard.

    >>> XLAShard(np.arange(4), [slice(0, 3)], "CPU:0", 0).unpadded_data
    array([0, 1, 2])
    """

    data: np.ndarray[Any, Any]
    indices: Any
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> np.ndarray[Any, Any]:
        """The part of `data` inside the array."""
        unpadded: np.ndarray[Any, Any] = self.data[self._box()]
        return unpadded

    @unpadded_data.setter
    def unpadded_data(self, t: Any) -> None:
        self.data[self._box()] = t

    def _box(self) -> Any:
        if self.indices is Ellipsis:
            return Ellipsis
        return tuple(slice(0, s.stop - s.start) for s in self.indices)


def shards_of(array: jax.Array) -> list[XLAShard]:
    """Return a host copy of the shard on each device of this process, by ascending number."""
    numbers = {device: number for number, device in enumerate(numbered_devices())}
    shards = sorted(array.addressable_shards, key=lambda s: numbers[s.device])
    return [
        XLAShard(
            np.array(shard.data),
            _indices(shard.index, array.shape),
            f"{shard.device.platform.upper()}:{numbers[shard.device]}",
            shard.replica_id,
        )
        for shard in shards
    ]


def packed(shards: Sequence[XLAShard], array: jax.Array) -> jax.Array:
    """Return an array made of shards, laid out like another one (`shoal.compat.pack`).

    Raises:
      UsageError: too few shards, or of other shapes or dtypes than the array's; or replicas differ.
    """
    held = unpack(array)
    _check_shards(shards, shards_of(array))
    ranks = sorted(range(len(held)), key=lambda n: _only_device(held[n]).id)
    by_place = {place: native(shards[n].data) for n, place in enumerate(ranks)}
    return pack([by_place[place] for place in range(len(held))], layout_of(array))


def _indices(index: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
    """Return slices with start and stop, or `...` if they are the whole array."""
    spans = [slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)]
    whole = all((s.start, s.stop) == (0, n) for s, n in zip(spans, shape, strict=True))
    return Ellipsis if whole else spans


def _only_device(piece: jax.Array) -> jax.Device:
    (device,) = piece.devices()
    return device


def _check_shards(shards: Sequence[XLAShard], held: Sequence[XLAShard]) -> None:
    if len(shards) != len(held):
        raise UsageError(
            f"Shards must be provided for all local devices: {len(held)}, not {len(shards)}"
        )
    for number, (new, old) in enumerate(zip(shards, held, strict=True)):
        if (np.shape(new.data), new.data.dtype) != (old.data.shape, old.data.dtype):
            raise UsageError(
                f"shard {number} must be {old.data.dtype}{list(old.data.shape)}, as the device "
                f"holds, not {new.data.dtype}{list(np.shape(new.data))}"
            )
