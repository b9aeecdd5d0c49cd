"""Where no launcher of shoal reports a failure, the processes of the job do: one line each, and one
report."""

from __future__ import annotations

import json
import os
import re
import signal
import stat

import pytest

from few import few
from processes.run.test_run_first_to_fail import ENDS, START
from processes.run.test_run_stalled import HEAD as HEAD_OF_STALLS
from processes.run.test_run_stalled import WAITS

TRAIN = """
import atexit, os, queue, signal, sys
import shoal
from shoal.errors import *
from shoal.runtime.barrier import barrier
from shoal.runtime.process import client

def others_wait():
    here = client()
    while sum(member.is_waiting for member in here.members(timeout_s=60)) < here.num_processes - 1:
        pass

def load(path): return open(path)

def fails(index, at=1):
    for step in range(3):
        with shoal.step(step):
            if step == 2 and index == at: others_wait(); load("data/shard-00001.npy")
            barrier("step")

def killed(index, at=1):
    barrier("ready")
    if index == at: others_wait(); os.kill(os.getpid(), signal.SIGKILL)
    barrier("after")

def alike(index):
    barrier("start"); rate = {"adam": 1e-3}["adamw"]
def apart(index):
    if index == 2: others_wait()
    barrier(f"epoch {5 if index == 2 else 4}")

def late(index):
    if index == 1: barrier("of one", processes=[1], timeout_s=60); signal.pause()
    barrier("batch", timeout_s=1)

def raises_of_its_own(index):
    try:
        fails(index)
    except PeerFailedError as error:
        raise RuntimeError("no epoch") from error

def stalls(index):
    for step in range(6):
        with shoal.step(step):
            if step == 4 and index == 1: queue.Queue().get()
            barrier("step")

def frozen(index):
    lowest = client().members(timeout_s=60)[0].pid
    barrier("ready")
    if index == 0: os.kill(os.getpid(), signal.SIGSTOP)
    if index == 1:
        while open(f"/proc/{lowest}/stat").read().rpartition(") ")[2][0] != "T": pass
        raise ValueError("no data")
    atexit.register(os.kill, lowest, signal.SIGKILL)
    barrier("after")
"""
SCRIPT = """
sys.path.insert(0, os.path.dirname(__file__))
initialize()
import train
train.{}
"""
JOINS = (
    "shoal.initialize(coordinator_address=sys.argv[1], process_id=int(sys.argv[2]),"
    " num_processes=int(sys.argv[3]), virtual_devices=1)"
)
IMPORT = "sys.path.insert(0, os.path.dirname(__file__))\nimport train\n"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: 'data/shard-00001.npy'"
AFTER = re.compile(r" after [\d.]+ s")


@pytest.fixture
def run(job):
    """Return a function that runs a function of TRAIN; it returns the processes' ends."""
    (job.folder / "train.py").write_text(TRAIN)

    def start(call, count=3, before="", **env):
        return job.run(count, before + SCRIPT.format(call), **env)

    return start


def own_lines(ended):
    """Return what a process has printed, without hosts and times."""
    said = AFTER.sub("", re.sub(r" \((?!train|of |1 )[\w.-]+\)", "", ended.err))
    return said.splitlines()


def test_each_process_prints_one_line_and_one_prints_the_report(run, job):
    path = job.folder / "failure.json"
    first, failed, other = run("fails(index)", SHOAL_FAILURE_FILE=str(path))
    line = f"stopped at barrier 'step' (train.py:19): process 1 raised {NO_FILE} (train.py:13)"
    assert own_lines(other) == [f"shoal: process 2 of 3: {line}"]
    assert own_lines(first) == [
        f"shoal: process 0 of 3: {line}",
        "shoal: failed: process 1 of 3 raised FileNotFoundError",
        '  File "script1.py", line 31, in <module>',
        "    train.fails(index)",
        '  File "train.py", line 18, in fails',
        '    if step == 2 and index == at: others_wait(); load("data/shard-00001.npy")',
        '  File "train.py", line 13, in load',
        "    def load(path): return open(path)",
        f"  {NO_FILE}",
        "",
        "  In step 2. Processes 0, 2 were waiting at barrier 'step' (train.py:19).",
        "  Exit code 72 (of this process).",
    ]
    assert (first.code, failed.code, other.code) == (72, 1, 72)
    assert failed.err.startswith("Traceback")
    assert failed.err.endswith(f"{NO_FILE}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    facts = json.loads(path.read_text())
    assert (facts["kind"], facts["exit_code"]) == ("exception", 72)
    assert facts["causes"][0]["processes"] == [[1, 1]]
    assert facts["text"].splitlines()[1:] == first.err.splitlines()[2:]
    assert [*job.folder.glob("failure.json*")] == [path]


@pytest.mark.parametrize("at", [0, 1])
def test_the_lowest_one_left_reports(run, at):
    ended = run(f"killed(index, {at})")
    reports = [one for one in ended if "shoal: failed" in one.err]
    assert reports == [ended[1 - at]]
    waiting = "1-2" if at == 0 else "0, 2"
    assert own_lines(reports[0])[1:] == [
        f"shoal: failed: process {at} of 3 was lost",
        "  Its connection closed.",
        "  Last seen at barrier 'ready' (train.py:22).",
        f"  Processes {waiting} were waiting at barrier 'after' (train.py:24).",
        "  Exit code 71 (of this process).",
    ]


def test_a_frozen_process_does_not_keep_the_others_from_reporting(run):
    ended = run("frozen(index)")
    reports = [one for one in ended if "shoal: failed" in one.err]
    assert reports == [ended[2]]
    assert own_lines(reports[0])[1] == "shoal: failed: process 1 of 3 raised ValueError"
    assert [one.code for one in ended] == [-signal.SIGKILL, 1, 72]


def test_equal_failures_have_one_report(run):
    first, *others = run("alike(index)")
    assert first.err.count("shoal: failed") == 1
    for one in (first, *others):
        assert one.err.startswith("Traceback")
    assert not any("shoal: failed" in one.err for one in others)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_coordinator_process_0_reports(job, number):
    script = "initialize()\nbarrier('ready')\nsay('ready')\nwhile True: barrier('again')\n"
    for index in range(3):
        job.start(index, 3, script, SHOAL_LOST_AFTER_S="2", SHOAL_HEARTBEAT_S="0.5")
    for process in job.processes:
        process.until_said("ready")
    (place,) = job.descendants(of="shoal.runtime.server.coordinator")
    os.kill(place, number)
    first, *others = job.wait()
    assert [one.code for one in (first, *others)] == [71] * 3, first.err
    stopped, headline, *rest = own_lines(first)
    headline = re.sub(r" at [\d.:]+", "", headline)
    assert headline == "shoal: failed: the coordinator was lost", first.err
    assert rest[-1] == "  Exit code 71 (of this process)."
    assert stopped.startswith("shoal: process 0 of 3: stopped at barrier 'again' (script0.py:")
    assert [own_lines(one)[0].partition(": stopped")[0] for one in others] == [
        f"shoal: process {process} of 3" for process in (1, 2)
    ]
    assert not any("shoal: failed" in one.err for one in others)


def test_a_deadline_names_the_process_that_did_not_arrive(run):
    first, missing, other = run("late(index)", SHOAL_HANG_TIMEOUT_S="0.5")
    line = "stopped at barrier 'batch' (train.py:34): process 1 of 3 did not reach barrier 'batch'"
    assert own_lines(other) == [f"shoal: process 2 of 3: {line}"]
    lines = own_lines(first)
    assert lines[:3] == [
        f"shoal: process 0 of 3: {line}",
        "shoal: failed: process 1 of 3 did not reach barrier 'batch'",
        '  arrived   processes 0, 2   train.py:34   barrier("batch", timeout_s=1)',
    ]
    assert lines[3].startswith("  missing   process 1        train.py:33   ")
    assert lines[-1] == "  Exit code 73 (of this process)."
    assert "shoal: failed" not in missing.err


def test_a_stall_is_reported_as_the_stall(run):
    first, stuck, other = run("stalls(index)", SHOAL_STALLED_AFTER_S="2")
    reports = [one for one in (first, stuck, other) if "shoal: failed" in one.err]
    assert [one.code for one in (first, stuck, other)] == [77] * 3
    assert len(reports) == 1
    lines = own_lines(reports[0])
    at = next(i for i, line in enumerate(lines) if line.startswith("shoal: failed"))
    claim = re.sub(r"moved for \d+ s", "moved for N s", lines[at])
    stall = "no process has moved for N s; processes 0, 2 wait for process 1"
    assert claim == f"shoal: failed: {stall}"
    assert lines[at + 1].startswith("  process 1        train.py:45")
    assert lines[at + 2].startswith("  processes 0, 2   train.py:46   waiting in shoal: barrier")
    assert lines[-1] == "  Exit code 77 (of this process)."


@pytest.mark.faults
@pytest.mark.parametrize("waits", WAITS)
def test_stall_report_names_which_process_waits_for_which(job, waits):
    program, words = WAITS[waits]
    text = HEAD_OF_STALLS.replace("shoal.initialize(virtual_devices=1)", JOINS) + program
    (job.folder / "train.py").write_text(text)
    for index in range(3):
        job.start(index, 3, IMPORT, SHOAL_STALLED_AFTER_S="4")
    ended = job.wait()
    assert [one.code for one in ended] == [77] * 3, ended[0].err
    (report,) = [one for one in ended if "shoal: failed" in one.err] or ended[:1]
    assert any(line.endswith(f"; {words}") for line in own_lines(report)), report.err
    assert "# odd" in "".join(one.err for one in ended), "the stack of the reader, too"


def test_a_comparison_has_all_processes_that_had_arrived(run):
    ended = run("apart(index)")
    reports = [own_lines(one) for one in ended if "shoal: failed" in one.err]
    line = "stopped at barrier 'epoch {}' (train.py:30): processes gave a barrier different names"
    assert len(reports) == 1
    assert reports[0][1:] == [
        "shoal: failed: processes gave a barrier different names",
        '  train.py:30   barrier(f"epoch {5 if index == 2 else 4}")',
        "    process 2       'epoch 5'",
        "    processes 0-1   'epoch 4'",
        "  A barrier needs the same name on every process.",
        "  Exit code 70 (of this process).",
    ]
    for index, one in enumerate(ended):
        name = 5 if index == 2 else 4
        assert own_lines(one)[0] == f"shoal: process {index} of 3: {line.format(name)}"
        assert "Traceback" not in one.err


def test_an_error_of_the_programs_own_keeps_its_traceback(run):
    first, _, other = run("raises_of_its_own(index)")
    for one in (first, other):
        assert "RuntimeError: no epoch" in one.err
        assert "Traceback" in one.err
    assert " Process 0 then raised RuntimeError (train.py:40): no epoch\n" in first.err
    assert "shoal: failed" not in other.err


def test_all_frames_if_asked_for(run):
    first, *_ = run("fails(index)", SHOAL_TRACEBACK="full")
    assert "Traceback" in first.err
    assert "PeerFailedError" in first.err
    assert "shoal: failed" in first.err


def test_a_hook_of_the_program_prints_and_the_report_follows(run):
    hook = "import rich.traceback; rich.traceback.install()\n"
    first, *_ = run("fails(index)", before=hook)
    assert first.err.index("PeerFailedError") < first.err.index("shoal: failed")


def test_another_launchers_sigterm_does_not_lose_the_report(run):
    # The hook runs where that signal usually arrives: once another process has ended.
    hook = "sys.excepthook = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
    first, *_ = run("fails(index)", before=hook)
    assert first.code == 72
    assert own_lines(first)[-1] == "  Exit code 72 (of this process)."


def test_a_second_sigterm_ends_it(run):
    twice = "lambda *_: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]"
    first, *_ = run("fails(index)", before=f"sys.excepthook = {twice}\n")
    assert first.code == -signal.SIGTERM


def test_a_process_that_does_not_join_is_reported_once(job):
    for index in (0, 1):
        script = (
            "process.initialize(timeout_s=3, coordinator_address=address,"
            " num_processes=count, process_id=index)\n"
        )
        job.start(index, 3, script)
    first, other = job.wait()
    assert own_lines(other) == [
        "shoal: process 1 of 3: stopped at script1.py:27: process 2 of 3 did not join"
    ]
    assert own_lines(first)[:3] == [
        "shoal: failed: process 2 of 3 did not join",
        "  arrived   processes 0-1   script0.py:27   process.initialize(timeout_s=3, …",
        "  missing   process 2       has not called initialize",
    ]
    assert own_lines(first)[-1] == "  Exit code 74 (of this process)."


def test_one_process_has_nothing_to_compare(run):
    (one,) = run("fails(index, 0)", count=1)
    assert one.code == 1
    assert "shoal: " not in one.err
    assert one.err.endswith(f"{NO_FILE}\n")


# Others never hear of it, or never end: a launcher is needed.
LAUNCHED = (
    "an abort, and another ignores SIGTERM", "a kill, and a peer makes an exit of its error",
)  # fmt: skip
# What is said otherwise than by `shoal run`, which knows exit codes and ends processes.
ALONE = {
    "sys.exit(256)": ("process 1 of 3 ended with exit code 0", "Exited with code 256"),
    "an exit that takes longer than the others wait": (
        "process 1 of 3 ended with exit code 9", "Exited with code 9",
    ),
    "an error, while the others compute": ("process 1 of 3 raised ValueError", "at train.py:15"),
    "an exec": ("process 1 of 3 was lost", "Its connection closed."),
    "a reader of feed, while its process computes": (
        "process 1 of 3 failed", "It had reported: OSError: shard 3",
    ),
}  # fmt: skip
IN_SUITE = (
    "a loop that is shorter, waits in jit", "a difference while one computes",
    "a reader of feed, while its process computes", "an error, while the others compute",
)  # fmt: skip


@pytest.mark.parametrize("end", few([end for end in ENDS if end not in LAUNCHED], IN_SUITE))
def test_the_process_that_failed_first_is_named(job, end):
    program, (headline, _, words) = ENDS[end]
    headline, words = ALONE.get(end, (headline, words.replace("script.py", "train.py")))
    text = START.replace("shoal.initialize(virtual_devices=1)", JOINS) + program
    (job.folder / "train.py").write_text(text)
    path = job.folder / "failure.json"
    for index in range(3):
        job.start(index, 3, IMPORT, COLUMNS="200", SHOAL_FAILURE_FILE=str(path),
                  SHOAL_HANG_TIMEOUT_S="5")  # fmt: skip
    lives_on = "os.execv" in program
    ended = [job.wait_for(index) for index in ((0, 2) if lives_on else range(3))]
    (report,) = [one for one in ended if "shoal: failed" in one.err] or [ended]
    lines = own_lines(report)
    first = next(n for n, line in enumerate(lines) if line.startswith("shoal: failed"))
    said = re.sub(r", found in step \d+$", "", lines[first])
    assert said == f"shoal: failed: {headline}", report.err
    assert len(lines) - first <= 24
    assert words in " ".join(" ".join(lines[first:]).split()), report.err
    assert "waiting at barrier 'start'" not in report.err, "they have gone on from it"
    assert json.loads(path.read_text())["headline"] in " ".join(lines[first].split())
