"""Signals to the launcher reach the processes; nothing waits longer than it must."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terminals import open_terminal, read_to_end, screen

HEAD = "import os, pathlib, signal, subprocess, sys, time; me = os.environ['RANK']\n"
HEAD_OF_ANY = "import os, signal, time\n"
BESIDE = Path(sys.executable).parent
# In short sleeps: a signal that arrives just before a sleep is handled after it.
SLEEP = "print('ready'); [time.sleep(0.1) for _ in range(6000)]\n"


def test_sigterm_lets_processes_save_and_end(launch):
    """It spares grandchildren, which a process may need to save its work."""
    launch.start(
        *("-n", "2"),
        script=HEAD
        + "helper = subprocess.Popen(['sleep', '600'])\n"
        + "def save(*_):\n"
        + "    print('helper lives:', helper.poll() is None); helper.kill(); sys.exit(0)\n"
        + "signal.signal(signal.SIGTERM, save)\n"
        + SLEEP,
    )
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 128 + signal.SIGTERM
    assert finished.lines == ["p0| helper lives: True", "p1| helper lives: True"]
    assert launch.leaves_nobody()


def test_sigterm_ends_processes_without_a_handler_even_if_stopped(launch):
    stop = "print('ready'); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)\n"
    launch.start("-n", "2", script=HEAD + f"if me == '1': {stop}\nelse: {SLEEP}")
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 128 + signal.SIGTERM
    assert finished.verdict == "shoal run: interrupted by SIGTERM"
    assert launch.leaves_nobody()


def test_sigint_interrupts_grandchildren_too(launch):
    launch.start("-n", "2", script=HEAD + "subprocess.Popen(['sleep', '600'])\n" + SLEEP)
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGINT)
    finished = launch.finish()
    assert finished.code == 128 + signal.SIGINT
    assert "Ctrl-C again kills them now" in finished.err
    assert "KeyboardInterrupt" not in finished.err  # each in its log
    assert finished.verdict == "shoal run: interrupted by SIGINT"
    assert launch.leaves_nobody()


def test_interrupt_report_has_the_step(launch):
    script = HEAD + f"import shoal; shoal.initialize()\nwith shoal.step(61):\n    {SLEEP}"
    launch.start("-n", "2", "--log-dir", "logs", script=script)
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGINT)
    finished = launch.finish()
    said, headline, last = finished.err.splitlines()
    assert said.startswith("shoal run: SIGINT: the processes have ")
    assert re.fullmatch(r"shoal run: interrupted after [\d.]+ s by SIGINT, in step 61", headline), (
        finished
    )
    assert re.fullmatch(
        r"  All 2 processes ended within [\d.]+ s\. Exit code 130\. Logs: logs", last
    ), finished
    facts = json.loads((launch.folder / "logs" / "failure.json").read_text())
    assert (facts["kind"], facts["exit_code"], facts["causes"]) == ("interrupted", 130, [])
    assert (facts["signal"], facts["step"]) == ("SIGINT", 61)


def test_process_that_had_to_be_killed_is_reported(launch):
    launch.env["SHOAL_GRACE_S"] = "0.2"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    launch.start("-n", "2", script=HEAD + f"if me == '1': {deaf}" + SLEEP)
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    words = "Process 1 was running, and was ended by shoal run with SIGKILL."
    assert f"  Process 0 ended because of it.\n  {words}\n" in finished.err


def test_the_second_ctrl_c_kills_at_once(launch):
    launch.env["SHOAL_GRACE_S"] = "500"
    launch.start(
        *("-n", "2"),
        script=HEAD
        + "signal.signal(signal.SIGINT, lambda *_: print('heard'))\n"
        + "print('ready')\nwhile True: time.sleep(600)\n",
    )
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGINT)
    launch.await_words("heard", 2)
    launch.popen.send_signal(signal.SIGINT)
    assert launch.finish().code == 128 + signal.SIGINT
    assert launch.leaves_nobody()


def test_a_notice_is_passed_on_and_ends_nothing(launch):
    launch.start(
        *("-n", "2"),
        script=HEAD
        + "signal.signal(signal.SIGUSR1, lambda *_: print('noticed') or sys.exit(0))\n"
        + SLEEP,
    )
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGUSR1)
    finished = launch.finish()
    assert (finished.code, finished.lines) == (0, ["p0| noticed", "p1| noticed"])


def test_a_launch_that_nohup_started_survives_the_terminal(launch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch.start("-n", "2", script="import time; print('ready', flush=True); time.sleep(0.3)")
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGHUP)
    assert launch.finish().code == 0


def test_background_start_in_a_script_prints_that_sigint_is_ignored(launch):
    """Its shell lets such programs ignore SIGINT, so that Ctrl-C ends the script alone."""
    run = f"{shlex.quote(sys.executable)} -m shoal run -n 2 script.py"
    steps = "pid=$!; read go; kill -INT $pid; kill -USR1 $pid; read go; kill $pid; wait $pid"
    program = HEAD + "signal.signal(signal.SIGUSR1, lambda *_: print('noticed'))\n" + SLEEP
    (launch.folder / "script.py").write_text(program)
    launch.popen = subprocess.Popen(
        ["sh", "-c", f"{run} & {steps}"],
        cwd=launch.folder, env=launch.env, text=True, stdin=-1, stdout=-1, stderr=-1,
    )  # fmt: skip
    for words in ("ready", "noticed"):
        launch.await_words(words, 2)
        print(file=launch.popen.stdin, flush=True)
    finished = launch.finish()
    first = finished.err.splitlines()[0]
    assert first.startswith("shoal run: SIGINT is ignored, as for a background command of a")
    assert re.search(r"`kill \d+` \(SIGTERM\) ends the job", first)
    assert finished.code == 128 + signal.SIGTERM
    assert finished.verdict == "shoal run: interrupted by SIGTERM"
    assert launch.leaves_nobody()


def test_a_reader_that_stalls_does_not_hold_up_the_end(launch):
    launch.env["SHOAL_GRACE_S"] = "0.3"
    launch.start("-n", "2", script="while True: print('x' * 70)")
    launch.popen.stdout.readline()  # and no more
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.popen.wait(timeout=60) == 128 + signal.SIGTERM
    assert launch.leaves_nobody()


def test_the_third_ctrl_c_does_not_need_the_supervisor(launch):
    launch.start("-n", "2", script=HEAD + SLEEP)
    launch.await_words("ready", 2)
    (supervisor,) = launch.pids("shoal-supervise")
    os.kill(supervisor, signal.SIGSTOP)
    deadline_s = time.monotonic() + 60
    while launch.popen.poll() is None and time.monotonic() < deadline_s:
        launch.popen.send_signal(signal.SIGINT)  # those that come too fast are one
        time.sleep(0.05)
    assert launch.popen.returncode == 128 + signal.SIGINT
    assert launch.leaves_nobody()


HANDLED = "for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):\n"
HANDLED += "    signal.signal(number, {})\n"
SAVES = HANDLED.format("lambda *_: print('saved', flush=True) or sys.exit(0)")


@pytest.mark.parametrize("number", ["SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP"])
def test_a_request_to_end_runs_the_handlers_of_a_program(launch, number):
    launch.start("-n", "2", script=HEAD + SAVES + SLEEP)
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.Signals[number])
    finished = launch.finish()
    assert finished.lines == ["p0| saved", "p1| saved"]
    assert finished.code == 128 + signal.Signals[number], finished.err
    assert finished.verdict == f"shoal run: interrupted by {number}"
    assert launch.leaves_nobody()


WAYS = (  # handlers of processes that end as they are asked to, and of one that has to be killed
    "signal.SIG_DFL",
    "signal.default_int_handler",
    "lambda *_: sys.exit(0)",
    "lambda *_: os._exit(0)",
    "lambda number, _: sys.exit(128 + number)",
    "signal.SIG_IGN",
)
FAILS = (
    "lambda *_: sys.exit(5)",
    "lambda *_: 1 / 0",
    "lambda *_: os.kill(os.getpid(), signal.SIGSEGV)",
)


@pytest.mark.parametrize("number", ["SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP"])
def test_a_request_to_end_is_an_interrupt_however_its_processes_end(launch, number):
    launch.env["SHOAL_GRACE_S"] = "0.5"
    ends = HANDLED.format(f"[{', '.join(WAYS)}][int(me)]")
    launch.start("-n", str(len(WAYS)), script=HEAD + ends + SLEEP)
    launch.await_words("ready", len(WAYS))
    launch.popen.send_signal(signal.Signals[number])
    finished = launch.finish()
    assert finished.code == 128 + signal.Signals[number], finished.err
    assert finished.verdict == f"shoal run: interrupted by {number}"
    assert f"Process {len(WAYS) - 1} was running, and was ended by shoal run" in finished.err
    assert launch.leaves_nobody()


@pytest.mark.parametrize("number", ["SIGINT", "SIGQUIT"])
def test_a_signal_from_a_terminal_is_an_interrupt_even_if_processes_fail_of_it(launch, number):
    """After SIGTERM and SIGHUP it is a failure, since they may save: see test_run_first_to_fail."""
    ends = HANDLED.format(f"[{', '.join(FAILS)}][int(me)]")
    launch.start("-n", str(len(FAILS)), script=HEAD + ends + SLEEP)
    launch.await_words("ready", len(FAILS))
    launch.popen.send_signal(signal.Signals[number])
    finished = launch.finish()
    assert finished.code == 128 + signal.Signals[number], finished.err
    assert finished.verdict == f"shoal run: interrupted by {number}"


@pytest.mark.parametrize("number", ["SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_supervisor_counts_as_one_to_the_launcher(launch, number):
    launch.start("-n", "2", script=HEAD + SAVES + SLEEP)
    launch.await_words("ready", 2)
    (supervisor,) = launch.pids("shoal-supervise")
    os.kill(supervisor, signal.Signals[number])
    finished = launch.finish()
    assert finished.lines == ["p0| saved", "p1| saved"]
    assert finished.code == 128 + signal.Signals[number], finished.err
    assert finished.verdict == f"shoal run: interrupted by {number}"


def test_a_signal_to_all_processes_of_a_step_counts_once(launch):
    """As `scancel --full` sends it: a second Ctrl-C would kill the processes that save."""
    save = "def save(*_): time.sleep(0.5); print('saved', flush=True); os._exit(0)\n"
    script = f"{HEAD}{save}signal.signal(signal.SIGINT, save)\n{SLEEP}"
    launch.start("-n", "2", script=script)
    launch.await_words("ready", 2)
    (supervisor,) = launch.pids("shoal-supervise")
    for pid in (launch.popen.pid, supervisor):
        os.kill(pid, signal.SIGINT)
    finished = launch.finish()
    assert finished.lines == ["p0| saved", "p1| saved"]
    assert finished.err.count("SIGINT: the processes have") == 1


# The terminal becomes that of the session: then its end is a SIGHUP.
ON_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("handler", "code"),
    [("", 128 + signal.SIGHUP), ("lambda *_: sys.exit(0)", 129), ("lambda *_: sys.exit(5)", 5)],
)
def test_a_closed_terminal_returns_what_the_facts_say(launch, handler, code):
    ours, theirs = os.openpty()
    setting = f"signal.signal(signal.SIGTERM, {handler})\n" if handler else ""
    launch.start(
        *("-n", "2", "--log-dir", "logs"),
        script=f"{HEAD}{setting}{SLEEP}",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        before=(sys.executable, "-c", ON_ITS_TERMINAL),
    )
    os.close(theirs)
    shown = b""
    while shown.count(b"ready") < 2:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert launch.popen.wait(timeout=60) == code
    facts = json.loads((launch.folder / "logs" / "failure.json").read_text())
    assert facts["exit_code"] == code
    assert launch.leaves_nobody()


OTHER_LAUNCHERS = {  # not MPICH 5, whose mpiexec.hydra passes it on, or hangs (1 of 6)
    "shoal run": [sys.executable, "-m", "shoal", "run", "-n", "2"],
    "torchrun": [str(BESIDE / "torchrun"), "--nproc-per-node", "2"],
}


def installed(launchers, name):
    """Return the command of a launcher, if it is installed beside this Python."""
    if not os.path.exists(launchers[name][0]):
        pytest.skip(f"{name} is not installed (pip install shoal[test])")
    return launchers[name]


@pytest.mark.parametrize("name", OTHER_LAUNCHERS)
def test_sigquit_runs_the_handlers_as_under_other_launchers(launch, name):
    command = installed(OTHER_LAUNCHERS, name)
    saves = "lambda *_: (os.open(f'saved{os.getpid()}', os.O_CREAT), os._exit(0))"
    script = f"{HEAD_OF_ANY}signal.signal(signal.SIGQUIT, {saves})\n{SLEEP}"
    (launch.folder / "script.py").write_text(script)
    launch.popen = subprocess.Popen(
        [*command, "script.py"], cwd=launch.folder, env=launch.env | {"PYTHONUNBUFFERED": "1"},
        text=True, stdin=-3, stdout=-1, stderr=-1,
    )  # fmt: skip
    launch.await_words("ready", 2)
    launch.popen.send_signal(signal.SIGQUIT)
    finished = launch.finish()
    assert len([*launch.folder.glob("saved*")]) == 2, finished


ONE_PROCESS = {
    "shoal run": [sys.executable, "-m", "shoal", "run", "-n", "1", "--no-prefix", "script.py"],
    "torchrun": [str(BESIDE / "torchrun"), "--nproc-per-node", "1", "script.py"],
    "MPICH": [str(BESIDE / "mpiexec.hydra"), "-n", "1", sys.executable, "script.py"],
}
BYTES = random.Random(7).randbytes(300_000)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_bytes_and_a_handled_sigterm_are_as_under_other_launchers(launch, name):
    """The bytes of one process arrive as written, and a job that SIGTERM ended is no success."""
    command = installed(ONE_PROCESS, name)
    write = "sys.stdout.buffer.write(random.Random(7).randbytes(300_000)); sys.stdout.flush()\n"
    handle = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    script = f"import random, sys\n{HEAD_OF_ANY}{handle}{write}time.sleep(600)\n"
    (launch.folder / "script.py").write_text(script)
    launch.popen = subprocess.Popen(
        command, cwd=launch.folder, env=launch.env, stdin=-3, stdout=-1, stderr=-1
    )
    assert launch.popen.stdout.read(len(BYTES)) == BYTES
    launch.popen.send_signal(signal.SIGTERM)
    rest, _ = launch.popen.communicate(timeout=60)
    assert rest == b""
    if name != "MPICH":  # which returns what its processes do
        assert launch.popen.returncode != 0


BAR = """
import sys, time
for step in range(41):
    sys.stderr.write(f"\\r{step * 100 // 40:3d}%|{'#' * (step // 4):10s}| {step}/40")
    sys.stderr.flush()
    time.sleep(0.02)
sys.stderr.write("\\n")
"""
TWO_PROCESSES = {
    **OTHER_LAUNCHERS,
    "MPICH": [str(BESIDE / "mpiexec.hydra"), "-n", "2", sys.executable],
}


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_a_progress_bar_takes_no_more_lines_than_under_other_launchers(launch, name):
    command = installed(TWO_PROCESSES, name)
    (launch.folder / "script.py").write_text(BAR)
    ours, theirs = open_terminal()
    launch.popen = subprocess.Popen(
        [*command, "script.py"], cwd=launch.folder, stdin=-3, stdout=theirs, stderr=theirs,
        env=launch.env | {"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(theirs)
    lines = screen(read_to_end(ours) + b"the end", columns=400)
    assert launch.popen.wait(timeout=60) == 0
    assert lines.pop() == "the end"
    if name == "shoal run":
        bars = sorted(line for line in lines if not line.startswith("shoal run: "))
        assert [line.partition("%")[0] for line in bars] == ["p0| 100", "p1| 100"]
    else:
        assert len(lines) >= 2
