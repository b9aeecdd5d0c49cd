"""Views of arrays and their shards, with torch_xla's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shoal.arrays.host_values import native
from shoal.arrays.pack import pack, unpack
from shoal.arrays.sharding import layout_of
from shoal.colour import collective, local, logically_collective
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.compat.torch_xla.mesh import Mesh, numbered_devices, on_numbers
from shoal.compat.torch_xla.placements import (
    Replicate,
    Shard,
    placements_of,
    spec_of_placements,
)
from shoal.compat.torch_xla.placing import fitted, placed
from shoal.compat.torch_xla.specs import op_sharding
from shoal.errors import UsageError
from shoal.plan.hlo import ShardingType
from shoal.plan.layout import Layout

__all__ = [
    "XLAShard",
    "XLAShardedTensor",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
]


@local
@dataclass
class XLAShard:
    """What one device of this process holds, as a copy on the host.

    Local.

    `data` [shape of a shard]; `indices`: a slice for each dim of the whole array, never past its
    end, or `...` for all of it; `shard_device`: platform and number; `replica_id`: its number among
    those that hold the same.

    >>> XLAShard(np.arange(4), [slice(0, 3)], "CPU:0", 0).unpadded_data
    array([0, 1, 2])
    """

    data: np.ndarray[Any, Any]
    indices: Any
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> np.ndarray[Any, Any]:
        """The part of `data` that is of the array."""
        unpadded: np.ndarray[Any, Any] = self.data[self._box()]
        return unpadded

    @unpadded_data.setter
    def unpadded_data(self, t: Any) -> None:
        self.data[self._box()] = t

    def _box(self) -> Any:
        if self.indices is Ellipsis:
            return Ellipsis
        return tuple(slice(0, s.stop - s.start) for s in self.indices)


@local
class XLAShardedTensor:
    """An array, and where its shards lie, under torch_xla's names.

    Local.

    A view: the array is `global_tensor`, which `jnp.asarray` returns. Arrays of JAX know
    their sharding by themselves, and functions here give and take them as they are.

    Args:
      elem: the array, or a view.
      mesh_shape, partition_spec: what is kept under these names; None: what the array says.

    >>> from shoal.compat.torch_xla.mesh import get_1d_mesh
    >>> x = placed(np.ones(8 * 3, np.float32), fitted(np.ones(1), get_1d_mesh("x"), ("x",)))
    >>> view = XLAShardedTensor(x)
    >>> view.partition_spec, view.sharding_type.name, view.placements
    (('x',), 'TILED', (Shard(dim=0),))
    """

    __slots__ = ("global_tensor", "mesh_shape", "partition_spec")

    def __init__(
        self,
        elem: Any,
        mesh_shape: Any = None,
        partition_spec: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.global_tensor: jax.Array = unwrap_sharded_tensor(elem)
        layout = None if isinstance(self.global_tensor, jax.core.Tracer) else self._layout()
        known = (None, None) if layout is None else (layout.mesh.shape, layout.dims)
        self.mesh_shape = known[0] if mesh_shape is None else mesh_shape
        self.partition_spec = known[1] if partition_spec is None else partition_spec

    def _layout(self) -> Layout | None:
        """Return the layout over the numbers of devices; None: the array is on no mesh."""
        if not _is_sharded(self.global_tensor):
            return None
        return on_numbers(layout_of(self.global_tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return tuple(self.global_tensor.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.global_tensor.dtype

    @property
    def local_shards(self) -> list[XLAShard]:
        """A copy of what each device of this process holds, by ascending number."""
        numbers = {device: number for number, device in enumerate(numbered_devices())}
        shards = sorted(self.global_tensor.addressable_shards, key=lambda s: numbers[s.device])
        return [
            XLAShard(
                np.array(shard.data),
                _indices(shard.index, self.shape),
                f"{shard.device.platform.upper()}:{numbers[shard.device]}",
                shard.replica_id,
            )
            for shard in shards
        ]

    @stands_for("shoal.pack")
    @logically_collective("shapes, dtypes and layouts")
    def load_local_shards_(self, shards: Sequence[XLAShard]) -> XLAShardedTensor:
        """Hold an array of these shards instead, laid out as before (`shoal.pack`).

        Logically collective: shapes, dtypes and layouts must be equal.

        Args:
          shards: one for each device of this process, in the order of `local_shards`.

        Raises:
          UsageError: too few, or of other shapes or dtypes than the array's; or replicas differ.
        """
        held = unpack(self.global_tensor)
        _check_shards(shards, self.local_shards)
        ranks = sorted(range(len(held)), key=lambda n: _only_device(held[n]).id)
        by_place = {place: native(shards[n].data) for n, place in enumerate(ranks)}
        pieces = [by_place[place] for place in range(len(held))]
        self.global_tensor = pack(pieces, layout_of(self.global_tensor))
        return self

    @property
    def sharding_spec(self) -> str:
        """The HLO text, which lists the numbers of devices; "" for an array on no mesh."""
        layout = self._layout()
        return "" if layout is None else op_sharding(layout).text

    @property
    def sharding_type(self) -> ShardingType | None:
        """The kind of sharding; None for an array on no mesh."""
        layout = self._layout()
        return None if layout is None else op_sharding(layout).type

    @property
    def _spec(self) -> Layout:
        return layout_of(self.global_tensor)

    @property
    def placements(self) -> tuple[Shard | Replicate, ...]:
        """For each axis of the mesh, what lies along it, as the array lies now."""
        return placements_of(layout_of(self.global_tensor))

    def invalidate_spec_cache(self) -> None:
        """Do nothing: what a view says, it reads from the array. Local."""

    @stands_for("shoal.relayout")
    @collective("the mesh's processes")
    def redistribute(
        self, device_mesh: Mesh, placements: Sequence[Any], *, async_op: bool = False
    ) -> XLAShardedTensor:
        """Return a view of the array in another layout; this one stays as it is.

        Collective over the mesh's processes.

        Args:
          device_mesh: the mesh.
          placements: for each axis of it a `Shard` or a `Replicate`, torch's too.
          async_op: JAX waits for no result in any case.

        Raises:
          UsageError: as many placements as axes are needed, and dims that exist (IndexError).
        """
        if len(placements) != len(device_mesh.mesh_shape):
            raise UsageError(
                f"Number of placements ({len(placements)}) must match mesh dimensions "
                f"({len(device_mesh.mesh_shape)})"
            )
        spec = spec_of_placements(placements, len(self.shape))
        return XLAShardedTensor(placed(self.global_tensor, fitted(self, device_mesh, spec)))

    def __jax_array__(self) -> jax.Array:
        return self.global_tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.global_tensor, dtype=dtype)

    def __repr__(self) -> str:
        return f"XLAShardedTensor({self.global_tensor!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoMeaningHere(_NO_TORCH)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoMeaningHere(_NO_TORCH)


_NO_TORCH = (
    "torch_xla XLAShardedTensor (jax.Array): torch's functions do not take it; use jax.numpy's on "
    "global_tensor"
)


@local
def wrap_as_sharded_tensor(
    t: Any, mesh_shape: Any = None, partition_spec: Any = None
) -> XLAShardedTensor:
    """Return a view of an array (`shoal.layout_of`).

    Local.

    Args:
      t: the array; a view is returned as it is, with what is given set.
      mesh_shape, partition_spec: as for `XLAShardedTensor`.
    """
    if not isinstance(t, XLAShardedTensor):
        return XLAShardedTensor(t, mesh_shape, partition_spec)
    t.mesh_shape = t.mesh_shape if mesh_shape is None else mesh_shape
    t.partition_spec = t.partition_spec if partition_spec is None else partition_spec
    return t


@local
def unwrap_sharded_tensor(t: Any) -> Any:
    """Return the array of a view; anything else as it is.

    Local.
    """
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


@local
def wrap_if_sharded(x: Any) -> Any:
    """Return a view of an array that lies on a mesh, and anything else as it is.

    Local.
    """
    return XLAShardedTensor(x) if _is_sharded(x) else x


def _is_sharded(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and isinstance(x.sharding, jax.sharding.NamedSharding)


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
