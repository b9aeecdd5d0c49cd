"""A hundred random programs of collectives in real processes; see `collectives.random_programs`."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import random_programs as programs
from collectives.random_programs import Ended
from faults import random_jobs

pytestmark = pytest.mark.faults
SEEDS = list(range(90))
DEADLY = 10  # programs with deaths: each is a job of its own
SETTINGS = {"SHOAL_HEARTBEAT_S": "0.3", "SHOAL_LOST_AFTER_S": "1.5"}


def findings(seed: int, processes: int, told: dict[int, Any], *, deadly: bool) -> list[str]:
    """Return what is wrong with a program, from what each process says of it."""
    program = programs.program_of(seed, deadly=deadly, processes=processes)
    endings = {p: [Ended(*row) for row in rows] for p, (_, rows, _) in told.items()}
    lasts = {p: RuntimeError(last) for p, (_, _, last) in told.items() if last is not None}
    wrong = [
        f"process {p}, operation {one.at}: {one.error}"
        for p, ended in endings.items()
        for one in ended
        if one.error is not None and "another operation" in str(one.error)
    ]
    found = wrong + programs.findings(program, endings, lasts)
    return [f"seed {seed}: {line}\n{program}" for line in found]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_programs_without_deaths_in_one_job(cluster, child_env, processes):
    seeds = SEEDS[processes - 2 :: 3]
    bench = cluster(processes, env=child_env | SETTINGS, deadline_s=110.0)
    told = bench.run(random_jobs.play, seeds, False)
    found = []
    for number, seed in enumerate(seeds):
        rows = {process: one[number] for process, one in enumerate(told)}
        found += findings(seed, processes, rows, deadly=False)
    assert not found, "\n".join(found)


def deadly_seeds() -> list[int]:
    """Return seeds of programs of three in which somebody dies, and somebody lives."""
    seeds = []
    for seed in range(1000, 2000):
        program = programs.program_of(seed, processes=3)
        if program.has_deaths and len(dying(program)) < 3:
            seeds.append(seed)
    return seeds[:DEADLY]


def dying(program: programs.Program) -> set[int]:
    return {fault.process for fault in program.faults if fault.kind in programs.DEADLY}


@pytest.mark.parametrize("seed", deadly_seeds())
def test_programs_with_deaths(cluster, child_env, seed):
    program = programs.program_of(seed, processes=3)
    survivors = [p for p in range(3) if p not in dying(program)]
    bench = cluster(3, env=child_env | SETTINGS, deadline_s=60.0)
    bench.start(random_jobs.play, [seed], True)
    ended = bench.wait(only=survivors)
    told = {one.process: one.value[0] for one in ended if one.value}
    assert sorted(told) == survivors, ended
    found = findings(seed, 3, told, deadly=True)
    assert not found, "\n".join(found)
