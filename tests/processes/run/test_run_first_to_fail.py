"""Jobs in which the process that ends first, or is heard of first, is not the one that failed."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

pytestmark = pytest.mark.usefixtures("forks")  # its jobs begin as any do

START = """
import atexit, os, signal, sys, threading, time
import numpy as np
import shoal
shoal.initialize(virtual_devices=1)
import jax
here = shoal.process_index()
mesh = shoal.make_mesh({"x": -1})
x = shoal.put(np.ones(12, "float32"), shoal.Layout(mesh, "x"))
normed = jax.jit(lambda v: v / v.sum())
normed(x).block_until_ready()
shoal.barrier("start")
"""
# What the processes do: the headline, the code, and words of the report.
ENDS = {
    "a loop that is shorter, waits in shoal": (
        "for step in range(9 if here != 1 else 4):\n"
        "    with shoal.step(step): shoal.barrier('s')\n",
        ("process 1 of 3 ended with exit code 0", 72, "Processes 0, 2 were waiting at barrier 's'"),
    ),
    "a loop that is shorter, waits in jit": (
        "for step in range(9 if here != 1 else 4):\n"
        "    with shoal.step(step): x = normed(x).block_until_ready()\n",
        ("process 1 of 3 ended with exit code 0", 72, "in step 3"),
    ),
    "sys.exit(256)": (
        "if here == 1: sys.exit(256)\nshoal.barrier('b')\n",
        ("process 1 of 3 ended with exit code 0", 72, "SystemExit: 256"),
    ),
    "a deadline of shutdown while one computes": (
        "if here == 1: normed(x).block_until_ready()  # odd\nshoal.shutdown(timeout_s=3)\n",
        ("process 1 of 3 did not reach shutdown", 73, "# odd"),
    ),
    "a deadline while one computes": (
        "if here == 1: normed(x).block_until_ready()  # odd\nshoal.barrier('b', timeout_s=3)\n",
        ("process 1 of 3 did not reach barrier 'b'", 73, "# odd"),
    ),
    "a difference while one computes": (
        "if here == 1: normed(x).block_until_ready()\n"
        "shoal.assert_same(here, processes=[0, 2], name='n')\n",
        ("assert_same 'n' found different values", 70, "process 2 2"),
    ),
    "an abort, and another ignores SIGTERM": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if here == 1: os.abort()  # odd\n"
        "time.sleep(1000)\n",
        ("process 1 of 3 was killed by SIGABRT", 134, "# odd"),
    ),
    "a kill, and a peer makes an exit of its error": (
        "if here == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: normed(x).block_until_ready()\n"
        "except Exception: sys.exit(9)\n",
        ("process 1 of 3 was killed by SIGKILL", 137, ""),
    ),
    "an exec": (
        "if here == 1: os.execv('/bin/sleep', ['sleep', '1000'])\nshoal.barrier('b')\n",
        ("process 1 of 3 was lost", 71, "but it lived on"),
    ),
    "an exit that takes longer than the others wait": (
        "if here == 1: sys.exit(9)  # odd\nshoal.barrier('b')\n",
        ("process 1 of 3 ended with exit code 9", 9, "# odd"),
    ),
    "a reader of feed, while its process computes": (
        "def read():\n"
        "    for k in range(99):\n"
        "        if here == 1 and k == 3: raise OSError('shard 3')  # odd\n"
        "        yield np.full((1, 2), k, 'float32')\n"
        "for step, batch in enumerate(shoal.feed(read(), shoal.Layout(mesh, 'x', None))):\n"
        "    with shoal.step(step): pass\n"
        "    if here == 1: time.sleep(1)\n",
        ("process 1 of 3 raised OSError", 1, "# odd"),
    ),
    "other rows in a feed, while one computes": (
        "def read():\n"
        "    for k in range(9):\n"
        "        yield np.ones((1, 3 if here == 1 and k == 2 else 2), 'float32')\n"
        "for step, _ in enumerate(shoal.feed(read(), shoal.Layout(mesh, 'x', None))):\n"
        "    if here == 0 and step == 1: normed(x).block_until_ready()\n",
        ("processes gave a call different values", 70, "float32[rows,3]"),
    ),
    "an error of XLA, after another has left": (
        "if here == 0: sys.exit()\n"
        "time.sleep(1)\n"
        "def host(v): raise ValueError('no such token')\n"
        "kind = jax.ShapeDtypeStruct((2,), 'float32')\n"
        "if here == 1:\n"
        "    jax.jit(lambda v: jax.pure_callback(host, kind, v))(np.ones(2, 'float32')) + 1\n"
        "shoal.barrier('b', processes=[1, 2])\n",
        ("process 1 of 3 raised JaxRuntimeError", 1, "no such token"),
    ),
    "a slow end because of one that left": (
        "with shoal.step(3):\n"
        "    if here == 0: sys.exit()\n"
        "if here == 2: threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "shoal.barrier('b')\n",
        ("process 0 of 3 ended with exit code 0", 72, "order, by sys.exit() at script.py:14, and"),
    ),
    "an error, while the others compute": (
        "for step in range(99):\n"
        "    if here == 1 and step == 5: raise ValueError('boom')\n"
        "    with shoal.step(step): time.sleep(0.1)  # computes\n",
        ("process 1 of 3 raised ValueError", 1, "Processes 0, 2 were running at script.py:15"),
    ),
    "an error in a callback": (
        "def host(v):\n"
        "    if here == 1: raise ValueError('no such token')\n"
        "    return v\n"
        "kind = jax.ShapeDtypeStruct((2,), 'float32')\n"
        "call = jax.jit(lambda v: jax.pure_callback(host, kind, v))\n"
        "call(np.ones(2, 'float32')).block_until_ready()\n"
        "shoal.barrier('b')\n",
        ("process 1 of 3 raised JaxRuntimeError", 1, 'script.py", line 14, in host'),
    ),
    "an error in a callback, while its result is saved": (
        "def host(v):\n"
        "    time.sleep(1)\n"
        "    if here == 1: raise ValueError('no such token')\n"
        "    return v\n"
        "call = jax.shard_map(\n"
        "    lambda v: jax.pure_callback(host, jax.ShapeDtypeStruct(v.shape, v.dtype), v),\n"
        "    mesh=x.sharding.mesh, in_specs=x.sharding.spec, out_specs=x.sharding.spec)\n"
        "shoal.save('ck', {'x': jax.jit(call)(x)})\n",
        ("process 1 of 3 raised JaxRuntimeError", 1, 'script.py", line 15, in host'),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_process_that_failed_first_is_named(launch, end):
    program, (headline, code, words) = ENDS[end]
    start = START
    if "1000" not in program and "takes longer" not in end:  # all end by themselves
        launch.env["SHOAL_FAILURE_GRACE_S"] = "20"
    if "takes longer" in end:  # handlers run in reverse order: this one after those of shoal
        start = start.replace("import shoal", "atexit.register(time.sleep, 1000)\nimport shoal")
    finished = launch.run("-n", "3", script=start + program)
    assert finished.verdict.endswith(f" s: {headline}"), finished.err
    assert finished.code == code, finished.err
    assert words in " ".join(finished.err.split()), finished.err


def test_a_process_that_lives_on_with_its_descriptors_closed_was_lost(launch):
    """Before it has computed: gloo would abort it."""
    script = (
        "import os, time, shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "if shoal.process_index() == 1: os.closerange(3, 1024); time.sleep(1000)\n"
        "shoal.barrier('b')\n"
    )
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 71, finished.err
    assert finished.verdict.endswith(" s: process 1 of 2 was lost"), finished.err
    assert "but it lived on" in finished.err


NOT_TRIED_AGAIN = {
    "wrong usage": "import shoal\nshoal.initialize(num_processes='x')\n",
    "an exit with 2, which takes longer than the others wait": (
        "import atexit, sys, time\n"
        "atexit.register(time.sleep, 1000)\n"
        "import shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "if shoal.process_index() == 1: sys.exit(2)\n"
        "atexit.unregister(time.sleep)\n"
        "shoal.barrier('b')\n"
    ),
}


@pytest.mark.parametrize("how", NOT_TRIED_AGAIN)
def test_exit_code_2_is_not_tried_again(launch, how):
    script = NOT_TRIED_AGAIN[how]
    finished = launch.run("-n", "2", "--max-restarts", "2", script=script)
    assert finished.code == 2, finished.err
    ends = "raised UsageError" if "usage" in how else "process 1 of 2 ended with exit code 2"
    assert finished.verdict.endswith(ends), finished.err
    assert "attempt" not in finished.err.partition("Exit code")[0]


def test_a_job_that_no_process_has_joined_says_so(launch):
    script = (
        "import os, shoal\n"
        "shoal.initialize(coordinator_address='nowhere.invalid:9', num_processes=2,\n"
        "                 process_id=int(os.environ['RANK']), timeout_s=2)\n"
    )
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 74, finished.err
    assert finished.verdict.endswith(": neither process joined"), finished.err


WHILE_SAVING = """
for step in range(10_000):
    if step == 3: print("runs", flush=True)
    with shoal.step(step):
        shoal.barrier("s")
        time.sleep(0.02)
    if shoal.preempted(step):
        if here == 1: {end}
        shoal.barrier("saved")
        break
raise SystemExit(shoal.preemption.exit_code())
"""
OWN_ENDS = {
    "raise OSError('no space')": ("process 1 of 3 raised OSError", 1),
    "sys.exit(5)": ("process 1 of 3 ended with exit code 5", 5),
    "os._exit(5)": ("process 1 of 3 ended with exit code 5", 5),
    "os.kill(os.getpid(), signal.SIGKILL)": ("process 1 of 3 was killed by SIGKILL", 137),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("process 1 of 3 was killed by SIGSEGV", 139),
    "shoal.barrier('other')": ("processes made different calls", 70),
}


@pytest.mark.parametrize("end", OWN_ENDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_fails_after_a_request_to_end_is_reported(launch, end, number):
    headline, code = OWN_ENDS[end]
    launch.start("-n", "3", script=START + WHILE_SAVING.format(end=end))
    launch.await_words("runs", 3)
    launch.popen.send_signal(number)
    finished = launch.finish()
    said = re.sub(r", found in step \d+$", "", finished.verdict)
    assert said.endswith(f" s: {headline}"), finished.err
    assert finished.code == code, finished.err
    (facts,) = launch.temporary.glob("shoal-run-*/failure.json")
    assert json.loads(facts.read_text())["causes"]
    assert [*facts.parent.glob("p0001.log")]


HANDLER = "signal.signal({}, lambda *_: sys.exit(0))"
RUNS = "print('runs', flush=True)\ntime.sleep(1000)\n"


def test_what_failed_before_a_request_to_end_is_reported(launch):
    """It cannot end, and a scheduler ends the whole job."""
    launch.env["SHOAL_FAILURE_GRACE_S"] = "30"
    script = START + (
        "print('runs', flush=True)\n"
        "if here == 1:\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    raise ValueError('boom')\n"
        "try: shoal.barrier('b')\n"
        "finally: print('heard', flush=True)\n"
    )
    launch.start("-n", "3", script=script)
    launch.await_words("heard", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.verdict.endswith(": process 1 of 3 raised ValueError"), finished.err
    assert finished.code == 1, finished.err


def test_a_job_that_goes_on_after_a_notice_and_does_its_work_has_ended_well(launch):
    script = START + (
        "for step in range(10_000):\n"
        "    if shoal.preempted(step): break\n"
        "    print('runs', flush=True); time.sleep(0.1)\n"
        "shoal.preemption.clear()\n"
    )
    launch.start("-n", "2", script=script)
    launch.await_words("runs", 4)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 0, finished.err


@pytest.mark.parametrize(
    ("before", "number"),
    [
        ("", signal.SIGTERM),
        (HANDLER.format("signal.SIGTERM"), signal.SIGTERM),
        (HANDLER.format("signal.SIGTERM"), signal.SIGHUP),
        (HANDLER.format("signal.SIGINT"), signal.SIGINT),
        ("", signal.SIGQUIT),
        (HANDLER.format("signal.SIGQUIT"), signal.SIGQUIT),
        ("signal.signal(signal.SIGTERM, signal.default_int_handler)", signal.SIGTERM),
    ],
)
def test_processes_that_end_as_asked_were_interrupted(launch, before, number):
    launch.start("-n", "3", script=f"{START}{before}\n{RUNS}")
    launch.await_words("runs", 3)
    launch.popen.send_signal(number)
    finished = launch.finish()
    assert finished.code == 128 + number, finished.err
    assert f"by {number.name}" in finished.verdict, finished.err


def test_a_frozen_coordinator_is_what_was_lost(launch):
    launch.env |= {"SHOAL_LOST_AFTER_S": "2"}
    wait = "print('ready', flush=True)\nwhile True: shoal.barrier('b')\n"
    launch.start("-n", "2", script=START + wait)
    launch.await_words("ready", 2)
    (service,) = launch.pids("shoal.runtime.server.coordinator")
    os.kill(service, signal.SIGSTOP)
    finished = launch.finish()
    assert finished.code == 71, finished.err
    assert finished.verdict.endswith(" s: the coordinator was lost"), finished.err
    assert "silent for 2 s: frozen or disconnected" in " ".join(finished.err.split())


def test_a_process_that_uses_jax_first_waits_for_the_devices_of_the_others(launch):
    script = (
        "import jax, shoal\n"
        "shoal.initialize(virtual_devices=1)\n"
        "if shoal.process_index() == 1: jax.devices()  # first\n"
        "shoal.barrier('b', timeout_s=8)\n"
    )
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 73, finished.err
    report = " ".join(finished.err.split())
    assert "jax.devices() # first" in report
    assert "its devices start, and wait for those of all processes: every process must" in report
