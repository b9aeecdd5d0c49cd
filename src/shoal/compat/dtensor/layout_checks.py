"""Validation of DTensor layouts."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from shoal.arguments import as_integer
from shoal.compat.dtensor.mesh import Mesh
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all

__all__ = [
    "ANY",
    "MATCH",
    "UNSHARDED",
    "check_dtensor_mesh",
    "checked",
    "mesh_owners",
    "rank_of",
    "sizes_of",
]

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
    number = as_integer(rank)
    if number is None:
        raise UsageTypeError(f"dtensor.Layout.{operation}: rank {rank!r} must be a whole number")
    if number < least:
        raise UsageError(f"dtensor.Layout.{operation}: rank {number} must be at least {least}")
    return number


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
