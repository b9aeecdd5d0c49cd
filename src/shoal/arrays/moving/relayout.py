"""Arrays → the same values in another layout."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.extend.core import concrete_or_error

from shoal.arguments import check_flags
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
)
from shoal.arrays.bridge.sharding import sharding
from shoal.arrays.host.host_values import deleted
from shoal.arrays.moving.agreed_move import agree_on_move, obstacle
from shoal.arrays.moving.host_copy import must_be_a_way
from shoal.arrays.moving.move import Move, move
from shoal.arrays.moving.staged_move import move_staged, why_not_staged
from shoal.colour import collective
from shoal.errors import UsageError, raise_all


@collective("the processes of both meshes")
def relayout(
    tree: Any,
    layouts: Layouts,
    *,
    donate: bool = False,
    staged: bool = False,
    way: Literal["collectives"] | None = None,
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
      staged: by way of host memory, an array after the other, for devices that lack room for both
        shards. With `donate` none holds more than the larger of the two and a chunk of 64 MiB;
        without, the source stays, and the target comes beside it. It costs the way over the host
        and back, on the host both shards of all devices of the process, and between processes a
        program for each chunk. PRNG keys go the usual way. All processes must say the same.
      way: "collectives" runs the planned program, or permutes to other devices, within one
        process, too: what a cluster would run can be tried on a laptop. Default: whatever is
        fastest.

    Returns:
      the tree, with the arrays in their new layouts.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, values that are not on
        devices or are inside `jit`; between several processes, devices of other kinds, and arrays
        under differentiation that go to other devices; with `staged` all arrays under
        differentiation, and other devices of several processes. All leaves at fault are named by
        path. On every process, before anything moves.
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
    check_flags("relayout", donate=donate, staged=staged)
    must_be_a_way("relayout", way)
    if staged and way is not None:
        raise UsageError("relayout: staged=True has a way of its own: leave way= out")
    offences: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, offences)
    arrays = [_concrete(leaf, offences) for leaf in leaves]
    for leaf, array in zip(leaves, arrays, strict=True):
        must_divide(leaf, offences)
        cannot_be_pending(leaf, offences)
        if array is not None and (why := obstacle(leaf, array, programs=way is not None)):
            offences.append(f"{leaf.path}: {why}")
        elif staged and array is not None:
            why = why_not_staged(leaf.value, array, sharding(leaf.layout))
            offences.extend([f"{leaf.path}: {why}"] if why else [])
    raise_all("relayout", offences)
    agree_on_move(leaves, arrays, options=("staged through the host",) * staged)
    moves = [
        Move(leaf.value, array, sharding(leaf.layout))
        for leaf, array in zip(leaves, arrays, strict=True)
        if array is not None
    ]
    if staged:
        moved = move_staged(moves, donate=donate)
    else:
        moved = move(moves, donate=donate, between_devices=way == "collectives")
    return jax.tree.unflatten(treedef, moved)


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
