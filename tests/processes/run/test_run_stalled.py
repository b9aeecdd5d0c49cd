"""A job that lives and does not move: each way of standing still is named, and ends it."""

from __future__ import annotations

import time

import pytest

from few import few
from shoal.testing.cluster import Cluster

pytestmark = pytest.mark.usefixtures("forks")  # its jobs begin as any do

HEAD = """
import ctypes, os, queue, sys, threading, time
import numpy as np
import shoal
shoal.initialize(virtual_devices=1)
import jax, jax.numpy as jnp
here = shoal.process_index()
x = shoal.put(np.ones(12, "float32"), shoal.Layout(shoal.make_mesh({"data": -1}), "data"))
normed = jax.jit(lambda v: v / jnp.sum(v))
read_end, write_end = os.pipe()
"""
STUCK = """
for step in range(6):
    with shoal.step(step):
        if step == 3 and here == 1:
            {hang}  # here
        x = normed(x).block_until_ready()  # waits
shoal.barrier("the end")  # end
"""
HANGS = {
    "queue": "queue.Queue().get()",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "sleep": "time.sleep(1e6)",
    "fifo": "os.mkfifo('fifo'); open('fifo')",
    "native": "ctypes.PyDLL(None).read(read_end, ctypes.create_string_buffer(1), 1)",
    "a collective less": "continue",
    "barrier": "shoal.barrier('of one process')",
}


IN_SHOAL = ("a collective less", "barrier")


def line_of(script, word):
    """Return the place of the line with this comment."""
    number = next(n for n, line in enumerate(script.splitlines(), 1) if f"# {word}" in line)
    return f"script.py:{number} "


@pytest.mark.parametrize("how", few(HANGS, ["queue", "native", "a collective less", "barrier"]))
def test_the_odd_process_is_named_with_its_line(launch, how):
    script = HEAD + STUCK.format(hang=HANGS[how])
    finished = launch.run("-n", "3", "--stalled-after", "3s", script=script)
    assert finished.code == 77, finished.err
    headline, odd, others, *_ = finished.err[finished.err.index("shoal run: failed") :].splitlines()
    assert ": no process has moved for " in headline
    if how in IN_SHOAL:  # the others may wait for it, too
        assert headline.endswith("; process 1 waits for processes 0, 2")
        odd, others = others, odd
    else:
        assert headline.endswith("; process 1 is elsewhere")
    assert odd.startswith("  process 1 ")
    assert line_of(script, "end" if how == "a collective less" else "here") in odd
    assert others.startswith("  processes 0, 2 ")
    assert line_of(script, "waits") in others
    source = script.splitlines()[int(odd.split("script.py:")[1].split()[0]) - 1].strip()
    assert how == "native" or source[:24] in odd
    assert finished.err.count("o process has moved for") == 1, "each says it in its log"


LOOPLESS = ["queue", "lock", "a collective less"]


@pytest.mark.parametrize("how", few(LOOPLESS, ["a collective less"]))
def test_a_program_without_steps_is_ended_too(launch, how):
    loop = STUCK.replace("    with shoal.step(step):\n", "    if True:\n")
    assert "shoal.step" not in loop
    script = HEAD + loop.format(hang=HANGS[how])
    finished = launch.run("-n", "3", "--stalled-after", "3s", script=script)
    assert finished.code == 77, finished.err
    assert line_of(script, "waits") in finished.err


def test_process_that_left_while_others_wait_is_named(launch):
    script = HEAD + "if here == 1: sys.exit()  # here\nnormed(x).block_until_ready()\n"
    finished = launch.run("-n", "2", "--stalled-after", "3s", script=script)
    assert finished.code == 77, finished.err
    place = line_of(script, "here")
    assert "; process 1 left the job\n" in finished.err
    assert f"  process 1   left the job, last at sys.exit() at {place.strip()}\n" in finished.err


# With one device gloo raises where a process has left; the threads of several wait for ever.
SEVERAL = HEAD.replace("virtual_devices=1", "virtual_devices=3")
LEFT = """
for step in range(40):
    if here == 1 and step == 3:
        sys.exit()
    {step}x = normed(x)  # waits
    {wait}
"""


STEPS, WAITS_IN_JIT = ["", "with shoal.step(step): "], ["", "float(x.sum())"]


@pytest.mark.parametrize("step", few(STEPS, STEPS[1:]))
@pytest.mark.parametrize("wait", few(WAITS_IN_JIT, WAITS_IN_JIT[:1]))
def test_without_a_limit_a_job_that_waits_in_jit_for_a_process_that_left_is_ended(
    launch, step, wait
):
    script = SEVERAL + LEFT.format(step=step, wait=wait) + "x.block_until_ready()\n"
    launch.env["SHOAL_HANG_TIMEOUT_S"] = "3"
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 77, finished.err
    headline, left, other, *_ = finished.err[finished.err.index("shoal run: failed") :].splitlines()
    assert headline.endswith("; process 1 left the job")
    assert left.startswith("  process 1   left the job, last at ")
    assert other.startswith("  process 0   script.py:")
    assert "because of it" not in finished.err


@pytest.mark.parametrize("result", ["normed(x)", "kept = normed(x)"], ids=["dropped", "kept"])
def test_process_whose_results_need_one_that_left_exits_normally(launch, result):
    script = SEVERAL + (
        "normed(x).block_until_ready()\n"
        "shoal.barrier('all have computed')\n"
        f"if here == 0: {result}\n"
        "print('done')\n"
    )
    finished = launch.run("-n", "2", "--no-prefix", script=script)
    # XLA (jaxlib 0.12) now and then prints a number, too, as gloo's connections end.
    assert (finished.code, finished.lines.count("done")) == (0, 2), finished.err


def test_process_that_works_on_after_the_others_left_is_not_ended(launch):
    """Not in JAX: native code, a child process, a loop; or its devices have computed all."""
    script = HEAD + (
        "x = normed(x).block_until_ready()\n"
        "shoal.barrier('all have computed')\n"
        "if here == 1: sys.exit()\n"
        "ctypes.PyDLL(None).usleep(5_000_000)\n"
        "os.system('sleep 5')\n"
        "import subprocess; subprocess.run(['sleep', '5'])\n"
        "y = jax.jit(lambda v: v * 2)(np.ones(3))\n"
        "for _ in range(100): y.is_ready(); time.sleep(0.05)\n"
        "print('done')\n"
    )
    launch.env["SHOAL_HANG_TIMEOUT_S"] = "2"
    finished = launch.run("-n", "2", "--no-prefix", script=script)
    assert (finished.code, finished.lines) == (0, ["done"]), finished.err


@pytest.mark.parametrize("count", ["1", "2"])
def test_stall_raises_in_a_shoal_wait_and_at_the_start_of_a_step(launch, count):
    """Process 0 of two is in a wait; alone it goes on after the limit of its step."""
    script = HEAD + (
        "try:\n"
        "    with shoal.step(1, within_s=2):\n"
        "        if here == 0 and shoal.process_count() > 1: shoal.barrier('it waits')\n"
        "        time.sleep(1e6)\n"
        "except shoal.errors.StalledError as error:\n"
        "    print('got', type(error).exit_code, str(error).count('process 1 at '))\n"
        "    raise\n"
    )
    finished = launch.run("-n", count, script=script)
    assert finished.code == 77, finished.err
    assert finished.lines == ([] if count == "1" else ["p0| got 77 1"])


def test_healthy_programs_are_not_ended(launch):
    """A loop without marks, with marks and long steps, work with a limit of its own, and native
    code that holds the interpreter lock."""
    script = HEAD + (
        "for _ in range(3):\n"
        "    x = normed(x).block_until_ready()\n"
        "    time.sleep(1.5)\n"
        "for step in range(2):\n"
        "    with shoal.step(step): time.sleep(1.5)\n"
        "with shoal.step(2): time.sleep(4)\n"  # ten median steps
        "with shoal.step(3, within_s=float('inf')):\n"
        '    os.system(f\'"{sys.executable}" -c "import time; time.sleep(4)"\')\n'
        "with shoal.step(4, within_s=float('inf')):\n"
        "    if here == 1: ctypes.PyDLL(None).usleep(4_000_000)\n"
        "    x = normed(x).block_until_ready()\n"
        "with shoal.step(5):\n"
        "    if here == 1: sum(range(10**8))\n"
        "    x = normed(x).block_until_ready()\n"
        "print('done')\n"
    )
    finished = launch.run("-n", "2", "--no-prefix", "--stalled-after", "2s", script=script)
    assert (finished.code, finished.lines) == (0, ["done"] * 2), finished.err
    assert "moved" not in finished.err


def test_a_debugger_and_a_prompt_end_nothing(launch):
    """The main thread stands in pdb, or has a prompt."""
    for held in ("bdb.Bdb().runcall(time.sleep, 4)", "sys.ps1 = '>>> '; time.sleep(4)"):
        script = f"import bdb, sys, time, shoal\nshoal.initialize()\n{held}\nprint('went on')\n"
        finished = launch.run("--stalled-after", "2s", script=script)
        assert (finished.code, finished.lines) == (0, ["p0| went on"]), finished.err


WAITS = {
    "in a call": (
        "if here != 1: time.sleep(1e6)  # odd\nshoal.barrier('s', timeout_s=1000)\n",
        "process 1 waits for processes 0, 2",
    ),
    "for its reader": (
        "def read():\n"
        "    for k in range(99):\n"
        "        if here == 1 and k == 5: queue.Queue().get()  # odd\n"
        "        yield np.full((1, 2), k, 'float32')\n"
        "mesh = shoal.make_mesh({'x': -1})\n"
        "for step, batch in enumerate(shoal.feed(read(), shoal.Layout(mesh, 'x', None))):\n"
        "    with shoal.step(step): shoal.barrier('s')\n",
        "process 1 waits for a reader",
    ),
}


@pytest.mark.parametrize("waits", WAITS)
def test_stall_verdict_names_which_process_waits_for_which(launch, waits):
    program, words = WAITS[waits]
    script = HEAD + program
    finished = launch.run("-n", "3", "--stalled-after", "4s", "--log-dir", "logs", script=script)
    assert finished.code == 77, finished.err
    assert finished.verdict.endswith(f"; {words}"), finished.err
    logs = "".join(path.read_text() for path in (launch.folder / "logs").glob("p*.log"))
    assert "# odd" in logs, "the stack of the reader, too"


def test_times_are_checked(launch):
    for wrong in ("0", "x", "-1s", "10 days"):
        finished = launch.run("--stalled-after", wrong, script="")
        assert finished.code == 2
        assert "must be a time, such as 90, 90s, 10m or 2h" in finished.err


def stand_still(seconds):
    import shoal

    with shoal.step(1):
        if shoal.process_index() == 1:
            print("stands", flush=True)
        time.sleep(seconds)
        shoal.barrier("all have stood")  # the first to go on is no process that left


def test_without_a_limit_it_is_reported_once_with_the_places_of_all():
    """And without a launcher: the processes are started by hand."""
    with Cluster(3, env={"SHOAL_STALL_WARN_S": "1"}, start_method="fork") as cluster:
        cluster.start(stand_still, 8.0)
        ended = cluster.wait()
    assert [one.code for one in ended] == [0, 0, 0], ended[0].err
    reports = [one.err.count("no process has moved for") for one in ended]
    assert min(reports) >= 1
    whole = [one.err for one in ended if "stacks of the stalled processes" in one.err]
    assert len(whole) == 1
    assert "processes 0-2 at " in whole[0]
    assert "in stand_still" in whole[0]


def test_without_a_launcher_it_is_ended_too():
    with Cluster(2, env={"SHOAL_STALLED_AFTER_S": "2"}, start_method="fork") as cluster:
        cluster.start(stand_still, 1e6)
        ended = cluster.wait()
    assert [one.code for one in ended] == [77, 77]
    for process, one in enumerate(ended):
        assert f"shoal: process {process} of 2 " in one.err
        assert "ended with exit code 77, because no process has moved for" in one.err


def test_a_job_that_is_suspended_as_a_whole_is_not_stalled():
    env = {"SHOAL_STALLED_AFTER_S": "3", "SHOAL_LOST_AFTER_S": "60"}
    with Cluster(2, env=env, start_method="fork") as cluster:
        cluster.start(stand_still, 1.0)
        cluster.wait_for("stands", 1)
        for process in (0, 1):
            cluster.stop(process)
        time.sleep(5.0)
        for process in (0, 1):
            cluster.cont(process)
        assert [one.code for one in cluster.wait()] == [0, 0]


def test_a_process_that_is_lost_in_native_code_is_named_with_its_line(launch):
    """Without a limit: the loss ends the job."""
    script = HEAD + STUCK.format(hang=HANGS["native"])
    launch.env |= {"SHOAL_SILENT_LOST_AFTER_S": "4", "SHOAL_LOST_AFTER_S": "1"}
    launch.env["SHOAL_HANG_TIMEOUT_S"] = "1"
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 71, finished.err
    native = "in native code that holds the interpreter lock, called at"
    assert f"{native} {line_of(script, 'here').strip()}" in finished.err


def stand_still_after_a_loss():
    import os
    import signal

    import shoal

    try:
        shoal.barrier("all")
        if shoal.process_index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        shoal.barrier("again")
    except shoal.ProcessLostError:
        assert [*shoal.live_processes()] == [0, 1]
        stand_still(1e6)


def test_survivors_that_stand_still_are_ended_too():
    with Cluster(3, env={"SHOAL_STALLED_AFTER_S": "2"}, start_method="fork") as cluster:
        cluster.start(stand_still_after_a_loss)
        ended = cluster.wait()
    assert [one.code for one in ended] == [77, 77, -9], ended[0].err
