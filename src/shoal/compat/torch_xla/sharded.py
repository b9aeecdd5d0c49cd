"""Views of arrays and their shards, with torch_xla's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shoal.arrays.bridge.sharding import layout_of
from shoal.colour import collective, local, logically_collective
from shoal.compat.array_operators import ArrayOperators
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.compat.torch_xla.mesh import Mesh, on_numbers
from shoal.compat.torch_xla.placements import (
    Replicate,
    Shard,
    placements_of,
    spec_of_placements,
)
from shoal.compat.torch_xla.placing import fitted, placed
from shoal.compat.torch_xla.shards import XLAShard, packed, shards_of
from shoal.compat.torch_xla.specs import op_sharding
from shoal.errors import UsageError
from shoal.plan.hlo import ShardingType
from shoal.plan.layout import Layout

__all__ = [
    "XLAShardedTensor",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
]


@local
class XLAShardedTensor(ArrayOperators):
    """An array and the placement of its shards, under torch_xla's names.

    Local.

    A view: the array is `global_tensor`, which `jnp.asarray` returns. It can be used like the
    array: with operators, `jax.numpy`, `jit` and `grad`, since it is a pytree node of one leaf.
    A view returned by these has the layout of its array.

    Args:
      elem: the array, or a view.
      mesh_shape, partition_spec: the values of these attributes; None: those of the array.

    >>> import numpy as np
    >>> from shoal.compat.torch_xla.mesh import get_1d_mesh
    >>> x = placed(np.ones(8 * 3, np.float32), fitted(np.ones(1), get_1d_mesh("x"), ("x",)))
    >>> view = XLAShardedTensor(x)
    >>> view.partition_spec, view.sharding_type.name, view.placements
    (('x',), 'TILED', (Shard(dim=0),))
    """

    __slots__ = ("_mesh_shape", "_partition_spec", "global_tensor")
    __hash__ = object.__hash__  # by identity, as torch's

    def __init__(
        self,
        elem: Any,
        mesh_shape: Any = None,
        partition_spec: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.global_tensor: jax.Array = unwrap_sharded_tensor(elem)
        self._mesh_shape, self._partition_spec = mesh_shape, partition_spec

    @property
    def mesh_shape(self) -> Any:
        """The shape of the mesh; None for an array without a mesh."""
        layout = self._layout()
        given = self._mesh_shape
        return layout.mesh.shape if given is None and layout is not None else given

    @mesh_shape.setter
    def mesh_shape(self, mesh_shape: Any) -> None:
        self._mesh_shape = mesh_shape

    @property
    def partition_spec(self) -> Any:
        """The axes that split each dim; None for an array without a mesh."""
        layout = self._layout()
        given = self._partition_spec
        return layout.dims if given is None and layout is not None else given

    @partition_spec.setter
    def partition_spec(self, partition_spec: Any) -> None:
        self._partition_spec = partition_spec

    def _layout(self) -> Layout | None:
        """Return the layout over device numbers; None for an array without a mesh."""
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
        """A host copy of the shard on each device of this process, by ascending number."""
        return shards_of(self.global_tensor)

    @stands_for("shoal.compat.pack")
    @logically_collective("shapes, dtypes and layouts")
    def load_local_shards_(self, shards: Sequence[XLAShard]) -> XLAShardedTensor:
        """Replace the array by one of these shards, laid out as before (`shoal.compat.pack`).

        Logically collective: shapes, dtypes and layouts must be equal.

        Args:
          shards: one for each device of this process, in the order of `local_shards`.

        Raises:
          UsageError: too few shards, or of other shapes or dtypes than the array's; or replicas
            differ.
        """
        self.global_tensor = packed(shards, self.global_tensor)
        return self

    @property
    def sharding_spec(self) -> str:
        """The HLO text, which lists device numbers; "" for an array without a mesh."""
        layout = self._layout()
        return "" if layout is None else op_sharding(layout).text

    @property
    def sharding_type(self) -> ShardingType | None:
        """The kind of sharding; None for an array without a mesh."""
        layout = self._layout()
        return None if layout is None else op_sharding(layout).type

    @property
    def _spec(self) -> Layout:
        return layout_of(self.global_tensor)

    @property
    def placements(self) -> tuple[Shard | Replicate, ...]:
        """The current placement along each axis of the mesh."""
        return placements_of(layout_of(self.global_tensor))

    def invalidate_spec_cache(self) -> None:
        """Do nothing: a view computes its attributes from the array. Local."""

    @stands_for("shoal.relayout")
    @collective("the mesh's processes")
    def redistribute(
        self, device_mesh: Mesh, placements: Sequence[Any], *, async_op: bool = False
    ) -> XLAShardedTensor:
        """Return a view of the array in another layout; this view is unchanged.

        Collective over the mesh's processes.

        Args:
          device_mesh: the mesh.
          placements: for each axis of it a `Shard` or a `Replicate`, torch's too.
          async_op: ignored; JAX always dispatches asynchronously.

        Raises:
          UsageError: not one placement per axis, or a dim does not exist (also an IndexError).
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

    def __repr__(self) -> str:
        return f"XLAShardedTensor({self.global_tensor!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoMeaningHere(_NO_TORCH)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoMeaningHere(_NO_TORCH)


def _flatten(view: XLAShardedTensor) -> tuple[tuple[Any], None]:
    return (view.global_tensor,), None


def _unflatten(_: None, values: Iterable[Any]) -> XLAShardedTensor:
    view = object.__new__(XLAShardedTensor)
    view._mesh_shape = view._partition_spec = None
    (view.global_tensor,) = values
    return view


jax.tree_util.register_pytree_node(XLAShardedTensor, _flatten, _unflatten)

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
      t: the array; a view is returned itself, with the given attributes set.
      mesh_shape, partition_spec: as for `XLAShardedTensor`.
    """
    if not isinstance(t, XLAShardedTensor):
        return XLAShardedTensor(t, mesh_shape, partition_spec)
    t.mesh_shape = t.mesh_shape if mesh_shape is None else mesh_shape
    t.partition_spec = t.partition_spec if partition_spec is None else partition_spec
    return t


@local
def unwrap_sharded_tensor(t: Any) -> Any:
    """Return the array of a view; other values unchanged.

    Local.
    """
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


@local
def wrap_if_sharded(x: Any) -> Any:
    """Return a view of an array on a mesh; other values unchanged.

    Local.
    """
    return XLAShardedTensor(x) if _is_sharded(x) else x


def _is_sharded(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and isinstance(x.sharding, jax.sharding.NamedSharding)
