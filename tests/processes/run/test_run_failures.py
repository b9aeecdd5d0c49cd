"""Who failed first, how, with what exit code; and that the others end too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

WAIT = "import os, signal, sys, time; me = int(os.environ['RANK'])\n"


def test_the_first_failure_is_named_with_its_traceback_and_its_code(launch):
    finished = launch.run(
        *("-n", "3", "--log-dir", "logs"),
        script=WAIT
        + "class Odd(Exception): pass\n"
        + "def inner(): raise Odd('this is why')\n"
        + "if me == 1: inner()\n"
        + "time.sleep(600)\n",
    )
    assert finished.code == 1
    assert finished.verdict.endswith(" s: process 1 of 3 raised Odd")
    assert finished.err.splitlines()[1:] == [
        '  File "script.py", line 4, in <module>',
        "    if me == 1: inner()",
        '  File "script.py", line 3, in inner',
        "    def inner(): raise Odd('this is why')",
        "  Odd: this is why",
        "",
        "  Processes 0, 2 were running, and were ended by shoal run with SIGTERM.",
        "  Exit code 1. Log: logs/p0001.log",
    ]
    log = (launch.folder / "logs" / "p0001.log").read_text()
    assert log.startswith("Traceback (most recent call last):\n")
    assert log.endswith("Odd: this is why\n")
    assert "child.py" not in log
    assert "\x1e" not in log + finished.err
    failure = json.loads((launch.folder / "logs" / "failure.json").read_text())
    assert failure["text"].splitlines()[1:] == finished.err.splitlines()[1:]
    assert failure["exit_code"] == failure["causes"][0]["exit_code"] == 1
    assert [path.name for path in (launch.folder / "logs").glob(".*")] == []
    for path in (["logs"], ["logs/failure.json"], []):
        command = [sys.executable, "-m", "shoal", "report", *path]
        again = subprocess.run(
            command, env=launch.env, cwd=launch.folder, capture_output=True, text=True, timeout=60
        )
        assert (again.returncode, again.stdout) == (0, finished.err), again
    assert launch.leaves_nobody()


@pytest.mark.usefixtures("forks")
def test_processes_that_came_after_a_difference_was_found_are_in_the_comparison(launch):
    finished = launch.run(
        *("-n", "5", "--devices", "1", "--log-dir", "logs"),
        script=WAIT
        + "import numpy as np, pathlib, shoal\n"
        + "shoal.initialize()\n"
        + "found = [pathlib.Path(f'found-{n}') for n in range(5)]\n"
        + "while me > 1 and not found[0].exists(): pass\n"
        + "try: shoal.allgather(np.zeros((3, 4, 4, 3, 5)[me]))\n"
        + "except shoal.DivergenceError:\n"
        + "    found[me].touch()\n"
        + "    while not all(path.exists() for path in found): time.sleep(0.01)\n"
        + "    raise\n",
    )
    assert finished.code == 70
    rows = [line.split() for line in finished.err.splitlines()[2:5]]
    assert rows == [
        ["process", "4", "float64[5]"],
        ["processes", "0,", "3", "float64[3]"],
        ["processes", "1-2", "float64[4]"],
    ]
    failure = json.loads((launch.folder / "logs" / "failure.json").read_text())
    (cause,) = failure["causes"]
    sides = cause["difference"]["sides"]
    assert [side["processes"] for side in sides] == [[[4, 4]], [[0, 0], [3, 3]], [[1, 2]]]
    assert launch.leaves_nobody()


@pytest.mark.usefixtures("forks")
def test_frozen_process_is_named_and_not_the_processes_that_lost_it(launch):
    launch.env |= {"SHOAL_LOST_AFTER_S": "1", "SHOAL_GRACE_S": "0.3"}
    finished = launch.run(
        *("-n", "3", "--devices", "1"),
        script=WAIT
        + "import shoal; shoal.initialize()\n"
        + "if me == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        + "shoal.barrier('never', timeout_s=60)\n",
    )
    assert finished.code == 71
    assert finished.verdict.endswith(": process 1 of 3 was lost")
    assert "  It was stopped by a signal (SIGSTOP), and was ended by shoal run with" in finished.err
    assert "  Processes 0, 2 were waiting at barrier 'never' (script.py:4)." in finished.err
    assert launch.leaves_nobody()


@pytest.mark.usefixtures("forks")
def test_a_thread_that_raised_is_named_with_the_wait_that_it_led_to(launch):
    script = WAIT + (
        "import queue, shoal, threading\n"
        "shoal.initialize(virtual_devices=1)\n"
        "batches = queue.Queue()\n"
        "def load(): batches.put(open('no-such-file').read() if me == 1 else '')\n"
        "threading.Thread(target=load, name='loader').start()\n"
        "batch = batches.get()\n"
        "shoal.barrier('batch', timeout_s=2)\n"
    )
    finished = launch.run("-n", "2", "--log-dir", "logs", script=script)
    assert finished.code == 73, finished.err
    assert "p1| FileNotFoundError: [Errno 2]" in finished.err, "at once"
    assert "process 1 of 2 did not reach barrier 'batch'; a thread had raised" in finished.verdict
    report = finished.err[finished.err.index("shoal run: failed") :]
    assert "  Its thread 'loader' had ended with an exception, " in report
    assert "    def load(): batches.put(open('no-such-file')" in report
    failure = json.loads((launch.folder / "logs" / "failure.json").read_text())
    assert failure["causes"][0]["thread"] == "loader"


def test_logs_that_the_program_removed_are_not_named(launch):
    script = WAIT + "import shutil\nif me == 1: shutil.rmtree('logs'); 1 / 0\ntime.sleep(60)\n"
    finished = launch.run("-n", "2", "--log-dir", "logs", script=script)
    assert finished.code == 1, finished.err
    assert "shoal run: the directory of the logs was removed while the job ran: /" in finished.err
    assert finished.err.endswith("\n  Exit code 1.\n")
    assert "ZeroDivisionError: division by zero" in finished.err
    assert "os._exit" not in finished.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_named_and_gives_128_more(launch, number):
    finished = launch.run(
        *("-n", "2"),
        script=WAIT + f"if me == 1: os.kill(os.getpid(), {int(number)})\ntime.sleep(600)",
    )
    assert finished.code == 128 + number
    assert finished.verdict.endswith(f": process 1 of 2 was killed by {number.name}")
    assert ("shoal run did not send the signal" in finished.err) == (number == signal.SIGKILL)
    assert ("\n    if me == 1: os.kill(" in finished.err) == (number == signal.SIGSEGV)


def test_failure_that_follows_another_is_not_the_verdict(launch):
    """Process 1 raises; process 0 learns of it and is gone first, with code 72."""
    finished = launch.run(
        *("-n", "2"),
        script=WAIT
        + "import atexit, pathlib\n"
        + "raised, gone = pathlib.Path('raised'), pathlib.Path('gone')\n"
        + "def last():\n"
        + "    raised.touch()\n"
        + "    while not gone.exists(): time.sleep(0.01)\n"
        + "if me == 1: atexit.register(last); raise ValueError('the root')\n"
        + "while not raised.exists(): time.sleep(0.01)\n"
        + "gone.touch(); sys.exit(72)\n",
    )
    assert finished.code == 1
    assert finished.verdict.endswith(": process 1 of 2 raised ValueError")
    assert "  ValueError: the root\n" in finished.err
    assert "  Process 0 ended with exit code 72.\n" in finished.err


@pytest.mark.usefixtures("forks")
def test_first_failure_is_the_verdict_even_if_its_process_exits_last(launch):
    """Process 1 ends with 3 once process 0, which learned of it and ended with 9, is reaped."""
    launch.env["SHOAL_FAILURE_GRACE_S"] = "60"
    finished = launch.run(
        *("-n", "2", "--devices", "1"),
        script=WAIT
        + "import atexit, pathlib, shoal\n"
        + "pid = pathlib.Path('pid')\n"
        + "def last():\n"
        + "    while not pid.exists() or os.path.exists('/proc/' + pid.read_text()): pass\n"
        + "if me == 1: atexit.register(last)\n"
        + "shoal.initialize(); shoal.barrier('here')\n"
        + "if me == 1: sys.exit(3)\n"
        + "try: shoal.barrier('never')\n"
        + "except shoal.errors.PeerFailedError:\n"
        + "    pathlib.Path('new').write_text(str(os.getpid())); os.rename('new', 'pid')\n"
        + "    sys.exit(9)\n",
    )
    assert finished.code == 3, finished.err
    assert finished.verdict.endswith(": process 1 of 2 ended with exit code 3")
    assert "  Process 0 was waiting at barrier 'never' (script.py:" in finished.err


ENDS = {  # what process 1 does while the others wait; the code of the job, and what is said of it
    "raise KeyError('own')": (1, "raised KeyError", "KeyError: 'own'"),
    "atexit.register(time.sleep, 60); raise KeyError('own')":
        (1, "raised KeyError", "Did not end by itself: shoal run sent SIGTERM"),
    "os._exit(0)": (71, "ended with exit code 0", "It ended before it left the job"),
    "sys.excepthook = lambda *_: os._exit(0); raise KeyError('own')":
        (71, "raised KeyError", "Ended with code 0 before it left the job"),
    "sys.exit(75)": (72, "ended with exit code 75", "but there was no preemption notice"),
    "sys.exit(72)": (72, "ended with exit code 72", "if me == 1: sys.exit(72)"),
}  # fmt: skip


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("ends", ENDS)
def test_exit_while_others_wait_is_the_first_failure_whatever_the_others_raise(launch, ends):
    """Process 2 once logged an exception, and ends with a code of its own; 0 raises another."""
    launch.env["SHOAL_FAILURE_GRACE_S"] = "1"
    code, way, words = ENDS[ends]
    script = WAIT + (
        "import atexit, logging, shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.exception('handled') if me == 2 else None\n"
        "shoal.barrier('a')\n"
        f"if me == 1: {ends}\n"
        "try: shoal.barrier('b')\n"
        "except shoal.ShoalError as error:\n"
        "    if me == 0: raise ValueError('no answer') from error\n"
        "if me == 2: sys.exit(9)\n"
    )
    finished = launch.run("-n", "3", script=script)
    assert finished.code == code, finished.err
    assert f": process 1 of 3 {way}" in finished.verdict
    assert words in finished.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("words", ["RESOURCE_EXHAUSTED: 80 GiB", "INTERNAL: no more"])
def test_an_error_of_jaxs_runtime_that_came_first_is_its_own(launch, words):
    """Process 0 closes its feed on its way out, from which process 1 learns first, and fails."""
    launch.env["SHOAL_FAILURE_GRACE_S"] = "5"
    script = WAIT + (
        "import jax, numpy as np, shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "layout = shoal.Layout(shoal.make_mesh({'data': -1}), 'data')\n"
        "batches = shoal.feed(np.zeros(80, np.float32), layout, batch=2)\n"
        "try:\n"
        "    for number, _ in enumerate(batches):\n"
        f"        if me == 0 and number == 3: raise jax.errors.JaxRuntimeError({words!r})\n"
        "finally:\n"
        "    batches.close()\n"
    )
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 1, finished.err
    assert ": process 0 of 2 raised JaxRuntimeError" in finished.verdict
    assert f"  JaxRuntimeError: {words}\n" in finished.err


@pytest.mark.usefixtures("forks")
def test_killed_host_agent_is_the_verdict_and_not_a_process(launch):
    launch.start(
        *("-n", "2", "--devices", "1"),
        script=WAIT + "import shoal; shoal.initialize(); print('ready'); time.sleep(600)\n",
    )
    launch.await_words("ready", 2)
    (pid,) = launch.pids("shoal.runtime.jax_service.host_agent")
    os.kill(pid, signal.SIGKILL)
    finished = launch.finish()
    assert finished.code == 71
    assert ": the agent of host " in finished.verdict
    assert finished.verdict.endswith(f" (pid {pid}) was killed by SIGKILL")
    words = "Its processes reach JAX's service through it: JAX aborted processes 0-1."
    assert f"  {words}\n" in finished.err
    assert launch.leaves_nobody()


def test_the_exit_of_a_runner_is_shown_with_its_own_frames_alone(launch):
    script = (
        "import unittest, shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "class Test(unittest.TestCase):\n"
        "    def test(self): assert shoal.process_index() == 0\n"
    )
    finished = launch.run("-n", "2", "-m", "unittest", script=script)
    assert finished.code == 1, finished.err
    report = finished.err[finished.err.index("shoal run: failed") :].splitlines()
    assert report[0].endswith(": process 1 of 2 ended with exit code 1")
    frames = [line for line in report if line.startswith("  File ")]
    assert len(frames) == 3
    assert all('File "unittest/' in line for line in frames), finished.err


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (
            "x = 1\ny = = 2\n",
            'raised SyntaxError\n  File "script.py", line 2, in <module>\n    y = = 2\n'
            "  SyntaxError: invalid syntax\n",
        ),
        (
            "import sys; sys.exit('no data')",
            'ended with exit code 1\n  File "script.py", line 1, in <module>\n'
            "    import sys; sys.exit('no data')\n  SystemExit: no data\n",
        ),
        (
            "import os; os._exit(5)",
            "ended with exit code 5\n  No exception and no sys.exit was recorded: os._exit,",
        ),
    ],
)
def test_program_that_fails_at_its_start_is_reported_with_the_reason(launch, script, end):
    assert f" s: process 0 {end}" in launch.run(script=script).err


def test_a_process_that_raised_and_cannot_end_is_ended_and_blamed(launch):
    finished = launch.run(
        *("-n", "2"),
        script=WAIT
        + "import atexit, pathlib\n"
        + "raised = pathlib.Path('raised')\n"
        + "def last(): raised.touch(); time.sleep(600)\n"
        + "if me == 1: atexit.register(last); raise ValueError('the root')\n"
        + "while not raised.exists(): time.sleep(0.01)\n"
        + "sys.exit(71)\n",
    )
    assert finished.code == 1
    assert finished.verdict.endswith(": process 1 of 2 raised ValueError")
    assert "  Did not end by itself: shoal run sent SIGTERM." in finished.err


def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(launch):
    launch.env["SHOAL_GRACE_S"] = "0.3"
    finished = launch.run(
        *("-n", "2"),
        script=WAIT
        + "signal.signal(signal.SIGTERM, lambda *_: print('got it'))\n"
        + "import pathlib\n"
        + "deaf = pathlib.Path('deaf')\n"
        + "if me == 0: deaf.touch()\n"
        + "while not deaf.exists(): time.sleep(0.01)\n"
        + "if me == 1: sys.exit(5)\n"
        + "while True: time.sleep(600)\n",
    )
    assert finished.code == 5
    assert "p0| got it" in finished.lines
    assert "  Process 0 was running, and was ended by shoal run with SIGKILL." in finished.err
    assert launch.leaves_nobody()


def test_a_service_that_dies_is_reported_and_ends_the_job(launch):
    launch.start("-n", "2", script=WAIT + "print('ready'); time.sleep(600)")
    launch.await_words("ready", 2)
    (pid,) = launch.pids("shoal.runtime.server.coordinator")
    os.kill(pid, signal.SIGKILL)
    finished = launch.finish()
    assert finished.code == 71
    assert "the coordinator ended, code -9" in finished.verdict
    assert launch.leaves_nobody()


def test_a_job_that_cannot_start_says_so(launch):
    few = ("sh", "-c", 'ulimit -n 40 && exec "$@"', "sh")
    finished = launch.run("-n", "30", script="import time; time.sleep(600)", before=few)
    assert finished.code == 74
    assert "of 30 could not be started" in finished.verdict
    assert launch.leaves_nobody()


def test_a_link_in_place_of_a_log_is_named_and_not_followed(launch):
    (launch.folder / "mine").write_text("precious")
    (launch.folder / "logs").mkdir()
    (launch.folder / "logs" / "p0001.log").symlink_to("../mine")
    finished = launch.run("-n", "2", "--log-dir", "logs", script="import time; time.sleep(600)")
    assert finished.code == 74, finished
    assert "process 1 could not be started: " in finished.verdict
    assert "p0001.log: it is a symbolic link to " in finished.verdict
    assert (launch.folder / "mine").read_text() == "precious"
    assert launch.leaves_nobody()


def test_a_job_goes_on_if_its_address_cannot_be_written_for_observers(launch):
    (launch.folder / "logs" / "job.json").mkdir(parents=True)
    finished = launch.run("-n", "2", "--log-dir", "logs", script="print('ran')")
    assert (finished.code, finished.out.count("ran")) == (0, 2), finished
    words = "job.json cannot be written (Is a directory): shoal watch and other observers will not"
    assert words in finished.err
    assert not list((launch.folder / "logs").glob("job.json.*"))


def test_exit_codes_come_through(launch):
    assert launch.run("-n", "2", script="raise SystemExit(0)").code == 0
    finished = launch.run("-n", "2", script=WAIT + "sys.exit(70)")
    assert (finished.code, finished.verdict[-23:]) == (70, "ended with exit code 70")


def test_in_github_actions_the_report_is_annotated(launch):
    launch.env |= {"GITHUB_ACTIONS": "true", "CI": "true", "GITHUB_WORKSPACE": str(launch.folder)}
    script = "import os\nif os.environ['RANK'] == '1': print('##[error]x'); open('data/b.bin')\n"
    finished = launch.run("-n", "2", script=script)
    lines = finished.err.splitlines()
    at = lines.index("::group::log of process 1")
    headline = "process 1 of 2 raised FileNotFoundError"
    assert lines[at - 1] == f"::error file=script.py,line=2,title=shoal run::{headline}"
    assert lines[at + 1].startswith("::stop-commands::")
    assert lines[at + 2] == "##[error]x"
    token = lines[at + 1].removeprefix("::stop-commands::")
    end = lines.index(f"::{token}::")
    assert lines[end + 1] == "::endgroup::"
    assert lines[end + 3].startswith("shoal run: failed after")
    assert lines[-2].startswith("  Exit code 1. Log: ")
    assert lines[-1] == lines[end + 2].replace("::stop-commands", "") + "::"
