"""Arrays → the same values in another layout."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.extend.core import concrete_or_error

from shoal.arrays.agreed_move import agree_on_move, obstacle
from shoal.arrays.host_copy import must_be_a_way
from shoal.arrays.host_values import deleted
from shoal.arrays.layouts import Layouts, Leaf, cannot_be_pending, leaf_layouts, must_divide
from shoal.arrays.move import Move, move
from shoal.arrays.sharding import sharding
from shoal.colour import collective
from shoal.errors import raise_all

__all__ = ["relayout"]


@collective("the processes of both meshes")
def relayout(
    tree: Any, layouts: Layouts, *, donate: bool = False, way: Literal["collectives"] | None = None
) -> Any:
    """Return a tree of arrays with the same values in other layouts.

    Collective over the processes of both meshes.

    Any layout to any layout of the same devices, in any order and under any axes, or of other
    devices of the same kind. Arrays that lie right already are not copied. The way is planned so
    that devices receive close to the least bytes, and a large array goes in chunks: `plan_relayout`
    says beforehand what moves. CPU devices of one process share its memory: there tiles are copied
    once, or not at all where they lie in one piece already. Among the same devices, PRNG keys, and
    arrays that are being differentiated, go the way that XLA chooses, which may gather them on each
    device first. Differentiable there, and within one process: cotangents travel the way back.
    Inside `jit` use `constrain`.

    Between different devices of several processes, those processes first agree on the call: it is
    impossible that a byte moves before all have come with equal layouts. Processes that own devices
    of neither mesh need not call.

    Args:
      tree: jax.Arrays. A pending sum is carried out.
      layouts: one layout, or a prefix tree of them, as for `put`.
      donate: give up the arrays that move, so that their memory can be used again; do not use
        them afterwards.
      way: "collectives" runs the planned program, or permutes to other devices, within one
        process, too: what a cluster would run can be tried on a laptop. Default: whatever is
        fastest.

    Returns:
      the tree, with the arrays in their new layouts.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, values that are not on
        devices or are inside `jit`; between several processes, devices of other kinds, and arrays
        under differentiation that go to other devices. All leaves at fault are named by path. On
        every process, before anything moves.
      DivergenceError: on all processes: calls or layouts differ. To other devices, before anything
        moves; else where the processes meet next.
      DeadlineError, ProcessLostError, PeerFailedError: to other devices, before anything moves, on
        all that came: a process did not come in time (SHOAL_TIMEOUT_S), is lost, or has failed.

    Example:
      >>> import numpy as np, shoal
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = shoal.put(np.ones((8, 8), np.float32), shoal.Layout(mesh, "x", None))
      >>> shoal.relayout(rows, shoal.Layout(mesh, None, "x")).sharding.spec
      P(None, 'x')
    """
    must_be_a_way("relayout", way)
    offences: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, offences)
    arrays = [_concrete(leaf, offences) for leaf in leaves]
    for leaf, array in zip(leaves, arrays, strict=True):
        must_divide(leaf, offences)
        cannot_be_pending(leaf, offences)
        if array is not None and (why := obstacle(leaf, array, programs=way is not None)):
            offences.append(f"{leaf.path}: {why}")
    raise_all("relayout", offences)
    agree_on_move(leaves, arrays)
    moves = [
        Move(leaf.value, array, sharding(leaf.layout))
        for leaf, array in zip(leaves, arrays, strict=True)
        if array is not None
    ]
    return jax.tree.unflatten(
        treedef, move(moves, donate=donate, between_devices=way == "collectives")
    )


def _concrete(leaf: Leaf, offences: list[str]) -> jax.Array | None:
    """Return the array behind a leaf; under `grad` that is the primal value."""
    if not isinstance(leaf.value, jax.Array):
        kind = type(leaf.value).__name__
        offences.append(f"{leaf.path}: a {kind} is not on devices yet; put places host values")
        return None
    try:
        array = concrete_or_error(None, leaf.value)
    except jax.errors.ConcretizationTypeError:
        offences.append(f"{leaf.path}: is a value inside jit or vmap; constrain pins it there")
        return None
    if why := deleted(array):
        offences.append(f"{leaf.path}: {why}")
        return None
    return array
