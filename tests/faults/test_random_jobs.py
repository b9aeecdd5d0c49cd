"""A hundred random programs of collectives in real processes; see `collectives.random_programs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from collectives import random_programs as programs
from collectives.random_programs import Ended
from faults import random_jobs
from faults.conftest import AT_ONCE
from shoal.testing.cluster import Cluster

pytestmark = pytest.mark.faults
SETTINGS = {"SHOAL_HEARTBEAT_S": "0.3", "SHOAL_LOST_AFTER_S": "1.5"}
SEEDS = range(90)  # of programs without deaths
DEADLY = 10  # programs with deaths: each is a job of its own


class Job(NamedTuple):
    """One job, and the programs that it plays one after the other."""

    processes: int
    seeds: tuple[int, ...]
    deadly: bool

    def __str__(self) -> str:
        return f"{self.processes} processes, seeds {self.seeds[0]}-{self.seeds[-1]}"

    def program(self, seed: int) -> programs.Program:
        """Return one of them."""
        return programs.program_of(seed, deadly=self.deadly, processes=self.processes)

    @property
    def survivors(self) -> list[int]:
        """The processes that live to the end."""
        faults = [fault for seed in self.seeds for fault in self.program(seed).faults]
        dying = {fault.process for fault in faults if fault.kind in programs.DEADLY}
        return [p for p in range(self.processes) if p not in dying]


def jobs() -> list[Job]:
    """Return all: programs without deaths by number of processes, and each one with deaths."""
    peaceful = [Job(n, tuple(SEEDS[n - 2 :: 3]), False) for n in (2, 3, 4)]
    several = (Job(3, (seed,), True) for seed in range(1000, 2000))
    deadly = [job for job in several if 0 < len(job.survivors) < 3]
    return [*peaceful, *deadly[:DEADLY]]


@pytest.fixture(scope="module")
def told_of(
    request: pytest.FixtureRequest, outside: Mapping[str, str]
) -> Iterator[Callable[[Job], Mapping[int, Any]]]:
    """Return a function that returns what each process of a job says; several run at a time."""

    def run(job: Job) -> Mapping[int, Any]:
        with Cluster(
            job.processes, env={**outside, **SETTINGS}, start_method="fork", deadline_s=110.0
        ) as bench:
            bench.start(random_jobs.play, list(job.seeds), job.deadly)
            ended = bench.wait(only=job.survivors)
        assert all(one.value for one in ended), ended
        return {one.process: one.value for one in ended}

    chosen = [
        item.callspec.params["job"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        told = {job: pool.submit(run, job) for job in dict.fromkeys(chosen)}
        yield lambda job: told[job].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_all_answer_and_the_point_at_last_works(told_of, job):
    told = told_of(job)
    found = [line for number in range(len(job.seeds)) for line in findings(job, number, told)]
    assert not found, "\n".join(found)


def findings(job: Job, number: int, told: Mapping[int, Any]) -> list[str]:
    """Return what is wrong with one program, from what each process says of it."""
    program = job.program(job.seeds[number])
    rows = {process: one[number] for process, one in told.items()}
    endings = {p: [Ended(*row) for row in ended] for p, (_, ended, _) in rows.items()}
    lasts = {p: RuntimeError(last) for p, (_, _, last) in rows.items() if last is not None}
    wrong = [
        f"process {p}, operation {one.at}: {one.error}"
        for p, ended in endings.items()
        for one in ended
        if one.error is not None and "another operation" in str(one.error)
    ]
    found = wrong + programs.findings(program, endings, lasts)
    return [f"seed {program.seed}: {line}\n{program}" for line in found]
