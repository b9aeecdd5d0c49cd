"""The end of real processes whose devices compute: sums of all processes are in flight."""

from __future__ import annotations

import os
import signal
import time

import pytest

from processes.in_flight import IN_FLIGHT


def count_from_now(job):
    """Let `ended_s` be the seconds from here on, without the start of the interpreters."""
    job.began = time.monotonic()


def kill_1(job, script, **env):
    """Start two processes, kill number 1 once it has said that it is ready; return the other."""
    job.start(0, 2, script, **env)
    victim = job.start(1, 2, script, **env)
    victim.until_said("ready")
    victim.kill()
    count_from_now(job)
    survivor, _ = job.wait()
    return survivor


SUMS_WITH_A_VICTIM = (
    IN_FLIGHT
    + """
barrier("ready")
if index == 1:
    say("ready")
    while True:
        total(array).block_until_ready()
pending = [total(array)]
"""
)


@pytest.mark.usefixtures("interpreters")
def test_killed_while_sums_are_in_flight(job):
    survivor = kill_1(job, SUMS_WITH_A_VICTIM + 'barrier("never")')
    assert survivor.code == 71, survivor
    assert ": process 1 (" in survivor.err.splitlines()[0], survivor
    assert "Traceback" not in survivor.err, survivor
    assert survivor.ended_s < 15
    assert job.leaves_no_orphan()


@pytest.mark.usefixtures("interpreters")
def test_exit_code_that_python_hides_is_not_turned_into_success(job):
    ends = """
try:
    barrier("never")
except ProcessLostError:
    raise SystemExit(3)
"""
    survivor = kill_1(job, SUMS_WITH_A_VICTIM + ends)
    # 71 if the sum can neither end nor fail: then no teardown, in which Python would keep the 3.
    assert survivor.code in (3, 71), survivor
    assert ("without JAX's teardown" in survivor.err) == (survivor.code == 71), survivor
    assert job.leaves_no_orphan()


TRAINING = """
def train():
    for step in range(1_000_000):
        total(array).block_until_ready()
        if step == 20:
            say("ready")
barrier("start")
"""
CAUGHT = """
try:
    train()
except Exception as error:
    raise RuntimeError("no more training") from error
"""


@pytest.mark.parametrize("ends", ["train()", CAUGHT], ids=["at once", "caught first"])
def test_an_error_of_the_runtime_is_explained(job, ends):
    one_device = IN_FLIGHT.replace("timeout_s=30", "timeout_s=30, virtual_devices=1")
    survivor = kill_1(job, one_device + TRAINING + ends, SHOAL_HANG_TIMEOUT_S="5")
    assert survivor.code == 71, survivor
    assert survivor.ended_s < 15
    assert job.leaves_no_orphan()
    first = survivor.err.splitlines()[0]
    if "it hangs, and is ended" in first:  # gloo does not always notice that its peer is gone
        assert "process 1 (" in first, survivor
        assert " is lost: " in first, survivor
        return
    assert "Error: " in survivor.err
    said = [line for line in survivor.err.splitlines() if line.startswith("shoal: process 1 of 2")]
    assert any("is lost" in line for line in said), survivor
    assert survivor.err.endswith("  Exit code 71 (of this process).\n")


@pytest.mark.usefixtures("interpreters")
def test_an_exception_while_a_sum_that_never_ends_is_in_flight(job):
    script = (
        IN_FLIGHT
        + """
barrier("ready")
if index == 1:
    say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
pending = total(array)
raise RuntimeError("in flight")
"""
    )
    job.start(0, 2, script)
    frozen = job.start(1, 2, script)
    frozen.until_said("ready")
    count_from_now(job)
    one = job.wait_for(0)
    assert one.code == 1, one
    assert "RuntimeError: in flight" in one.err.splitlines()
    assert one.ended_s < 15
    os.kill(frozen.pid, signal.SIGKILL)
    job.wait()
    assert job.leaves_no_orphan()


ENDS_FIRST = """
import atexit, pathlib, time
from shoal.runtime.process import client
barrier("ready")
if index == 0:
    jax.set_mesh(Mesh(devices, "x"))
    atexit.register(pathlib.Path(sys.path[0], "ended").touch)  # before shoal's own handler
    {result}
else:
    while not pathlib.Path(sys.path[0], "ended").exists():
        time.sleep(0.01)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert client().members(timeout_s=30)[0].state == "here"
    say(total(array)[0])
"""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("result", ["total(array)", "kept = total(array)"], ids=["dropped", "kept"])
def test_a_program_that_ends_first_computes_its_part(job, said, devices, result):
    start = IN_FLIGHT.replace("timeout_s=30", f"timeout_s=30, virtual_devices={devices}")
    first, other = job.run(2, start + ENDS_FIRST.format(result=result))
    assert (first.code, other.code) == (0, 0), (first, other)
    assert said(other) == str(2.0 * devices)
    assert job.leaves_no_orphan()


ENDS_ALONE = (
    IN_FLIGHT
    + """
from shoal.runtime.exit import unfinished
from shoal.runtime.process import client
unfinished._ALONE_S = 0.1
barrier("ready")
def ending():
    one = client().members(timeout_s=30)[0]
    return one if unfinished.HAS_ENDED in one.last_words else None
if index == 0:
    total(array)
"""
)


def test_a_program_that_no_other_process_runs_keeps_none_from_its_end(job):
    ended = job.run(2, ENDS_ALONE)
    assert [one.code for one in ended] == [0, 0], ended
    assert job.leaves_no_orphan()


def test_a_program_that_no_other_process_runs_keeps_none_that_waits(job):
    ended, waiting = job.run(2, ENDS_ALONE + 'else:\n    barrier("after")')
    assert (ended.code, waiting.code) == (0, 72), waiting
    assert "left the job" in waiting.err.splitlines()[0]
    assert job.leaves_no_orphan()


def test_a_program_that_no_other_process_runs_has_a_deadline(job):
    waits = """
else:
    while client().members(timeout_s=30)[0].state == "here":
        pass
"""
    ended, _ = job.run(2, ENDS_ALONE + waits, SHOAL_TIMEOUT_S="0.5")
    assert ended.code == 73, ended
    assert "waits for its devices: they did not finish within 0.5 s" in ended.err
    assert "Traceback" not in ended.err, ended
    assert job.leaves_no_orphan()


@pytest.mark.parametrize(
    ("name", "handler", "code"),
    [("SIGINT", "signal.default_int_handler", 130), ("SIGTERM", "lambda *_: sys.exit(5)", 5)],
)
def test_a_signal_ends_the_wait_for_devices(job, name, handler, code):
    script = f"""
    signal.signal(signal.{name}, {handler})
else:
    while not ending():
        pass
    os.kill(ending().pid, signal.{name})
    barrier("after")
"""
    ended, other = job.run(2, ENDS_ALONE + script)
    assert (ended.code, other.code) == (code, 72), ended
    assert "atexit" not in ended.err, ended
    assert job.leaves_no_orphan()


@pytest.mark.parametrize("results", ["", "kept = "], ids=["dropped", "kept"])
def test_a_queue_of_programs_that_is_full_when_a_peer_freezes(job, results):
    """Starting another program blocks then, in native code."""
    start = IN_FLIGHT.replace("timeout_s=30", "timeout_s=30, virtual_devices=1")
    script = f"""
barrier("ready")
if index == 1:
    say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
{results}[total(array) for _ in range(32)]
"""
    job.start(0, 2, start + script, SHOAL_LOST_AFTER_S="1")
    frozen = job.start(1, 2, start + script, SHOAL_LOST_AFTER_S="1")
    frozen.until_said("ready")
    survivor = job.wait_for(0)
    assert survivor.code == 71, survivor
    frozen.kill()
    job.wait()
    assert job.leaves_no_orphan()
