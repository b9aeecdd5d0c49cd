"""Save a tree of sharded values: committed on all processes, or on none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.arguments import check_flags, integer
from shoal.arrays.bridge.layout_functions import short_text
from shoal.checkpoint.at import Path, store_at
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.format.fields import check_json
from shoal.checkpoint.format.json_files import metrics_json
from shoal.checkpoint.saving.agreeing import agree_on
from shoal.checkpoint.saving.protocol import complete, snapshot
from shoal.checkpoint.saving.request import Request, SaveOptions, Waits
from shoal.checkpoint.store.step_names import step_at
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_delivered
from shoal.runtime.uses_client import uses_client


@collective("processes")
@uses_client
@collective_scope("save")
def save(
    client: JobClient,
    path: Path,
    tree: Any,
    *,
    step: int | None = None,
    user: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> None:
    """Save a tree of values at `path`, durably.

    Collective over processes.

    When it returns, the checkpoint is committed: it survives a crash of any process or host. An
    incomplete checkpoint is never taken for a complete one, nothing saved before is overwritten
    unless you pass `overwrite`, and the checkpoint is saved for all processes or for none. With
    `overwrite`, a complete checkpoint is at `path` at every moment, whatever is killed: the one
    before, or the new one. Each distinct box of an
    array is written once, by one of its holders, and checksummed; replicas share the work. Values
    in this host's memory are read in place.

    Device arrays may be sharded in any way over the devices of all processes. NumPy arrays, Python
    values and arrays on devices of one process alone must be equal on all processes. `PerProcess`
    marks values that are not.

    No device takes part, and every wait has a deadline. If a process is lost, fails or is late, the
    save ends on all others, which may continue; but once every process has written its data, no
    failure can undo it.

    Args:
      path: a directory that all processes share, or a bucket: a `Bucket`, or an address such as
        "s3://bucket/model". Without a checkpoint, unless `overwrite`.
      tree: dicts, lists, tuples, namedtuples and nodes registered with JAX; leaves are JAX and
        NumPy arrays of any dtype, PRNG keys, numbers, str, bytes, None, PerProcess.
      step: the step number to store with it.
      user: JSON to store with it, equal on all processes.
      metrics: numbers for retention policies, equal on all processes; 1 KiB at most.
      overwrite: whether to replace the checkpoint at `path`, if there is one, damaged or not; equal
        on all processes. It needs room for both. Other files there are left alone.
      processes: the processes that save, including the caller; equal on all. The data on their
        devices are saved, as if they were the whole job. None: all of the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline of the save, in seconds; None: each wait in it has a deadline of
        SHOAL_TIMEOUT_S (600). The earliest deadline ends the wait for all.
      lane: an independent sequence of collective calls, as for `barrier`: a thread that saves
        beside others needs one of its own, except in a job of one process.

    Raises:
      StepAlreadyCommittedError: on all: something is saved there; with `overwrite`: by another
        save, while this one ran.
      DivergenceError: on all that arrived: trees, layouts, values or the calls differ.
      SaveAbortedError: on all survivors: a process was lost, failed or was late.
      StorageFullError, StorageError: on all: the file system, or the bucket, of one process failed.
      NotSharedError: on all: processes do not see one another's files.
      UsageError: on the caller: an argument is wrong, or leaves cannot be saved (it names all).
        The others get SaveAbortedError. On all: parts of the named arrays are held only by
        processes that `processes` does not name, or what `overwrite` would replace is pinned, a
        step of a history, or a symbolic link; nothing was written.

    >>> import tempfile, numpy as np, shoal
    >>> shoal.save(tempfile.mkdtemp() + "/model", {"w": np.ones(3), "epoch": 2})
    """
    from shoal.runtime.preemption import failure_noted, note_kept

    with failure_noted(client, str(path), step) as number:
        request = save_request(
            path, step=step, user=user, metrics=metrics, overwrite=overwrite, name=name,
            timeout_s=timeout_s, lane=lane,
        )  # fmt: skip
        write_tree(client, request, tree, processes)
    note_kept(client, str(path), number)


@interrupts_delivered
def write_tree(
    client: JobClient,
    request: Request,
    tree: Any,
    processes: Iterable[int] | None = None,
    *,
    arena: Arena | None = None,
) -> None:
    """Save a tree as requested.

    Args:
      arena: memory to copy the values to first.
    """
    attempt, state, own = agree_on(client, request, tree, processes)
    complete(attempt, snapshot(attempt, state, own, arena))


def save_request(
    path: object,
    *,
    step: int | None = None,
    user: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> Request:
    """Check the arguments of a save.

    Raises:
      UsageError: one is wrong.
    """
    store = store_at(path, f"save: path={short_text(path)}", "save(path, tree)")
    operation = f"save({store.path!r})"
    for what, text in (("name", name), ("lane", lane)):
        if (text is not None or what == "lane") and (not isinstance(text, str) or not text):
            raise UsageTypeError(f"{operation}: {what}={text!r} must be a non-empty string")
    for what, given in (("user", user), ("metrics", metrics)):
        if given is not None and not isinstance(given, Mapping):
            raise UsageTypeError(f"{operation}: {what}={given!r} must be a dict")
    check_json(dict(user or {}), f"{operation}: user")
    check_flags(operation, overwrite=overwrite)
    waits = Waits.of(operation, timeout_s)
    return Request(
        store if timeout_s is None else store.limited(lambda: waits.left_s),
        SaveOptions(
            step=_step(operation, step, store.path),
            user=dict(user or {}),
            metrics=_metrics(operation, metrics),
            overwrite=overwrite,
        ),
        name=name,
        site=callsite(),
        waits=waits,
        lease_s=store.pace.lease_s,
        lane=lane,
    )


def _step(operation: str, step: object, path: str) -> int | None:
    if step is None:
        return None
    number = integer(operation, "step", step)
    if not 0 <= number < 1 << 62:
        raise UsageError(f"{operation}: step={number} must not be negative, and below 2**62")
    named = step_at(path)
    if named not in (None, number):
        raise UsageError(
            f"{operation}: step={number}, and the directory is named after step {named}"
        )
    return number


def _metrics(operation: str, metrics: Mapping[str, float] | None) -> dict[str, float]:
    numbers = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise UsageTypeError(f"{operation}: metrics: the name {name!r} must be a string")
        if isinstance(value, bool | str | bytes):
            raise UsageTypeError(f"{operation}: metrics: {name}={value!r} must be a number")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise UsageTypeError(
                f"{operation}: metrics: {name}={value!r} must be a number"
            ) from None
        except OverflowError:
            raise UsageError(f"{operation}: metrics: {name} is too large for a float") from None
    try:
        metrics_json(numbers)
    except UsageError as error:
        raise UsageError(f"{operation}: {error}") from None
    return numbers
