"""`shoal run` returns 75 when its job was preempted and has saved; and lets it save."""

from __future__ import annotations

import signal

import pytest

HEAD = """
import os, pathlib, signal, sys, time
import shoal
shoal.initialize()
here = shoal.process_index()

def train(on_step=lambda step: None):
    step = 0
    while not shoal.preempted(step):
        shoal.barrier("step")
        if step == 0:
            print("trains", flush=True)
        on_step(step)
        step += 1
    return step

def be_noticed(step):
    if here == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_to_the_launcher_leaves_time_to_save(launch):
    """Longer than the grace of programs that take it as no notice: they save for five seconds."""
    launch.env["SHOAL_GRACE_S"] = "4"
    launch.start(
        *("-n", "2"),
        script=HEAD + "step = train(); time.sleep(5); shoal.saved(step); print('saved', step)",
    )
    launch.await_words("trains", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 75, finished.err
    assert len(finished.lines) == 2
    assert len({line.partition("saved")[2] for line in finished.lines}) == 1
    assert "they took it as a notice" in finished.err
    assert finished.verdict == "shoal run: preempted, and saved: start it again (exit code 75)"


@pytest.mark.parametrize("initialize", ["shoal.initialize()", ""])
def test_a_job_of_one_has_time_to_save_too(launch, initialize):
    launch.env["SHOAL_GRACE_S"] = "2"
    head = HEAD.replace("shoal.initialize()", initialize)
    launch.start(script=head + "step = train(); time.sleep(3); shoal.saved(step)")
    launch.await_words("trains", 1)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 75, finished.err
    assert finished.verdict == "shoal run: preempted, and saved: start it again (exit code 75)"


def test_a_job_of_one_that_goes_on_is_not_preempted(launch):
    twice = """
    shoal.watch_notices()
    for turn in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        shoal.saved(train())
        if turn < int(sys.argv[1]):
            shoal.rearm()
    """
    script = HEAD + "if True:" + twice
    for rearms, code in (("2", 0), ("1", 75)):
        finished = launch.run(script=script, arguments=(rearms,))
        assert finished.code == code, finished.err


def test_a_save_of_one_process_counts_unless_the_program_went_on(launch):
    launch.env["SHOAL_AFTERMATH_S"] = "100"
    again = "step = train(be_noticed)\nif here == 0: shoal.saved(step)\nshoal.barrier('saved')\n"
    finished = launch.run("-n", "2", script=HEAD + again + "print(shoal.exit_code())")
    assert (finished.code, finished.lines) == (
        75,
        ["p0| 75", "p0| trains", "p1| 0", "p1| trains"],
    )
    goes_on = again + "shoal.rearm(); print(shoal.exit_code())"
    finished = launch.run("-n", "2", script=HEAD + goes_on)
    assert (finished.code, finished.err.count("shoal run:")) == (0, 0), finished.err


def test_scripts_that_exit_with_75_by_themselves_have_not_failed(launch):
    """One is long gone when the others end; nobody is told that it failed, nor ends them."""
    launch.env["SHOAL_AFTERMATH_S"] = "0.1"
    ends = """
    shoal.saved(train(be_noticed))
    if here != 1:
        me = shoal.runtime.process.coordinator()
        while (state := me.members(timeout_s=30)[1].state) == "here":
            pass
        with shoal.step(99):  # raises if somebody has failed
            print(state)
        time.sleep(1)
    sys.exit(shoal.exit_code())
    """
    finished = launch.run("-n", "2", script=HEAD + "if True:" + ends)
    assert (finished.code, finished.out.count("left")) == (75, 1), finished.err
    assert finished.err.count("shoal run:") == 1
    assert "preempted, and saved" in finished.verdict


def test_after_a_failure_sigterm_ends_who_watches_for_it(launch):
    """It is no notice: nobody who hangs is left to SIGKILL."""
    launch.env |= {"SHOAL_GRACE_S": "500", "SHOAL_ABORT_AFTER_S": "inf", "SHOAL_AFTERMATH_S": "2"}
    hangs = "shoal.preempted(0); shoal.barrier('watched')\n"
    hangs += "if here == 1: raise ValueError('no data')\n"
    hangs += "while True: signal.pause()\n"
    finished = launch.run("-n", "2", script=HEAD + hangs)
    assert finished.code == 1
    assert "ValueError: no data" in finished.verdict
    assert "p0: ended by shoal run with SIGTERM" in finished.err
