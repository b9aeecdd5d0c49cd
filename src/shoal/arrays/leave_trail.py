"""What `put` and `pack` leave in the trail: what must be equal on all processes that call them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shoal.arrays.digest import digest
from shoal.arrays.host_values import as_numpy, is_key
from shoal.arrays.layouts import Leaf
from shoal.errors import InitializeError, WrongType
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.callsite import callsite
from shoal.runtime.coordinator import Coordinator
from shoal.runtime.trail import Entry

__all__ = ["lane_offences", "leave_trail"]


def leave_trail(
    operation: str,
    leaves: Sequence[Leaf],
    *,
    lane: str | None,
    options: tuple[str, ...] = (),
    values: bool = False,
) -> None:
    """Record a call that all processes make which own devices of the leaves' meshes.

    Nothing is sent, and nothing is done where one process owns them all. Where it cannot be known
    which processes these are (part of a TPU slice, a program that has not called `initialize`),
    nothing is recorded.

    Args:
      lane: the line of execution; None: the one in which this thread meets others.
      options: what else must be equal, a line each.
      values: must the leaves' values be equal, too?
    """
    meshes = tuple(dict.fromkeys(leaf.layout.mesh for leaf in leaves))
    owners = frozenset[int]().union(*map(_owners, meshes))
    coordinator = None if len(owners) < 2 else _coordinator()
    if coordinator is None or coordinator.num_processes == 1:
        return
    is_all = len(owners) == coordinator.num_processes
    if not is_all and any(mesh.kind == "tpu" for mesh in meshes):
        return  # JAX may count them in an order of its own
    if not is_all and coordinator.process not in owners:
        return
    several = len(meshes) > 1
    lines = [_line(*_facts(leaf), meshes.index(leaf.layout.mesh) if several else 0, several)
             for leaf in leaves]  # fmt: skip
    spec = (*options, *map(_mesh_line, meshes), *lines)
    told = "\n".join(map(_digest, leaves)) if values else ""
    entry = Entry(operation, callsite(), spec, told)
    coordinator.trails.record(entry, group=None if is_all else owners, lane=lane)


def lane_offences(lane: object) -> list[str]:
    """Return what is wrong with a lane that was given."""
    if lane is None or (isinstance(lane, str) and lane):
        return []
    if isinstance(lane, str):
        return ["lane must not be empty"]
    return [WrongType(f"lane={lane!r} must be text")]


def _coordinator() -> Coordinator | None:
    from shoal.runtime.process import coordinator

    try:
        return coordinator()
    except InitializeError:  # this process meets no others: not yet, or it is a fork
        return None


@lru_cache(maxsize=256)
def _owners(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.process_indices)


@lru_cache(maxsize=256)
def _mesh_line(mesh: Mesh) -> str:
    return f"mesh: {mesh.text}"


@lru_cache(maxsize=4096)
def _line(
    path: str, shape: tuple[int, ...], dtype: Any, layout: Layout, mesh: int, several: bool
) -> str:
    """Say what a leaf is and where it lies; of the mesh, which has a line of its own, the number.

    `['w']: float32[8,4] as (x, -)`, and with several meshes `... on mesh 1`.
    """
    dims = layout.text.removesuffix(f" @ {layout.mesh.text}")
    split = dims if dims.startswith("(") else f"({dims})"  # of no dims it is "()"
    sizes = ",".join(map(str, shape))
    return f"{path}: {dtype}[{sizes}] as {split}" + (f" on mesh {mesh}" if several else "")


def _facts(leaf: Leaf) -> tuple[str, tuple[int, ...], Any, Layout]:
    value = leaf.value if hasattr(leaf.value, "dtype") else as_numpy(leaf.value)
    dtype = value.dtype.newbyteorder("=") if isinstance(value.dtype, np.dtype) else value.dtype
    return leaf.path, tuple(value.shape), dtype, leaf.layout


def _digest(leaf: Leaf) -> str:
    """Return the digest of a leaf's values; empty if it lies where it shall, or if one process
    owns all devices that it is put on, so that nothing of other processes can get in."""
    value = leaf.value
    if len(_owners(leaf.layout.mesh)) < 2:
        return ""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return ""
    return digest(as_numpy(jax.random.key_data(value) if is_key(value) else value))
