"""Meshes: named axes over a grid of devices. Pure values that need no devices to exist."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.arguments import as_integer, integer, not_one_of
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all
from shoal.plan.notation import mesh_text
from shoal.plan.notation.mesh_checks import (
    check_axes,
    check_axis_types,
    check_ids,
    check_name,
    check_processes,
)
from shoal.plan.notation.words import Words

IntArray = NDArray[np.int64]

_AXIS_TYPES = {"Auto": "auto", "Explicit": "explicit"}  # name of JAX's `AxisType` → ours


@local
class Mesh:
    """Named axes over a grid of device ids and the processes that own them.

    Local.

    Immutable, hashable, equal by content, picklable. *Position* (where in the grid) and *device
    id* (which device) are different: the first counts row-major, the second is the hardware's
    number. A mesh whose ids are 0..n-1 and whose devices all belong to process 0 stores nothing
    per device, whatever its size.

    Args:
      axes: name → size, in order, major first; a dict or pairs. `{}` is a mesh of one device.
      device_ids: the id at each position, [mesh shape] or flat; default 0..n-1.
      processes: the process that owns the device at each position, [mesh shape] or flat; or one
        number for all; default 0.
      kind: the platform of the devices: "cpu", "gpu", "tpu".
      label: a name for messages and pictures; part of equality.
      axis_types: "auto" (the compiler chooses layouts of intermediates) or "explicit" (layouts
        are part of the type, as JAX's `AxisType`); or a dict: axis name → one of these.

    Raises:
      UsageError: names all problems with the arguments.

    Example:
      >>> mesh = Mesh({"data": 4, "model": 2})
      >>> mesh
      Mesh(data=4, model=2; 8 cpu devices, 1 process, auto axes)
      >>> mesh.coords(5)
      (2, 1)
      >>> mesh.submesh(model=1).device_ids
      array([1, 3, 5, 7])
      >>> Mesh.parse(mesh.text) == mesh
      True
    """

    __slots__ = ("_explicit", "_hash", "_ids", "_kind", "_label", "_names", "_processes", "_sizes")

    _names: tuple[str, ...]
    _sizes: tuple[int, ...]
    _ids: IntArray | None  # None: 0..n-1
    _processes: IntArray | int  # one number: all devices belong to it
    _kind: str
    _label: str
    _explicit: frozenset[str]
    _hash: int

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        *,
        device_ids: ArrayLike | None = None,
        processes: ArrayLike | None = None,
        kind: str = "cpu",
        label: str = "",
        axis_types: str | Mapping[str, str] = "auto",
    ) -> None:
        problems: list[str] = []
        names, sizes = check_axes(axes, problems)
        shape = None if problems else sizes
        ids = check_ids(device_ids, shape, problems)
        owners = check_processes(processes, shape, problems)
        explicit = check_axis_types(axis_types, names, problems)
        kind = check_name(kind, "kind", problems)
        label = check_name(label, "label", problems, may_be_empty=True)
        raise_all("Mesh", problems)
        self._fill(names, sizes, ids, owners, kind, label, explicit)

    def _fill(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        ids: IntArray | None,
        processes: IntArray | int,
        kind: str,
        label: str,
        explicit: frozenset[str],
    ) -> None:
        """Set the fields of a validated value, in normal form."""
        if ids is not None:
            ids = None if (ids.ravel() == np.arange(ids.size)).all() else _freeze(ids, sizes)
        if not isinstance(processes, int):
            first = int(processes.item(0))
            processes = first if (processes == first).all() else _freeze(processes, sizes)
        content = (names, sizes, _bytes_of(ids), _bytes_of(processes), kind, label, explicit)
        fields = (names, sizes, ids, processes, kind, label, explicit, hash(content))
        order = ("_names", "_sizes", "_ids", "_processes", "_kind", "_label", "_explicit", "_hash")
        for field, value in zip(order, fields, strict=True):
            object.__setattr__(self, field, value)

    @classmethod
    def _of(cls, *fields: Any) -> Mesh:
        mesh = object.__new__(cls)
        mesh._fill(*fields)
        return mesh

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """Return the planning value of a `jax.sharding.Mesh`: axes, types, ids, owners. Local.

        JAX is not imported. A planning value is returned unchanged. `shoal.jax_mesh` is the way
        back.

        Raises:
          UsageError: it is no mesh; it is abstract, has Manual axes, or devices of several kinds.

        Example:
          >>> import jax
          >>> Mesh.of(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])).axes["x"]
          1
        """
        return mesh_of("Mesh.of", mesh)

    @property
    def axes(self) -> Mapping[str, int]:
        """Name → size, in order, major first. Read-only."""
        return MappingProxyType(dict(zip(self._names, self._sizes, strict=True)))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names, major first."""
        return self._names

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, major first."""
        return self._sizes

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._sizes)

    @property
    def kind(self) -> str:
        """The platform of the devices."""
        return self._kind

    @property
    def label(self) -> str:
        """A name for messages and pictures; part of equality."""
        return self._label

    @property
    def axis_types(self) -> Mapping[str, str]:
        """Name → "auto" or "explicit"."""
        return MappingProxyType(
            {name: "explicit" if name in self._explicit else "auto" for name in self._names}
        )

    @property
    def is_iota(self) -> bool:
        """True if the id of every device is its position."""
        return self._ids is None

    @property
    def device_ids(self) -> IntArray:
        """The id at each position [mesh shape], read-only."""
        if self._ids is not None:
            return self._ids
        ids = np.arange(self.size, dtype=np.int64).reshape(self._sizes)
        ids.flags.writeable = False
        return ids

    @property
    def processes(self) -> IntArray:
        """The process that owns the device at each position [mesh shape], read-only."""
        return np.broadcast_to(np.asarray(self._processes, dtype=np.int64), self._sizes)

    @property
    def process_indices(self) -> tuple[int, ...]:
        """The processes that own devices here, ascending."""
        if isinstance(self._processes, int):
            return (self._processes,)
        return tuple(np.unique(self._processes).tolist())

    def position(self, device_id: int) -> int:
        """Return the row-major position of a device. Local.

        Raises:
          UsageError: the mesh has no such device.
        """
        wanted = integer("Mesh", "device_id", device_id)
        if self._ids is None:
            places = [wanted] if 0 <= wanted < self.size else []
        else:
            places = np.flatnonzero(self._ids.ravel() == wanted)[:1].tolist()
        if not places:
            last = f"0..{self.size - 1}" if self.size > 1 else "0"
            ids = last if self._ids is None else mesh_text.short_runs(self._ids)
            raise UsageError(f"device {wanted} is not in {self!r}; its ids: {ids}")
        return int(places[0])

    def coords(self, device_id: int) -> tuple[int, ...]:
        """Return the index of a device along each axis, in the order of the axes. Local.

        Raises:
          UsageError: the mesh has no such device.
        """
        return coords_of(self.position(device_id), self._sizes)

    def local(self, process: int) -> IntArray:
        """Return the ids of the devices that `process` owns [count], in mesh order. Local.

        A process that owns none gets an empty array.

        Raises:
          UsageError: `process` is not a process index.
        """
        owned = integer("Mesh.local", "process", process, least=0)
        if isinstance(self._processes, int):
            return self.device_ids.ravel() if owned == self._processes else np.empty(0, np.int64)
        return np.asarray(self.device_ids[self._processes == owned])

    def host_mesh(self, per: str = "device") -> Mesh:
        """Return a mesh of the CPU devices that `initialize(host_devices=n)` adds. Local.

        Args:
          per: "device": the same axes; at each position the CPU device of the same id and process.
            "process": one axis "process", in ascending order; of each process the CPU device with
            the lowest id that this process has here.

        Raises:
          UsageError: `per` is neither.
        """
        raise_all("host_mesh", not_one_of("per", per, ("device", "process")))
        if per == "process":
            owners = self.process_indices
            ids = [int(self.local(process).min()) for process in owners]
            return Mesh(
                {"process": len(owners)},
                device_ids=ids,
                processes=owners,
                kind="cpu",
                label=self._label,
            )
        kind = "cpu"
        return Mesh._of(
            self._names, self._sizes, self._ids, self._processes, kind, self._label, self._explicit
        )

    def submesh(self, /, **picks: int | slice) -> Mesh:
        """Return part of the mesh: an int drops the axis, a slice keeps it. Local.

        Args:
          picks: axis name → index or slice, as in NumPy (negative indices count from the end).

        Raises:
          UsageError: unknown axes, indices out of range, empty slices; all in one message.

        Example:
          >>> Mesh({"x": 4, "y": 2}).submesh(x=slice(0, 4, 2)).text
          'x=2 y=2 | ids 0..1,4..5'
        """
        problems: list[str] = []
        for name, pick in picks.items():
            problems += self._pick_problems(name, pick)
        raise_all("submesh", problems)
        index = [picks.get(name, slice(None)) for name in self._names]
        index = [pick if isinstance(pick, slice) else operator.index(pick) for pick in index]
        ids = self._positions(index) if self._ids is None else np.asarray(self._ids[tuple(index)])
        kept = [isinstance(pick, slice) for pick in index]
        names = tuple(itertools.compress(self._names, kept))
        processes = self._processes
        if not isinstance(processes, int):
            processes = np.asarray(processes[tuple(index)])
        explicit = self._explicit & set(names)
        return Mesh._of(names, ids.shape, ids, processes, self._kind, self._label, explicit)

    def _positions(self, index: Sequence[int | slice]) -> IntArray:
        """Return the positions of an index; costs the sum of the sizes, not the product."""
        positions: IntArray = np.zeros((), dtype=np.int64)
        for size, pick in zip(self._sizes, index, strict=True):
            positions = np.add.outer(positions * size, np.arange(size, dtype=np.int64)[pick])
        return np.asarray(positions)

    def _pick_problems(self, name: str, pick: object) -> list[str]:
        if name not in self._names:
            known = ", ".join(self._names)
            return [f"no axis {name!r} (axes: {known}){nearest(name, self._names)}"]
        size = self._sizes[self._names.index(name)]
        if isinstance(pick, slice):
            try:
                count = len(range(size)[pick])
            except (TypeError, ValueError) as error:
                return [f"{name}={pick}: {error}"]
            return [] if count else [f"{name}={pick} leaves nothing of its {size} positions"]
        index = as_integer(pick)
        if index is None:
            return [WrongType(f"{name}={pick!r} must be an int or a slice")]
        if -size <= index < size:
            return []
        bound = f"not below its size {size}" if index >= size else f"below {-size}, its first index"
        return [f"{name}={index} is {bound}"]

    @property
    def text(self) -> str:
        """The text form, exact: `Mesh.parse(mesh.text) == mesh`."""
        processes = self._processes
        return mesh_text.write(
            self.axes,
            ids=None if self._ids is None else self._ids.ravel(),
            processes=processes if isinstance(processes, int) else processes.ravel(),
            kind=self._kind,
            name=self._label,
            explicit=self._explicit,
        )

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read the text form. Local.

        Raises:
          UsageError: the text is malformed (says where), or describes an invalid mesh.
        """
        tokens = Words(text, "Mesh")
        mesh = cls(**mesh_text.read_mesh(tokens))
        tokens.end()
        return mesh

    def __repr__(self) -> str:
        return mesh_text.show_mesh(
            self.axes,
            self._ids,
            num_processes=len(self.process_indices),
            kind=self._kind,
            name=self._label,
            explicit=self._explicit,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and self._names == other._names
            and self._sizes == other._sizes
            and (self._kind, self._label) == (other._kind, other._label)
            and self._explicit == other._explicit
            and _same(self._ids, other._ids)
            and _same(self._processes, other._processes)
        )

    def __hash__(self) -> int:
        return self._hash

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a planned Mesh names devices by id and has no {name!r}: where JAX wants its own "
            "Mesh, pass that of shoal.make_mesh, or shoal.jax_mesh(mesh); for a NamedSharding, "
            "write shoal.named_sharding(layout)"
        )

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a Mesh is immutable; {field} cannot be set: make another Mesh")

    def __delattr__(self, field: str) -> None:
        self.__setattr__(field, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh._of, (
            self._names,
            self._sizes,
            self._ids,
            self._processes,
            self._kind,
            self._label,
            self._explicit,
        )


def mesh_of(operation: str, given: Any) -> Mesh:
    """Return the planning value of a mesh, JAX's or ours, for an argument of an operation."""
    if isinstance(given, Mesh):
        return given
    try:
        is_mesh = isinstance(given.devices, np.ndarray) and not given.empty
    except AttributeError:
        is_mesh = False
    except ValueError:  # JAX's AbstractMesh
        text = "is abstract: it has sizes but no devices; pass the mesh itself"
        raise UsageError(f"{operation}: {given} {text}") from None
    if not is_mesh:
        raise UsageTypeError(f"{operation}: {given!r} must be a jax.sharding.Mesh or a shoal.Mesh")
    try:
        return _planned(given)
    except UsageError as error:
        raise UsageError(f"{operation}: {error}") from None


@lru_cache(maxsize=256)
def _planned(mesh: Any) -> Mesh:
    """Return the planning value of a `jax.sharding.Mesh`."""
    types = {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    manual = [repr(name) for name, kind in types.items() if kind not in _AXIS_TYPES]
    if manual:
        text = "are Manual: inside shard_map arrays have no layout along them"
        raise UsageError(f"axes {', '.join(manual)} {text}")
    devices = mesh.devices.ravel().tolist()
    kinds = sorted({device.platform for device in devices})
    if len(kinds) != 1:
        raise UsageError(f"{mesh} has devices of {len(kinds)} kinds: {', '.join(kinds)}")
    return Mesh(
        zip(mesh.axis_names, mesh.devices.shape, strict=True),
        device_ids=[device.id for device in devices],
        processes=[device.process_index for device in devices],
        kind=kinds[0],
        axis_types={name: _AXIS_TYPES[kind] for name, kind in types.items()},
    )


def coords_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Unravel a row-major position; as `np.unravel_index`, in plain ints."""
    coords = []
    for size in reversed(shape):
        position, coord = divmod(position, size)
        coords.append(coord)
    return tuple(reversed(coords))


def _freeze(array: IntArray, shape: tuple[int, ...]) -> IntArray:
    """Copy into an array backed by bytes, which can never be made writable."""
    return np.frombuffer(array.tobytes(), dtype=np.int64).reshape(shape)


def _bytes_of(array: IntArray | int | None) -> bytes | int | None:
    return array.tobytes() if isinstance(array, np.ndarray) else array


def _same(one: IntArray | int | None, other: IntArray | int | None) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return type(one) is type(other) and one == other
