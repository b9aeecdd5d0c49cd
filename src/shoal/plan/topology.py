"""Topologies: descriptions of hardware that need no hardware.

    Torus    chips in a grid of links, as a TPU slice is       v5p:8x8x8
    Slices   several of them over a slower network             v5e:4x8 x 2 slices
    Hosts    hosts of n devices, perhaps behind switches       gpu:4 hosts x 8
    Flat     devices of unknown arrangement                    flat:8

All are pure values: equal by content and hashable. They come from a text, from live devices, and
from JSON.

>>> parse("v5e:4x8 x 2 slices").num_devices
64
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import check_kind
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, counted, nearest, raise_all
from shoal.plan.hardware.hosts import Flat, Hosts
from shoal.plan.hardware.tpu_generations import GENERATIONS, generation_of_kind
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.hardware.wiring_checks import DIMS

__all__ = [
    "Flat", "Hosts", "Slices", "Topology", "Torus", "from_devices", "from_json", "parse", "to_json",
]  # fmt: skip

_EXAMPLES = (
    "v5p:8x8x8, v5e:4x8 x 2 slices, torus:4x4 wrap=xy, gpu:4 hosts x 8, cpu:16 hosts x 1, flat:8"
)
_SIZES = re.compile(r"\d{1,7}(?:x\d{1,7}){0,2}", re.ASCII)
_CORES = re.compile(r"\d{1,7}", re.ASCII)
_SLICES = re.compile(r"(.*\S)\s+x\s+(\d{1,7})\s+slices?", re.ASCII)
_HOSTS = re.compile(
    r"(gpu|cpu):\s*(\d{1,7})\s+hosts?\s+x\s+(\d{1,5})(?:\s+switch=(\d{1,7}))?", re.ASCII
)
_FLAT = re.compile(r"flat:\s*(\d{1,9})(?: on=(cpu|gpu|tpu))?", re.ASCII)


@local
def parse(text: str) -> Topology:
    """Read the text of a topology.

    Local.

    Args:
      text: `GENERATION:SIZES`, and `torus:SIZES` for chips of no generation; after it, where it
        differs from the generation's rules, `wrap=xy` (or `none`), `host=2x2x1` (chips of a host),
        `cores=2` (devices of a chip); then ` x N slices`, or ` + ` between slices that differ.
        `gpu:N hosts x D` and `cpu:N hosts x D`, with `switch=S` hosts behind a switch. `flat:N`,
        with `on=tpu`.

    Raises:
      UsageError: it is malformed, or describes an impossible topology.

    Example:
      >>> parse("v5p:4x4x8").wrap
      (True, True, True)
      >>> parse("gpu:2 hosts x 8").processes.ravel().tolist()
      [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    if not isinstance(text, str):
        raise UsageTypeError(f"parse takes the text of a topology, not {text!r}; {_EXAMPLES}")
    one_line = " ".join(text.split())
    match = _FLAT.fullmatch(one_line)
    if match:
        return Flat(int(match[1]), match[2] or "cpu")
    match = _HOSTS.fullmatch(one_line)
    if match:
        return Hosts(int(match[2]), int(match[3]), match[1], int(match[4]) if match[4] else None)
    slices: list[Torus] = []
    made: dict[str, Torus] = {}
    for part in one_line.split(" + "):
        many = _SLICES.fullmatch(part)
        slice_text = many[1] if many else part
        made[slice_text] = made[slice_text] if slice_text in made else _torus(slice_text, text)
        slices += [made[slice_text]] * (int(many[2]) if many else 1)
    return slices[0] if len(slices) == 1 else Slices(tuple(slices))


def _torus(part: str, text: str) -> Torus:
    head, *options = part.split(" ")
    name, colon, sizes = head.partition(":")
    known = (*GENERATIONS, "torus", "gpu", "cpu", "flat")
    if not colon or name not in (*GENERATIONS, "torus") or not _SIZES.fullmatch(sizes):
        hint = "" if name in known else nearest(name, known)
        if re.fullmatch(r"\w+-\d+", name):  # a number of chips, as clouds name slices
            hint = "; write the sizes of its dims, not the number of its chips"
        raise UsageError(f"{text!r} is not a topology{hint}\nexamples: {_EXAMPLES}")
    named: dict[str, Any] = {}
    shape = tuple(map(int, sizes.split("x")))
    for option in options:
        key, _, value = option.partition("=")
        if key == "wrap" and (value == "none" or re.fullmatch(r"[xyz]+", value)):
            named[key] = _wrap(value, shape, text)
        elif key == "host" and _SIZES.fullmatch(value):
            named[key] = tuple(map(int, value.split("x")))
        elif key == "cores" and _CORES.fullmatch(value):
            named[key] = int(value)
        else:
            raise UsageError(
                f"{text!r}: {option!r} is not one of wrap=xy, wrap=none, host=2x2x1, cores=2"
            )
    return Torus(shape, "" if name == "torus" else name, **named)


def _wrap(value: str, shape: tuple[int, ...], text: str) -> tuple[bool, ...]:
    dims = DIMS[: len(shape)]
    given = "" if value == "none" else value
    unknown = [dim for dim in given if dim not in dims]
    if unknown:
        raise UsageError(f"{text!r}: wrap={value}: there is no dim {unknown[0]}, only {dims}")
    if len({*given}) < len(given):
        raise UsageError(f"{text!r}: wrap={value} names a dim twice")
    return tuple(dim in given for dim in dims)


class Device(NamedTuple):
    """The known facts of one device."""

    id: int
    process: int
    coords: tuple[int, ...] | None
    core: int
    slice: int
    kind: str  # JAX's `device_kind`
    platform: str


@local
def from_devices(devices: Iterable[Any], *, within: Iterable[Any] | None = None) -> Topology:
    """Describe live devices, in any order.

    Local.

    Args:
      devices: JAX devices, or mappings with `id` and, as far as known, `process`, `coords` (x, y,
        z), `core`, `slice`, `kind` ("TPU v4"), `platform`.
      within: all devices of the slices of which these are a part, such as `jax.devices()`: a dim
        of which a part is used has no linked ends. None: these are all. A box that begins at
        other coordinates than 0 always counts as a part.

    Returns:
      A Torus or Slices if all have coordinates that fill boxes, wherever these begin; Hosts if
      every process has equally many devices; else Flat. Ids and processes are those of the
      devices.

    Raises:
      UsageError: there are no devices, an id or a place occurs twice, only some have coordinates,
        or some are not in `within`.

    Example:
      >>> at = [(2, 2), (3, 2), (2, 3), (3, 3)]
      >>> rows = [{"id": 7 + i, "coords": (*xy, 0), "kind": "TPU v5e"} for i, xy in enumerate(at)]
      >>> torus = from_devices(rows)
      >>> torus.text, torus.device_ids.ravel().tolist()
      ('v5e:2x2', [7, 9, 8, 10])
    """
    if not isinstance(devices, Iterable):
        raise UsageTypeError(f"from_devices: {devices!r} must be devices, or mappings of facts")
    rows = [_device(device) for device in devices]
    problems = _problems(rows)
    raise_all("from_devices", problems)
    if rows[0].coords is None:
        return _without_coords(rows)
    tori = _boxes(rows)
    wholes = tori if within is None else _boxes(_around(rows, within))
    parts = [
        _part(torus, wholes[slice_index])
        for slice_index, torus in tori.items()
        if torus is not None
    ]
    if len(parts) < len(tori):  # the links of a box with holes are unknown
        return _flat(rows)
    if len(parts) == 1:
        return parts[0]
    plain = Slices(tuple(parts))
    return plain.numbered(plain.device_ids, plain.processes, [row.id for row in rows])


def _device(device: Any) -> Device:
    """Read a JAX device, or a mapping of the same facts."""
    if isinstance(device, Mapping):
        read = {"process": 0, "coords": None, "core": 0, "slice": 0, "kind": "", "platform": ""}
        unknown = [name for name in device if name not in ("id", *read)]
        if unknown:
            known = ("id", *read)
            raise UsageError(
                f"from_devices: {unknown[0]!r} is not one of {', '.join(known)}"
                f"{nearest(str(unknown[0]), known)}"
            )
        if "id" not in device:
            raise UsageError(f"from_devices: {dict(device)} has no id")
        facts = read | {name: value for name, value in device.items() if value is not None}
    else:
        names = {"id": "id", "process": "process_index", "coords": "coords", "core": "core_on_chip",
                 "slice": "slice_index", "kind": "device_kind", "platform": "platform"}  # fmt: skip
        facts = {ours: getattr(device, theirs, None) for ours, theirs in names.items()}
        if facts["id"] is None:
            raise UsageTypeError(
                f"from_devices: {device!r} is neither a device nor a mapping of its attributes"
            )
    coords = facts["coords"]
    platform = str(facts["platform"] or ("tpu" if coords is not None else "cpu"))
    try:
        coordinates = None if coords is None else tuple(map(operator.index, coords))
        whole = [operator.index(facts[name] or 0) for name in ("id", "process", "core", "slice")]
    except TypeError:
        raise UsageTypeError(
            f"from_devices: {device!r}: id, process, core, slice and coords must be whole numbers"
        ) from None
    device_id, process, core, part = whole
    return Device(
        id=device_id,
        process=process,
        coords=coordinates,
        core=core,
        slice=part,
        kind=str(facts["kind"] or ""),
        platform=platform,
    )


def _problems(rows: Sequence[Device]) -> list[str]:
    if not rows:
        return ["there are no devices"]
    problems = []
    ids, counts = np.unique([row.id for row in rows], return_counts=True)
    if (counts > 1).any():
        problems.append(f"ids occur twice: {ids[counts > 1].tolist()[:8]}")
    kinds = {row.slice: set[str]() for row in rows}
    for row in rows:
        kinds[row.slice].add(row.kind)
    mixed = [sorted(own) for own in kinds.values() if len(own) > 1]
    if mixed:
        problems.append(f"one slice has devices of several kinds: {', '.join(map(repr, mixed[0]))}")
    without = [row.id for row in rows if row.coords is None]
    if without and len(without) < len(rows):
        problems.append(f"devices {without[:8]} have no coordinates, and others have")
    if not without and len({len(row.coords or ()) for row in rows}) > 1:
        problems.append("coordinates differ in their number of dims")
    elif not without:
        places = {(row.slice, row.coords, row.core) for row in rows}
        if len(places) < len(rows):
            twice = counted(len(rows) - len(places), "place occurs", "places occur")
            problems.append(f"{twice} twice: each device has its own")
    return problems


def _around(rows: Sequence[Device], within: Iterable[Any]) -> list[Device]:
    """Read all devices of the slices, which must include the given ones."""
    around = [_device(device) for device in within]
    strange = sorted({row.id for row in rows} - {row.id for row in around})
    problems = [f"devices {strange[:8]} are not in within"] if strange else []
    raise_all("from_devices", problems or [f"within: {what}" for what in _problems(around)])
    return around


def _boxes(rows: Sequence[Device]) -> dict[int, Torus | None]:
    """Return the torus of each slice by its number, in order; None for one with holes."""
    slices: dict[int, list[Device]] = {}
    for row in rows:
        slices.setdefault(row.slice, []).append(row)
    return {slice_index: _box(slices[slice_index]) for slice_index in sorted(slices)}


def _part(torus: Torus, whole: Torus | None) -> Torus:
    """Remove the links that a part of a slice lacks."""
    if whole is None or len(whole.shape) != len(torus.shape):
        return dataclasses.replace(torus, wrap=(False,) * len(torus.shape))
    begin = torus.origin or (0,) * len(torus.shape)
    dims = zip(whole.wrap, torus.shape, whole.shape, begin, strict=False)
    wrap = tuple(wraps and own == all_ and not start for wraps, own, all_, start in dims)
    return dataclasses.replace(torus, wrap=wrap)


def _box(rows: Sequence[Device]) -> Torus | None:
    """Return the torus that the devices of a slice fill; None if it has holes."""
    generation = generation_of_kind(rows[0].kind)
    coords = np.array([row.coords for row in rows], np.int64)
    cores = np.array([row.core for row in rows], np.int64)
    places = np.column_stack((coords, cores))
    origin = places.min(axis=0)
    places -= origin
    grid = tuple((places.max(axis=0) + 1).tolist())
    if np.prod(grid) != len(rows):
        return None
    ids, processes = (np.empty(grid, np.int64) for _ in range(2))
    ids[tuple(places.T)] = [row.id for row in rows]
    processes[tuple(places.T)] = [row.process for row in rows]
    shape = grid[:-1]
    dims = generation.dims if generation else len(shape)
    if all(size == 1 for size in shape[dims:]):  # the z of a flat network is meaningless
        shape = shape[:dims]
    host = _host(processes)
    torus = Torus(
        shape,
        generation.name if generation else "",
        host=host[: len(shape)] if host else None,  # type: ignore[arg-type]
        cores=grid[-1],
        kind=rows[0].kind,
        origin=tuple(origin[:-1].tolist()) if origin[:-1].any() else (),
    )
    listed = [row.id for row in rows]
    return torus.numbered(ids.reshape(torus.grid), processes.reshape(torus.grid), listed)


def _host(processes: NDArray[np.int64]) -> tuple[int, ...] | None:
    """Return the box of chips of the first chip's process; None if they do not form one."""
    own = np.argwhere((processes == processes.flat[0]).any(axis=-1))
    box = own.max(axis=0) + 1
    sizes = tuple(box.tolist())
    fits = len(own) == box.prod() and not any(
        size % part for size, part in zip(processes.shape, sizes, strict=False)
    )
    return sizes if fits else None


def _without_coords(rows: Sequence[Device]) -> Topology:
    """Return hosts, if all processes have equally many devices."""
    by_process: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        by_process.setdefault(row.process, []).append(row.id)
    counts = {len(ids) for ids in by_process.values()}
    platform = rows[0].platform if rows[0].platform in ("cpu", "gpu") else "gpu"
    if len(counts) > 1:
        return _flat(rows)
    order = sorted(by_process)
    hosts = Hosts(len(order), counts.pop(), platform)
    processes = [process for process in order for _ in range(hosts.devices)]
    listed = [row.id for row in rows]
    return hosts.numbered([by_process[p] for p in order], processes, listed)


def _flat(rows: Sequence[Device]) -> Flat:
    ordered = sorted(rows, key=lambda row: (row.process, row.id))
    on = rows[0].platform if rows[0].platform in ("cpu", "tpu") else "gpu"
    flat = Flat(len(rows), on)
    listed = [row.id for row in rows]
    return flat.numbered([r.id for r in ordered], [r.process for r in ordered], listed)


@local
def to_json(topology: Topology) -> dict[str, Any]:
    """Return a topology as plain values, exactly.

    Local.

    `topology` is its text; `ids` and `processes` (row-major) and `listed` are present if they
    deviate from its rule, `kind` and `origin` if the devices reported them.

    >>> to_json(parse("v5e:2x2"))
    {'topology': 'v5e:2x2'}
    """
    check_kind("to_json", topology, Topology, "a topology: parse makes one from text")
    fields: dict[str, Any] = {"topology": topology.text}
    for name in ("ids", "processes", "listed"):
        stored = getattr(topology.numbering, name)
        if stored:
            fields[name] = np.frombuffer(stored, np.int64).tolist()
    first = topology.slices[0] if isinstance(topology, Slices) else topology
    if isinstance(first, Torus):
        plain = Torus(first.shape, first.generation)
        fields |= {"kind": first.kind} if first.kind != plain.kind else {}
        fields |= {"origin": list(first.origin)} if first.origin else {}
    return fields


@local
def from_json(values: Mapping[str, Any]) -> Topology:
    """Parse the result of `to_json`: `from_json(to_json(topology)) == topology`.

    Local.

    Raises:
      UsageError: it is not a result of `to_json`.
    """
    known = ("topology", "ids", "processes", "listed", "kind", "origin")
    if not isinstance(values, Mapping) or "topology" not in values:
        raise UsageError(f"from_json: a topology has the keys {', '.join(known)}, the first always")
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UsageError(f"from_json: {unknown[0]!r} is not one of {', '.join(known)}")
    topology = parse(values["topology"])
    facts = {name: values[name] for name in ("kind", "origin") if name in values}
    if isinstance(topology, Torus):
        topology = dataclasses.replace(topology, **facts)
    elif isinstance(topology, Slices) and facts:
        made = {torus: dataclasses.replace(torus, **facts) for torus in {*topology.slices}}
        topology = Slices(tuple(made[torus] for torus in topology.slices))
    return topology.numbered(*(values.get(name) for name in known[1:4]))
