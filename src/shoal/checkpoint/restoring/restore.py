"""Restore a tree of values: any layout, on any mesh and process count; on all or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, get_args

from shoal.arguments import integer
from shoal.arrays.bridge.layout_functions import short_text
from shoal.checkpoint.at import Path, store_at
from shoal.checkpoint.blocks.memory import extra_bytes
from shoal.checkpoint.format.records import BLOCK_BYTES
from shoal.checkpoint.restoring.protocol import Restore, RestoreRequest, open_for, parse_request
from shoal.checkpoint.restoring.read_strategy import RestorePlan, plan_all
from shoal.checkpoint.restoring.target import (
    Dtype,
    Form,
    Mode,
    RestoreOptions,
    check_names,
    option_value,
    options_of,
)
from shoal.checkpoint.tree.names import ROOT
from shoal.collectives.arguments import deadline_of
from shoal.colour import collective, local
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.agreement import Call
from shoal.runtime.client.group import group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_delivered
from shoal.runtime.system.shapes_only import shapes_only
from shoal.runtime.uses_client import uses_client


@collective("processes")
@uses_client
@interrupts_delivered
@collective_scope("restore")
def restore(
    client: JobClient,
    path: Path,
    target: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    missing_ok: bool = False,
    dtype: Dtype = "exact",
    form: Form = "tree",
    mode: Mode = "auto",
    max_host_bytes: int | None = None,
    merge: Callable[[list[Any]], Any] | None = None,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> Any:
    """Restore what was saved at `path`, in the layouts of `target`.

    Collective over processes.

    Every block read is checked against its hash before a value is returned. A process reads each
    block once; where it casts, blocks at the boundaries of batches twice. Either all leaves are
    restored or none, and all processes restore the same save. Any layout on any mesh can restore
    what any other saved. Each process reads what its own devices hold; where that would be more
    than 1.5 times the bytes of a leaf, because processes hold replicas or short rows, the processes
    share the reading, and the devices exchange the data.

    Without `target` it works where JAX is not installed.

    Args:
      path: a single checkpoint: a directory, a `Bucket`, or the address of one in a bucket.
      target: the result's layouts. None: all leaves as full NumPy arrays, on every process. A tree
        of Layouts or shardings, which may stand for whole subtrees; of `jax.ShapeDtypeStruct`s
        (with a sharding; else they become NumPy arrays); of arrays, whose placement is used. Leaves
        that were not arrays come back as saved, whatever value the target has there; a number may
        also stand for an array of rank 0, which becomes a NumPy array. None stands for a saved
        None alone, a `PerProcess` for a saved one. Any other value for an array is an error, and so
        is a layout for a leaf that was no array.
        An array that JAX may move (*uncommitted*, such as the count of an optimizer's state) comes
        back so; and so does one for which a sharding or Layout names only JAX's default device.
        One layout for all arrays. A mesh: each array is replicated over its devices, whatever its
        rank. A function that is called with (name, x) for each array, `name` in the checkpoint such
        as "params/w", `x` a `jax.ShapeDtypeStruct` of its shape and dtype, and returns a Layout, a
        sharding, a mesh, or None for a NumPy array. Meshes, functions and "stored" may also stand
        for subtrees. "stored": the saved layouts, where they fit, and memory kinds, such as
        "pinned_host"; an error where the devices lack that kind.
      only: names of leaves, or patterns such as "params/**" or "opt/*/mu"; with "!" before it, a
        pattern leaves out what it matches: `only="!last_batch/**"` is all but these. Other leaves
        come back as the target has them; without a target they are left out. A string that is the
        name of a leaf takes that leaf alone, whatever characters it has. "target": the leaves of
        the target, whatever else was saved.
      rename: prefixes of names of the target → those in the checkpoint, such as `{"enc":
        "encoder"}` ("" is the root), or a function of a name. If subtrees were renamed, the error
        prints the mapping that finds them.
      missing_ok: True: patterns of `only` and prefixes of `rename` may take no leaf; False: each
        must take one.
      dtype: "exact"; "safe": arrays are cast to the target's dtype if the cast is lossless;
        "any": they are cast. On the host, before they are placed. Where a number was saved and
        a 0-d array is wanted, such as the step of a train state, both convert it.
      form: of the result without a target, or with one layout, mesh or function for all of it:
        "tree": as saved; "dicts": nested dicts, also in place of lists, tuples and classes
        (the keys of lists are "0", "1", …); "flat": one dict from names to values.
      mode: "direct", "exchange", or "auto"; among some processes of the job, or in another lane
        than "main", "auto" is "direct".
      max_host_bytes: limit of temporary memory on each process; None: a quarter of what is free, at
        most 2 GiB. Data for devices with memory of their own passes through it: at least one leaf
        at a time, as much of it as this process's devices hold.
      merge: merges the list of all per-process values into one, where the job has another
        number of processes than the one that saved them.
      processes: the processes that restore, including the caller; equal on all. Layouts use only
        their devices; per-process values are theirs in order. None: all of the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds of each wait for other processes; None: SHOAL_TIMEOUT_S (600).
      lane: an independent sequence of collective calls, as for `barrier`: a thread that restores
        beside others needs one of its own, except in a job of one process.

    Returns:
      The tree of the target, of the target's own classes. Without a target, and below a layout
      that stands for a subtree, the saved tree: classes are looked up by their names, and nodes
      whose classes are not loaded are `UnknownNode`s, which say what to import.

    Raises:
      NotCommittedError: on all: nothing is saved there.
      RestoreMismatchError: on all: leaves are missing, unexpected, or of another shape or dtype, or
        a name, pattern or prefix takes no leaf; all are named, nothing was read.
      CorruptCheckpointError: on all: data have changed since the save; names file and leaf.
      UnsupportedCheckpointError: on all: it needs a newer shoal.
      StorageError: on all: the file system failed; `NotSharedError`: processes see no checkpoint
        where others do.
      DivergenceError: on all that arrived: targets, options, or the checkpoints seen differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError. On all:
        layouts have devices of other processes than `processes`; all leaves are named.

    >>> import tempfile, numpy as np, shoal
    >>> from jax import NamedSharding, P
    >>> path = tempfile.mkdtemp() + "/model"
    >>> shoal.save(path, {"w": np.ones(3), "epoch": 2})
    >>> shoal.restore(path)
    {'epoch': 2, 'w': array([1., 1., 1.])}

    Under other names:

    >>> shoal.restore(path, {"model": {"w": np.zeros(3)}, "epoch": 0}, rename={"model": ""})
    {'epoch': 2, 'model': {'w': array([1., 1., 1.])}}

    As a flat dict, whatever classes the tree has:

    >>> shoal.save(path + "1", {"layers": [{"w": np.ones(2)}, {"w": np.zeros(2)}]})
    >>> shoal.restore(path + "1", form="flat")
    {'layers/0/w': array([1., 1.]), 'layers/1/w': array([0., 0.])}

    A number as an array:

    >>> shoal.restore(path, {"w": np.zeros(3), "epoch": np.zeros((), np.int32)}, dtype="safe")
    {'epoch': array(2, dtype=int32), 'w': array([1., 1., 1.])}

    Replicated over a mesh, or with large arrays split:

    >>> shoal.save(path + "2", {"w": np.ones((8, 2), np.float32), "b": np.ones(2, np.float32)})
    >>> mesh = shoal.make_mesh({"data": -1})
    >>> shoal.restore(path + "2", mesh)["b"].sharding.is_fully_replicated
    True
    >>> back = shoal.restore(
    ...     path + "2", lambda name, x: NamedSharding(mesh, P("data")) if x.ndim == 2 else mesh
    ... )
    >>> back["w"].sharding.spec, back["b"].sharding.spec
    (P('data',), P())
    """
    if shapes_only():
        raise UsageError("restore: is not called for the shapes of its result alone")
    deadline = deadline_of("restore", name, timeout_s, lane)
    options: RestoreOptions = {
        "only": only, "rename": rename, "missing_ok": missing_ok, "dtype": dtype, "form": form,
        "mode": mode, "max_host_bytes": max_host_bytes, "merge": merge,
    }  # fmt: skip
    request = restore_request("restore", path, target, options)
    group = group_in(client, "restore", processes)
    if request.mode == "auto" and not (group.is_all and lane == "main"):
        # Devices might wait for processes that are dead, or run programs of another thread first.
        request = request._replace(mode="direct")
    call = Call("restore", name, callsite(), request.lines)
    return Restore(client, request, call, deadline.timeout_s, group, lane).run()


@local
def plan_restore(path: Path, target: Any = None, **options: Unpack[RestoreOptions]) -> RestorePlan:
    """Return the cost of a `restore` for each process: bytes, files, requests, memory.

    Local.

    Reads metadata only. The result prints as a table.

    Args:
      path: a single checkpoint.
      target: as for `restore`.
      options: as for `restore`: only, rename, missing_ok, dtype, form, mode, max_host_bytes, merge.

    Raises:
      NotCommittedError: nothing is saved there.
      RestoreMismatchError: the target does not match the checkpoint.
      CorruptCheckpointError, UnsupportedCheckpointError, StorageError: it cannot be read.
      UsageError: an argument is wrong.

    >>> import tempfile, numpy as np, shoal
    >>> path = tempfile.mkdtemp() + "/model"
    >>> shoal.save(path, {"w": np.ones(3)})
    >>> shoal.plan_restore(path).needed_bytes
    24
    """
    from shoal.runtime.process import process_count

    check_names("plan_restore", options)
    request = restore_request("plan_restore", path, target, options)
    opened = open_for(request)
    requests = opened.requests.all
    processes = range(process_count())
    return plan_all(opened.checkpoint, requests, opened.strategy, opened.geometry, processes)


def restore_request(
    operation: str, path: object, target: Any, options: RestoreOptions
) -> RestoreRequest:
    """Check the arguments.

    Raises:
      UsageError: one is wrong.
    """
    prefix = f"{operation}: path={short_text(path)}"
    store = store_at(path, prefix, f"{operation}(path, target)")
    asked = options_of(operation, options, has_target=target is not None)
    mode = option_value(operation, "mode", options.get("mode", "auto"), get_args(Mode))
    request = parse_request(store, target, asked, mode)
    merge = options.get("merge")
    if merge is not None and not callable(merge):
        raise UsageTypeError(f"{operation}: merge={merge!r} must be a function of a list of values")
    most = _most(operation, options.get("max_host_bytes"))
    form = _form(operation, options.get("form", "tree"), request)
    return request._replace(form=form, merge=merge, max_host_bytes=most)


def _form(operation: str, form: object, request: RestoreRequest) -> str:
    chosen = option_value(operation, "form", form, get_args(Form))
    is_for_all = request.rebuild is None or (
        [leaf.name for leaf in request.wanted] == [ROOT] and request.wanted[0].is_layout
    )
    if chosen != "tree" and not is_for_all:
        detail = (
            "no target, or one layout, mesh or function for all; this target determines the form"
        )
        raise UsageError(f"{operation}: form={chosen!r} is for {detail}")
    return chosen


def _most(operation: str, max_host_bytes: object) -> int:
    if max_host_bytes is None:
        return extra_bytes(None)
    num_bytes = integer(operation, "max_host_bytes", max_host_bytes, wanted="a number of bytes")
    if num_bytes < BLOCK_BYTES:
        detail = f"at least a block of {BLOCK_BYTES} bytes is read at a time"
        raise UsageError(f"{operation}: max_host_bytes={num_bytes}: {detail}")
    return num_bytes
