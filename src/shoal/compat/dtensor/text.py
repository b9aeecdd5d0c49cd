"""Validated fields of a DTensor mesh: one set of rules for its constructor and its text form."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.arguments import as_integer
from shoal.errors import InitializeError, UsageError, UsageTypeError, WrongType, raise_all
from shoal.runtime.process import process_index

__all__ = [
    "EMPTY",
    "RESERVED",
    "DeviceSpec",
    "MeshFields",
    "checked_fields",
    "ids_of",
    "prefix_of",
    "read_mesh",
    "single_device_mesh",
    "spec_of",
    "split",
    "write_mesh",
]

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


def single_device_mesh(device: object) -> MeshFields:
    """Return the mesh of one device, whose name is kept as it is.

    Raises:
      UsageError: it is not the name of a device.
    """
    if device == "":
        raise UsageError("dtensor.Mesh: Single device is empty; name one, such as CPU:0")
    if spec_of(device).device_type is None:  # type: ignore[arg-type]
        raise UsageError(f"dtensor.Mesh: {device!r} names no device: its device_type is required")
    return MeshFields(single=str(device))


def checked_fields(
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
    here, everywhere = (tuple(spec.to_string() for spec in row) for row in (locals_, globals_))
    return MeshFields(
        name=str(name),
        dims=tuple(dims),
        first_id=ids[0],
        local_ids=tuple(owned),
        local_devices=here,
        global_devices=everywhere,
        use_xla_spmd=is_xla,
    )


def _count_problems(
    ids: Sequence[int], here: Sequence[DeviceSpec], everywhere: Sequence[DeviceSpec]
) -> list[str]:
    if not here and not everywhere:
        return ["Empty list of devices not allowed: pass local_devices or global_devices"]
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
    problems: list[str] = []
    for name in dict.fromkeys(map(str, names)):
        if name in RESERVED or not _NAME.fullmatch(name) or not name.isprintable():
            problems.append(
                f"dimension name {name!r} is reserved, or the mesh's text cannot hold it"
            )
    if len(set(map(str, names))) < len(names):
        problems.append(f"dimension names are repeated: {', '.join(map(str, names))}")
    problems += [
        WrongType(f"dimension name {name!r} must be a string")
        for name in names
        if not isinstance(name, str)
    ]
    return problems


def _id_problems(ids: Sequence[int]) -> list[str]:
    if not len(ids):
        return ["Variable global_device_ids must be non-empty."]
    if any(device_id != ids[0] + place for place, device_id in enumerate(ids)):
        more = ", …" if len(ids) > 8 else ""
        return [f"global_device_ids must sequentially increase: {list(ids[:8])}{more}"]
    return [] if ids[0] >= 0 else [f"global_device_ids must not be negative: {ids[0]}"]


def _ids(given: object, problems: list[str]) -> list[int]:
    if not isinstance(given, list):
        problems.append(WrongType("Variable local_device_ids must be a list."))
        return []
    wrong = [device_id for device_id in given if as_integer(device_id) is None]
    if wrong:
        problems.append(WrongType(f"local_device_ids must be whole numbers, not {wrong[:8]}"))
        return []
    return [int(device_id) for device_id in given]


def _devices(what: str, given: object, problems: list[str]) -> list[DeviceSpec]:
    if not isinstance(given, list):
        problems.append(WrongType(f"Variable {what} must be a list."))
        return []
    devices = []
    for text in given:
        try:
            devices.append(_full(spec_of(text)))
        except UsageError as error:
            problems.append(f"{what}: {error}")
    return devices


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
    problems = []
    distinct = set(devices)
    is_host = len(distinct) == 1 and devices[0].device_type == "CPU"  # a virtual host mesh
    if len(distinct) < len(devices) and not is_host:
        shown = sorted({d.to_string() for d in devices if list(devices).count(d) > 1})
        problems.append(f"Duplicate devices found in mesh specification {shown[:8]}")
    if len(owned) != len(devices):
        problems.append(f"{len(owned)} local_device_ids for {len(devices)} local_devices")
    return problems


def _where_problems(ids: Sequence[int], owned: Sequence[int]) -> list[str]:
    problems = ["local_device_ids are repeated"] if len(set(owned)) < len(owned) else []
    known = range(ids[0], ids[0] + len(ids)) if len(ids) else range(0)
    strange = [device_id for device_id in owned if device_id not in known]
    if strange:
        problems.append(f"local_device_ids {strange[:8]} are not among the global_device_ids")
    if owned and len(ids) % len(owned):
        problems.append(f"Uneven local clusters: {len(ids)} global and {len(owned)} local devices")
    return problems


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
    return array.shape, tuple(int(device_id) for device_id in array.ravel())


# ---- TensorFlow's device names: /job:localhost/replica:0/task:0/device:CPU:3.


_SHORT = re.compile(r"(CPU|GPU|TPU)(?::(\d{1,18}|\*))?", re.IGNORECASE | re.ASCII)
_FIELD = re.compile(r"(job|replica|task):(.*)", re.DOTALL)
_DEVICE = re.compile(r"device:([A-Za-z]\w*)(?::(\d{1,18}|\*))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """One device: the process (`task`) that has it, its type, and its index there.

    >>> spec = DeviceSpec.from_string("/job:worker/task:1/device:CPU:3")
    >>> spec.task, spec.device_type, spec.device_index, spec.to_string()
    (1, 'CPU', 3, '/job:worker/task:1/device:CPU:3')
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    @classmethod
    def from_string(cls, spec: str) -> DeviceSpec:
        """Read a name; fields that it lacks are None.

        Raises:
          UsageError: a part of it is not one of job, replica, task and device, or there are two
            devices, or it is not a string (also a TypeError).
        """
        if not isinstance(spec, str):
            raise UsageTypeError(f"dtensor.DeviceSpec: {spec!r} must be the name of a device")
        parsed: dict[str, str | int | None] = {}
        for part in filter(None, spec.split("/")):
            fields = _read(part, spec)
            if "device_type" in parsed.keys() & fields.keys():
                raise UsageError(f"dtensor.DeviceSpec: {spec!r} has several devices")
            parsed |= fields
        return cls(**parsed)  # type: ignore[arg-type]

    def replace(self, **fields: str | int | None) -> DeviceSpec:
        """Return the same with other values of some fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to_string(self) -> str:
        """Return the name that `from_string` reads."""
        fields = {"job": self.job, "replica": self.replica, "task": self.task}
        text = "".join(f"/{name}:{value}" for name, value in fields.items() if value is not None)
        if self.device_type is None:
            return text
        index = "*" if self.device_index is None else self.device_index
        return f"{text}/device:{self.device_type}:{index}"


def _read(part: str, spec: str) -> dict[str, str | int | None]:
    device = _DEVICE.fullmatch(part) or _SHORT.fullmatch(part)
    if device:
        number = device[2]
        index = None if number in (None, "*") else int(number)
        return {"device_type": device[1].upper(), "device_index": index}
    field = _FIELD.fullmatch(part)
    if field and field[1] == "job":
        return {"job": field[2] or None}
    if field and re.fullmatch(r"\d{1,18}", field[2], re.ASCII):
        return {field[1]: int(field[2])}
    raise UsageError(
        f"dtensor.DeviceSpec: {part!r} in {spec!r} is not part of a device's name, such as "
        "/job:localhost/replica:0/task:0/device:CPU:0"
    )


def spec_of(device: DeviceSpec | str) -> DeviceSpec:
    """Return a device, given as such or by its name.

    Raises:
      UsageError: it is neither.
    """
    if hasattr(device, "to_string"):  # ours, or TensorFlow's
        device = str(device.to_string())
    return DeviceSpec.from_string(device)


# ---- The text form of DTensor layouts, as in TensorFlow, and checks of their specs.
#
# ::
#
#     sharding_specs:x,unsharded, mesh:MESH      parted:x, mesh:MESH
#     maximal:true, mesh:/job:localhost/replica:0/task:0/device:CPU:0      empty_layout


_PREFIXES = {1: "sharding_specs:", 2: "maximal:true,", 3: "parted:"}


def prefix_of(kind: int) -> str:
    """Return the prefix of the text of this kind of layout."""
    return _PREFIXES[kind]


def split(text: str) -> tuple[int, list[str], str]:
    """Return the kind, the specs, and the mesh's text; kind 0 is the empty layout.

    A missing last comma loses no spec here. The mesh's name may contain spaces.

    Raises:
      UsageError: it is not the text of a layout.
    """
    if text == "empty_layout":
        return 0, [], ""
    head, space, mesh = text.partition(" ")
    if not space or not mesh.startswith("mesh:"):
        raise _bad(text, "Expected 2 items, the specs and mesh:…, with a space between them")
    kind = next((kind for kind, prefix in _PREFIXES.items() if head.startswith(prefix)), 0)
    rest = head.removeprefix(_PREFIXES.get(kind, ""))
    if not kind or (kind == 2 and rest):
        known = ", ".join(_PREFIXES.values())
        raise _bad(text, f"Unknown layout type prefix {head[:40]!r}; known: {known}")
    specs = rest.removesuffix(",").split(",") if rest else []
    return kind, [] if specs == ["scalar"] else specs, mesh.removeprefix("mesh:")


def _bad(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return UsageError(f"dtensor.Layout.from_string({shown!r}): {why}")


# ---- The text form of DTensor meshes, as in TensorFlow.
#
# Fields between bars; the last two only where the mesh has them::
#
#     name|x=2,y=2|0,1,2,3|0,1,2,3|/job:…/device:CPU:0,…|global devices|use_xla_spmd
#
# `empty_mesh`, the name of one device, and `name|x=2|*CPU` (all devices implied) are also meshes.


_XLA = "use_xla_spmd"
_MOST_MADE_UP = 1 << 20  # of devices that a few characters of text may imply
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)


def write_mesh(fields: MeshFields) -> str:
    """Return the text of a mesh."""
    if fields.single or not fields.size:
        return fields.single or "empty_mesh"
    ids = range(fields.first_id, fields.first_id + fields.size)
    parts = [
        fields.name,
        ",".join(f"{name}={size}" for name, size in fields.dims),
        ",".join(map(str, ids)),
        ",".join(map(str, fields.local_ids)),
        ",".join(fields.local_devices),
    ]
    parts += [",".join(fields.global_devices)] if fields.global_devices else []
    return "|".join(parts + [_XLA] * fields.use_xla_spmd)


def read_mesh(text: str) -> MeshFields:
    """Read the text of a mesh.

    Raises:
      UsageError: the text is malformed, or the mesh it describes is invalid.
    """
    if "|" not in text:
        return EMPTY if text == "empty_mesh" else _single(text)
    name, dims, *rest = text.split("|")
    sizes = _dims(dims, text)
    size = math.prod(size for _, size in sizes)
    if len(rest) == 1:
        made_up, names = _made_up(size, rest[0], text)
        return checked_fields(
            operation=_operation(text),
            dims=sizes,
            ids=made_up,
            local_ids=made_up,
            local_devices=names,
            name=name,
            global_devices=None,
            use_xla_spmd=False,
        )
    is_xla = _check_parts(rest, text)
    ids, owned = _id_list(rest[0], text), list(_id_list(rest[1], text))
    if size != len(ids):
        raise _bad_mesh(text, f"{len(ids)} global device ids for dims {dims}")
    everywhere = _device_list(rest[3]) if len(rest) - is_xla == 4 else []
    return checked_fields(
        operation=_operation(text),
        dims=sizes,
        ids=ids,
        local_ids=owned,
        local_devices=_device_list(rest[2]),
        name=name,
        global_devices=everywhere,
        use_xla_spmd=is_xla,
    )


def _check_parts(rest: list[str], text: str) -> bool:
    """Check the number of parts; return whether the last one requests XLA's SPMD."""
    if not 3 <= len(rest) <= 5:
        num_parts = len(rest) + 2
        raise _bad_mesh(text, f"Expected either 5, 6, 7 or 3 mesh parts but found {num_parts}")
    if len(rest) == 5 and rest[4] != _XLA:
        raise _bad_mesh(text, f"Expected string {_XLA} as the 7th argument but got: {rest[4]!r}")
    return rest[-1] == _XLA and len(rest) > 3


def _single(text: str) -> MeshFields:
    try:
        return single_device_mesh(text)
    except UsageError as error:
        raise _bad_mesh(text, f"Input string is invalid: {error}") from None


def _dims(text: str, whole: str) -> list[tuple[str, int]]:
    dims = []
    for part in text.split(",") if text else []:
        name, equals, size = part.partition("=")
        if not equals or not _WHOLE.fullmatch(size) or int(size) < 1:
            raise _bad_mesh(whole, f"{part!r} is not a dim, such as x=2")
        dims.append((name, int(size)))
    return dims


def _made_up(size: int, kind: str, whole: str) -> tuple[list[int], list[str]]:
    if not re.fullmatch(r"\*[A-Za-z]\w*", kind, re.ASCII):
        raise _bad_mesh(whole, f"{kind!r} is not a device type with a star, such as *CPU")
    if size > _MOST_MADE_UP:
        raise _bad_mesh(
            whole, f"{size} devices exceed the limit for implied devices: {_MOST_MADE_UP}"
        )
    kind = kind[1:]
    return [*range(size)], [f"/job:localhost/task:0/device:{kind}:{n}" for n in range(size)]


def _id_list(text: str, whole: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    wrong = [word for word in parts if not _WHOLE.fullmatch(word)]
    if wrong:
        raise _bad_mesh(whole, f"{wrong[0]!r} is not a device id")
    return tuple(map(int, parts))


def _device_list(text: str) -> list[str]:
    return text.split(",") if text else []


def _operation(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return f"dtensor.Mesh.from_string({shown!r})"


def _bad_mesh(text: str, why: str) -> UsageError:
    return UsageError(f"{_operation(text)}: {why}")
