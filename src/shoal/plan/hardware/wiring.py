"""Wiring of chips: the base of all topologies, tori of chips, and slices of them.

*Cell* numbers the devices of a topology in row-major order of its grid; *device id* is the
hardware's number.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UsageError, UsageTypeError, WrongType, raise_all
from shoal.plan.hardware.tpu_generations import GENERATIONS, Generation
from shoal.plan.hardware.wiring_checks import DIMS, frozen, origin_of, sizes_of, stored, text_of

IntArray = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Numbering:
    """The device id and process of each cell; by default the topology's rule."""

    ids: bytes = b""  # int64, row-major; empty: by the rule
    processes: bytes = b""
    # The ids in the order of the program's device list; empty: by process, then z, y, x, core, as
    # JAX lists them.
    listed: bytes = dataclasses.field(default=b"", compare=False)


PLAIN = Numbering()


class Topology(abc.ABC):
    """Base class of all topologies."""

    numbering: Numbering

    @property
    def platform(self) -> str:
        """The platform of the devices: "tpu", "gpu" or "cpu"."""
        return "tpu"

    @property
    @abc.abstractmethod
    def grid(self) -> tuple[int, ...]:
        """The shape of the grid of devices: one more dim than the links where chips have cores."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.grid)

    @cached_property
    def device_ids(self) -> IntArray:
        """The id of the device in each cell [grid], read-only."""
        return frozen(self.numbering.ids, self._ids, self.grid)

    @cached_property
    def processes(self) -> IntArray:
        """The process that owns the device in each cell [grid], read-only."""
        return frozen(self.numbering.processes, self._processes, self.grid)

    def process_of(self, ids: IntArray) -> IntArray:
        """Return the process of each of these devices."""
        order = np.argsort(self.device_ids, axis=None)
        return np.asarray(
            self.processes.ravel()[order[np.searchsorted(self.device_ids.ravel()[order], ids)]]
        )

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The topology as text, without ids and processes that deviate from its rule."""

    @cached_property
    def listed_ids(self) -> IntArray:
        """The ids in the order in which a program lists the devices [count], read-only."""
        return frozen(self.numbering.listed, self._listed, (self.num_devices,))

    def _listed(self) -> IntArray:
        """By process, then in cell order with the last dim of links slowest."""
        cells = np.arange(self.num_devices).reshape(self.grid)
        dims = range(cells.ndim - 1)
        cells = cells.transpose(*reversed(dims), cells.ndim - 1).ravel()
        order = np.argsort(self.processes.ravel()[cells], kind="stable")
        return np.asarray(self.device_ids.ravel()[cells[order]])

    def _ids(self) -> IntArray:
        """Return the ids by the rule."""
        return np.arange(self.num_devices)

    @abc.abstractmethod
    def _processes(self) -> IntArray:
        """Return the processes by the rule [grid]."""

    def numbered(
        self,
        ids: ArrayLike | None = None,
        processes: ArrayLike | None = None,
        listed: ArrayLike | None = None,
    ) -> Self:
        """Return the same topology with other device ids and processes, or None for its own.

        Args:
          ids: the id of each device [grid].
          processes: its process [grid].
          listed: all ids in the order in which a program lists the devices [count].

        Raises:
          UsageError: there is not one for each device, or an id occurs twice.
        """
        problems: list[str] = []
        new = Numbering(
            stored(ids, self._ids(), "ids", problems, distinct=True),
            stored(processes, self._processes(), "processes", problems),
        )
        raise_all(type(self).__name__, problems)
        renumbered = dataclasses.replace(self, numbering=new)  # type: ignore[type-var]
        if listed is None:
            return renumbered
        order = stored(listed, renumbered.listed_ids, "listed", problems, distinct=True)
        if not problems and not np.array_equal(np.sort(listed), np.sort(renumbered.listed_ids)):
            problems.append("listed must be the ids of the devices, each once")
        raise_all(type(self).__name__, problems)
        new = dataclasses.replace(new, listed=order)
        return dataclasses.replace(renumbered, numbering=new)  # type: ignore[type-var]


def check_topology(operation: str, given: object) -> None:
    """Raise a UsageTypeError unless it is a topology."""
    if not isinstance(given, Topology):
        text = given if isinstance(given, str) else "v5e:4x8"
        raise UsageTypeError(
            f"{operation}: {given!r} is not a topology: topology.parse({text!r}) makes one"
        )


@dataclasses.dataclass(frozen=True)
class Torus(Topology):
    """Chips in a grid of links, some of whose lines close to rings.

    Args:
      shape: chips along x, y, z; one to three numbers, one dim for each of the links' directions.
      generation: a name of `GENERATIONS`, which supplies the defaults; "" for a plain torus.
      wrap: for each dim, whether its two ends are linked; None: as in the generation; a plain
        torus does not wrap.
      host: chips of one host along each dim; None: as in the generation, where that divides
        the dim; a plain torus is one host.
      cores: devices of a chip; None: as in the generation, else 1.
      kind: JAX's `device_kind`; "": the generation's first one.
      origin: the coordinates of the first chip; (): all 0.

    Ids count cores first, then x, y, z; processes count host blocks in the same order, as libtpu
    does for a slice that it describes.

    Raises:
      UsageError: names all problems.

    >>> Torus((2, 4), "v5e").device_ids.ravel().tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    >>> Torus((4, 4, 4), "v5p").wrap
    (True, True, True)
    """

    shape: tuple[int, ...]
    generation: str = ""
    wrap: tuple[bool, ...] = None  # type: ignore[assignment]
    host: tuple[int, ...] = None  # type: ignore[assignment]
    cores: int = None  # type: ignore[assignment]
    numbering: Numbering = PLAIN
    # Reported by live devices; used only by JAX's own orders.
    kind: str = dataclasses.field(default="", compare=False)
    origin: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        problems: list[str] = []
        shape = sizes_of(self.shape, "shape", problems)
        known = GENERATIONS.get(self.generation)
        if self.generation and known is None:
            problems.append(
                f"generation={self.generation!r} is not one of {', '.join(GENERATIONS)}; "
                "without one it is a plain torus"
            )
        raise_all("Torus", problems)
        rank = len(shape)
        wrap = self._wrap(shape, known)
        host = self._host(shape, known, problems)
        if len(wrap) != rank:
            problems.append(f"wrap={wrap} must have one entry for each dim of {text_of(shape)}")
        cores = self.cores
        if cores is None:
            cores = known.cores if known else 1
        (cores,) = sizes_of((cores,), "cores", problems) or (1,)
        origin = origin_of(self.origin, rank, problems)
        if not isinstance(self.kind, str):
            problems.append(WrongType(f"kind={self.kind!r} must be a string"))
        raise_all("Torus", problems)
        host = tuple(min(pair) for pair in zip(host, shape, strict=True))
        # A dim of one chip has no link at all.
        wrap = tuple(bool(w) and size > 1 for w, size in zip(wrap, shape, strict=True))
        kind = self.kind or (known.kinds[0] if known else "")
        values = {"shape": shape, "wrap": wrap, "host": host, "cores": cores, "kind": kind}
        for name, value in {**values, "origin": origin}.items():
            object.__setattr__(self, name, value)

    def _host(
        self, shape: tuple[int, ...], known: Generation | None, problems: list[str]
    ) -> tuple[int, ...]:
        if self.host is None:
            blocks = known.host[: len(shape)] if known else shape
            return tuple(b if s % b == 0 else 1 for s, b in zip(shape, blocks, strict=True))
        host = sizes_of(self.host, "host", problems, rank=len(shape))
        broken = [dim for dim in range(len(host)) if shape[dim] % min(host[dim], shape[dim])]
        if broken:
            dims = ", ".join(f"{DIMS[d]}={shape[d]} in blocks of {host[d]}" for d in broken)
            problems.append(f"a host's chips do not divide the slice: {dims}")
        return host

    def parts(self) -> Iterator[Torus]:
        """Yield the chips of each process, with their ids and order.

        Raises:
          UsageError: the chips of a process do not form a box.
        """
        for process in np.unique(self.processes):
            own = np.argwhere(self.processes == process)
            low, high = own.min(axis=0), own.max(axis=0) + 1
            box = tuple(slice(*ends) for ends in zip(low.tolist(), high.tolist(), strict=True))
            ids = self.device_ids[box]
            if ids.size != len(own):
                raise UsageError(f"the chips of process {process} of {self.text} do not fill a box")
            begin = np.add(low[:-1], self.origin or 0)
            part = Torus(
                ids.shape[:-1],
                self.generation,
                wrap=(False,) * len(self.shape),
                cores=ids.shape[-1],
                kind=self.kind,
                origin=tuple(begin.tolist()),
            )
            listed = self.listed_ids[np.isin(self.listed_ids, ids)]
            yield part.numbered(ids, self.processes[box], listed)

    def _wrap(self, shape: tuple[int, ...], known: Generation | None) -> tuple[bool, ...]:
        if self.wrap is not None:
            return tuple(self.wrap)
        return known.wraps(shape) if known else tuple(False for _ in shape)

    @property
    def grid(self) -> tuple[int, ...]:
        """Chips along each dim, and the cores of each."""
        return (*self.shape, self.cores)

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    def _ids(self) -> IntArray:
        chips = np.arange(self.num_chips).reshape(self.shape[::-1]).T
        return np.asarray(chips[..., None] * self.cores + np.arange(self.cores))

    def _processes(self) -> IntArray:
        blocks = tuple(-(-s // h) for s, h in zip(self.shape, self.host, strict=True))
        hosts = np.arange(math.prod(blocks)).reshape(blocks[::-1]).T
        for dim, size in enumerate(self.host):
            hosts = np.repeat(hosts, size, axis=dim)
        return np.broadcast_to(hosts[..., None], self.grid)

    @property
    def text(self) -> str:
        """`v5p:4x4x8`, and any differences from its generation."""
        plain = Torus(self.shape, self.generation)
        fields = [f"{self.generation or 'torus'}:{text_of(self.shape)}"]
        if self.wrap != plain.wrap:
            dims = "".join(d for d, wraps in zip(DIMS, self.wrap, strict=False) if wraps)
            fields.append(f"wrap={dims or 'none'}")
        if self.host != plain.host:
            fields.append(f"host={text_of(self.host)}")
        if self.cores != plain.cores:
            fields.append(f"cores={self.cores}")
        return " ".join(fields)


@dataclasses.dataclass(frozen=True)
class Slices(Topology):
    """Several tori over a slower network. The cells are those of one slice after the other.

    Args:
      slices: the tori, in the order of their slice numbers; they may differ. If one has ids of its
        own, those of all are used; else each slice's ids and processes follow the previous one's.

    Raises:
      UsageError: there are no slices, one is not a Torus, or an id occurs twice.
    """

    slices: tuple[Torus, ...]
    numbering: Numbering = PLAIN

    def __post_init__(self) -> None:
        slices = tuple(self.slices)
        if not slices:
            raise UsageError("Slices: there must be at least one slice")
        wrong = [torus for torus in slices if not isinstance(torus, Torus)]
        if wrong:
            raise UsageError(f"Slices: {wrong[0]!r} is not a Torus")
        plain = tuple(
            torus if torus.numbering == PLAIN else dataclasses.replace(torus, numbering=PLAIN)
            for torus in slices
        )
        object.__setattr__(self, "slices", plain)
        if plain != slices and self.numbering == PLAIN:
            ids, processes = (
                np.concatenate([getattr(torus, name).ravel() for torus in slices])
                for name in ("device_ids", "processes")
            )
            listed = np.concatenate([torus.listed_ids for torus in slices])
            object.__setattr__(self, "numbering", self.numbered(ids, processes, listed).numbering)

    @property
    def is_even(self) -> bool:
        """Whether all slices have the same shape."""
        return len({(torus.shape, torus.cores) for torus in self.slices}) == 1

    @property
    def grid(self) -> tuple[int, ...]:
        """Slices first where all have one shape; else one line of devices."""
        if self.is_even:
            return (len(self.slices), *self.slices[0].grid)
        return (sum(torus.num_devices for torus in self.slices),)

    def parts(self) -> Iterator[Torus]:
        """Yield each slice with its ids, processes and order of the whole."""
        ids, processes, begin = self.device_ids.ravel(), self.processes.ravel(), 0
        for torus in self.slices:
            cells = slice(begin, begin + torus.num_devices)
            own = np.isin(self.listed_ids, ids[cells])
            yield torus.numbered(ids[cells], processes[cells], self.listed_ids[own])
            begin += torus.num_devices

    def _ids(self) -> IntArray:
        return self._joined([torus.device_ids for torus in self.slices], count=True)

    def _processes(self) -> IntArray:
        return self._joined([torus.processes for torus in self.slices])

    def _joined(self, rows: list[IntArray], *, count: bool = False) -> IntArray:
        """Concatenate the numbers of the slices, each offset past the largest before it."""
        base, joined = 0, []
        for row in rows:
            joined.append(row.ravel() + base)
            base += row.size if count else int(row.max()) + 1
        return np.concatenate(joined).reshape(self.grid)

    @property
    def text(self) -> str:
        """`v5e:4x8 x 2 slices`; where they differ, `v5e:4x8 + v5e:4x4`."""
        if len(set(self.slices)) == 1:
            return f"{self.slices[0].text} x {len(self.slices)} slices"
        return " + ".join(torus.text for torus in self.slices)
