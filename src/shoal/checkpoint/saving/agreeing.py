"""The first phase of a save: all processes agree that it is possible, and who writes what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax

from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.checkpoint.planning.who_writes import WriteBox
from shoal.checkpoint.saving.request import Request, state_lines
from shoal.checkpoint.saving.save_members import SaveAttempt, SaveMembers
from shoal.checkpoint.saving.state import State, among, own_of
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store, taken
from shoal.checkpoint.store.step_names import new_attempt
from shoal.checkpoint.together.lead import encode_error
from shoal.errors import CheckpointError, StorageFullError, UsageError, raise_all
from shoal.runtime.system import fault_points
from shoal.runtime.system.failure_words import listed


def agree_on(
    members: SaveMembers, state: State, *, own_lane: bool = False
) -> tuple[SaveAttempt, list[WriteBox]]:
    """Check with all processes that the save is possible.

    Args:
      own_lane: whether a thread of its own completes the save, which needs a lane of its own.

    Returns:
      The attempt, and the boxes that this process writes.

    Raises:
      DivergenceError: the processes do not save the same state.
      SaveAbortedError: a process was lost, failed or late.
      StepAlreadyCommittedError, StorageError, …: on all, if raised on any.
    """
    process, group, store = members.process, members.group, members.request.store
    fault_points.reach("save.preflight", process)
    answer: dict[str, Any] = {"path": store.path}
    if members.is_lead:
        answer["attempt"] = new_attempt()
    numbers = _numbers(members, state)
    own: list[WriteBox] = []
    problem: Exception | None = None
    try:
        number, own = _share(members, state, numbers)
        answer |= {"bytes": bytes_needed(own)}
        answer |= {"number": number} if number != process else {}
        answer |= check_store(members.request, is_lead=members.is_lead)
        members.request.check(state)
    except (CheckpointError, UsageError) as error:
        problem = error
    lines = state_lines(state, members.request.options.lines, group.count)
    payload = json.dumps(answer).encode() if problem is None else encode_error(problem)
    answers = members.agree(lines, payload)
    members.raise_failure("agree", answers, problem)
    if group.is_all:
        check_numbers(members.request.operation, answers)
    paths = {who: json.loads(text)["path"] for who, text in answers.items()}
    check_space(store, answers)
    leads = json.loads(answers[group.lead])
    attempt, replaces = leads["attempt"], leads["replaces"]
    lane = f"save {attempt}" if own_lane else members.lane
    return SaveAttempt(members, attempt, replaces, paths, lane), own


def _numbers(members: SaveMembers, state: State) -> list[int] | None:
    """Exchange the JAX process numbers of the members; None if all of the job save."""
    group = members.group
    if group.is_all:
        return None
    number = jax.process_index() if state.is_spread else group.process
    answers = members.agree(("the processes that save",), str(number).encode())
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
        number = process
        if state.is_spread and group.count > 1:
            number = jax.process_index()
        return number, own_of(state, number, process, group.count)
    held, lost = among(state, numbers)
    operation = f"{members.request.operation} by {listed(group.members)}"
    raise_all(operation, [f"{what}; leave it out" for what in lost])
    return process, own_of(held, group.place, group.place, group.count)


def check_numbers(operation: str, answers: Mapping[int, bytes]) -> None:
    """Check that JAX's process numbers are those of the job, in any order."""
    found = [
        json.loads(text)["number"] if b'"number"' in text else process
        for process, text in answers.items()
    ]
    if sorted(found) != list(range(len(answers))):
        _refuse_numbers(operation, found)


def _refuse_numbers(operation: str, found: Sequence[int]) -> NoReturn:
    raise UsageError(
        f"{operation}: the processes of this job have the numbers {list(found)} in "
        "JAX, so JAX's job is not the same as shoal's; initialize both together"
    )


# ---- Checks that fail before anything is written.


_ENTRY_BYTES = 100  # of a header, without the name
_SPARE = 1.05  # headers, indexes, and other concurrent writes


def bytes_needed(own: Sequence[WriteBox]) -> int:
    """Estimate the size of the files that hold these boxes."""
    data_bytes = sum(write.num_bytes for write in own)
    return data_bytes + sum(_ENTRY_BYTES + len(write.record.name) for write in own) + PAGE_BYTES


def check_store(request: Request, *, is_lead: bool) -> dict[str, Any]:
    """Return how many bytes may be "free" there, None: unknown; and the attempt it "replaces".

    What is overwritten is what the lead finds: it also removes what killed saves have left there,
    before the free space is looked at.

    Raises:
      StepAlreadyCommittedError: something is saved there.
      CorruptCheckpointError: something is saved there, and damaged.
      UsageError: it is a history of steps, or must not be overwritten.
      StorageError: it is not a directory and cannot become one, or is not writable.
    """
    store, replaces = request.store, request.replaces
    if not request.options.overwrite:
        commit = store.standing() if replaces else store.committed()
        if commit is not None and commit.attempt != replaces:
            raise taken(store.path, commit, replaces)
    saved_steps.check_single(store)
    if not request.options.overwrite:
        return {"free": store.check_writable(), "replaces": replaces}
    replaces = saved_steps.make_way(store, idle_s=request.lease_s) if is_lead else ""
    free_bytes = store.check_writable()  # others may have looked before the lead has cleaned up
    return {"free": free_bytes if is_lead else None, "replaces": replaces}


def check_space(store: Store, answers: Mapping[int, bytes]) -> None:
    """Raise on all processes if their files together do not fit.

    Args:
      answers: JSON of each process: its "bytes" to write, and the bytes "free", null if unknown.

    Raises:
      StorageFullError: says how much is needed, and how much is free.
    """
    answer: dict[bytes, Any] = {text: json.loads(text) for text in {*answers.values()}}
    needed = int(_SPARE * sum(answer[text]["bytes"] for text in answers.values()))
    known = [one["free"] for one in answer.values() if one["free"] is not None]
    if known and needed > (free := min(known)):
        raise StorageFullError(
            f"{store.path}: the save needs {needed} bytes, but only {free} are free\n"
            "remove something, or save elsewhere; nothing was written",
            path=store.path,
            needed_bytes=needed,
            free_bytes=free,
        )
