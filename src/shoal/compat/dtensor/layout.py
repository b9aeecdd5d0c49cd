"""`dtensor.Layout`: the name of the mesh dim that splits each dim of an array."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arguments import as_integer
from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.bridge.use_mesh import default_mesh as block_mesh
from shoal.colour import local
from shoal.compat.arguments import takes, text, whole, wholes
from shoal.compat.dtensor import config
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.mesh import MeshDimension as MeshDimension
from shoal.compat.dtensor.refused import EagerOnly, NotPossible
from shoal.compat.dtensor.text import prefix_of, split
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all, with_article
from shoal.plan import layout as plan_layout
from shoal.plan.mesh import Mesh as PlanMesh
from shoal.plan.mesh import coords_of
from shoal.runtime.process import meshes

__all__ = [
    "ANY",
    "MATCH",
    "UNSHARDED",
    "Layout",
    "LayoutType",
    "array_of",
    "check_dtensor_mesh",
    "checked",
    "is_on_mesh",
    "layout_for",
    "mesh_for",
    "mesh_owners",
    "named",
    "rank_of",
    "sizes_of",
    "value_of",
]


class LayoutType(enum.IntEnum):
    """The kinds of layouts, numbered as TensorFlow numbers them."""

    EMPTY = 0
    STATIC = 1
    SINGLE_DEVICE = 2
    PARTED = 3


@local
class Layout:
    """DTensor's layout: which dim of a mesh splits which dim of an array.

    Local.

    A value: immutable, hashable, equal by content, with the text form that TensorFlow reads.
    `shoal_layout` is the equivalent `shoal.Layout`.

    Args:
      sharding_specs: for each dim of the array the name of a mesh dim, `UNSHARDED`, or `MATCH`,
        which only `relayout` accepts.
      mesh: the mesh.

    Raises:
      UsageError: names all problems.

    >>> import numpy as np
    >>> mesh = Mesh(["x"], np.arange(2), [0, 1], ["CPU:0", "CPU:1"])
    >>> layout = Layout(["x", UNSHARDED], mesh)
    >>> layout.local_shape_from_global_shape([4, 3]), layout.offset_to_shard()
    ((2, 3), [(0, 0), (1, 0)])
    """

    __slots__ = ("_mesh", "_specs", "_type")

    _mesh: Mesh | None  # None: the empty layout
    _specs: tuple[str, ...]
    _type: LayoutType

    def __init__(self, sharding_specs: Sequence[str], mesh: Mesh) -> None:
        self._fill(checked("dtensor.Layout", sharding_specs, mesh), mesh, LayoutType.STATIC)

    def _fill(self, specs: tuple[str, ...], mesh: Mesh | None, kind: LayoutType) -> None:
        for field, value in (("_specs", specs), ("_mesh", mesh), ("_type", kind)):
            object.__setattr__(self, field, value)

    @classmethod
    def _of(cls, specs: tuple[str, ...], mesh: Mesh | None, kind: LayoutType) -> Layout:
        layout = object.__new__(cls)
        layout._fill(specs, mesh, kind)
        return layout

    @classmethod
    def from_shoal(cls, layout: plan_layout.Layout, mesh: Mesh) -> Layout:
        """Return a shoal layout as a DTensor layout, on the equivalent DTensor mesh."""
        if any(isinstance(dim, tuple) for dim in layout.dims) or layout.partial:
            raise UsageError(
                f"dtensor.Layout cannot express {layout!r}: there one mesh dim splits one dim, "
                "and nothing is pending; shoal.layout_of can"
            )
        return cls([UNSHARDED if dim is None else str(dim) for dim in layout.dims], mesh)

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Return the layout in which every device holds the whole array."""
        return cls([UNSHARDED] * rank_of("replicated", rank, 0), mesh)

    @classmethod
    @takes("dtensor.", batch_dim=text, axis=whole)
    def batch_sharded(cls, mesh: Mesh, batch_dim: str, rank: int, axis: int = 0) -> Layout:
        """Return the layout in which a mesh dim splits one dim of the array, by default dim 0."""
        specs = [UNSHARDED] * rank_of("batch_sharded", rank, 1)
        if not -rank <= axis < rank:
            raise UsageError(
                f"dtensor.Layout.batch_sharded: axis={axis} is not a dim of rank {rank}"
            )
        specs[axis] = batch_dim
        return cls(specs, mesh)

    @classmethod
    @takes("dtensor.", inner_dim=text)
    def inner_sharded(cls, mesh: Mesh, inner_dim: str, rank: int) -> Layout:
        """Return the layout in which a mesh dim splits the last dim of the array."""
        return cls.batch_sharded(mesh, inner_dim, rank_of("inner_sharded", rank, 1), -1)

    @classmethod
    def from_single_device_mesh(cls, mesh: Mesh) -> Layout:
        """Return the layout of an array on the device of a single-device mesh."""
        if not check_dtensor_mesh(mesh).is_single_device():
            raise UsageError(
                "dtensor.Layout: type is single device, but mesh is not single device: "
                f"{mesh.to_string()!r}"
            )
        return cls._of((), mesh, LayoutType.SINGLE_DEVICE)

    @classmethod
    def from_device(cls, device: str) -> Layout:
        """Return the layout of an array on one device, by its name."""
        return cls.from_single_device_mesh(Mesh.from_device(device))

    @classmethod
    def from_string(cls, layout_str: str) -> Layout:
        """Read the text that `to_string`, or TensorFlow, wrote."""
        if not isinstance(layout_str, str):
            raise UsageTypeError(f"dtensor.Layout.from_string: {layout_str!r} must be a string")
        kind, specs, mesh_text = split(layout_str)
        if kind == LayoutType.EMPTY:
            return cls._of((), None, LayoutType.EMPTY)
        mesh = Mesh.from_string(mesh_text)
        if kind == LayoutType.SINGLE_DEVICE:
            return cls.from_single_device_mesh(mesh)
        named = checked("dtensor.Layout.from_string", specs, mesh, may_be_any=True)
        return cls._of(named, mesh, LayoutType(kind))

    @classmethod
    def from_proto(cls, layout_proto: Any) -> Layout:
        """Read a TensorFlow LayoutProto, or any object with the same fields."""
        kind, mesh = LayoutType(layout_proto.type), Mesh.from_proto(layout_proto.mesh_config)
        if kind in (LayoutType.EMPTY, LayoutType.SINGLE_DEVICE):
            return cls._of((), mesh if kind else None, kind)
        specs = [spec.sharding_spec for spec in layout_proto.sharding_specs]
        named = checked("dtensor.Layout.from_proto", specs, mesh, may_be_any=True)
        return cls._of(named, mesh, kind)

    def as_proto(self) -> Any:
        """Refuse: protocol buffers are TensorFlow's; its `Layout.from_string` reads our text."""
        raise NotPossible(
            "dtensor.Layout.as_proto: there are no protocol buffers here; TensorFlow's "
            "Layout.from_string reads to_string()"
        )

    @property
    def shoal_layout(self) -> plan_layout.Layout:
        """The equivalent `shoal.Layout`, accepted by all of shoal.

        Raises:
          UsageError: a spec is `match` or `any`, or the layout is empty.
        """
        open_ = [spec for spec in self._specs if spec in (MATCH, ANY)]
        if open_:
            raise UsageError(
                f"dtensor.Layout: {open_[0]!r} does not define a layout; only relayout accepts it"
            )
        dims = [None if spec == UNSHARDED else spec for spec in self._specs]
        return plan_layout.Layout(self.mesh.shoal_mesh, *dims)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return Mesh.from_string("empty_mesh") if self._mesh is None else self._mesh

    @property
    def sharding_specs(self) -> list[str]:
        """For each dim the mesh dim that splits it, or `UNSHARDED`."""
        return list(self._specs)

    @property
    def rank(self) -> int:
        """The rank of arrays with this layout."""
        return len(self._specs)

    @property
    def shape(self) -> list[int]:
        """The sizes of the mesh's dims."""
        return self.mesh.shape()

    @property
    def type(self) -> LayoutType:
        """The kind of layout."""
        return self._type

    def to_parted(self) -> Layout:
        """Return the same layout, marked as holding separate values on each device."""
        if self._type not in (LayoutType.STATIC, LayoutType.PARTED):
            raise UsageError("dtensor.Layout.to_parted: only a layout of a grid can be parted")
        return self._of(self._specs, self._mesh, LayoutType.PARTED)

    def delete(self, dims: int | Sequence[int]) -> Layout:
        """Return the layout without some dims, by their indices; negative count from the end."""
        given = list(dims) if isinstance(dims, Iterable) else [dims]
        wrong = [dim for dim in given if as_integer(dim) is None]
        if wrong:
            raise UsageTypeError(f"dtensor.Layout.delete: {wrong} must be integers")
        wrong = [dim for dim in given if not -self.rank <= dim < self.rank]
        if wrong:
            raise UsageError(f"dtensor.Layout.delete: {wrong} are not dims of rank {self.rank}")
        gone = {dim % self.rank for dim in given}
        specs = tuple(spec for place, spec in enumerate(self._specs) if place not in gone)
        return self._of(specs, self._mesh, self._type)

    def is_fully_replicated(self) -> bool:
        """Return whether no dim names a mesh dim, not even one of size 1."""
        is_grid = self._type in (LayoutType.STATIC, LayoutType.PARTED)
        return is_grid and all(spec == UNSHARDED for spec in self._specs)

    def is_single_device(self) -> bool:
        """Return whether it is the layout of an array on one device."""
        return self._type == LayoutType.SINGLE_DEVICE

    def is_batch_parallel(self) -> bool:
        """Return whether only the first dim is split."""
        return [spec != UNSHARDED for spec in self._specs] == [True, *[False] * (self.rank - 1)]

    @takes("dtensor.", idx=whole)
    def num_shards(self, idx: int) -> int:
        """Return the number of shards of a dim; negative indices count from the end."""
        if not -self.rank <= idx < self.rank:
            raise UsageError(f"dtensor.Layout.num_shards: {idx} is not a dim of rank {self.rank}")
        spec = self._specs[idx]
        if spec in (MATCH, ANY):
            raise UsageError(f"dtensor.Layout.num_shards: dim {idx} is {spec!r}")
        return 1 if spec == UNSHARDED else self.mesh.dim_size(spec)

    def _counts(self) -> list[int]:
        return [self.num_shards(dim) for dim in range(self.rank)]

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return for each position of the mesh the index along each dim of the shard there."""
        self._counts()  # rejects incomplete specs
        places = [dict(zip(self.mesh.dim_names, coords_of(place, self.shape), strict=True))
                  for place in range(self.mesh.size)]  # fmt: skip
        return [tuple(place.get(spec, 0) for spec in self._specs) for place in places]

    @takes("dtensor.", offset_tuple=wholes)
    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the row-major number of the shard with these indices."""
        counts = self._counts()
        index = tuple(offset_tuple)
        fits = len(index) == len(counts) and all(map(operator.lt, index, counts))
        if not fits or any(place < 0 for place in index):
            raise UsageError(f"dtensor.Layout: {index} is not a shard of {counts}")
        return sum(place * math.prod(counts[dim + 1 :]) for dim, place in enumerate(index))

    def global_shape_from_local_shape(self, local_shape: Sequence[int | None]) -> tuple[int, ...]:
        """Return the shape of an array whose shards have a shape; -1 stands for an unknown size."""
        counts = self._counts()
        sizes = sizes_of("global_shape_from_local_shape", local_shape, self.rank)
        return tuple(s if s < 0 else s * count for s, count in zip(sizes, counts, strict=True))

    def local_shape_from_global_shape(self, global_shape: Sequence[int | None]) -> tuple[int, ...]:
        """Return the shape of the shards of an array; -1 stands for an unknown size.

        Raises:
          UsageError: a dim does not divide evenly, or the rank is not the layout's.
        """
        operation, counts = "local_shape_from_global_shape", self._counts()
        sizes = sizes_of(operation, global_shape, self.rank)
        pairs = list(zip(sizes, counts, strict=True))
        uneven = [
            f"dim {dim}: {size} over {count} shards"
            for dim, (size, count) in enumerate(pairs)
            if size > 0 and size % count
        ]
        raise_all(f"dtensor.Layout.{operation}: uneven", uneven)
        return tuple(size if size < 0 else size // count for size, count in pairs)

    def to_string(self) -> str:
        """Return the text that `from_string` reads, here and in TensorFlow."""
        if self._type == LayoutType.EMPTY:
            return "empty_layout"
        listed = "".join(f"{spec}," for spec in self._specs)
        return f"{prefix_of(self._type)}{listed} mesh:{self.mesh.to_string()}"

    def _content(self) -> tuple[Any, ...]:
        return self._specs, self._mesh, self._type

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a dtensor.Layout is immutable; {field} cannot be set")

    def __repr__(self) -> str:
        return f"Layout.from_string({self.to_string()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout._of, self._content()


# ---- Validation of DTensor layouts.


UNSHARDED = "unsharded"
MATCH = "match"
ANY = "any"  # only in text written by TensorFlow's compiler


def check_dtensor_mesh(mesh: object) -> Mesh:
    """Return the mesh.

    Raises:
      UsageError: it is not a DTensor mesh.
    """
    if not isinstance(mesh, Mesh):
        raise UsageTypeError(f"dtensor.Layout: mesh is not a valid Mesh object: {mesh!r}")
    return mesh


def mesh_owners(mesh: object = None, *_: object, **__: object) -> tuple[int, ...] | None:
    """Return the processes that make a call with a DTensor mesh; None: not known."""
    return mesh.shoal_mesh.process_indices if isinstance(mesh, Mesh) else None


def checked(
    operation: str, specs: Sequence[str], mesh: object, *, may_be_any: bool = False
) -> tuple[str, ...]:
    """Return the specs of a layout, validated.

    Raises:
      UsageError: names all problems.
    """
    names = check_dtensor_mesh(mesh).dim_names
    if mesh.is_single_device():  # type: ignore[attr-defined]
        raise UsageError(f"{operation}: the mesh has a single device: use from_single_device_mesh")
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        raise UsageTypeError(f"{operation}: sharding_specs must be a list of names, not {specs!r}")
    known = [*names, UNSHARDED, MATCH, *[ANY] * may_be_any]
    problems = [_unknown(place, spec, names) for place, spec in enumerate(specs)
                if not isinstance(spec, str) or spec not in known]  # fmt: skip
    repeated = [name for name in names if list(specs).count(name) > 1]
    raise_all(operation, [*problems, *(_repeated(name, specs) for name in repeated)])
    return tuple(specs)


def _unknown(place: int, spec: object, names: Sequence[str]) -> str:
    if not isinstance(spec, str):
        return WrongType(f"spec {place}: {spec!r} must be a name")
    hint = nearest(spec, [*names, UNSHARDED])
    return (
        f"{spec}: A dimension sharding must either be a valid mesh dimension ({', '.join(names)}) "
        f"or UNSHARDED{hint}"
    )


def _repeated(name: str, specs: Sequence[str]) -> str:
    return (
        f"Mesh dimension {name} was repeated in sharding specs {list(specs)}. Mesh dimensions must "
        "be unique in a layout."
    )


def rank_of(operation: str, rank: object, least: int) -> int:
    """Return a rank.

    Raises:
      UsageError: it is not an integer, or too small.
    """
    value = as_integer(rank)
    if value is None:
        raise UsageTypeError(f"dtensor.Layout.{operation}: rank {rank!r} must be a whole number")
    if value < least:
        raise UsageError(f"dtensor.Layout.{operation}: rank {value} must be at least {least}")
    return value


def sizes_of(operation: str, shape: Sequence[int | None], rank: int) -> list[int]:
    """Return a validated shape of this rank, with unknown sizes as -1.

    Raises:
      UsageError: it is not a shape, or has another rank.
    """
    try:
        sizes = [-1 if size is None else operator.index(size) for size in shape]
    except TypeError:
        raise UsageTypeError(f"dtensor.Layout.{operation}: {shape!r} is not a shape") from None
    if len(sizes) != rank:
        raise UsageError(f"dtensor.Layout.{operation}: {sizes} has rank {len(sizes)}, not {rank}")
    if any(size < -1 for size in sizes):
        raise UsageError(f"dtensor.Layout.{operation}: {sizes} has a negative size")
    return sizes


# ---- DTensor layouts of JAX arrays.


_PLACE = "copy_to_mesh (shoal.put) places it"


def value_of(value: Any) -> Any:
    """Return the value of a DVariable; return other values unchanged."""
    return value.read_value() if hasattr(value, "read_value") else value


def is_on_mesh(value: Any) -> bool:
    """Is it an array on a mesh?"""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and isinstance(value.sharding, NamedSharding)


def array_of(operation: str, value: Any) -> jax.Array:
    """Return an array on a mesh; for a DVariable, its value.

    Raises:
      UsageError: it is not on a mesh.
    """
    value = value_of(value)
    if not isinstance(value, jax.Array):
        detail = f"Expecting an array on a mesh, not {with_article(type(value).__name__)}; {_PLACE}"
        raise UsageTypeError(f"dtensor.{operation}: {detail}")
    if isinstance(value, jax.core.Tracer):
        raise EagerOnly(
            f"dtensor.{operation} must be called eagerly: inside jit and grad the value has no "
            "layout yet; fetch that of an argument or a result"
        )
    if not is_on_mesh(value):
        detail = f"an array on a mesh, and this one is on {value.sharding}; {_PLACE}"
        raise UsageError(f"dtensor.{operation} expects {detail}")
    return value


def mesh_for(mesh: PlanMesh) -> Mesh:
    """Return the DTensor mesh for a shoal mesh, whose name is lost if it came from a JAX mesh.

    The name is that of the default mesh if it has the same grid, else of the newest such mesh.
    """
    default = block_mesh()
    known = [entry.mesh for entry in meshes()] + ([default] if default is not None else [])
    same = [candidate for candidate in known if named(candidate, mesh.label) == mesh]
    chosen = mesh
    if same and not mesh.label:
        chosen = same[-1]
    described = Mesh.from_shoal(chosen, job=config.job_name())
    if mesh.axes:
        return described
    (device,) = described.local_devices() or described.global_devices()
    return Mesh.from_device(device)


def named(mesh: PlanMesh, name: str) -> PlanMesh:
    """Return a mesh under another name."""
    ids, owners = mesh.device_ids, mesh.processes
    return PlanMesh(
        mesh.axes,
        device_ids=ids,
        processes=owners,
        kind=mesh.kind,
        label=name,
        axis_types=mesh.axis_types,
    )


def layout_for(operation: str, value: Any, layout: Layout) -> plan_layout.Layout:
    """Return the target layout of a value, with `match` resolved from its current layout.

    Raises:
      UsageError: it is not a DTensor layout, or uses `match` for a value of unknown layout.
    """
    if not isinstance(layout, Layout):
        raise UsageTypeError(f"dtensor.{operation}: {layout!r} must be a dtensor.Layout")
    if value is None:
        raise UsageError(f"dtensor.{operation}: None is not a value; pass an array or a number")
    if layout.type == LayoutType.SINGLE_DEVICE:
        return plan_layout.Layout.replicated(layout.mesh.shoal_mesh, np.ndim(value))
    if MATCH not in layout.sharding_specs:
        return layout.shoal_layout
    return _matched(operation, value, layout)


def _matched(operation: str, value: Any, layout: Layout) -> plan_layout.Layout:
    """Return a layout with `match` replaced by the value's split of that dim."""
    if isinstance(value, jax.core.Tracer):
        raise EagerOnly(
            f"dtensor.{operation}: {MATCH!r} keeps the current split, which is unknown inside jit "
            "and grad; name the mesh dim"
        )
    has = [*(layout_of(value).dims if is_on_mesh(value) else ()), *[None] * layout.rank]
    named = {UNSHARDED: None}
    dims = [has[dim] if spec == MATCH else named.get(spec, spec)
            for dim, spec in enumerate(layout.sharding_specs)]  # fmt: skip
    return plan_layout.Layout(layout.mesh.shoal_mesh, *dims)
