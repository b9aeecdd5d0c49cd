"""Agree, outside `jit`, on a call whose program sends between processes, before it runs.

Processes that disagree about such a program would wait for each other inside XLA, which has no
deadline and names no process. So they first meet, in one round trip, which also compares the call
records of their earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.extend.core import concrete_or_error
from jax.sharding import Sharding

from shoal import settings
from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.bridge.sharding import layout_of_sharding
from shoal.arrays.host.record_call import dims_text, owners_of_mesh, record_lines
from shoal.errors import DeadlineError, UsageError
from shoal.plan.mesh import Mesh
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import fail_call
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.comparison import AMONG
from shoal.runtime.failures.process_text import listed
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.jax_service.process_numbers import processes_of
from shoal.runtime.rules.spec_lines import SpecLine, with_origin
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import client_here


def agree_on_program(
    operation: str,
    leaves: Sequence[Leaf],
    arrays: Mapping[str, jax.Array],
    *,
    options: Sequence[str] = (),
    nodes: Sequence[str] = (),
    timeout_s: float | None = None,
) -> None:
    """Return once all processes that own devices of the leaves and arrays have made this call.

    Args:
      leaves: what the program takes, with the layouts that it is to have.
      arrays: the arrays among it, by path, whose present layouts must be equal.
      options: further lines that must be equal.
      nodes: lines that are shown where the leaves are equal: of the tree, or of a program.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S.

    Raises:
      DivergenceError: on all that arrived: another call, other lines, or other call records.
      DeadlineError, ProcessLostError, PeerFailedError: as `JobClient.arrive`.
    """
    client = client_here()
    if client is None or client.num_processes == 1:
        return
    if timeout_s is None:
        timeout_s = settings.seconds("SHOAL_TIMEOUT_S")
    meshes = [leaf.layout.mesh for leaf in leaves]
    owners = _owners(client, operation, meshes, arrays=arrays.values(), timeout_s=timeout_s)
    if client.process not in owners:
        return
    if operation == "relayout":
        fault_points.reach("relayout.before_arrive", client.process)
    agree(
        client,
        Call(
            f"{operation}{AMONG}{listed(owners)}",
            None,
            callsite(),
            (*options, *_lines(leaves, arrays), *nodes),
        ),
        timeout_s=timeout_s,
        group=None if len(owners) == client.num_processes else tuple(sorted(owners)),
        lane=client.call_records.lane or "main",
    )
    if operation == "relayout":
        fault_points.reach("relayout.after_arrive", client.process)


def fail_program(
    operation: str, error: BaseException, arrays: Iterable[jax.Array], meshes: Iterable[Mesh] = ()
) -> None:
    """Fail a refused call for the other processes, which would meet for it.

    Args:
      arrays, meshes: those of the call. Without several processes among them nothing is to be done.
    """
    client = client_here()
    if client is None or client.num_processes == 1:
        return
    timeout_s = settings.seconds("SHOAL_TIMEOUT_S")
    owners = _owners(client, operation, meshes, arrays, timeout_s)
    if len(owners) > 1:
        lane = client.call_records.lane or "main"
        fail_call(client, operation, error, lane=lane, processes=owners)


def concrete(value: object) -> jax.Array | None:
    """Return the array behind a value, under `grad` the primal; None inside `jit` and `vmap`."""
    if not isinstance(value, jax.Array):
        return None
    try:
        primal = concrete_or_error(None, value)
    except jax.errors.ConcretizationTypeError:
        return None
    # `grad` of a host value: JAX keeps it as it is until an operation needs it on a device
    with own_programs(), jax_runtime.explicit_transfers():
        array = primal if isinstance(primal, jax.Array) else jnp.asarray(primal)
    return None if isinstance(array, jax.core.Tracer) else array  # `grad` inside `jit`


def owners_of(sharding: Sharding) -> frozenset[int]:
    """Return the processes that own a sharding's devices, by their numbers in JAX."""
    return _facts(sharding)[0]


@lru_cache(maxsize=4096)
def _facts(sharding: Sharding) -> tuple[frozenset[int], str]:
    """Return the owners of a sharding's devices, and their kind."""
    devices = sharding.device_set
    return frozenset(device.process_index for device in devices), next(iter(devices)).platform


def _lines(leaves: Sequence[Leaf], arrays: Mapping[str, jax.Array]) -> list[str]:
    """Return a line for each mesh and leaf, with the present layout; then for each other array."""
    lines = [*record_lines(leaves)]
    others = dict(arrays)
    for index, leaf in enumerate(leaves, start=len(lines) - len(leaves)):
        array = others.pop(leaf.path, None)
        if array is not None:
            origin = _text(array.sharding, array.ndim, leaf.layout.mesh)
            lines[index] = with_origin(lines[index], origin)
    for path, array in others.items():
        sizes = ",".join(map(str, array.shape))
        dims = _text(array.sharding, array.ndim, None)
        line = SpecLine(path=path, dtype=str(array.dtype), shape=f"[{sizes}]", layout=dims)
        lines.append(line.packed)
    return lines


@lru_cache(maxsize=4096)
def _text(sharding: Sharding, rank: int, mesh: Mesh | None) -> str:
    """Return a layout in words, `(x, -)`, and on which mesh it is, unless on this one."""
    try:
        layout = layout_of_sharding(sharding, rank)
    except UsageError:  # a sharding that XLA chose
        return str(sharding)
    dims = dims_text(layout)
    return dims if layout.mesh == mesh else f"{dims} on {layout.mesh.text}"


def _owners(
    client: JobClient,
    operation: str,
    meshes: Iterable[Mesh],
    arrays: Iterable[jax.Array],
    timeout_s: float,
) -> set[int]:
    """Return the processes that meet."""
    facts = [(owners_of_mesh(mesh), mesh.kind) for mesh in meshes]
    facts += [_facts(array.sharding) for array in arrays]
    owners = {process for own, _ in facts for process in own}
    if any(kind == "tpu" for _, kind in facts):
        owners = _job_numbers(client, operation, owners, timeout_s)
    return owners


def _job_numbers(client: JobClient, operation: str, owners: set[int], timeout_s: float) -> set[int]:
    """Return processes by their job numbers: on TPUs JAX may number them differently.

    Raises:
      DeadlineError: one of them has not made the call, so it has not said its number.
    """
    if len(owners) == client.num_processes:
        return owners
    try:
        return {*processes_of(owners, client.process, timeout_s=timeout_s)}
    except jax_runtime.NothingPublishedError as error:
        me = ThisProcess(client.process, client.hosts)
        raise DeadlineError(
            f"{me}: {operation}: the processes that are {sorted(owners)} in JAX own the devices, "
            f"and have not all called it within {timeout_s:g} s ({error})",
            name=operation,
            waited_s=timeout_s,
        ) from None
