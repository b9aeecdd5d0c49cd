"""DTensor's functions for saving and restoring: `shoal.save` and `shoal.restore`."""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.tree.names import component
from shoal.colour import collective
from shoal.compat.dtensor.layout import check_dtensor_mesh, mesh_owners, value_of
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.numbers import array_from
from shoal.compat.dtensor.refused import check_eager, prefix_errors
from shoal.errors import UsageError, UsageTypeError, raise_all, with_article
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.process import process_count
from shoal.runtime.uses_client import client_here

__all__ = [
    "SliceOf",
    "name_based_restore",
    "name_based_save",
    "part_of",
    "processes_of",
    "saved_form",
    "sharded_save",
    "whole_of",
]

Prefix = str | os.PathLike[str]


def processes_of(mesh: Mesh) -> tuple[int, ...] | None:
    """Return the processes that save and restore; None: all of the job."""
    owners = check_dtensor_mesh(mesh).shoal_mesh.process_indices
    return None if len(owners) == process_count() else owners


@own_programs()
def saved_form(operation: str, name: str, value: Any) -> Any:
    """Return the array to save for a value; a DVariable's as bfloat16 if so configured.

    Python numbers, and lists of them, count as arrays.

    Raises:
      UsageError: it is not an array.
    """
    array = value_of(value)
    if not hasattr(array, "dtype"):
        array = array_from(f"{operation}: {name!r}", array)
    if getattr(value, "save_as_bf16", False):
        return jax.jit(lambda x: x.astype(jnp.bfloat16))(array)
    return array


@collective("the mesh's processes")
@collective_scope("sharded_save", of=client_here, among=mesh_owners)
def sharded_save(
    mesh: Mesh, file_prefix: Prefix, tensor_names: Sequence[str], shape_and_slices: Sequence[str],
    tensors: Sequence[Any],
) -> None:  # fmt: skip
    """Save arrays by name, committed on all processes or on none: `shoal.save`.

    Collective over the mesh's processes.

    Args:
      mesh: the mesh whose processes save; of any kind of device.
      file_prefix: a directory without a checkpoint, for shoal's files, which TensorFlow cannot
        read.
      tensor_names: a name for each tensor; several with slices of one array share its name.
      shape_and_slices: for each tensor "" (whole), or the slice of an array that it holds, such as
        "8 4 0,2:-"; the slices of one name must make up the array.
      tensors: arrays on meshes, DVariables, or host values that are equal on all processes:
        arrays, numbers, lists of numbers.
    """
    check_eager("sharded_save", "save what the program returns")
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for name, text, tensor in _as_many(tensor_names, shape_and_slices, tensors):
        value = saved_form("sharded_save", name, tensor)
        rows = parts.setdefault(_name("sharded_save", name), [])
        rows.append((part_of(text, np.shape(value)), value))
    tree = {name: whole_of(name, *zip(*rows, strict=True)) for name, rows in parts.items()}
    with prefix_errors("sharded_save"):
        save(file_prefix, tree, processes=processes_of(mesh), name="dtensor.sharded_save")


def _as_many(names: Any, slices: Any, tensors: Any) -> list[tuple[Any, Any, Any]]:
    for name, given in (
        ("tensor_names", names), ("shape_and_slices", slices), ("tensors", tensors)
    ):  # fmt: skip
        if isinstance(given, str | bytes) or not hasattr(given, "__len__"):
            raise UsageTypeError(f"dtensor.sharded_save: {name}={given!r} must be a list")
    if not len(names) == len(slices) == len(tensors) > 0:
        raise UsageError(
            f"dtensor.sharded_save: {len(names)} tensor_names, {len(slices)} shape_and_slices and "
            f"{len(tensors)} tensors: pass equally many of each, at least one"
        )
    return [*zip(names, slices, tensors, strict=True)]


@collective("the mesh's processes")
@collective_scope("name_based_save", of=client_here, among=mesh_owners)
def name_based_save(
    mesh: Mesh, checkpoint_prefix: Prefix, name_tensor_dict: Mapping[str, Any]
) -> None:
    """Save arrays by name, committed on all processes or on none: `shoal.save`.

    Collective over the mesh's processes.

    Args:
      mesh: the mesh whose processes save; of any kind of device.
      checkpoint_prefix: a directory without a checkpoint, for shoal's files, which TensorFlow
        cannot read.
      name_tensor_dict: name → an array on a mesh, a DVariable (as bfloat16 if so configured),
        or a host value that is equal on all processes: an array, a number, a list of numbers.
    """
    check_eager("name_based_save", "save what the program returns")
    operation = "name_based_save"
    tree = {n: saved_form(operation, n, value) for n, value in _named(operation, name_tensor_dict)}
    with prefix_errors(operation):
        save(checkpoint_prefix, tree, processes=processes_of(mesh), name=f"dtensor.{operation}")


@collective("the mesh's processes")
@collective_scope("name_based_restore", of=client_here, among=mesh_owners)
def name_based_restore(
    mesh: Mesh, checkpoint_prefix: Prefix, name_tensor_dict: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Return arrays by name as they were saved, laid out as the given ones: `shoal.restore`.

    Collective over the mesh's processes.

    Args:
      mesh: the mesh whose processes restore; of any kind of device.
      checkpoint_prefix: the same as for the save.
      name_tensor_dict: name → an array, a DVariable or a `jax.ShapeDtypeStruct`, whose shape must
        be the saved one; its dtype must hold all saved values. Other saved names are ignored.

    Returns:
      the arrays, in the order of `name_tensor_dict`; nothing is assigned.

    Raises:
      UsageError: a value says no shape and dtype.
    """
    check_eager("name_based_restore", "pass in what it returns")
    target = _targets("name_based_restore", name_tensor_dict)
    # each is a leaf of the target, so that a name such as "w[0]" is not taken for a pattern
    only = [component(name) for name in target]
    with prefix_errors("name_based_restore"):
        values = restore(
            checkpoint_prefix, target, only=only, dtype="safe", processes=processes_of(mesh),
            name="dtensor.name_based_restore",
        )  # fmt: skip
    return OrderedDict((name, values[name]) for name in target)


def _targets(operation: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, or their descriptions, that say what is restored.

    Raises:
      UsageError: some are something else, as in DTensor not a TypeError; names all.
    """
    target, problems = {}, []
    for name, value in _named(operation, given):
        target[name] = array = value_of(value)
        if not isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            problems.append(f"{name!r} is {with_article(type(array).__name__)}")
    if problems:
        detail = "Saving/Restoring tensor must be a DTensor: an array, a DVariable or a "
        raise_all(f"dtensor.{operation}: {detail}jax.ShapeDtypeStruct", problems)
    return target


def _named(operation: str, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not isinstance(given, Mapping):
        raise UsageTypeError(f"dtensor.{operation}: name_tensor_dict={given!r} must be a dict")
    if not given:
        raise UsageError(f"dtensor.{operation}: name_tensor_dict is empty; name at least one array")
    return [(_name(operation, name), value) for name, value in given.items()]


def _name(operation: str, name: object) -> str:
    if not isinstance(name, str):
        raise UsageTypeError(f"dtensor.{operation}: the name {name!r} must be a string")
    return name


# ---- The `shape_and_slices` of TensorFlow's SaveV2: which slice of an array a tensor holds.


_TEXT = re.compile(r"(?:\d{1,18} )+(?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*", re.ASCII)


class SliceOf(NamedTuple):
    """The position of a tensor in the whole array."""

    shape: tuple[int, ...]  # of the whole
    begins: tuple[int, ...]
    sizes: tuple[int, ...]


def part_of(text: str, shape: Sequence[int]) -> SliceOf:
    """Read a slice such as "8 4 0,2:-": rows 0 and 1 of 8x4; "" is a whole tensor of `shape`.

    >>> part_of("8 4 0,2:-", (2, 4))
    SliceOf(shape=(8, 4), begins=(0, 0), sizes=(2, 4))

    Raises:
      UsageError: it is not a slice, or does not fit the tensor.
    """
    shape = tuple(shape)
    if text == "":
        return SliceOf(shape, (0,) * len(shape), shape)
    if not isinstance(text, str) or not _TEXT.fullmatch(text):
        raise _bad(text, "not a shape and slice, such as '8 4 0,2:-'; '' is the whole tensor")
    *sizes, spec = text.split(" ")
    whole, bounds = tuple(map(int, sizes)), spec.split(":")
    if len(whole) != len(bounds):
        raise _bad(text, "not a shape and a slice with as many dims, such as '8 4 0,2:-'")
    pairs = [_bounds(bound, size) for bound, size in zip(bounds, whole, strict=True)]
    part = SliceOf(whole, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    if part.sizes != shape or any(b + s > w for (b, s), w in zip(pairs, whole, strict=True)):
        raise _bad(text, f"not a slice of the shape {list(shape)}")
    return part


def _bounds(text: str, size: int) -> tuple[int, int]:
    """Return where a slice begins, and its size."""
    begin, _, length = (f"0,{size}" if text == "-" else text).partition(",")
    return int(begin), int(length)


def _bad(text: object, what: str) -> UsageError:
    return UsageError(f"dtensor.sharded_save: {text!r} is {what}")


@own_programs()
def whole_of(name: str, parts: Sequence[SliceOf], values: Sequence[Any]) -> Any:
    """Return the array that parts make up; they may neither overlap nor leave gaps.

    Raises:
      UsageError: they do not make up one array.
    """
    shapes, dtypes = {part.shape for part in parts}, {value.dtype for value in values}
    covered = sum(math.prod(part.sizes) for part in parts)
    if len(shapes) > 1 or len(dtypes) > 1 or covered != math.prod(parts[0].shape) or _meet(parts):
        raise UsageError(
            f"dtensor.sharded_save: the {len(parts)} slices of {name!r} do not make up one array: "
            f"{[(part.begins, part.sizes) for part in parts[:8]]} of {sorted(shapes)}"
        )
    if len(parts) == 1:
        return values[0]
    if any(isinstance(value, jax.Array) for value in values):
        return jax.jit(partial(_joined, tuple(parts)))(*values)
    return _joined_here(parts, values)


def _joined_here(parts: Sequence[SliceOf], pieces: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Join host values, whose dtype JAX may not support."""
    whole = np.empty(parts[0].shape, pieces[0].dtype)
    for part, piece in zip(parts, pieces, strict=True):
        ends = zip(part.begins, part.sizes, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ends)] = piece
    return whole


def _joined(parts: Sequence[SliceOf], *pieces: jax.Array) -> jax.Array:
    whole = jnp.zeros(parts[0].shape, pieces[0].dtype)
    for part, piece in zip(parts, pieces, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, part.begins)
    return whole


def _meet(parts: Sequence[SliceOf]) -> bool:
    """Do two parts overlap?"""
    return any(
        all(
            b < d + t and d < b + s
            for b, s, d, t in zip(one.begins, one.sizes, other.begins, other.sizes, strict=True)
        )
        for place, one in enumerate(parts)
        for other in parts[:place]
    )
