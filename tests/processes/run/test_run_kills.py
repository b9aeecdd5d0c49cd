"""A job whose processes are killed again and again trains what an undisturbed one trains.

One run of examples/digits.py on 4 processes. As many kills as the variable RANDOM_KILLS says, each
of a random process, of JAX's service or of the coordinator, every third of two at once: while they
start, restore, train or save.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.launch.log_dir import JOB_FILE
from shoal.runtime.system import progress_file

EXAMPLE = Path(__file__).parents[3] / "examples"
COUNT = int(os.environ.get("RANDOM_KILLS", "8"))
LIMIT_S = 60.0 + 30.0 * COUNT
pytestmark = [pytest.mark.faults, pytest.mark.timeout(2 * LIMIT_S)]
PROCESSES, SAVED_EACH = 4, 3
# It trains until the test has written, before an attempt, after how many epochs it ends.
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {example!r})
import digits
last = Path("epochs")
digits.EPOCHS = int(last.read_text()) if last.exists() else 1_000_000
sys.exit(digits.main(sys.argv[1]))
"""
LATEST_S = 1.5  # after the start of an attempt
SOON_S = 0.3  # after a process has come where it is to be killed


class Attempt(NamedTuple):
    """What `shoal run` says of a running attempt."""

    token: str
    pids: dict[str, int]  # by name: "process 3", "coordinator", …
    progress: list[str]  # files


def posted(folder: Path, before: Attempt | None) -> Attempt | None:
    """Return the attempt that runs now, once it is another one than before."""
    try:
        job = json.loads((folder / "logs" / JOB_FILE).read_text())
    except (OSError, ValueError):
        return None
    pids = {f"process {index}": pid for index, pid in enumerate(job["processes"])}
    newest = max((folder / "logs").glob("attempt*"), key=lambda path: int(path.name[7:]))
    files = [f"{newest}/.p{index:04d}.progress" for index in range(PROCESSES)]
    attempt = Attempt(job["token"], {**job["services"], **pids}, files)
    return attempt if before is None or attempt.token != before.token else None


def moments(attempt: Attempt, one: int) -> dict[str, Callable[[], bool]]:
    """Return the states of process `one` in which a kill is to come, each with a check of it."""
    file = attempt.progress[one]
    return {
        "start": lambda: True,
        "restore": lambda: progress_file.has_devices(file),
        "train": lambda: progress_file.read(file).step >= 0,
        "save": lambda: progress_file.is_saving(file),
    }


def run(launch: Any, name: str) -> subprocess.Popen[str]:
    """Start the job; its output goes into a file."""
    output = (launch.folder / f"{name}.txt").open("w")
    options = ("-n", str(PROCESSES), "--devices", "1", "--log-dir", "logs")
    options += ("--max-restarts", str(10 * COUNT))
    script = SCRIPT.format(example=str(EXAMPLE))
    with output:
        return launch.start(
            *options, script=script, arguments=(name,), stdout=output, stderr=output
        )


def until(job: subprocess.Popen[str], is_so: Callable[[], Any]) -> Any:
    """Wait until it is so, while the job runs; return what it says."""
    give_up_s = time.monotonic() + LIMIT_S
    while not (found := is_so()):
        assert job.poll() is None, "the job has ended"
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    return found


def test_all_kills_are_recovered_and_the_parameters_are_the_same(launch):
    chance = random.Random(COUNT)
    job = run(launch, "killed")
    attempt, saved = None, -1
    for number in range(COUNT):
        attempt = until(job, partial(posted, launch.folder, attempt))
        where = moments(attempt, chance.randrange(PROCESSES))
        moment = chance.choice([*where])
        until(job, where[moment])
        time.sleep({"start": LATEST_S, "save": 0.0}.get(moment, SOON_S) * chance.random())
        saved = max([saved, *(progress_file.read(file).saved for file in attempt.progress)])
        if number == COUNT - 1:
            last = (saved // SAVED_EACH + 4) * SAVED_EACH
            (launch.folder / "epochs").write_text(str(last))
        victims = chance.sample([*attempt.pids], 2 if number % 3 == 2 else 1)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(attempt.pids[victim], signal.SIGKILL)
        print(f"kill {number}, {moment}: {', '.join(victims)}", flush=True)
    assert job.wait(LIMIT_S) == 0, (launch.folder / "killed.txt").read_text()[-4000:]
    said = (launch.folder / "killed.txt").read_text()
    assert said.count("shoal run: attempt ") >= COUNT
    job = run(launch, "undisturbed")
    assert job.wait(LIMIT_S) == 0
    compare = [sys.executable, "-m", "shoal", "ckpt", "diff", "killed", "undisturbed"]
    done = subprocess.run(compare, cwd=launch.folder, env=launch.env, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert launch.leaves_nobody()
