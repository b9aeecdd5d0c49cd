"""Random failures of real jobs: a way to fail, a place in the program, and what the others do.

The first line names the right process and cause, whoever reports. As many are tried as the variable
RANDOM_FAILURES says, half of them without `shoal run`.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from processes.conftest import Job
from processes.run.conftest import Launch

pytestmark = pytest.mark.faults
COUNT = int(os.environ.get("RANDOM_FAILURES", "12"))
AT_ONCE = 3
MOST_LINES = 24

FOUND = "processes made different calls"
WAYS = {  # what the process does: the headline, the code; without `shoal run`, if they differ
    "raise ValueError('no data')": ("process {} raised ValueError", 1),
    "{}['adamw']": ("process {} raised KeyError", 1),
    "open('data/shard-00001.npy')": ("process {} raised FileNotFoundError", 1),
    "raise MemoryError": ("process {} raised MemoryError", 1),
    "sys.exit(5)": ("process {} ended with exit code 5", 5),
    "sys.exit('no data')": ("process {} ended with exit code 1", 1),
    "sys.exit(72)": ("process {} ended with exit code 72", 72),
    "sys.exit(0)": ("process {} ended with exit code 0", 72),
    "os._exit(6)": ("process {} ended with exit code 6", 6, "process {} was lost"),
    "os.abort()": ("process {} was killed by SIGABRT", 134, "process {} was lost"),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        "process {} was killed by SIGKILL", 137, "process {} was lost",
    ),
    "os.kill(os.getpid(), signal.SIGSEGV)": (
        "process {} was killed by SIGSEGV", 139, "process {} was lost",
    ),
    "shoal.barrier('other')": (FOUND, 70),
}  # fmt: skip
PLACES = (
    "fail()",
    "(lambda: fail())()",
    "[fail() for _ in range(1)]",
    "try: 1 / 0\n        except ZeroDivisionError: fail()",
    "try: pass\n        finally: fail()",
    "with threading.Lock(): fail()",
)
CATCHES = "try: shoal.barrier('s')\n    except shoal.ShoalError as error: "
OTHERS = {  # and whether they come to an end by themselves
    "shoal.barrier('s')": True,
    "shoal.allgather(step, name='s')": True,
    CATCHES + "sys.exit(9)": True,
    CATCHES + "raise RuntimeError('no epoch') from error": True,
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); shoal.barrier('s')": True,
    "reduced(x).block_until_ready()": True,
    "time.sleep(0.01)": False,
}
DEVICES = """
import jax, numpy
mesh = shoal.make_mesh({"x": -1})
x = shoal.put(numpy.ones(12, "float32"), shoal.Layout(mesh, "x"))
reduced = jax.jit(lambda v: v / v.sum())
reduced(x).block_until_ready()
"""
PROGRAM = """
import os, signal, sys, threading, time
import shoal
shoal.initialize({options})
here = shoal.process_index()
{devices}
def fail():
    {way}

def train(step):
    if step == {step} and here == {victim}:
        {place}
    {others}

shoal.barrier("start")
for step in range(1000):
    with shoal.step(step): train(step)
"""
IMPORT = "sys.path.insert(0, os.path.dirname(__file__))\nimport train\n"


class Failure(NamedTuple):
    """One job that fails."""

    way: str
    place: str
    others: str
    processes: int
    victim: int
    step: int
    launched: bool  # by `shoal run`

    def program(self, options: str) -> str:
        """Return the program of all processes."""
        devices = DEVICES if "reduced" in self.others else ""
        return PROGRAM.format(**self._asdict(), options=options, devices=devices)

    @property
    def headline(self) -> str:
        """What the first line says."""
        by_launcher, _, *alone = WAYS[self.way]
        text = by_launcher if self.launched or not alone else alone[0]
        return text.format(f"{self.victim} of {self.processes}")


def failures() -> list[Failure]:
    """Return random failures that have one right answer."""
    chance, found = random.Random(20261129), []
    while len(found) < COUNT:
        count = chance.choice((2, 3, 4))
        one = Failure(
            chance.choice([*WAYS]), chance.choice(PLACES), chance.choice([*OTHERS]), count,
            chance.randrange(count), chance.randrange(4), launched=len(found) % 2 == 0,
        )  # fmt: skip
        waits = OTHERS[one.others]
        is_missed_only = one.way in ("sys.exit(0)", "shoal.barrier('other')")
        if not waits and (is_missed_only or not one.launched):
            continue  # nobody misses it; or no process learns of it
        if not one.launched and "sys.exit" in one.others:
            continue  # no process ends by an error of others, and so none reports
        if one.way == "shoal.barrier('other')" and one.others != "shoal.barrier('s')":
            continue  # of other calls, or with an error that is caught
        found.append(one)
    return found


def launched(one: Failure, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run a job by `shoal run`; return what is wrong with its report."""
    launch = Launch(folder, {**env})
    try:
        script = one.program("virtual_devices=1")
        options = ("-n", str(one.processes), "--log-dir", str(folder / "logs"))
        finished = launch.run(*options, script=script)
    finally:
        launch.end()
    problems = problems_of(one, "shoal run", finished.err, folder / "logs" / "failure.json")
    code = WAYS[one.way][1]
    return [*problems, *([f"code {finished.code}"] if finished.code != code else [])]


def alone(one: Failure, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run a job without a launcher; return what is wrong with its report."""
    path = folder / "failure.json"
    job = Job(folder, {**env, "SHOAL_FAILURE_FILE": str(path)})
    try:
        options = (
            "coordinator_address=sys.argv[1], process_id=int(sys.argv[2]),"
            " num_processes=int(sys.argv[3]), virtual_devices=1"
        )
        (folder / "train.py").write_text(one.program(options))  # at one place on all of them
        ended = job.run(one.processes, IMPORT)
    finally:
        job.end()
    reports = [each.err for each in ended if "shoal: failed" in each.err]
    if len(reports) != 1:
        return [f"{len(reports)} reports: {[each.err for each in ended]}"]
    return problems_of(one, "shoal", reports[0], path)


def problems_of(one: Failure, program: str, err: str, path: Path) -> list[str]:
    """Return what is wrong with a report and its facts."""
    lines = err.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith(f"{program}: failed")]
    if not heads:
        return [f"no report: {err}"]
    report = lines[heads[-1] :]
    said = re.sub(r"^.*? after [\d.]+ s: |, found in step \d+$", "", report[0])
    said = re.sub(r" \([\w.-]+\)", "", said)
    facts = json.loads(path.read_text())
    causes = facts["causes"][0]
    processes = [p for first, last in causes["processes"] for p in range(first, last + 1)]
    found = {
        f"{said!r}": said == one.headline,
        f"{len(report)} lines": len(report) <= MOST_LINES,
        f"facts: {facts['headline']}": facts["headline"] in report[0],
        f"processes {processes}": one.victim in processes,
        f"exit_code {facts['exit_code']}": not one.launched
        or facts["exit_code"] == WAYS[one.way][1],
    }
    return [f"{text}\n{err}" for text, is_right in found.items() if not is_right]


@pytest.fixture(scope="module")
def problems_in(
    request: pytest.FixtureRequest,
    outside: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[int], list[str]]]:
    """Return a function that returns what is wrong with a failure; a few run at a time."""
    rows = failures()

    def run(number: int) -> list[str]:
        folder = tmp_path_factory.mktemp(f"failure{number}")
        return (launched if rows[number].launched else alone)(rows[number], folder, outside)

    if hasattr(request.config, "workerinput"):  # pytest -n runs the tests several at a time
        yield run
        return
    chosen = [
        item.callspec.params["number"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {number: pool.submit(run, number) for number in chosen}
        yield lambda number: found[number].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(COUNT))
def test_the_first_line_names_the_right_process_and_cause(problems_in, number):
    assert not problems_in(number), str(failures()[number])
