"""The first phase of a save: all processes agree that it is possible, and who writes what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.checkpoint.planning.who_writes import WriteBox
from shoal.checkpoint.saving.request import Request, state_lines
from shoal.checkpoint.saving.save_members import SaveAttempt, SaveMembers
from shoal.checkpoint.saving.state import State, among, own_of, read_state, refuse_device_axis
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store, already_committed
from shoal.checkpoint.store.step_names import new_attempt
from shoal.errors import StorageFullError, UsageError, raise_all
from shoal.runtime.client.group import group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.failures.process_text import listed
from shoal.runtime.system import fault_points


def agree_on(
    client: JobClient,
    request: Request,
    tree: Any,
    processes: Iterable[int] | None,
    *,
    own_lane: bool = False,
) -> tuple[SaveAttempt, State, list[WriteBox]]:
    """Check with all processes that the save is possible.

    Args:
      own_lane: whether a thread of its own completes the save, which needs a lane of its own.

    Returns:
      The attempt, the state, and the boxes of it that this process writes.

    Raises:
      DivergenceError: the processes do not save the same state.
      SaveAbortedError: a process was lost, failed or late.
      StepAlreadyCommittedError, StorageError, …: on all, if raised on any.
      UsageError: on this process: leaves cannot be saved, or `processes` is wrong.
    """
    state = read_state(tree, client.num_processes, request.operation)
    group = group_in(client, request.operation, processes)
    if group.count > 1:
        refuse_device_axis(state, request.operation)
    members = SaveMembers(client, request, group)
    fault_points.reach("save.preflight", members.process)
    numbers = _numbers(members, state)
    with members.agreement(state_lines(state, request.options.lines, group.count)) as exchange:
        holder, own = _share(members, state, numbers)
        answer: dict[str, Any] = {"path": request.store.path, "bytes": bytes_needed(own)}
        if members.is_lead:
            answer["attempt"] = new_attempt()
        if holder != members.process:
            answer["number"] = holder
        answer |= store_answer(request, is_lead=members.is_lead)
        request.check(state)
        exchange.payload = json.dumps(answer).encode()
    answers = {process: json.loads(text) for process, text in exchange.answers.items()}
    if group.is_all:
        check_numbers(request.operation, answers)
    check_space(request.store, answers)
    lane, leads = request.lane, answers[group.lead]
    if own_lane:
        lane = f"save {leads['attempt']}"
    attempt = SaveAttempt(
        members,
        id=leads["attempt"],
        replaces=leads["replaces"],
        paths={process: answer["path"] for process, answer in answers.items()},
        lane=lane,
    )
    return attempt, state, own


def _numbers(members: SaveMembers, state: State) -> list[int] | None:
    """Exchange the JAX process numbers of the members; None if all of the job save."""
    group = members.group
    if group.is_all:
        return None
    holder = jax.process_index() if state.is_spread else group.process
    answers = members.agree(("the processes that save",), str(holder).encode())
    numbers = [int(answers[member]) for member in group.members]
    if len({*numbers}) < len(numbers):
        _refuse_numbers(members.request.operation, numbers)
    return numbers


def _share(
    members: SaveMembers, state: State, numbers: Sequence[int] | None
) -> tuple[int, list[WriteBox]]:
    """Choose the boxes that this process writes; return its number as a holder, and the boxes.

    Raises:
      UsageError: parts of the state are held only by processes outside the group.
    """
    group, process = members.group, members.process
    if numbers is None:
        holder = process
        if state.is_spread and group.count > 1:
            holder = jax.process_index()
        return holder, own_of(state, holder, process, group.count)
    held, lost = among(state, numbers)
    operation = f"{members.request.operation} by {listed(group.members)}"
    raise_all(operation, [f"{what}; leave it out" for what in lost])
    return process, own_of(held, group.place, group.place, group.count)


def check_numbers(operation: str, answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that JAX's process numbers are those of the job, in any order.

    Args:
      answers: of each process: its "number", if that is another one in JAX.
    """
    numbers = [answer.get("number", process) for process, answer in answers.items()]
    if sorted(numbers) != list(range(len(answers))):
        _refuse_numbers(operation, numbers)


def _refuse_numbers(operation: str, numbers: Sequence[int]) -> NoReturn:
    raise UsageError(
        f"{operation}: the processes of this job have the numbers {list(numbers)} in "
        "JAX, so JAX's job is not the same as shoal's; initialize both together"
    )


# ---- Checks that fail before anything is written.


_ENTRY_BYTES = 100  # of a header, without the name
_SPARE = 1.05  # headers, indexes, and other concurrent writes


def bytes_needed(own: Sequence[WriteBox]) -> int:
    """Estimate the size of the files that hold these boxes."""
    data_bytes = sum(write.num_bytes for write in own)
    return data_bytes + sum(_ENTRY_BYTES + len(write.record.name) for write in own) + PAGE_BYTES


def store_answer(request: Request, *, is_lead: bool) -> dict[str, Any]:
    """Check that a save can be written there; return what this process adds to its answer.

    That is the number of bytes that are "free", None if it is unknown, and the attempt that the
    save "replaces". With overwrite=, those of the lead count: before it measures the free space, it
    removes what killed saves have left there.

    Raises:
      StepAlreadyCommittedError: something is saved there.
      CorruptCheckpointError: something is saved there, and damaged.
      UsageError: it is a history of steps, or must not be overwritten.
      StorageError: it is not a directory and cannot become one, or is not writable.
    """
    store, replaces, overwrites = request.store, request.replaces, request.options.overwrite
    if not overwrites:
        commit = store.standing() if replaces else store.committed()
        if commit is not None and commit.attempt != replaces:
            raise already_committed(store.path, commit, replaces)
    saved_steps.check_single(store)
    if overwrites and is_lead:
        replaces = saved_steps.make_way(store, idle_s=request.lease_s)
    free_bytes = store.check_writable()
    if overwrites and not is_lead:
        free_bytes = None  # it may have been measured before the lead has cleaned up
    return {"free": free_bytes, "replaces": replaces}


def check_space(store: Store, answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise on all processes if their files together do not fit.

    Args:
      answers: of each process: its "bytes" to write, and the bytes "free", None if unknown.

    Raises:
      StorageFullError: says how much is needed, and how much is free.
    """
    needed = int(_SPARE * sum(answer["bytes"] for answer in answers.values()))
    known = [answer["free"] for answer in answers.values() if answer["free"] is not None]
    if not known:
        return
    free = min(known)
    if needed > free:
        raise StorageFullError(
            f"{store.path}: the save needs {needed} bytes, but only {free} are free\n"
            "remove something, or save elsewhere; nothing was written",
            path=store.path,
            needed_bytes=needed,
            free_bytes=free,
        )
