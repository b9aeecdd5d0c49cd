"""However a real process ends, it ends, the others hear how, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from textwrap import dedent

import pytest


def test_an_exception_reaches_the_others_with_its_traceback(job, said):
    script = """
    initialize()
    def train():
        raise RuntimeError("no more data")
    def loss(rate):
        raise ValueError("rate must be positive\\nsee the manual")
    if index == 1:
        train()
    if index == 2:
        import jax, rich.traceback
        rich.traceback.install()
        jax.jit(loss)(0)
    try:
        barrier("of two", processes=[0, 2])
    except PeerFailedError as error:
        say(str(error).splitlines()[0].partition(" cannot complete: ")[2])
        assert "removed its internal frames" in error.failed[2]
    barrier("after")
    """
    other, failed, traced = job.run(3, script)
    assert traced.code == 1, traced
    fate = re.sub(r"\(.*?\)", "()", said(other), count=1)
    assert re.sub(r"py:[0-9]+", "py:N", fate) == (
        "process 2 () raised ValueError: rate must be positive (script2.py:N (loss))"
    )
    assert failed.code == 1, failed
    assert failed.err.splitlines()[-1] == "RuntimeError: no more data"
    assert failed.err.count("Traceback") == 1
    assert other.code == 72, other
    assert "Traceback" not in other.err
    assert " raised RuntimeError: no more data (script1.py:" in other.err
    assert "in train" in other.err
    assert "RuntimeError: no more data" in map(str.strip, other.err.splitlines())
    assert job.leaves_no_orphan()


def test_sys_exit_reaches_the_others_with_its_code(job):
    script = """
    initialize()
    if index == 1:
        sys.exit(5)
    barrier("after")
    """
    other, failed = job.run(2, script)
    assert (failed.code, failed.err) == (5, "")
    assert other.code == 72, other
    assert "process 1 (" in other.err
    assert ") exited with code 5 (script1.py:" in other.err
    assert job.leaves_no_orphan()


def test_a_program_that_handles_the_loss_ends_well(job, said):
    script = """
    initialize()
    global_sum()
    barrier("ready")
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        barrier("after")
    except ProcessLostError as error:
        say("saved what I have; lost", *error.lost)
    """
    survivor, _ = job.run(2, script)
    assert (survivor.code, survivor.err) == (0, ""), survivor
    assert said(survivor).splitlines() == ["saved what I have; lost 1"]
    assert job.leaves_no_orphan()


def test_the_loss_of_a_process_ends_an_attached_job_too(job, said):
    script = """
    import jax
    jax.distributed.initialize(address, count, index)
    process.initialize(timeout_s=30)
    barrier("ready")
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        barrier("after")
    except ProcessLostError as error:
        say("lost", *error.lost)
    """
    survivor, _ = job.run(2, script)
    assert survivor.code == 71, survivor
    assert said(survivor) == "lost 1"
    assert "without JAX's teardown" in survivor.err
    assert survivor.ended_s < 30
    assert job.leaves_no_orphan()


def test_a_thread_that_never_ends_does_not_keep_a_failed_process(job):
    script = """
    import threading
    initialize()
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=threading.Event().wait).start()
    barrier("after")
    """
    survivor, _ = job.run(2, script, SHOAL_HANG_TIMEOUT_S="0.5")
    assert survivor.code == 71, survivor
    assert "did not exit by itself" in survivor.err.splitlines()[-1]
    assert survivor.ended_s < 30


def test_signals_still_end_a_process(job):
    script = """
    initialize()
    global_sum()
    barrier("ready")
    say("ready")
    import threading
    threading.Event().wait() if index == 1 else barrier("after")
    """
    other = job.start(0, 2, script)
    waiting = job.start(1, 2, script)
    waiting.until_said("ready")
    other.until_said("ready")
    waiting.send_signal(signal.SIGTERM)
    other, terminated = job.wait()
    assert terminated.code == -signal.SIGTERM
    assert other.code == 71, other
    assert job.leaves_no_orphan()


@pytest.mark.usefixtures("interpreters")
def test_ctrl_c_in_one_process_raises_on_the_others(job):
    script = """
    initialize()
    barrier("ready")
    say("ready")
    import threading
    threading.Event().wait() if index == 1 else barrier("after")
    """
    job.start(0, 2, script)
    waiting = job.start(1, 2, script)
    waiting.until_said("ready")
    waiting.send_signal(signal.SIGINT)
    other, interrupted = job.wait()
    assert interrupted.code == 128 + signal.SIGINT
    assert other.code == 72, other
    assert "KeyboardInterrupt" in other.err
    assert job.leaves_no_orphan()


def test_all_killed_leaves_no_orphan(job):
    script = """
    initialize()
    barrier("ready")
    say("ready")
    import threading
    threading.Event().wait()
    """
    processes = [job.start(index, 2, script) for index in range(2)]
    for process in processes:
        process.until_said("ready")
    assert len(job.descendants()) >= 4  # and the two services
    for process in processes:
        process.kill()
    job.wait()
    assert job.leaves_no_orphan()


def test_a_forked_child_is_no_member(job, said):
    script = """
    import warnings
    warnings.simplefilter("ignore")
    initialize()
    child = os.fork()
    if child == 0:
        try:
            barrier("from a fork")
        except InitializeError as error:
            say(str(error).splitlines()[0], process.process_index())
        os._exit(3)  # as multiprocessing's children end
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    barrier("after")
    """
    for index, one in enumerate(job.run(2, script)):
        assert one.code == 0, one
        words = f"this process is a fork of process {index} of 2, and not a member of the job"
        assert said(one).splitlines() == [f"{words} {index}", "3"]
    assert job.leaves_no_orphan()


def test_a_forked_child_ends_as_it_wants_to(job, said):
    script = """
    import warnings
    warnings.simplefilter("ignore")
    initialize()
    global_sum()
    for end in (lambda: sys.exit(7), lambda: 1 / 0):
        child = os.fork()
        if child == 0:
            end()
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    barrier("after")
    """
    for one in job.run(2, script):
        assert one.code == 0, one
        assert said(one).split() == ["7", "1"]
        assert one.err.count("ZeroDivisionError") == 1
    assert job.leaves_no_orphan()


def test_killed_coordinator_raises_a_python_exception(job):
    script = """
    initialize()
    global_sum()
    barrier("ready")
    say("ready")
    threading.Event().wait() if index == 1 else barrier("after")
    """
    one = job.start(0, 2, "import threading\n" + dedent(script), SHOAL_HANG_TIMEOUT_S="1")
    other = job.start(1, 2, "import threading\n" + dedent(script))
    one.until_said("ready")
    other.until_said("ready")
    (place,) = job.descendants(of="shoal.runtime.server.coordinator")
    os.kill(place, signal.SIGKILL)
    ended = job.wait_for(0)
    assert ended.code == 71, ended
    assert "coordinator" in ended.err
    other.kill()
    job.wait()
    assert job.leaves_no_orphan()
