"""Views of arrays and their shards, with torch_xla's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.host.host_values import as_array, native, unfit
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.pack import pack, unpack
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.colour import collective, local, logically_collective
from shoal.compat.arguments import a, row, takes
from shoal.compat.array_operators import ArrayOperators
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.compat.torch_xla.mesh import Mesh, numbered_devices, on_numbers, spec_of_layout
from shoal.compat.torch_xla.placements import Replicate, Shard, placements_of, spec_of_placements
from shoal.compat.torch_xla.specs import layout_of_spec, op_sharding
from shoal.compat.torch_xla.tensors import host_form, is_tensor
from shoal.draw.describe import describe
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.hlo import ShardingType
from shoal.plan.hlo_reading import layout_of_text
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh as PlanMesh

__all__ = [
    "XLAShard",
    "XLAShardedTensor",
    "fitted",
    "is_traced",
    "packed",
    "placed",
    "shards_of",
    "unwrap_sharded_tensor",
    "value_of",
    "values_of",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
]


def _shards(value: Any) -> str:
    """A list of shards."""
    is_right = not row(value) and all(isinstance(shard, XLAShard) for shard in value)
    return "" if is_right else "a list of XLAShards, as local_shards is"


@local
class XLAShardedTensor(ArrayOperators):
    """An array and the placement of its shards, under torch_xla's names.

    Local.

    A view: the array is `global_tensor`, which `jnp.asarray` returns. It can be used like the
    array: with operators, `jax.numpy`, `jit` and `grad`, since it is a pytree node of one leaf.
    A view returned by these has the layout of its array.

    Args:
      elem: the array, or a view; a torch tensor is copied.
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

    @stands_for("shoal.layout_of")
    def __init__(
        self,
        elem: Any,
        mesh_shape: Any = None,
        partition_spec: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        value = value_of(elem)
        if is_tensor(elem):
            why = unfit(value)
            if why:
                raise UsageError(f"the tensor {why}")
            value = as_array(value)
        self.global_tensor: jax.Array = value
        self._mesh_shape, self._partition_spec = mesh_shape, partition_spec

    @property
    def mesh_shape(self) -> Any:
        """The shape of the mesh; None for an array without a mesh."""
        layout = self._layout()
        if self._mesh_shape is None and layout is not None:
            return layout.mesh.shape
        return self._mesh_shape

    @mesh_shape.setter
    def mesh_shape(self, mesh_shape: Any) -> None:
        self._mesh_shape = mesh_shape

    @property
    def partition_spec(self) -> Any:
        """The axes that split each dim, by index if they have no names; None without a mesh."""
        layout = self._layout()
        if self._partition_spec is None and layout is not None:
            return spec_of_layout(layout)
        return self._partition_spec

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
    @takes("torch_xla ", shards=_shards)
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
        """The current placement along each axis of the mesh.

        Raises:
          UsageError: the array is on no mesh: it was never marked, or was cleared.
        """
        if self._layout() is None:
            raise UsageError(
                "torch_xla XLAShardedTensor.placements (shoal.layout_of): the array is on no mesh: "
                "mark_sharding places it"
            )
        return placements_of(layout_of(self.global_tensor))

    def invalidate_spec_cache(self) -> None:
        """Do nothing: a view computes its attributes from the array. Local."""

    @stands_for("shoal.relayout")
    @collective("the mesh's processes")
    @takes("torch_xla ", device_mesh=a(Mesh, "a shoal.compat.torch_xla.Mesh"), placements=row)
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
    # Only those that are given: the others are read from the array, which may be replaced.
    if mesh_shape is not None:
        t.mesh_shape = mesh_shape
    if partition_spec is not None:
        t.partition_spec = partition_spec
    return t


@local
def unwrap_sharded_tensor(t: Any) -> Any:
    """Return the array of a view; other values unchanged.

    Local.
    """
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def value_of(t: Any) -> Any:
    """Return the array of a view, a torch tensor as a NumPy array; other values unchanged.

    Raises:
      UsageTypeError: a tensor that cannot become an array.
    """
    return host_form(unwrap_sharded_tensor(t))


def values_of(tree: Any) -> Any:
    """Return a tree with each view and torch tensor replaced by its array. Raises as `value_of`."""
    return jax.tree.map(value_of, tree, is_leaf=lambda part: isinstance(part, XLAShardedTensor))


@local
def wrap_if_sharded(x: Any) -> Any:
    """Return a view of an array on a mesh; other values unchanged.

    Local.
    """
    return XLAShardedTensor(x) if _is_sharded(x) else x


def _is_sharded(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and isinstance(x.sharding, jax.sharding.NamedSharding)


# ---- The shards of an array per device, under torch_xla's names.


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
        host_form(self.data)[self._box()] = host_form(t)

    def _box(self) -> Any:
        if self.indices is Ellipsis:
            return Ellipsis
        return tuple(slice(0, s.stop - s.start) for s in self.indices)


def shards_of(array: jax.Array) -> list[XLAShard]:
    """Return a host copy of the shard on each device of this process, by ascending number."""
    numbers = {device: index for index, device in enumerate(numbered_devices())}
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
    values = [host_form(shard.data) for shard in shards]
    _check_shards(values, shards_of(array))
    ranks = sorted(range(len(held)), key=lambda n: _only_device(held[n]).id)
    by_place = {place: native(values[n]) for n, place in enumerate(ranks)}
    return pack([by_place[place] for place in range(len(held))], layout_of(array))


def _indices(index: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
    """Return slices with start, stop and step, or `...` if they are the whole array."""
    spans = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    whole = all((s.start, s.stop) == (0, n) for s, n in zip(spans, shape, strict=True))
    return Ellipsis if whole else spans


def _only_device(piece: jax.Array) -> jax.Device:
    (device,) = piece.devices()
    return device


def _check_shards(values: Sequence[Any], held: Sequence[XLAShard]) -> None:
    if len(values) != len(held):
        raise UsageError(
            f"Shards must be provided for all local devices: {len(held)}, not {len(values)}"
        )
    for index, (new, old) in enumerate(zip(values, held, strict=True)):
        if (np.shape(new), new.dtype) != (old.data.shape, old.data.dtype):
            raise UsageError(
                f"shard {index} must be {old.data.dtype}{list(old.data.shape)}, as the device "
                f"holds, not {new.dtype}{list(np.shape(new))}"
            )


# ---- The API of torch_xla's sharding visualisation.


@local
@stands_for("shoal.describe")
def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> str:
    """Print which devices hold which block of an array, of any rank (`shoal.describe`).

    Local.

    Args:
      sharding: HLO text, with devices listed or as an iota: `{devices=[2,2]<=[4]}`; "" or
        `{replicated}`: on all devices.
      use_color, scale, min_width, max_width: ignored; blocks are as wide as their content.
    Returns:
      the printed text.

    Raises:
      UsageError: the text is not the sharding of one array.

    >>> picture = visualize_sharding("{devices=[2,1]0,1}")
    [2, 1] as Layout(dim0, - @ dim0=2 dim1=1)
    ┌─────────────────────────────────┬─────┐
    │ dim 0 (dim0) ↓  dim 1 (whole) → │ 0:1 │
    ├─────────────────────────────────┼─────┤
    │ 0:1                             │  0  │
    ├─────────────────────────────────┼─────┤
    │ 1:2                             │  1  │
    └─────────────────────────────────┴─────┘
    each block on 1 device
    """
    if sharding in ("", "{replicated}"):  # names no devices: all
        layout = Layout.replicated(PlanMesh({"replica": len(numbered_devices())}), 0)
    else:
        layout = layout_of_text(sharding)
    picture = describe(layout)
    print(picture)
    return picture


@local
@stands_for("shoal.describe")
def visualize_tensor_sharding(t: Any, **kwargs: Any) -> str:
    """Print which devices hold which block of an array (`shoal.describe`).

    Local.

    Args:
      t: the array, or a view.
      kwargs: as for `visualize_sharding`.
    Returns:
      the printed text.
    """
    picture = describe(value_of(t))
    print(picture)
    return picture


# ---- Place a value in the layout of a partition spec, inside `jit` and outside.


def fitted(value: Any, mesh: Mesh, spec: Any) -> Layout:
    """Return the layout on devices for a value and a spec.

    Raises:
      UsageError: the spec is wrong, or has another rank than the value.
    """
    if not isinstance(mesh, Mesh):
        raise UsageTypeError(f"the mesh must be a shoal.compat.torch_xla.Mesh, not {mesh!r}")
    layout = layout_of_spec(mesh.on_devices(), spec)
    if layout.rank != np.ndim(value):
        raise UsageError(
            f"Partition spec length ({layout.rank}) should be equal to the input rank "
            f"({np.ndim(value)}): {tuple(spec)!r} and shape {np.shape(value)}"
        )
    return layout


def placed(value: Any, layout: Layout, *, gradient: bool = False) -> jax.Array:
    """Return a value in a layout: pinned inside `jit` or under `grad`, else moved."""
    if is_traced(value):
        return constrain(value, layout, gradient=gradient)
    if isinstance(value, jax.Array) and _is_spread(value, layout):
        return relayout(value, layout)
    return put(value, layout)


def is_traced(value: Any) -> bool:
    """True for a value inside `jit`, `grad` or `vmap`."""
    return isinstance(value, jax.core.Tracer) or is_tracing()


def _is_spread(array: jax.Array, layout: Layout) -> bool:
    """True for an array that moves between devices; other values are a process's host values."""
    return not array.is_fully_addressable or len(layout.mesh.process_indices) == 1
