"""Real processes that die, freeze or hang: the others learn it while they compute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from processes.in_flight import IN_FLIGHT

PATIENCE_S = 60.0  # a deadline of the test itself: reached only when something is broken

# Members that meet without JAX, which most of these tests have no use for.
MEMBER = """
import ctypes, logging, threading, time
from shoal.collectives.live_processes import live_processes
from shoal.runtime.barrier import barrier
from shoal.runtime.client.over_tcp import join
from shoal.runtime.exit.hang import HangWatch, HangTimeout
from shoal.runtime.step import step

logging.basicConfig(format="%(message)s")
member = join(address, process=index, num_processes=count, timeout_s=30)
member.watch_main_line(HangWatch(member, HangTimeout.of_settings()).look)
meet = lambda name, **more: barrier.on(member, name, timeout_s=50, **more)

def attempt(action):
    try:
        say(action())
    except ShoalError as error:
        say(type(error).__name__, "->", str(error))

def steps_until_error():
    for number in range(10**9):
        with step.on(member, number):
            time.sleep(0.001)  # a program that computes

def count_in_native_code(seconds, keeps_the_lock=False):
    (ctypes.PyDLL if keeps_the_lock else ctypes.CDLL)(None).sleep(seconds)

told, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)  # a handler in Python would run only after the read that it is to end
signal.signal(signal.SIGUSR1, lambda *_: None)
await_the_test = lambda: os.read(told, 1)

meet("all are here")
say("ready")
"""
QUICK = {"SHOAL_HEARTBEAT_S": "0.1", "SHOAL_LOST_AFTER_S": "1", "SHOAL_WARN_AFTER_S": "60"}


class Stage:
    """A coordinator of its own, and processes of one job."""

    def __init__(self, job, settings):
        self.job = job
        self.settings = settings
        self.place = None

    def start(self, *scripts):
        """Start one process for each script; return once all are here."""
        command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--until-empty"]
        self.place = subprocess.Popen(
            [*command, "--processes", str(len(scripts))],
            stdout=subprocess.PIPE,
            env={**self.job.env, **self.settings},
        )
        self.job.address = json.loads(self.place.stdout.readline())["address"]
        processes = [
            self.job.start(index, len(scripts), MEMBER + script, **self.settings)
            for index, script in enumerate(scripts)
        ]
        for process in processes:
            self.until(process, "ready")
        return processes

    def until(self, process, word):
        """Read what a process says up to `word`; return that line."""
        for text in process.stdout:
            if text.startswith(f"> {word}"):
                return text
        raise AssertionError(f"it never said {word!r}")

    def strike(self):
        if self.place is not None:
            self.place.send_signal(signal.SIGCONT)
            self.place.kill()
            self.place.wait(PATIENCE_S)
            self.place.stdout.close()


@pytest.fixture
def told(said):
    """Return the function that returns the lines a member said once all were here."""
    return lambda ended: said(ended).split("ready\n")[-1].splitlines()


@pytest.fixture
def stage(job):
    stage = Stage(job, dict(QUICK))
    yield stage
    stage.strike()


def test_a_loop_of_steps_learns_of_a_death_and_the_survivors_go_on(stage, told):
    script = """
attempt(steps_until_error)
attempt(lambda: live_processes.on(member, timeout_s=50))
attempt(lambda: meet("on", processes=[0, 2, 3]))
attempt(steps_until_error)
attempt(lambda: live_processes.on(member, processes=[0, 2, 3], timeout_s=50))
"""
    dies = "threading.Event().wait()"
    dies_later = script.rpartition("attempt(steps")[0] + "say('again')\nthreading.Event().wait()"
    processes = stage.start(script, dies, dies_later, script)
    processes[1].kill()
    stage.until(processes[2], "again")
    processes[2].kill()
    for number in (0, 3):
        ended = stage.job.wait_for(number)
        assert ended.code == 0, ended
        first, left, on, second, last = (line for line in told(ended) if line != "again")
        assert first.startswith(f"ProcessLostError -> process {number} of 4 (")
        assert "step " in first
        assert "process 1 (" in first
        assert (left, on) == ("(0, 2, 3)", "None")
        assert "process 2 (" in second
        assert last == "(0, 3)"


def test_process_that_holds_the_interpreter_lock_is_silent_but_not_lost(stage, told):
    waits = "attempt(lambda: meet('later'))"
    stage.start(waits, "count_in_native_code(3, keeps_the_lock=True)\n" + waits)
    ended = stage.job.wait()
    assert [one.code for one in ended] == [0, 0], ended
    assert told(ended[0]) == ["None"]
    assert "process 0 of 2 (" in ended[0].err
    assert "process 1 (" in ended[0].err
    assert "is silent: " in ended[0].err


def test_frozen_process_is_lost_and_raises_when_it_resumes(stage, told):
    stage.settings["SHOAL_SILENT_LOST_AFTER_S"] = "2"
    _, frozen = stage.start("attempt(lambda: meet('never'))", "attempt(steps_until_error)")
    frozen.send_signal(signal.SIGSTOP)
    survivor = stage.job.wait_for(0)
    assert survivor.code == 0, survivor
    assert told(survivor)[0].startswith("ProcessLostError -> process 0 of 2 (")
    assert "process 1 (" in told(survivor)[0]
    frozen.send_signal(signal.SIGCONT)
    woken = stage.job.wait_for(1)
    assert woken.code == 0, woken
    assert "this process was declared lost" in told(woken)[0]
    assert "others have continued without it" in told(woken)[0]


def test_frozen_process_that_resumes_in_time_continues(stage, told):
    waits = """
while member.members(timeout_s=50)[1].state != "silent":
    pass
say("silent")
attempt(lambda: meet("later"))
while member.members(timeout_s=50)[1].state == "silent":
    pass
"""
    waiting, frozen = stage.start(waits, "attempt(lambda: meet('later'))")
    frozen.send_signal(signal.SIGSTOP)
    stage.until(waiting, "silent")
    frozen.send_signal(signal.SIGCONT)
    for ended in stage.job.wait():
        assert ended.code == 0, ended
        assert told(ended)[-1] == "None", ended


def test_frozen_coordinator_is_lost_to_a_program_that_makes_no_calls(stage, told):
    stage.start("attempt(steps_until_error)", "attempt(lambda: meet('never'))")
    stage.place.send_signal(signal.SIGSTOP)
    for ended in stage.job.wait():
        assert ended.code == 0, ended
        assert told(ended)[0].startswith("ProcessLostError -> process ")
        assert f"the coordinator at {stage.job.address} is lost (silent for 1 s" in "\n".join(
            told(ended)
        )


@pytest.mark.parametrize(("end", "code"), [("kill", 71), ("raise", 72)])
def test_process_that_hangs_in_native_code_is_ended_with_a_report(stage, end, code):
    stage.settings["SHOAL_HANG_TIMEOUT_S"] = "1"
    hangs = """
from shoal.runtime.rules.programs import CompiledProgram
member.programs.note([0, 1], CompiledProgram("d", "jit(f)", "f32[8]", 2, "eval.py:31 (main)"))
member.programs.is_noting = True
meet("one")
meet("two")
while not member.job_state(timeout_s=50).programs:
    pass
with step.on(member, 41):
    say('hangs')
    count_in_native_code(10_000)
"""
    ends = """
member.programs.is_noting = True
meet("one")
meet("two")
await_the_test()
member.report('failed', 'Traceback\\nValueError: no data')
os._exit(1)
"""
    hanging, victim = stage.start(hangs, ends)
    stage.until(hanging, "hangs")
    victim.send_signal(signal.SIGKILL if end == "kill" else signal.SIGUSR1)
    ended = stage.job.wait_for(0)
    assert ended.code == code, ended
    warning, *report = ended.err.splitlines()
    assert report[0].startswith("shoal: process 0 of 2 (")
    assert report[0].endswith(f"it hangs, and is ended with exit code {code}")
    assert warning.endswith(
        ": process 0 alone has compiled jit(f) for 2 devices of processes 0-1 at eval.py:31; if it "
        "runs it, it may wait for the others"
    )
    assert report[1].strip() == warning.partition(": ")[2]
    assert report[2].startswith("  process 1 (")
    assert ("no data" in report[2]) == (end == "raise")
    assert report[3].startswith("  it was last at step 41, step (script0.py:")
    assert "  |   count_in_native_code(10_000)" in report


def test_loss_of_the_coordinator_ends_hanging_processes(stage):
    stage.settings["SHOAL_HANG_TIMEOUT_S"] = "1"
    hanging, _ = stage.start(*["say('hangs')\ncount_in_native_code(10_000)"] * 2)
    stage.until(hanging, "hangs")
    stage.place.kill()
    for ended in stage.job.wait():
        assert ended.code == 71, ended
        assert f"the coordinator at {stage.job.address} is lost" in ended.err


def test_a_thread_that_hangs_keeps_no_process_whose_main_one_is_through(stage):
    stage.settings["SHOAL_HANG_TIMEOUT_S"] = "1"
    hangs = """
threading.Thread(target=count_in_native_code, args=(10_000,), name="beside").start()
say("hangs")
"""
    hanging, victim = stage.start(hangs, "threading.Event().wait()")
    stage.until(hanging, "hangs")
    victim.kill()
    ended = stage.job.wait_for(0)
    assert ended.code == 71, ended
    assert "  | Thread 'beside':" in ended.err


def test_survivor_that_got_the_error_and_saves_its_work_is_left_alone(stage, told):
    stage.settings["SHOAL_HANG_TIMEOUT_S"] = "0.2"
    saves = """
attempt(steps_until_error)
until = time.monotonic() + 2
while time.monotonic() < until:
    pass
say("saved")
"""
    _, victim = stage.start(saves, "threading.Event().wait()")
    victim.kill()
    ended = stage.job.wait_for(0)
    assert ended.code == 0, ended
    assert told(ended)[-1] == "saved"


def test_a_deadline_shows_the_stack_of_a_process_that_hangs_in_native_code(stage, told):
    waits = "attempt(lambda: barrier.on(member, 'epoch', timeout_s=0.5))"
    stage.start(waits, "say('hangs')\ncount_in_native_code(10_000)")
    ended = stage.job.wait_for(0)
    assert ended.code == 0, ended
    assert "DeadlineError -> process 0 of 2 (" in "\n".join(told(ended))
    assert " in count_in_native_code" in "\n".join(told(ended))


def test_a_handler_of_the_program_runs_while_it_waits(stage, told):
    waits = """
signal.signal(signal.SIGTERM, lambda *_: say("handled"))
say("waits")
attempt(lambda: meet("later"))
"""
    comes = "await_the_test()\nattempt(lambda: meet('later'))"
    waiting, coming = stage.start(waits, comes)
    stage.until(waiting, "waits")
    waiting.send_signal(signal.SIGTERM)
    stage.until(waiting, "handled")
    coming.send_signal(signal.SIGUSR1)
    ended = stage.job.wait_for(0)
    assert ended.code == 0, ended
    assert told(ended)[-1] == "None"


def test_a_collective_with_a_dead_peer_ends_with_the_documented_code(job):
    sums = """
barrier("ready")
say("ready")
while True:
    total(array).block_until_ready()
"""
    survivor, victim = (
        job.start(index, 2, IN_FLIGHT + sums, **QUICK, SHOAL_HANG_TIMEOUT_S="2")
        for index in range(2)
    )
    for process in (survivor, victim):
        process.until_said("ready")
    os.kill(victim.pid, signal.SIGKILL)
    ended = job.wait_for(0)
    assert ended.code == 71, ended
    # It hangs, or the transport tells: then the error is explained.
    told = [line for line in ended.err.splitlines() if line.startswith("shoal: process ")]
    assert any("hangs, and is ended" in line or "is lost" in line for line in told), ended
    assert job.leaves_no_orphan()
