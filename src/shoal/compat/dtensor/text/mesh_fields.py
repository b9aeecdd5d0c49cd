"""Validated fields of a DTensor mesh: one set of rules for its constructor and its text form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.arguments import as_integer
from shoal.compat.dtensor.text.device_spec import DeviceSpec, spec_of
from shoal.errors import InitializeError, UsageError, WrongType, raise_all
from shoal.runtime.process import process_index

__all__ = ["EMPTY", "RESERVED", "MeshFields", "check", "ids_of", "single"]

RESERVED = ("unsharded", "any", "match")
_NAME = re.compile(r"[^,|=\s]+")


class MeshFields(NamedTuple):
    """A mesh as a plain value. Of a single-device mesh only `single` is set."""

    name: str = ""
    dims: tuple[tuple[str, int], ...] = ()
    first_id: int = 0
    local_ids: tuple[int, ...] = ()
    local_devices: tuple[str, ...] = ()
    global_devices: tuple[str, ...] = ()
    use_xla_spmd: bool = False
    single: str = ""

    @property
    def size(self) -> int:
        """The number of devices; 0 for a mesh without a grid."""
        is_grid = bool(self.local_devices or self.global_devices)
        return math.prod(size for _, size in self.dims) if is_grid else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(size for _, size in self.dims)

    @property
    def device_type(self) -> str:
        """The type of the devices; "" for the empty mesh."""
        names = (self.single, *self.global_devices[:1], *self.local_devices[:1])
        name = next(filter(None, names), "")
        return DeviceSpec.from_string(name).device_type or "" if name else ""


EMPTY = MeshFields()


def single(device: object) -> MeshFields:
    """Return the mesh of one device, whose name is kept as it is.

    Raises:
      UsageError: it is not the name of a device.
    """
    if device == "":
        raise UsageError("dtensor.Mesh: Single device is empty; name one, such as CPU:0")
    if spec_of(device).device_type is None:  # type: ignore[arg-type]
        raise UsageError(f"dtensor.Mesh: {device!r} names no device: its device_type is required")
    return MeshFields(single=str(device))


def check(
    operation: str, dims: Sequence[tuple[Any, int]], ids: Sequence[int], local_ids: object,
    local_devices: object, name: object, global_devices: object, use_xla_spmd: object,
) -> MeshFields:  # fmt: skip
    """Return the fields of a mesh, if all of its rules hold.

    Raises:
      UsageError: names all problems.
    """
    problems = [*_dim_problems(dims), *_id_problems(ids)]
    owned = _ids(local_ids, problems)
    locals_ = _devices("local_devices", local_devices, problems)
    globals_ = _devices("global_devices", global_devices or [], problems)
    problems += [*_local_problems(ids, owned, locals_), *_where_problems(ids, owned)]
    problems += _count_problems(ids, locals_, globals_)
    is_xla = bool(use_xla_spmd)
    problems += [*_type_problems([*locals_, *globals_], is_xla), *_name_problems(name)]
    raise_all(operation, problems)
    here, everywhere = (tuple(one.to_string() for one in row) for row in (locals_, globals_))
    return MeshFields(str(name), tuple(dims), ids[0], tuple(owned), here, everywhere, is_xla)


def _count_problems(
    ids: Sequence[int], here: Sequence[DeviceSpec], everywhere: Sequence[DeviceSpec]
) -> list[str]:
    if not here and not everywhere:
        return ["Empty list of devices not allowed: give local_devices or global_devices"]
    if everywhere and len(everywhere) != len(ids):
        return [f"{len(everywhere)} global_devices for {len(ids)} global device ids"]
    return []


def _name_problems(name: object) -> list[str]:
    if not isinstance(name, str):
        return [WrongType(f"mesh_name {name!r} must be a string")]
    if "|" in name or not name.isprintable():
        return [f"mesh_name {name!r} has characters that the mesh's text cannot contain"]
    return []


def _dim_problems(dims: Sequence[tuple[Any, int]]) -> list[str]:
    names = [name for name, _ in dims]
    found: list[str] = []
    for name in dict.fromkeys(map(str, names)):
        if name in RESERVED or not _NAME.fullmatch(name) or not name.isprintable():
            found.append(f"dimension name {name!r} is reserved, or the mesh's text cannot hold it")
    if len(set(map(str, names))) < len(names):
        found.append(f"dimension names are repeated: {', '.join(map(str, names))}")
    found += [
        WrongType(f"dimension name {name!r} must be a string")
        for name in names
        if not isinstance(name, str)
    ]
    return found


def _id_problems(ids: Sequence[int]) -> list[str]:
    if not len(ids):
        return ["Variable global_device_ids must be non-empty."]
    if any(number != ids[0] + place for place, number in enumerate(ids)):
        shown = f"{list(ids[:8])}{', …' if len(ids) > 8 else ''}"
        return [f"global_device_ids must sequentially increase: {shown}"]
    return [] if ids[0] >= 0 else [f"global_device_ids must not be negative: {ids[0]}"]


def _ids(given: object, problems: list[str]) -> list[int]:
    if not isinstance(given, list):
        problems.append(WrongType("Variable local_device_ids must be a list."))
        return []
    wrong = [one for one in given if as_integer(one) is None]
    if wrong:
        problems.append(WrongType(f"local_device_ids must be whole numbers, not {wrong[:8]}"))
    return [] if wrong else [int(one) for one in given]


def _devices(what: str, given: object, problems: list[str]) -> list[DeviceSpec]:
    if not isinstance(given, list):
        problems.append(WrongType(f"Variable {what} must be a list."))
        return []
    found = []
    for one in given:
        try:
            found.append(_full(spec_of(one)))
        except UsageError as error:
            problems.append(f"{what}: {error}")
    return found


def _full(spec: DeviceSpec) -> DeviceSpec:
    """Complete a short name such as CPU:0, which TensorFlow's parser rejects in a mesh."""
    if spec.job is not None and spec.task is not None:
        return spec
    try:
        me = process_index()
    except InitializeError:  # not yet one of several
        me = 0
    task = me if spec.task is None else spec.task
    return spec.replace(job=spec.job or "localhost", replica=spec.replica or 0, task=task)


def _local_problems(
    ids: Sequence[int], owned: Sequence[int], devices: Sequence[DeviceSpec]
) -> list[str]:
    found = []
    distinct = set(devices)
    is_host = len(distinct) == 1 and devices[0].device_type == "CPU"  # a virtual host mesh
    if len(distinct) < len(devices) and not is_host:
        shown = sorted({d.to_string() for d in devices if list(devices).count(d) > 1})
        found.append(f"Duplicate devices found in mesh specification {shown[:8]}")
    if len(owned) != len(devices):
        found.append(f"{len(owned)} local_device_ids for {len(devices)} local_devices")
    return found


def _where_problems(ids: Sequence[int], owned: Sequence[int]) -> list[str]:
    found = ["local_device_ids are repeated"] if len(set(owned)) < len(owned) else []
    known = range(ids[0], ids[0] + len(ids)) if len(ids) else range(0)
    if strange := [one for one in owned if one not in known]:
        found.append(f"local_device_ids {strange[:8]} are not among the global_device_ids")
    if owned and len(ids) % len(owned):
        found.append(f"Uneven local clusters: {len(ids)} global and {len(owned)} local devices")
    return found


def _type_problems(devices: Sequence[DeviceSpec], use_xla_spmd: bool) -> list[str]:
    types = sorted({device.device_type or "" for device in devices})
    if "" in types:
        return ["device_type is required of every device"]
    if len(types) > 1:
        return [f"Devices containing multiple device_types : {', '.join(types)}"]
    if use_xla_spmd and types not in ([], ["TPU"]):
        return [f"use_xla_spmd=True: XLA SPMD is not supported for {types[0]} mesh"]
    return []


def ids_of(given: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and flat values of global device ids.

    Raises:
      UsageError: they are not an array of integers.
    """
    if not isinstance(given, np.ndarray):
        raise_all("dtensor.Mesh", [WrongType("Variable global_device_ids must be an ndarray.")])
    elif given.dtype.kind not in "iu":
        wrong = WrongType(f"global_device_ids must be integers, not {given.dtype}")
        raise_all("dtensor.Mesh", [wrong] if given.size else [])
    array = np.asarray(given)
    return array.shape, tuple(int(one) for one in array.ravel())
