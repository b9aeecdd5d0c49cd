"""Record, for comparison, what must be equal on all callers of `put`, `pack`, `create`, …"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.host.digest import digest
from shoal.arrays.host.host_values import as_numpy, is_key
from shoal.errors import WrongType
from shoal.hashing import short_digest
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.process_boxes import process_box
from shoal.runtime.client.interface import JobClient
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.rules.spec_lines import SpecLine
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import client_here

Group = frozenset[int]

_MOST_LANE = 200  # characters of a lane's name
_FEW = 4  # numbers that are shown themselves


def record_call(
    operation: str,
    leaves: Sequence[Leaf],
    *,
    lane: str | None,
    options: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    values: bool = False,
) -> None:
    """Record a call made by all processes that own devices of the leaves' meshes.

    Nothing is sent, and nothing is recorded where one process owns all of them, or where the owners
    are unknown (part of a TPU slice, a program that has not called `initialize`).

    Args:
      lane: the line of execution; None: that of this thread.
      options: further lines that must be equal.
      nodes: the line of the tree, shown where the leaves are equal.
      values: must the leaves' values also be equal?
    """
    taking = _taking_part(leaves)
    if taking is not None:
        client, group = taking
        digests = "\n".join([*map(_digest, leaves), *[""] * len(nodes)]) if values else ""
        spec = (*options, *record_lines(leaves), *nodes)
        entry = RecordedCall(
            operation, site=callsite(), spec=spec, values=digests, step=client.progress.step
        )
        client.call_records.record(entry, group=group, lane=lane)


def record_call_of_parts(
    operation: str,
    leaves: Sequence[Leaf],
    *,
    lane: str | None,
    options: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    values: bool = False,
    site: str = "",
) -> None:
    """Record a call to which each process contributes its own part of each leaf.

    The leaves' values are the parts, their layouts those of the whole. Parts of the same box are
    replicas, and must be equal if `values`. What all processes hold is compared with the call
    itself; what only some hold, in an extra lane of theirs.

    Args:
      site: the call site; "": the caller's.
    """
    taking = _taking_part(leaves)
    if taking is None:
        return
    client, group = taking
    everyone = _owners_of_any(leaves)
    held = [_holders(leaf) if values else Group() for leaf in leaves]
    site = site or callsite()
    digests = [
        _digest(leaf) if holders == everyone else ""
        for leaf, holders in zip(leaves, held, strict=True)
    ]
    values_text = "\n".join([*digests, *[""] * len(nodes)]) if any(digests) else ""
    spec, step = (*options, *record_lines(leaves), *nodes), client.progress.step
    entry = RecordedCall(operation, site, spec, values_text, step)
    client.call_records.record(entry, group=group, lane=lane)
    lane = lane or client.call_records.lane
    for some in sorted(
        {holders for holders in held if 1 < len(holders) < len(everyone)}, key=sorted
    ):
        shared = [leaf for leaf, holders in zip(leaves, held, strict=True) if holders == some]
        digests = list(map(_digest, shared))
        entry = RecordedCall(
            operation, site, spec=record_lines(shared), values="\n".join(digests), step=step
        )
        if lane is not None:  # otherwise `record` has warned
            client.call_records.record(entry, group=group, lane=_beside(lane, some))


def _beside(lane: str, some: Group) -> str:
    """Return the lane in which a subset of the processes compares what only it holds."""
    name = f"replicas on {listed(some)}"
    if len(name) > _MOST_LANE:
        name = f"{name[:_MOST_LANE]}… ({short_digest(name.encode()).hex()})"
    return name if lane == "main" else f"{lane}, {name}"


def _holders(leaf: Leaf) -> Group:
    """Return the processes that hold the same part as this one."""
    return Group(process_box(leaf.layout, jax.process_index()).holders)


def _taking_part(leaves: Sequence[Leaf]) -> tuple[JobClient, Group | None] | None:
    """Return the group to compare a call with, None for all; None if there is none."""
    owners = _owners_of_any(leaves)
    client = None if len(owners) < 2 else client_here()
    if client is None or client.num_processes == 1:
        return None
    if len(owners) == client.num_processes:
        return client, None
    if any(leaf.layout.mesh.kind == "tpu" for leaf in leaves):
        return None  # JAX may number them differently
    return (client, owners) if client.process in owners else None


def _owners_of_any(leaves: Sequence[Leaf]) -> Group:
    return Group().union(*(owners_of_mesh(leaf.layout.mesh) for leaf in leaves))


def record_lines(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Return a line for each mesh, then one for each leaf."""
    meshes = tuple(dict.fromkeys(leaf.layout.mesh for leaf in leaves))
    several = len(meshes) > 1
    lines = [_line(*_facts(leaf), meshes.index(leaf.layout.mesh) if several else 0, several)
             for leaf in leaves]  # fmt: skip
    return (*map(_mesh_line, meshes), *lines)


def lane_problems(lane: object) -> list[str]:
    """Return what is wrong with a given lane."""
    if lane is None or (isinstance(lane, str) and lane):
        return []
    if isinstance(lane, str):
        return ["lane must not be empty"]
    return [WrongType(f"lane={lane!r} must be a string")]


@lru_cache(maxsize=256)
def owners_of_mesh(mesh: Mesh) -> Group:
    """Return the processes that own a mesh's devices, by their numbers in JAX."""
    return Group(mesh.process_indices)


@lru_cache(maxsize=256)
def _mesh_line(mesh: Mesh) -> str:
    return SpecLine("mesh", value=mesh.text).packed


@lru_cache(maxsize=4096)
def _line(
    path: str, shape: tuple[int, ...], dtype: Any, layout: Layout, mesh: int, several: bool
) -> str:
    """Describe a leaf and its layout, `(x, -)`, and with several meshes `(x, -) on mesh 1`: a mesh
    has a line of its own.
    """
    sizes = ",".join(map(str, shape))
    dims = dims_text(layout) + (f" on mesh {mesh}" if several else "")
    return SpecLine(path=path, dtype=str(dtype), shape=f"[{sizes}]", layout=dims).packed


def dims_text(layout: Layout) -> str:
    """Return a layout without its mesh: `(x, -)`."""
    dims = layout.text.removesuffix(f" @ {layout.mesh.text}")
    return dims if dims.startswith("(") else f"({dims})"  # without dims it is "()"


def _facts(leaf: Leaf) -> tuple[str, tuple[int, ...], Any, Layout]:
    value = leaf.value if hasattr(leaf.value, "dtype") else as_numpy(leaf.value)
    dtype = value.dtype.newbyteorder("=") if isinstance(value.dtype, np.dtype) else value.dtype
    return leaf.path, tuple(value.shape), dtype, leaf.layout


def _digest(leaf: Leaf) -> str:
    """Return a leaf's values as text, or their digest; empty if it has none or is already placed,
    or if one process owns all target devices, so that no other process's values are involved.
    """
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        return ""
    if len(owners_of_mesh(leaf.layout.mesh)) < 2:
        return ""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return ""
    if is_key(value):
        return digest(as_numpy(jax.random.key_data(value)))
    array = as_numpy(value)
    return _few_as_text(array) or digest(array)


def _few_as_text(array: Any) -> str:
    """Return up to four numbers as a text that tells all bits of them; empty for others.

    >>> _few_as_text(np.float32([0.001, -0.0])), _few_as_text(np.int64(3)), _few_as_text(np.ones(9))
    ('= [0.001, -0.0]', '= 3', '')
    """
    if array.size > _FEW or array.dtype.kind not in "biuf" or (array != array).any():
        return ""  # NaNs have bits of their own
    numbers = [_number(number) for number in array.ravel()]
    return f"= {numbers[0]}" if array.ndim == 0 else f"= [{', '.join(numbers)}]"


def _number(number: Any) -> str:
    """Return as many digits as tell a number from its neighbors, whatever the print options."""
    if not isinstance(number, np.floating):
        return str(number.item())
    is_plain = number == 0 or 1e-4 <= abs(float(number)) < 1e6
    shown = np.format_float_positional if is_plain else np.format_float_scientific
    return shown(number, unique=True, trim="0" if is_plain else "-")
