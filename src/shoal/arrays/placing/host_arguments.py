"""Host values passed outside `jit` to a function of arrays.

`jit` assumes that the values of all processes are equal. So they are placed as by `put`, which
compares them at the processes' next collective call, and which JAX's transfer guard permits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.host.record_call import record_call
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.placing.put import place_leaves


def is_elsewhere(value: Any, mesh: jax.sharding.Mesh) -> bool:
    """True for an array committed to other devices than a mesh's, or in another order.

    A program of JAX has one order of devices.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    if not value.committed or value.sharding.device_set != set(mesh.devices.flat):
        return value.committed
    sharding = value.sharding
    return isinstance(sharding, NamedSharding) and [*sharding.mesh.devices.flat] != [
        *mesh.devices.flat
    ]


def place_arguments(operation: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves, with host values among them placed; the others unchanged."""
    indices = [index for index, leaf in enumerate(leaves) if is_from_host(leaf)]
    if not indices or is_tracing():
        return [*leaves]
    from_host = [leaves[index] for index in indices]
    record_call(operation, from_host, lane=None, values=True)
    arrays = dict(zip(indices, place_leaves(from_host), strict=True))
    return [leaf._replace(value=arrays.get(index, leaf.value)) for index, leaf in enumerate(leaves)]


def is_from_host(leaf: Leaf) -> bool:
    """True for a host value, and for an array of this process alone that is needed on several."""
    value = leaf.value
    if leaf.layout is None or isinstance(value, jax.core.Tracer):
        return False
    if not isinstance(value, jax.Array):
        return True
    return value.is_fully_addressable and len(leaf.layout.mesh.process_indices) > 1
