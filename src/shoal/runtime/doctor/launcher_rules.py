"""The rule of the launcher table that applies in an environment, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.startup.launcher_table import (
    LAUNCHERS,
    Environment,
    Launcher,
    shown,
    variables_of,
)


class RuleState(NamedTuple):
    """One row of the table, with the reason why it is used or is not."""

    launcher: str
    is_used: bool
    is_seen: bool  # whether any of its variables is set
    why: str


def rule_states(env: Environment) -> tuple[RuleState, ...]:
    """Return the state of each row, in order: at most one is used, the first that can be.

    >>> env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    >>> [(row.launcher, row.is_used) for row in rule_states(env) if row.is_seen]
    [('torchrun', True), ('Slurm step', False)]
    """
    used, states = "", []
    for launcher in LAUNCHERS:
        state = _state(launcher, env, used)
        used = used or (launcher.name if state.is_used else "")
        states.append(state)
    return tuple(states)


def _state(launcher: Launcher, env: Environment, used: str) -> RuleState:
    try:
        whole = launcher.completed(env, [])
    except InitializeError as error:
        return RuleState(launcher.name, False, True, str(error))
    numbers = (*launcher.indices, *launcher.counts)
    found = variables_of(whole, (*launcher.needs, *numbers, *launcher.same_index))
    why_not = _why_not(launcher, found)
    if why_not:
        return RuleState(launcher.name, False, bool(found), why_not)
    if used:
        return RuleState(launcher.name, False, True, f"{shown(found)}: {used} is further inside")
    return RuleState(launcher.name, True, True, shown(found))


def _why_not(launcher: Launcher, found: Mapping[str, str]) -> str:
    """Return why these variables are not this launcher's, or describe no job; else ""."""
    numbers = [name for name in (*launcher.indices, *launcher.counts) if name in found]
    if not numbers:
        lacking = " and ".join((*launcher.indices[:1], *launcher.counts[:1]))
        return f"{shown(found)} without {lacking}" if found else f"{lacking} not set"
    lacking = ", ".join(name for name in launcher.needs if name not in found)
    if lacking:
        return f"{shown(found)} without {lacking}"
    if len(numbers) == 1 and (half := f"{numbers[0]}={found[numbers[0]]}") in launcher.no_job:
        return f"{half} without {launcher.counts[0]}: a batch script or a shell, not a step"
    return ""
