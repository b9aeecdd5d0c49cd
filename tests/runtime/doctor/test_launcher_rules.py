"""The rule that the doctor names is the one that `initialize` uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.runtime.doctor.examine import rule_states
from shoal.runtime.startup.inherited import note_of
from shoal.runtime.startup.launcher_table import LAUNCHERS
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments

NAMES = sorted(
    {
        name
        for launcher in LAUNCHERS
        for name in (*launcher.indices, *launcher.counts, *launcher.needs, *launcher.same_index)
        if " " not in name
    }
    | {"JOB_COMPLETION_INDEX", "DTENSOR_JOBS"}
)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "0", "1", "2"]), max_size=6))
def test_rule_shown_as_used_is_the_one_that_decides(env):
    env = {**env, "JAX_PLATFORMS": "cpu", "SHOAL_COORDINATOR": "127.0.0.1:9"}
    states = rule_states(env)
    assert [state.launcher for state in states] == [launcher.name for launcher in LAUNCHERS]
    used = [state.launcher for state in states if state.is_used]
    assert len(used) <= 1
    try:
        reason = decide(Arguments(), env).reason
    except ShoalError as error:
        said = str(error)
        assert used or "SHOAL_COORDINATOR=127.0.0.1:9 without a count" in said
        return
    assert reason.startswith(f"{used[0]} (" if used else "no launcher's variables")


@pytest.mark.parametrize(
    ("env", "launcher", "why"),
    [
        ({}, "torchrun", "RANK and WORLD_SIZE not set"),
        (
            {"SLURM_PROCID": "0"},
            "Slurm step",
            "SLURM_PROCID=0 without SLURM_STEP_NUM_TASKS: a batch script or a shell, not a step",
        ),
        ({"PMIX_RANK": "1"}, "PRRTE", "PMIX_RANK=1 without PRTE_LAUNCHED"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"},
            "MPICH",
            "PMI_RANK=1, PMI_SIZE=2: torchrun is further inside",
        ),
    ],
)
def test_unused_launcher_rules_have_a_reason(env, launcher, why):
    (state,) = (s for s in rule_states({"JAX_PLATFORMS": "cpu", **env}) if s.launcher == launcher)
    assert (state.is_used, state.why) == (False, why)


def test_the_variables_of_an_outer_job_are_named():
    job = {"SHOAL_PROCESS_ID": "0", "SHOAL_NUM_PROCESSES": "1"}
    env = {**job, "SHOAL_LAUNCHED": note_of(job), "PMI_RANK": "1", "PMI_SIZE": "2"}
    seen = {state.launcher: state for state in rule_states(env) if state.is_seen}
    assert seen["MPICH"].is_used
    assert not seen["SHOAL_*"].is_used
    assert seen["SHOAL_*"].why == (
        "SHOAL_PROCESS_ID=0, SHOAL_NUM_PROCESSES=1: of the job in which a process has started "
        "another launcher"
    )
