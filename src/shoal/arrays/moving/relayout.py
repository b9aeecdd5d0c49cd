"""Move a tree of arrays to other layouts."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import jax

from shoal import settings
from shoal.arguments import check_flags
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
    path_text,
)
from shoal.arrays.host.agreed_program import concrete
from shoal.arrays.host.host_values import deleted, not_placed
from shoal.arrays.host.tree_words import tree_lines
from shoal.arrays.moving.agreed_move import agree_on_move, fail_move, move_of, obstacle
from shoal.arrays.moving.host_copy import check_way
from shoal.arrays.moving.move import move
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.arrays.moving.staged_move import move_staged, why_not_staged
from shoal.colour import collective
from shoal.errors import UsageError, raise_all
from shoal.runtime.client.lanes import refused_for_all
from shoal.runtime.system.shapes_only import shapes_only


@collective("the processes of both meshes")
@refused_for_all(fail_move)
def relayout(
    tree: Any,
    layouts: Layouts,
    *,
    donate: bool = False,
    staged: bool = False,
    way: Literal["collectives"] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Return a tree of arrays with the same values in other layouts.

    Collective over the processes of both meshes.

    From any layout to any layout of the same devices, in any order and under any axes, or of other
    devices of the same kind. Arrays already in place are not copied. The move is planned so that
    devices receive close to the minimum of bytes, and a large array moves in chunks:
    `plan_relayout` tells in advance what moves. CPU devices of one process share its memory: there
    tiles are copied once, or not at all if they are contiguous already. Among the same devices,
    PRNG keys, and arrays under differentiation, move by XLA's own program, which may gather them on
    each device first. Differentiable there, and within one process: cotangents move back. Inside
    `jit` use `constrain`.

    Where arrays are sent between processes, those that own the devices first agree on the call, in
    one round trip: no byte ever moves before all have arrived with equal trees, layouts and
    options. If each process already holds the data of its devices, nothing is sent, and the call is
    compared at their next collective call. Processes that own devices of neither mesh need not
    call.

    Args:
      tree: jax.Arrays. Pending sums are reduced.
      layouts: one layout, or a prefix tree of them, as for `put`.
      donate: donate the arrays that move, so that their memory can be reused; do not use
        them afterwards. Must be equal on all processes.
      staged: via host memory, one array at a time, for devices that lack room for both shards. With
        `donate` none holds more than the larger of the two and a chunk of 64 MiB; without, source
        and target coexist. It costs the transfer to the host and back, host memory for both shards
        of all devices of the process, and between processes a program for each chunk. PRNG keys
        move as usual. Must be equal on all processes.
      way: "collectives" runs the planned program, or permutes to other devices, even within one
        process, so that a laptop can try what a cluster would run. Default: whatever is
        fastest.
      timeout_s: deadline in seconds of the agreement between processes; None: SHOAL_TIMEOUT_S
        (600). The earliest deadline ends the wait for all.

    Returns:
      The tree, with the arrays in their new layouts.

    Raises:
      UsageError: ranks that do not match, dims that do not divide evenly, values that are not on
        devices or are inside `jit`; between several processes, devices of other kinds, and arrays
        under differentiation that move to other devices; with `staged` all arrays under
        differentiation, and other devices of several processes. All offending leaves are named by
        path. On every process, before anything moves.
      DivergenceError: on all processes: calls, trees, layouts or options differ, or what earlier
        calls recorded (`put`). Between processes, before anything moves; otherwise at the
        processes' next collective call.
      DeadlineError, ProcessLostError, PeerFailedError: between processes, before anything moves, on
        all that arrived: a process did not arrive in time, is lost, or failed.

    Example:
      >>> import numpy as np, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = shoal.put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x")))
      >>> shoal.relayout(rows, NamedSharding(mesh, P(None, "x"))).sharding.spec
      P(None, 'x')
    """
    if shapes_only():
        return tree
    try:
        if timeout_s is not None:
            timeout_s = settings.timeout("relayout", timeout_s, "SHOAL_TIMEOUT_S")
        leaves, treedef, moves = _checked(tree, layouts, donate=donate, staged=staged, way=way)
    except BaseException as error:
        with contextlib.suppress(Exception):  # whose call it is cannot be known
            fail_move(error, tree, layouts)
        raise
    options = (f"options: donate={donate}, staged={staged}",)
    nodes = tree_lines(treedef)
    agree_on_move("relayout", leaves, moves, options=options, nodes=nodes, timeout_s=timeout_s)
    if staged:
        moved = move_staged(moves, donate=donate)
    else:
        moved = move(moves, donate=donate, between_devices=way == "collectives")
    return jax.tree.unflatten(treedef, moved)


def _checked(
    tree: Any, layouts: Layouts, *, donate: bool, staged: bool, way: str | None
) -> tuple[list[Leaf], Any, list[ArrayMove]]:
    """Check the arguments; return the leaves, the tree's structure, and the move of each leaf."""
    check_flags("relayout", donate=donate, staged=staged)
    check_way("relayout", way)
    if staged and way is not None:
        raise UsageError("relayout: staged=True chooses the way: omit way=")
    problems: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    problems += [
        f"{path_text(path)}: {not_placed(value)}"
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]
        if not isinstance(value, jax.Array)
    ]
    moves: list[ArrayMove] = []
    for leaf in leaves:
        move = move_of(leaf, _concrete(leaf, problems))
        must_divide(leaf, problems)
        cannot_be_pending(leaf, problems)
        if move is None:
            continue
        moves.append(move)
        why = obstacle(move, programs=way is not None) or (why_not_staged(move) if staged else "")
        problems += [f"{leaf.path}: {why}"] if why else []
    raise_all("relayout", problems)
    return leaves, treedef, moves


def _concrete(leaf: Leaf, problems: list[str]) -> jax.Array | None:
    """Return the array behind a leaf; under `grad` that is the primal value."""
    if not isinstance(leaf.value, jax.Array):
        return None
    array = concrete(leaf.value)
    if array is None:
        problems.append(f"{leaf.path}: is a value inside jit or vmap; constrain pins it there")
        return None
    why = deleted(array)
    if why:
        problems.append(f"{leaf.path}: {why}")
        return None
    return array
