"""Host values given outside `jit` to a function of arrays, where several processes own the mesh.

`jit` takes the value of each process for that of all. So these are laid out as by `put`, which
compares them where the processes meet next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.host.leave_trail import leave_trail
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.placing.put import place


def is_elsewhere(value: Any, mesh: jax.sharding.Mesh) -> bool:
    """True for an array that is bound to other devices than those of a mesh, or in another order.

    A program of JAX has one order of devices.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    if not value.committed or value.sharding.device_set != set(mesh.devices.flat):
        return value.committed
    lies = value.sharding
    return isinstance(lies, NamedSharding) and [*lies.mesh.devices.flat] != [*mesh.devices.flat]


def placed(operation: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves, with arrays for the host values among them; the others as they are."""
    numbers = [number for number, leaf in enumerate(leaves) if _is_from_host(leaf)]
    if not numbers or is_tracing():
        return [*leaves]
    from_host = [leaves[number] for number in numbers]
    leave_trail(operation, from_host, lane=None, values=True)
    arrays = dict(zip(numbers, place(from_host), strict=True))
    return [
        leaf._replace(value=arrays.get(number, leaf.value)) for number, leaf in enumerate(leaves)
    ]


def _is_from_host(leaf: Leaf) -> bool:
    """True for what this process alone holds, and several shall."""
    if leaf.layout is None or len(leaf.layout.mesh.process_indices) < 2:
        return False
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable
