"""S0 of a save: all find out together that it can be done, and which part is whose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import jax

from shoal.checkpoint.planning.who_writes import Own
from shoal.checkpoint.saving import preflight
from shoal.checkpoint.saving.lines import lines_of
from shoal.checkpoint.saving.save_members import SaveMembers
from shoal.checkpoint.saving.state import State, among, own_of
from shoal.checkpoint.together.errors_between import told
from shoal.errors import CheckpointError, UsageError, raise_all
from shoal.runtime.rules.outcomes import listed
from shoal.runtime.system import fault_points


class Agreed(NamedTuple):
    """A save that can be done."""

    members: SaveMembers
    own: list[Own]  # what this process writes

    @property
    def own_lane(self) -> str:
        """A lane for a thread that completes this save, and for nothing else."""
        return f"save {self.members.attempt}"


def agree_on(members: SaveMembers, state: State) -> Agreed:
    """Find out, with all others, that the save can be done.

    Raises:
      DivergenceError: the processes do not save the same.
      SaveAborted: a process was lost, failed or late.
      StepAlreadyCommitted, StorageError, …: on all alike, what one of them found.
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
    lines = lines_of(state, members.request.lines, group.count)
    payload = json.dumps(said).encode() if problem is None else told(problem)
    answers = members.agree(lines, payload)
    members.raise_told("agree", answers, problem)
    if group.is_all:
        check_numbers(members.request.asked, answers)
    paths = {who: json.loads(text)["path"] for who, text in answers.items()}
    preflight.check_space(folder, answers)
    attempt = json.loads(answers[group.lead])["attempt"]
    return Agreed(replace(members, attempt=attempt, paths=paths), own)


def _numbers(members: SaveMembers, state: State) -> list[int] | None:
    """Ask the members which numbers they have in JAX; None: all of the job save."""
    group = members.group
    if group.is_all:
        return None
    number = jax.process_index() if state.is_spread else group.process
    answers = members.agree(("the processes that save",), str(number).encode())
    numbers = [int(answers[member]) for member in group.members]
    if len({*numbers}) < len(numbers):
        _refuse_numbers(members.request.asked, numbers)
    return numbers


def _share(
    members: SaveMembers, state: State, numbers: Sequence[int] | None
) -> tuple[int, list[Own]]:
    """Decide what this process writes; return how it is called as a holder, and that.

    Raises:
      UsageError: parts of the state lie on processes outside of the group alone.
    """
    group, process = members.group, members.process
    if numbers is None:
        number = jax.process_index() if state.is_spread and group.count > 1 else process
        return number, own_of(state, number, process, group.count)
    held, lost = among(state, numbers)
    asked = f"{members.request.asked} by {listed(group.members)}"
    raise_all(asked, [f"{what}; leave it out" for what in lost])
    return process, own_of(held, group.place, group.place, group.count)


def check_numbers(asked: str, answers: Mapping[int, bytes]) -> None:
    """JAX's numbers of processes must be those of the job, in whatever order."""
    found = [
        json.loads(text)["number"] if b'"number"' in text else process
        for process, text in answers.items()
    ]
    if sorted(found) != list(range(len(answers))):
        _refuse_numbers(asked, found)


def _refuse_numbers(asked: str, found: Sequence[int]) -> NoReturn:
    raise UsageError(
        f"{asked}: the processes of this job have the numbers {list(found)} in "
        "JAX, so JAX's job is another one; initialize both together"
    )
