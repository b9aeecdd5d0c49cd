"""Random programs of calls, threads, notices, stops, interrupts and deaths, in real processes.

`--hypothesis-profile=explore` plays many more.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from collectives.random_programs import Ended, wide_findings
from processes import random_jobs
from processes.random_jobs import PROCESSES, program_of
from shoal.testing.cluster import Cluster

EXPLORES = settings.get_current_profile_name() == "explore"
JOBS = 20 if EXPLORES else 1
DEATHS = 20 if EXPLORES else 1
PROGRAMS = 4  # in a job
SLACK_S = 10.0  # past its deadline, on a machine that has much else to do


def started(child_env, function, *arguments):
    """Run a function in all processes of a job; return how each ended."""
    with Cluster(
        PROCESSES, start_method="fork", env=child_env, services="stand-alone", deadline_s=120
    ) as cluster:
        cluster.start(function, *arguments)
        return cluster.wait()


def found_in(program, rows):
    """Return what is wrong with a program that all processes have ended: `rows` are theirs."""
    calls = {p: [Ended(*call) for call in row["calls"]] for p, row in enumerate(rows)}
    lasts = {(p, lane): ends for p, row in enumerate(rows) for lane, ends in row["ends"]}
    found = wide_findings(program, calls, lasts)
    for each in calls.values():
        found += [one for one in each if one.took_s > one.timeout_s + SLACK_S]
    answers = {}
    for step, stops in (stop for row in rows for stop in row["stops"]):
        answers.setdefault(step, set()).add(stops)
    return found + [f"step {step}: {each}" for step, each in answers.items() if len(each) > 1]


@pytest.mark.parametrize("part", range(JOBS))
def test_all_calls_end_in_time_and_all_are_in_step(child_env, part):
    seeds = list(range(part * PROGRAMS, (part + 1) * PROGRAMS))
    ended = started(child_env, random_jobs.play, seeds)
    assert [one.code for one in ended] == [0] * PROCESSES, [one.error or one.err for one in ended]
    for number, seed in enumerate(seeds):
        program = program_of(seed)
        found = found_in(program, [one.value[number] for one in ended])
        assert not found, f"seed {seed}: {found}\n{program}"


@pytest.mark.parametrize("number", range(DEATHS))
def test_all_that_live_meet_after_a_death(child_env, number):
    seeds = (seed for seed in range(1000) if program_of(seed, deadly=True).has_deaths)
    seed = [next(seeds) for _ in range(number + 1)][-1]
    program = program_of(seed, deadly=True)
    dead = {fault.process for fault in program.faults if fault.kind == "killed"}
    ended = started(child_env, random_jobs.survive, seed)
    expected = [-9 if process in dead else 0 for process in range(PROCESSES)]
    assert [one.code for one in ended] == expected, [one.error or one.err for one in ended]
    late_s = [late for one in ended for late in one.value or []]
    assert max(late_s, default=0.0) < SLACK_S, f"seed {seed}: {late_s}\n{program}"
