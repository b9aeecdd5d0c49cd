"""The API of `jax.experimental.multihost_utils`, with shoal's guarantees.

Change `from jax.experimental import multihost_utils` to `from shoal.compat import multihost_utils`.
Calls at different places of the program count as the same call, as there. Differences:
docs/coming-from/multihost_utils.md. Never imports the original; knows no other facade.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal import settings
from shoal.arrays.bridge.leaf_layouts import Leaf, leaf_layouts
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.host_local.host_local import from_host_local, to_host_local
from shoal.arrays.host_local.parts import lies_elsewhere, own_box, seen
from shoal.arrays.moving.move import relabelled
from shoal.arrays.moving.relayout import relayout
from shoal.collectives.allgather import allgather
from shoal.collectives.broadcast import broadcast
from shoal.collectives.leaves import is_global
from shoal.collectives.live_processes import LiveBlock
from shoal.collectives.owners import owner_indices
from shoal.collectives.same import assert_same
from shoal.colour import collective, logically_collective
from shoal.compat.arguments import flag, or_none, takes, text
from shoal.compat.wording import errors_named
from shoal.errors import DivergenceError, ProcessLostError, UsageError, raise_all
from shoal.runtime import process
from shoal.runtime.barrier import barrier
from shoal.runtime.client.lanes import collective_scope, fail_call, refused_for_all
from shoal.runtime.preemption import checked_step, preempted
from shoal.runtime.uses_client import client_here
from shoal.tracebacks import block_at_caller

__all__ = [
    "ProcessFailureError",
    "SpreadArrayError",
    "UnequalError",
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "live_devices",
    "process_allgather",
    "reached_preemption_sync_point",
    "sync_global_devices",
]

Tree = Any


@collective()
@collective_scope("broadcast_one_to_all", of=client_here)
@takes("", is_source=or_none(flag))
def broadcast_one_to_all(in_tree: Tree, is_source: bool | None = None) -> Tree:
    """Return the values of one process on all: `shoal.broadcast`.

    Collective over all processes.

    Values arrive bit-exactly, whatever the dtype.

    Args:
      in_tree: arrays, numbers, PRNG keys, str, bytes; of equal structure, shapes and dtypes.
      is_source: True on the process whose values are sent. None: process 0 is the source.

    Returns:
      The tree, with arrays and numbers as NumPy arrays, also with one process.

    Raises:
      DivergenceError: on all: no process is the source, or several are, which are named; or
        trees, shapes or dtypes differ.
      SpreadArrayError: an array is distributed over several processes. Also a RuntimeError.
      UsageError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.broadcast`.

    >>> broadcast_one_to_all({"lr": 0.5})
    {'lr': array(0.5)}
    """
    is_mine = process.process_index() == 0 if is_source is None else bool(is_source)
    also = [SpreadArrayError] if any(map(_is_spread, jax.tree.leaves(in_tree))) else []
    with errors_named("broadcast_one_to_all", *also):
        tree = broadcast(
            jax.tree.map(_array, in_tree), is_source=is_mine, name="broadcast_one_to_all"
        )
    return jax.tree.map(_array, tree)


@collective()
@collective_scope("process_allgather", of=client_here)
@takes("", tiled=flag)
def process_allgather(in_tree: Tree, tiled: bool = False) -> Tree:
    """Return the values of all processes, side by side, on every process: `shoal.allgather`.

    Collective over all processes.

    Args:
      in_tree: leaves as for `broadcast_one_to_all`; with `tiled` dim 0 may differ.
      tiled: False: add a dim 0, of size N with N processes. True: concatenate along dim 0; values
        without dims are stacked. An array on devices of several processes becomes its global
        value, whatever `tiled` if it is fully replicated.

    Returns:
      The tree, with NumPy arrays, whose rank does not depend on the number of processes.

    Raises:
      UsageError: an array is distributed over several processes, without `tiled`.
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.allgather`.

    >>> process_allgather(3.0), process_allgather(np.zeros((2, 3)), tiled=True).shape
    (array([3.]), (2, 3))
    """
    leaves = jax.tree.leaves(in_tree)
    spread = any(map(_is_spread, leaves))
    # Replicated arrays come back as their own value, as with `tiled`: the others then stack by
    # concatenating rows, so that all travel in one call.
    in_rows = not tiled and not spread and any(map(_is_one, leaves))
    detail = ""
    if spread and not tiled:
        detail = "Gathering global non-fully-addressable arrays only supports tiled=True: "
    tree = jax.tree.map(_row if in_rows else _array, in_tree)
    with errors_named(f"process_allgather: {detail}".removesuffix(": ")):
        gathered = allgather(tree, tiled=bool(tiled) or in_rows, name="process_allgather")
    there = partial(_as_there, bool(tiled) or in_rows)
    return jax.tree.map(there, in_tree, gathered, is_leaf=lambda x: x is None)


@collective()
@collective_scope("assert_equal", of=client_here)
@takes("", fail_message=text)
def assert_equal(in_tree: Tree, fail_message: str = "") -> None:
    """Return if all processes hold equal bits, else raise on all of them: `shoal.assert_same`.

    Collective over all processes.

    Args:
      in_tree: leaves as for `broadcast_one_to_all`. Of an array on devices of several processes
        each region is compared among its holders.
      fail_message: the beginning of the error message.

    Raises:
      UnequalError: on all: values differ; the first difference is shown, with the holders of each
        side. Or trees, shapes or dtypes differ. Also an AssertionError.
      UsageError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.assert_same`.

    >>> assert_equal({"seed": 7, "w": np.zeros(3)}, fail_message="at the start")
    """
    begin = f"{fail_message}. assert_equal" if fail_message else "assert_equal"
    with errors_named(begin, UnequalError):
        assert_same(jax.tree.map(_array, in_tree), name="assert_equal")


def _array(leaf: Any) -> Any:
    """Return numbers and array-likes as NumPy arrays; other values unchanged."""
    if isinstance(leaf, str | bytes | np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf)
    return leaf if array.dtype.hasobject else array


def _is_spread(leaf: Any) -> bool:
    """Is it distributed over several processes?"""
    return is_global(leaf) and not leaf.is_fully_replicated


def _is_one(leaf: Any) -> bool:
    """Is it an array with one value for all processes?

    In a job of one process, a mesh of its devices looks like a mesh of the whole job.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    if not leaf.is_fully_replicated:
        return False
    is_alone = process.process_count() == 1 and isinstance(leaf.sharding, NamedSharding)
    return is_alone or is_global(leaf)


def _row(leaf: Any) -> Any:
    """Return a value with a dim 0 of size 1, unless it is one for all processes."""
    value = _array(leaf)
    is_array = isinstance(value, np.ndarray | jax.Array) and not _is_one(value)
    return value[None] if is_array else value


def _as_there(is_tiled: bool, given: Any, gathered: Any) -> Any:
    """Return None for None, and the value of a replicated 0-d array, as JAX does."""
    if given is None:
        return None
    is_scalar = is_tiled and _is_one(given) and given.ndim == 0
    return gathered[0, ...] if is_scalar else gathered


# ---- `sync_global_devices`, `reached_preemption_sync_point`: synchronization points.


@collective()
@collective_scope("sync_global_devices", of=client_here)
def sync_global_devices(name: str) -> None:
    """Wait until all processes have reached this point: `shoal.barrier`.

    Collective over all processes.

    No device takes part; `shoal.sync_devices` waits for the devices' work, too.

    Args:
      name: the name of the point, equal on all. It may be reused.

    Raises:
      UnequalError: on all: names differ. Also an AssertionError.
      DeadlineError, ProcessLostError, PeerFailedError, UsageError: as `shoal.barrier`.

    >>> sync_global_devices("data is ready")
    """
    with errors_named("sync_global_devices", UnequalError):
        barrier(f"sync_global_devices({name!r})" if isinstance(name, str) else name)


@collective("processes")
def reached_preemption_sync_point(step_id: int) -> bool:
    """Return whether to save and stop at this step: `shoal.preempted`.

    Collective over processes.

    False until some process has a notice, then True on all from one agreed step on, at any stride.
    A program of one process that called neither `shoal.initialize` nor `shoal.preemption.watch`
    receives no notice: False.

    Args:
      step_id: the number of the step, 0 or greater, of any size.

    Raises:
      UsageError, DeadlineError, ProcessLostError, PeerFailedError, DivergenceError: as
        `shoal.preempted`.

    >>> reached_preemption_sync_point(0)
    False
    """
    has_service = process.process_count() > 1 or process.has_joined() or process.is_watching()
    with errors_named("reached_preemption_sync_point"):
        checked_step("preempted", step_id)
        return preempted(step_id) if has_service else False


# ---- Per-process arrays ⇄ global arrays, by a mesh and PartitionSpecs.


PSpecs = Any
"""A `jax.sharding.PartitionSpec`, or a prefix tree of them."""

_NO_NONE = (
    "`None` is not a valid input to the pspecs argument. Please use jax.sharding.PartitionSpec() "
    "if you wanted to replicate your input."
)


@logically_collective("shapes, dtypes, pspecs and what processes hold in common")
def host_local_array_to_global_array(
    local_inputs: Tree, global_mesh: jax.sharding.Mesh, pspecs: PSpecs
) -> Tree:
    """Return global arrays assembled from each process's part: `shoal.from_host_local`.

    Logically collective: shapes, dtypes, pspecs and what processes hold in common must be equal.

    Differentiable and batched. Inside `jit`, where every array is global, values pass through
    unchanged; a pspec by which processes would each give a part is refused.

    Args:
      local_inputs: this process's parts: NumPy arrays, numbers, PRNG keys, jax.Arrays on its own
        devices. Arrays that are global already pass through, in any layout.
      global_mesh: a mesh of JAX or shoal; the devices of each process are one block of it.
      pspecs: PartitionSpecs; dims that they leave out are not split.

    Returns:
      the tree, with global jax.Arrays. 64-bit values are narrowed as by `shoal.put`.

    Raises:
      UsageError: a pspec is None; inside `jit`, a pspec that processes split; and as
        `shoal.from_host_local`. All leaves at fault are named by path.
      InitializeError: this process is one of several, and has not joined them.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(jax.devices(), "x")
    >>> host_local_array_to_global_array(np.arange(8), mesh, jax.P("x")).sharding.spec
    P('x',)
    """
    process.last_client()
    with errors_named("host_local_array_to_global_array"), use_mesh(global_mesh):
        layouts = _layouts(pspecs)
        if _passes(local_inputs, layouts):
            return local_inputs
        whole = from_host_local(jax.tree.map(_with_bits, local_inputs), layouts)
    return jax.tree.map(_spelled, pspecs, local_inputs, whole, is_leaf=_is_none)


@collective("the processes of arrays in other layouts than pspecs")
def global_array_to_host_local_array(
    global_inputs: Tree, global_mesh: jax.sharding.Mesh, pspecs: PSpecs
) -> Tree:
    """Return this process's parts of global arrays: `shoal.to_host_local`.

    Collective over the processes of arrays in other layouts than pspecs.

    These are moved first, by `shoal.relayout`. The others are neither sent nor copied.
    Differentiable and batched. Inside `jit`, like `host_local_array_to_global_array`.

    Args:
      global_inputs: global jax.Arrays. Local arrays pass through.
      global_mesh: a mesh of JAX or shoal; the devices of each process are one block of it.
      pspecs: PartitionSpecs; dims that they leave out are not split.

    Returns:
      the tree, with jax.Arrays on this process's devices.

    Raises:
      UsageError: a pspec is None; inside `jit`, one that processes split; as
        `shoal.to_host_local`, and as `shoal.relayout`. All leaves at fault are named by path.
      InitializeError: as `host_local_array_to_global_array`.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(jax.devices(), "x")
    >>> whole = host_local_array_to_global_array(np.arange(8), mesh, jax.P("x"))
    >>> global_array_to_host_local_array(whole, mesh, jax.P("x")).is_fully_addressable
    True
    """
    process.last_client()
    with errors_named("global_array_to_host_local_array"), use_mesh(global_mesh):
        layouts = _layouts(pspecs, is_global_kept=False)
        if _passes(global_inputs, layouts):
            return global_inputs
        own = to_host_local(_in_place(global_inputs, layouts), layouts)
    return jax.tree.map(_spelled, pspecs, global_inputs, own, is_leaf=_is_none)


def _with_bits(value: Any) -> Any:
    """Return the tangent of an integer, which has no bits, as zeros of bool; others unchanged."""
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        return np.zeros(value.shape, np.bool_)
    return value


def _layouts(pspecs: PSpecs, *, is_global_kept: bool = True) -> Any:
    """Return a function from leaf to layout; None is refused, as in JAX."""
    return jax.tree.map(
        lambda spec: partial(_layout, spec, is_global_kept), pspecs, is_leaf=_is_none
    )


def _is_none(spec: Any) -> bool:
    return spec is None


def _layout(spec: Any, is_global_kept: bool, path: str, leaf: Any) -> Any:
    if spec is None:
        raise UsageError(_NO_NONE)
    value = seen(leaf)
    if is_global_kept and is_global(value):
        return value.sharding
    return _cut(spec, np.ndim(leaf))


def _cut(spec: Any, rank: int) -> Any:
    """Return a spec without trailing entries beyond the rank that split nothing, as JAX allows."""
    if not isinstance(spec, PartitionSpec) or len(spec) <= rank or spec[-1] is not None:
        return spec
    return _cut(PartitionSpec(*spec[:-1], unreduced=spec.unreduced, reduced=spec.reduced), rank)


def _passes(tree: Tree, layouts: Any) -> bool:
    """Are these values inside `jit`, and not split between processes? They are not converted."""
    if not is_tracing():
        return False
    problems: list[str] = []
    leaves, _ = leaf_layouts(tree, layouts, problems)
    raise_all("inside jit", problems)
    return not any(set(own_box(leaf.layout).boxes) - {1} for leaf in leaves)


def _spelled(spec: Any, given: Tree, made: Tree) -> Tree:
    """Return the arrays with the PartitionSpec exactly as the caller wrote it, as JAX does."""
    return jax.tree.map(partial(_spelled_leaf, spec), given, made)


def _spelled_leaf(spec: Any, given: Any, made: Any) -> Any:
    if not isinstance(made, jax.Array) or isinstance(made, jax.core.Tracer) or made is given:
        return made
    if isinstance(given, jax.Array) and made.shape == given.shape:
        if made.sharding.is_equivalent_to(given.sharding, made.ndim):
            return given  # passed through
    if not isinstance(spec, PartitionSpec):
        return made
    return relabelled(made, NamedSharding(made.sharding.mesh, _cut(spec, made.ndim)))


def _in_place(tree: Tree, layouts: Any) -> Tree:
    """Return the tree, moving arrays that are in other layouts."""
    problems: list[str] = []
    leaves, treedef = leaf_layouts(tree, layouts, problems)
    if problems:  # to_host_local reports them
        return tree
    values = {index: leaf.value for index, leaf in enumerate(leaves)}
    moving = {index: leaf.layout for index, leaf in enumerate(leaves) if _must_move(leaf)}
    if moving:
        values |= relayout({index: values[index] for index in moving}, moving)
    return jax.tree.unflatten(treedef, [values[index] for index in range(len(leaves))])


def _must_move(leaf: Leaf) -> bool:
    value = seen(leaf.value)
    if not isinstance(value, jax.Array) or value.is_deleted():
        return False
    is_here = value.sharding.device_set == sharding_of(leaf.layout).device_set
    return (is_here or is_global(value)) and bool(lies_elsewhere(value, leaf.layout))


# ---- `live_devices`: a context manager over the devices whose processes are alive.


def _fail(error: BaseException, *_: object, **__: object) -> None:
    """Fail the call for the other processes: the devices are not known here."""
    here = client_here()
    if here is not None:
        fail_call(here, "live_devices", error, survivors=True)


@collective("the devices' processes")
@block_at_caller
@refused_for_all(_fail)
def live_devices(devices: Iterable[jax.Device]) -> Iterator[list[jax.Device]]:
    """Return a context manager that yields the devices whose processes are alive.

    Collective over the devices' processes.

    The living processes enter the block together, with the same devices, and leave it together. It
    is impossible that one of them leaves it without an exception while another died inside or
    leaves it with an exception.

    Args:
      devices: the candidates, some of this process's among them; equal on all.

    Returns:
      A context manager that yields the devices of the living processes, by ascending id.

    Raises:
      ProcessFailureError: on all survivors, at the end: processes died inside.
      PeerFailedError: at the end, on those whose own code did not raise: another's did.
      UsageError: there are no devices, or none of this process.
      DeadlineError, DivergenceError, ProcessLostError: as `shoal.live_processes`.

    >>> with live_devices(jax.devices()) as alive:
    ...     alive == jax.devices()
    True
    """
    devices, owners = _owners(devices)
    alive: list[jax.Device] = []
    try:
        with LiveBlock(process.client(), "live_devices", sorted({*owners.values()})) as living:
            alive += (device for device in devices if owners[device.process_index] in living)
            yield sorted(alive, key=lambda device: device.id)
    except ProcessLostError as error:
        failed = {device for device in alive if owners[device.process_index] in error.lost}
        if not failed:
            raise
        failure = ProcessFailureError(failed, f"{error}: devices {sorted(map(str, failed))}")
        failure.lost = error.lost
        raise failure from error


def _owners(given: Iterable[jax.Device]) -> tuple[tuple[jax.Device, ...], dict[int, int]]:
    """Return the devices, and their owners: JAX's process numbers → processes of the job.

    An error fails the call for the other processes.
    """
    try:
        devices = tuple(dict.fromkeys(given))
        if not devices:
            raise UsageError("live_devices: No devices provided.")
        if jax.process_index() not in {device.process_index for device in devices}:
            raise UsageError("live_devices: Provided devices do not have any local devices.")
        timeout_s = settings.timeout("live_devices", None, "SHOAL_TIMEOUT_S")
        return devices, owner_indices(process.client(), devices, timeout_s)
    except BaseException as error:
        _fail(error)
        raise


# ---- The facade's errors: shoal's, and also instances of the types that JAX raises.


class UnequalError(DivergenceError, AssertionError):
    """Processes hold different values, or are at different points. Raised by `assert_equal` and
    `sync_global_devices`, on every process. Also an AssertionError."""


class SpreadArrayError(UsageError, RuntimeError):
    """An array is distributed over processes, but one process must hold all of it.
    Also a RuntimeError."""


class ProcessFailureError(ProcessLostError):
    """Processes died inside a `live_devices` block; `failed_devices` is the set of their devices.

    `lost` maps each of these processes to the reason, in words.
    """

    def __init__(self, failed_devices: set[jax.Device], message: str = "") -> None:
        super().__init__(message or f"Devices failed: {failed_devices}")
        self.failed_devices = failed_devices

    def __reduce__(self) -> tuple[object, ...]:  # devices of JAX cannot be pickled: their names
        known = {**vars(self), "failed_devices": {str(device) for device in self.failed_devices}}
        return type(self), (known["failed_devices"], str(self)), known
