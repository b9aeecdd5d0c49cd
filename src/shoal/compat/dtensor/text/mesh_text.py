"""The text form of DTensor meshes, as in TensorFlow.

Fields between bars; the last two only where the mesh has them::

    name|x=2,y=2|0,1,2,3|0,1,2,3|/job:…/device:CPU:0,…|global devices|use_xla_spmd

`empty_mesh`, the name of one device, and `name|x=2|*CPU` (all devices implied) are also meshes.
"""

from __future__ import annotations

import math
import re

from shoal.compat.dtensor.text.mesh_fields import EMPTY, MeshFields, check, single
from shoal.errors import UsageError

__all__ = ["read", "write"]

_XLA = "use_xla_spmd"
_MOST_MADE_UP = 1 << 20  # of devices that a few characters of text may imply
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)


def write(fields: MeshFields) -> str:
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


def read(text: str) -> MeshFields:
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
        return check(_operation(text), sizes, made_up, made_up, names, name, None, False)
    is_xla = _check_parts(rest, text)
    ids, owned = _ids(rest[0], text), list(_ids(rest[1], text))
    if size != len(ids):
        raise _bad(text, f"{len(ids)} global device ids for dims {dims}")
    everywhere = _devices(rest[3]) if len(rest) - is_xla == 4 else []
    return check(_operation(text), sizes, ids, owned, _devices(rest[2]), name, everywhere, is_xla)


def _check_parts(rest: list[str], text: str) -> bool:
    """Check the number of parts; return whether the last one requests XLA's SPMD."""
    if not 3 <= len(rest) <= 5:
        found = len(rest) + 2
        raise _bad(text, f"Expected either 5, 6, 7 or 3 mesh parts but found {found}")
    if len(rest) == 5 and rest[4] != _XLA:
        raise _bad(text, f"Expected string {_XLA} as the 7th argument but got: {rest[4]!r}")
    return rest[-1] == _XLA and len(rest) > 3


def _single(text: str) -> MeshFields:
    try:
        return single(text)
    except UsageError as error:
        raise _bad(text, f"Input string is invalid: {error}") from None


def _dims(text: str, whole: str) -> list[tuple[str, int]]:
    dims = []
    for part in text.split(",") if text else []:
        name, equals, size = part.partition("=")
        if not equals or not _WHOLE.fullmatch(size) or int(size) < 1:
            raise _bad(whole, f"{part!r} is not a dim, such as x=2")
        dims.append((name, int(size)))
    return dims


def _made_up(size: int, kind: str, whole: str) -> tuple[list[int], list[str]]:
    if not re.fullmatch(r"\*[A-Za-z]\w*", kind, re.ASCII):
        raise _bad(whole, f"{kind!r} is not a device type with a star, such as *CPU")
    if size > _MOST_MADE_UP:
        raise _bad(whole, f"{size} devices exceed the limit for implied devices: {_MOST_MADE_UP}")
    kind = kind[1:]
    return [*range(size)], [f"/job:localhost/task:0/device:{kind}:{n}" for n in range(size)]


def _ids(text: str, whole: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    wrong = [word for word in words if not _WHOLE.fullmatch(word)]
    if wrong:
        raise _bad(whole, f"{wrong[0]!r} is not a device id")
    return tuple(map(int, words))


def _devices(text: str) -> list[str]:
    return text.split(",") if text else []


def _operation(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return f"dtensor.Mesh.from_string({shown!r})"


def _bad(text: str, why: str) -> UsageError:
    return UsageError(f"{_operation(text)}: {why}")
