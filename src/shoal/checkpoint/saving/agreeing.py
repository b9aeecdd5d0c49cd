"""S0 of a save: all processes agree that it is possible, and on the part that each writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import jax

from shoal.checkpoint.planning.who_writes import Own
from shoal.checkpoint.saving import preflight
from shoal.checkpoint.saving.lines import state_lines
from shoal.checkpoint.saving.save_members import SaveMembers
from shoal.checkpoint.saving.state import State, among, own_of
from shoal.checkpoint.together.errors_between import encode_error
from shoal.errors import CheckpointError, UsageError, raise_all
from shoal.runtime.system import fault_points
from shoal.runtime.system.failure_words import listed


class Agreed(NamedTuple):
    """A save that all processes agreed on."""

    members: SaveMembers
    own: list[Own]  # the boxes that this process writes

    @property
    def own_lane(self) -> str:
        """A lane used only by the thread that completes this save."""
        return f"save {self.members.attempt}"


def agree_on(members: SaveMembers, state: State) -> Agreed:
    """Check with all processes that the save is possible.

    Raises:
      DivergenceError: the processes do not save the same state.
      SaveAbortedError: a process was lost, failed or late.
      StepAlreadyCommittedError, StorageError, …: on all, if raised on any.
    """
    process, group, folder = members.process, members.group, members.request.folder
    fault_points.reach("save.preflight", process)
    said: dict[str, Any] = {"attempt": members.attempt} if members.is_lead else {}
    said["path"] = folder.path
    numbers = _numbers(members, state)
    own: list[Own] = []
    problem: Exception | None = None
    try:
        number, own = _share(members, state, numbers)
        said |= {"bytes": preflight.bytes_needed(own)}
        said |= {"number": number} if number != process else {}
        said["free"] = preflight.check_folder(folder)
    except (CheckpointError, UsageError) as error:
        problem = error
    lines = state_lines(state, members.request.lines, group.count)
    payload = json.dumps(said).encode() if problem is None else encode_error(problem)
    answers = members.agree(lines, payload)
    members.raise_failure("agree", answers, problem)
    if group.is_all:
        check_numbers(members.request.operation, answers)
    paths = {who: json.loads(text)["path"] for who, text in answers.items()}
    preflight.check_space(folder, answers)
    attempt = json.loads(answers[group.lead])["attempt"]
    return Agreed(replace(members, attempt=attempt, paths=paths), own)


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
) -> tuple[int, list[Own]]:
    """Choose the boxes that this process writes; return its number as a holder, and the boxes.

    Raises:
      UsageError: parts of the state are held only by processes outside the group.
    """
    group, process = members.group, members.process
    if numbers is None:
        number = jax.process_index() if state.is_spread and group.count > 1 else process
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
