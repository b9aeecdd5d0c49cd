"""Layouts: which mesh axes split which dims of an array. Pure values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeVar

from shoal.arguments import as_integer, check_kind, integer
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all
from shoal.plan.mesh import Mesh, mesh_of
from shoal.plan.notation import mesh_text
from shoal.plan.notation.words import Words, quote

Dim = None | str | tuple[str, ...]
Axis = TypeVar("Axis", str, int)  # by name, or by number

REDUCTIONS = ("sum", "prod", "min", "max", "mean")


@local
class Layout:
    """Which axes of a mesh split which dims of an array.

    Local.

    Immutable, hashable, equal by content, picklable. The rank is part of a layout: it fits arrays
    of exactly that many dims.

    Args:
      mesh: a `jax.sharding.Mesh`, or a planned one.
      dims: for each dim `None` (whole), an axis name, or a tuple of names, the first most
        significant. `()` equals `None` and `("x",)` equals `"x"`. Or one PartitionSpec.
      partial: axis → reduction ("sum", "prod", "min", "max", "mean"): along this axis devices hold
        terms of a pending reduction. Such an axis splits no dim.

    Raises:
      UsageError: unknown axes, axes used twice, wrong types; all in one message.

    Example:
      >>> mesh = Mesh({"data": 4, "model": 2, "seq": 2})
      >>> layout = Layout(mesh, "data", ("model", "seq"), None)
      >>> layout
      Layout(data, model+seq, - @ data=4 model=2 seq=2)
      >>> layout.shard_shape((8, 8, 3))
      (2, 2, 3)
      >>> Layout.parse(layout.text) == layout
      True
    """

    __slots__ = ("_dims", "_hash", "_mesh", "_partial")

    _mesh: Mesh
    _dims: tuple[tuple[str, ...], ...]
    _partial: tuple[tuple[str, str], ...]  # in the order of the mesh's axes
    _hash: int

    def __init__(self, mesh: Any, *dims: Dim, partial: Mapping[str, str] | None = None) -> None:
        mesh = mesh_of("Layout", mesh)
        problems: list[str] = []
        if len(dims) == 1 and hasattr(dims[0], "unreduced"):  # a PartitionSpec
            spec: Any = dims[0]
            pending = dict.fromkeys(spec.unreduced, "sum")
            dims, partial = tuple(spec.partitions), {**pending, **(partial or {})}
        split = tuple(_check_dim(index, dim, problems) for index, dim in enumerate(dims))
        terms = _check_partial(partial, problems)
        _check_axes(mesh, split, terms, problems)
        if problems:
            raise_all(f"Layout{_shown(dims)} on {mesh!r}", problems)
        ordered = tuple((axis, terms[axis]) for axis in mesh.axis_names if axis in terms)
        fields = {"_mesh": mesh, "_dims": split, "_partial": ordered}
        for field, value in (*fields.items(), ("_hash", hash((mesh, split, ordered)))):
            object.__setattr__(self, field, value)

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Return the layout in which every device holds the whole array. Local."""
        return cls(mesh, *[None] * _check_rank("replicated", rank, 0))

    @classmethod
    def batch_sharded(cls, mesh: Mesh, axis: Dim, rank: int) -> Layout:
        """Return the layout in which `axis` splits the first dim. Local."""
        return cls(mesh, axis, *[None] * (_check_rank("batch_sharded", rank, 1) - 1))

    @classmethod
    def inner_sharded(cls, mesh: Mesh, axis: Dim, rank: int) -> Layout:
        """Return the layout in which `axis` splits the last dim. Local."""
        return cls(mesh, *[None] * (_check_rank("inner_sharded", rank, 1) - 1), axis)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    @property
    def dims(self) -> tuple[Dim, ...]:
        """For each dim `None`, an axis, or a tuple of two or more axes."""
        return tuple(map(dim_of, self._dims))

    @property
    def axes_of_dims(self) -> tuple[tuple[str, ...], ...]:
        """For each dim the axes that split it, most significant first; `()` for a whole dim."""
        return self._dims

    @property
    def partial(self) -> Mapping[str, str]:
        """Axis → pending reduction along it. Read-only."""
        return MappingProxyType(dict(self._partial))

    @property
    def rank(self) -> int:
        """The rank of arrays with this layout."""
        return len(self._dims)

    @property
    def unused_axes(self) -> tuple[str, ...]:
        """The axes along which devices hold replicas: they split nothing and are not partial."""
        used = {axis for dim in self._dims for axis in dim} | {axis for axis, _ in self._partial}
        return tuple(axis for axis in self._mesh.axis_names if axis not in used)

    @property
    def is_replicated(self) -> bool:
        """True if every device holds the whole array."""
        partial = any(self._mesh.axes[axis] > 1 for axis, _ in self._partial)
        return not partial and all(self.num_shards(dim) == 1 for dim in range(self.rank))

    def num_shards(self, dim: int) -> int:
        """Return the number of shards of `dim`. Local.

        Args:
          dim: the dim's index; negative counts from the end.

        Raises:
          UsageError: the layout has no such dim.
        """
        index = integer("num_shards", "dim", dim)
        try:
            axes = self._dims[index]
        except IndexError:
            raise UsageError(f"num_shards({dim!r}): {self!r} has rank {self.rank}") from None
        return math.prod(self._mesh.axes[axis] for axis in axes)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the largest shard of an array of `shape`. Local.

        Where the shards do not divide a dim evenly the largest has the quotient rounded up, and
        the last ones are smaller, or empty (`shards.region` says which).

        Raises:
          UsageError: the rank of `shape` is not the layout's, or a size is negative.
        """
        return shard_of(self, self.check_shape(shape))

    def global_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the array whose shards all have `shard_shape`. Local.

        Raises:
          UsageError: the rank of `shard_shape` is not the layout's, or a size is negative.
        """
        sizes = self.check_shape(shard_shape)
        return tuple(size * self.num_shards(dim) for dim, size in enumerate(sizes))

    def check_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return `shape` as plain ints if an array of this layout can have it. Local.

        Raises:
          UsageError: it cannot; both ranks, or the sizes at fault, are named.
        """
        is_row = isinstance(shape, Iterable) and not isinstance(shape, Set)
        given = tuple(map(as_integer, shape)) if is_row else (None,)
        sizes = tuple(size for size in given if size is not None)
        if len(sizes) < len(given):
            raise UsageTypeError(f"shape {shape!r} must be a sequence of integers")
        if len(sizes) != self.rank:
            hint = "; add None for each whole dim" if len(sizes) > self.rank else ""
            raise UsageError(
                f"shape {sizes} has rank {len(sizes)}, but {self!r} has rank {self.rank}{hint}"
            )
        if any(size < 0 for size in sizes):
            raise UsageError(f"shape {sizes} has a negative size")
        return sizes

    def with_mesh(self, mesh: Mesh) -> Layout:
        """Return the same split on another mesh that has these axes. Local.

        Raises:
          UsageError: the mesh lacks axes that this layout uses.
        """
        return Layout(mesh, *self.dims, partial=dict(self._partial))

    @property
    def text(self) -> str:
        """The text form, exact: `Layout.parse(layout.text) == layout`."""
        return f"{self._dims_text()} @ {self._mesh.text}"

    def _dims_text(self) -> str:
        dims = ", ".join("+".join(map(quote, dim)) or "-" for dim in self._dims) or "()"
        partial = ", ".join(f"{reduction} over {quote(axis)}" for axis, reduction in self._partial)
        return f"{dims} | {partial}" if partial else dims

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form. Local.

        Raises:
          UsageError: the text is malformed (says where), or describes an invalid layout.
        """
        tokens = Words(text, "Layout")
        dims = _read_dims(tokens)
        partial = _read_partial(tokens) if tokens.skip("|") else {}
        tokens.expect("@")
        mesh = Mesh(**mesh_text.read_mesh(tokens))
        tokens.end()
        return cls(mesh, *dims, partial=partial)

    def __repr__(self) -> str:
        mesh = self._mesh  # its text lists ids and processes: do they fit on a line?
        is_short = mesh.is_iota and (mesh.size <= 64 or len(mesh.process_indices) == 1)
        shown = mesh.text if is_short else repr(mesh)
        return f"Layout({self._dims_text()} @ {shown})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self._dims, self._partial, self._mesh) == (other._dims, other._partial, other._mesh)

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a Layout is immutable; {field} cannot be set: make another Layout")

    def __delattr__(self, field: str) -> None:
        self.__setattr__(field, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout._of, (self._mesh, self.dims, dict(self._partial))

    @classmethod
    def _of(cls, mesh: Mesh, dims: tuple[Dim, ...], partial: Mapping[str, str]) -> Layout:
        return cls(mesh, *dims, partial=partial)


def _check_rank(what: str, rank: object, least: int) -> int:
    return integer(f"Layout.{what}", "rank", rank, least=least)


def dim_of(axes: Sequence[Axis]) -> Axis | tuple[Axis, ...] | None:
    """Return the axes that split a dim as users write it: None, the only axis, or several.

    >>> dim_of([]), dim_of(["data"]), dim_of(["data", "model"])
    (None, 'data', ('data', 'model'))
    """
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def shard_of(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return `Layout.shard_shape` of a shape that has been checked."""
    return tuple(-(-size // layout.num_shards(dim)) for dim, size in enumerate(shape))


def check_layout(operation: str, value: object) -> None:
    """Raise a UsageTypeError unless it is a Layout."""
    check_kind(operation, value, Layout, "a Layout")


def _check_dim(index: int, dim: object, problems: list[str]) -> tuple[str, ...]:
    """Return the axes of a dim; report those of the wrong type and drop them."""
    if dim is None:
        return ()
    axes = dim if isinstance(dim, tuple) else (dim,)
    for axis in axes:
        if isinstance(axis, tuple):
            hint = "write one tuple of axis names"
            problems.append(WrongType(f"dim {index}: {dim!r} nests tuples; {hint}"))
        elif axis is None and isinstance(dim, tuple):
            each = ", ".join(map(repr, dim))
            problems.append(WrongType(f"dim {index}: {dim!r}: write Layout(mesh, {each})"))
        elif not isinstance(axis, str):
            wanted = "an axis name" if isinstance(dim, tuple) else "None, an axis name or a tuple"
            problems.append(WrongType(f"dim {index}: {axis!r} must be {wanted}"))
    return tuple(str.__str__(axis) for axis in axes if isinstance(axis, str))


def _check_partial(partial: Mapping[str, str] | None, problems: list[str]) -> dict[str, str]:
    if partial is None:
        return {}
    if not isinstance(partial, Mapping):
        problems.append(WrongType(f"partial={partial!r} must be a dict of axis: reduction"))
        return {}
    terms = {}
    for axis, reduction in partial.items():
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            problems.append(f"partial[{axis!r}]={reduction!r} must be one of {known}")
        else:
            reduction = str.__str__(reduction)
        terms[str.__str__(axis) if isinstance(axis, str) else axis] = reduction
    return terms


def _check_axes(
    mesh: Mesh,
    dims: tuple[tuple[str, ...], ...],
    partial: Mapping[str, str],
    problems: list[str],
) -> None:
    """Check that every axis is the mesh's and used once."""
    places: dict[str, list[str]] = {}
    for index, dim in enumerate(dims):
        for axis in dim:
            places.setdefault(axis, []).append(f"dim {index}")
    for axis in partial:
        places.setdefault(axis, []).append("partial")
    known = ", ".join(mesh.axis_names)
    for axis, where in places.items():
        if axis not in mesh.axis_names:
            hint = nearest(axis, mesh.axis_names) if len(problems) < 100 else ""
            problems.append(f"{where[0]}: no axis {axis!r} (axes: {known}){hint}")
        if len(where) > 1:
            shown = ", ".join(where[:8]) + (", …" if len(where) > 8 else "")
            problems.append(f"axis {axis!r} is used {len(where)} times: {shown}")


def _shown(dims: tuple[object, ...]) -> str:
    text = "(" + ", ".join(map(repr, dims)) + ")"
    return text if len(text) <= 200 else text[:199] + "…"


def _read_dims(tokens: Words) -> list[Dim]:
    if tokens.skip("("):
        tokens.expect(")")
        return []
    dims: list[Dim] = []
    while True:
        if tokens.skip("-"):
            dims.append(None)
        else:
            axes = [tokens.name()]
            while tokens.skip("+"):
                axes.append(tokens.name())
            dims.append(dim_of(axes))
        if not tokens.skip(","):
            return dims


def _read_partial(tokens: Words) -> dict[str, str]:
    partial: dict[str, str] = {}
    while True:
        reduction = tokens.name()
        tokens.expect("over")
        axis = tokens.name()
        if axis in partial:
            raise tokens.error(f"axis {axis!r} occurs twice,")
        partial[axis] = reduction
        if not tokens.skip(","):
            return partial
