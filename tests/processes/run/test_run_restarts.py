"""`shoal run --max-restarts`: a job that failed is started again, on one host and on several."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from processes.run.launchers import Launchers, codes, said, verdict
from shoal.launch.conclusion import Conclusion
from shoal.launch.nodes.messages import pack_verdict
from shoal.runtime.rules.liveness import Limits
from shoal.runtime.wire.frames import FrameReader, pack_frame
from shoal.runtime.wire.proof import is_proof, proof
from shoal.testing.warding import Warden

HEAD = """
import os, signal, subprocess, sys, time
attempt = int(os.environ["SHOAL_ATTEMPT"])
def say(*words): print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # one write
"""


@pytest.fixture
def launchers(tmp_path, child_env):
    """Return launchers of two nodes; nothing of them outlives the test."""
    warden = Warden(0)
    launchers = Launchers(tmp_path, child_env, warden)
    yield launchers
    launchers.close()
    warden.close()


def test_a_failed_job_is_started_again_with_nothing_of_the_earlier_one(launch):
    script = """
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    names = "SHOAL_TOKEN SHOAL_COORDINATOR SHOAL_JAX_SERVICE".split()
    say("attempt", attempt, *[os.environ[name] for name in names])
    if attempt < 2: sys.exit(3)
    """
    options = ("-n", "2", "--max-restarts", "5", "--log-dir", "logs", "--no-prefix")
    finished = launch.run(*options, script=HEAD + textwrap.dedent(script))
    assert finished.code == 0, finished.err
    rows = [line.split()[1:] for line in finished.lines]
    assert [row[0] for row in rows] == ["0", "0", "1", "1", "2", "2"]
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == 3
    assert "shoal run: attempt 1 begins (1 of --max-restarts 5)\n" in finished.err
    assert "shoal run: attempt 2 begins (2 of --max-restarts 5)\n" in finished.err
    logs = launch.folder / "logs"
    for attempt in range(3):
        assert f"attempt {attempt} " in (logs / f"attempt{attempt}" / "p0001.log").read_text()
    assert not list(logs.rglob(".*"))
    assert launch.leaves_nobody()


COMPILES = """
import collections, jax, jax.numpy as jnp, numpy as np, shoal
count = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: count.update([event.split("/")[-1]]))
shoal.initialize()
mesh = shoal.make_mesh({"data": -1})
x = shoal.put(np.arange(8, dtype="float32"), shoal.Layout(mesh, "data"))
total = jax.jit(lambda x: (jnp.sin(x) * x).sum())(x)
own = jax.jit(lambda x: x @ x.T)(jnp.ones((2, 3)))
requests, hits = count["compile_requests_use_cache"], count["cache_hits"]
say(attempt, shoal.process_index(), requests, hits, float(total), float(own.sum()))
shoal.barrier("counted")
signals = [signal.SIGKILL, signal.SIGSEGV]
if attempt < 2 and shoal.process_index() == 1: os.kill(os.getpid(), signals[attempt])
"""


def test_every_process_loads_what_it_has_compiled_until_it_crashes_before_a_step(launch):
    launch.env["XDG_CACHE_HOME"] = str(launch.folder / "cache")
    options = ("-n", "2", "--devices", "2", "--max-restarts", "2", "--no-prefix")
    finished = launch.run(*options, script=HEAD + COMPILES)
    assert finished.code == 0, finished.err
    rows = [line.split() for line in finished.lines]
    assert [row[0] + row[1] for row in rows] == ["00", "01", "10", "11", "20", "21"]
    requests, hits = ([int(row[at]) for row in rows] for at in (2, 3))
    assert min(requests) >= 2
    assert hits == [0, 0, *requests[2:4], 0, 0]
    assert len({(row[4], row[5]) for row in rows}) == 1
    begins = [line for line in finished.err.splitlines() if "begins" in line]
    words = "; without the compile cache: process 1 died of SIGSEGV before its first step"
    assert [line.partition(";")[1:] for line in begins] == [("", ""), (";", words[1:])]
    left = [path for path in (launch.folder / "cache").rglob("*") if path.is_file()]
    assert left == []


def test_a_crash_loop_ends_early(launch):
    finished = launch.run("--max-restarts", "9", script=HEAD + "say('ran'); sys.exit(4)")
    assert finished.code == 4
    assert finished.out.count("ran") == 3
    words = "No new attempt: a crash loop, 3 failed and noted no step (shoal.step, "
    assert f"  {words}shoal.preempted, shoal.preemption.mark_saved).\n" in finished.err
    assert finished.err.count(": process 0 ended with exit code 4\n") == 3
    assert finished.err.count("  Exit code 4. Log: ") == 3
    (logs,) = launch.temporary.glob("shoal-run-*")
    assert sorted(path.name for path in logs.iterdir()) == ["attempt0", "attempt1", "attempt2"]


def test_the_same_exception_twice_ends_it_also_before_the_first_step(launch):
    finished = launch.run("--max-restarts", "9", script=HEAD + "say('ran')\nundefined\n")
    assert finished.code == 1
    assert finished.out.count("ran") == 2
    words = "  No new attempt: two failed alike, NameError at script.py:"
    (line,) = [one for one in finished.err.splitlines() if words in one]
    assert line.endswith(" before the first step.")
    assert "  NameError: name 'undefined' is not defined\n" in finished.err


@pytest.mark.usefixtures("forks")
def test_the_same_exception_at_other_steps_goes_on(launch):
    script = """
    import shoal
    say("ran")
    last = min(attempt, 2) + 5
    with shoal.step(last - 1): pass
    with shoal.step(last): 1 / 0
    """
    finished = launch.run("--max-restarts", "9", script=HEAD + textwrap.dedent(script))
    assert finished.code == 1
    assert finished.out.count("ran") == 4  # steps 5, 6, 7 and 7
    words = "No new attempt: two failed alike, ZeroDivisionError at script.py:"
    assert words in finished.err
    assert " at step 7.\n" in finished.err


@pytest.mark.usefixtures("forks")
def test_the_same_exception_after_a_new_saved_step_goes_on(launch):
    """It notes no other step, and fails at the tenth after it."""
    script = """
    import shoal
    say("ran")
    if attempt < 3: shoal.preemption.mark_saved(10 * attempt)
    1 / 0
    """
    finished = launch.run("--max-restarts", "9", script=HEAD + textwrap.dedent(script))
    assert finished.code == 1
    assert finished.out.count("ran") == 4, finished.err
    assert " before the first step.\n" in finished.err


def test_preemptions_before_the_first_step_are_no_crash_loop(launch):
    script = "say('ran')\nif attempt < 4: sys.exit(75)\n"
    finished = launch.run("--restart-preempted", script=HEAD + script)
    assert (finished.code, finished.out.count("ran")) == (0, 5), finished.err


def test_signals_from_outside_are_no_crash_loop(launch):
    """Five early SIGKILLs and two exceptions between them that differ; then it succeeds."""
    script = """
    say("ran")
    if attempt == 2: 1 / 0
    if attempt == 4: undefined
    if attempt < 7: os.kill(os.getpid(), signal.SIGKILL)
    """
    finished = launch.run("--max-restarts", "100", script=HEAD + textwrap.dedent(script))
    assert finished.code == 0, finished.err
    assert finished.out.count("ran") == 8
    assert "No new attempt" not in finished.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("steps", [4, 0], ids=["at a step", "before the first step"])
def test_the_step_of_a_failure_is_that_of_the_process_that_failed(launch, steps):
    """Its peer goes further in each attempt."""
    script = f"""
    import shoal
    shoal.initialize(virtual_devices=1)
    say("ran")
    own = shoal.process_index() == 1
    for step in range({steps} if own else 10 * (attempt + 1)):
        with shoal.step(step): pass
    shoal.barrier("here")
    if own: undefined
    shoal.barrier("there")
    """
    options = ("-n", "2", "--max-restarts", "4")
    finished = launch.run(*options, script=HEAD + textwrap.dedent(script))
    assert finished.code == 1
    assert finished.out.count("ran") == 2 * 2
    when = "at step 3" if steps else "before the first step"
    (line,) = [one for one in finished.err.splitlines() if "two failed alike" in one]
    assert line.endswith(f"{when}.")


@pytest.mark.parametrize("ends", ["sys.exit(3)", "sys.exit(1)", "raise SystemExit('no data')"])
def test_an_exception_that_the_program_survived_is_not_its_cause(launch, ends):
    script = f"""
    import logging
    say("ran")
    try: undefined
    except NameError: logging.exception("an optional part")
    if attempt < 2: {ends}
    """
    finished = launch.run("--max-restarts", "9", script=HEAD + textwrap.dedent(script))
    assert (finished.code, finished.out.count("ran")) == (0, 3), finished.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("ends", ["sys.exit(1)", "sys.exit('no data')", "raise SystemExit(1)"])
def test_nor_is_one_that_it_handled_before_it_exits(launch, ends):
    script = f"""
    import logging
    import shoal
    shoal.initialize(virtual_devices=1)
    say("ran")
    shoal.barrier("here")
    if shoal.process_index() == 1 and attempt < 2:
        try: undefined
        except NameError: logging.exception("an optional part")
        {ends}
    if attempt < 2: shoal.barrier("there")
    """
    options = ("-n", "2", "--max-restarts", "9")
    finished = launch.run(*options, script=HEAD + textwrap.dedent(script))
    assert (finished.code, finished.out.count("ran")) == (0, 2 * 3), finished.err


@pytest.mark.usefixtures("forks")
def test_the_same_exception_is_known_however_it_is_printed(launch):
    script = """
    import shoal
    shoal.initialize(virtual_devices=1)
    say("ran")
    sys.excepthook = lambda kind, error, trace: print("╭─ drawn", kind, file=sys.stderr)
    shoal.barrier("here")
    if shoal.process_index() == 1: undefined
    shoal.barrier("there")
    """
    options = ("-n", "2", "--max-restarts", "9")
    finished = launch.run(*options, script=HEAD + textwrap.dedent(script))
    assert (finished.code, finished.out.count("ran")) == (1, 2 * 2), finished.err
    assert "two failed alike, NameError at script.py:" in finished.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("service", ["coordinator", "JAX service"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_kill_of_a_service_is_no_crash_loop_but_its_fault_is(launch, service, number):
    script = f"""
    import json
    import shoal
    say("ran")
    shoal.initialize(virtual_devices=1)
    if attempt == 4: sys.exit(0)
    services = json.load(open("logs/job.json"))["services"]
    os.kill(services[{service!r}], {int(number)})
    time.sleep(600)
    """
    options = ("--max-restarts", "9", "--log-dir", "logs")
    finished = launch.run(*options, script=HEAD + textwrap.dedent(script))
    code, attempts = (0, 5) if number == signal.SIGKILL else (71, 3)
    assert (finished.code, finished.out.count("ran")) == (code, attempts), finished.err


FAILURE_GRACE = """
import shoal
shoal.initialize(virtual_devices=1)
if attempt == 2: sys.exit(0)
shoal.barrier("here")
if shoal.process_index() == 1: raise ValueError(attempt)
{survives}
"""


@pytest.mark.usefixtures("forks")
def test_survivors_have_little_time_if_another_attempt_follows(launch):
    """They would write a line after 2 s; only the last attempt waits that long."""
    del launch.env["SHOAL_FAILURE_GRACE_S"]
    script = HEAD + FAILURE_GRACE.format(survives="time.sleep(2); say('late', attempt)")
    script = script.replace("raise ValueError(attempt)", "os._exit(4)")
    finished = launch.run("-n", "2", "--max-restarts", "1", "--no-prefix", script=script)
    assert finished.code == 4
    assert finished.lines == ["late 1"]


@pytest.mark.usefixtures("forks")
def test_a_survivor_that_saves_is_spared(launch):
    del launch.env["SHOAL_FAILURE_GRACE_S"]
    survives = """
    import numpy
    os.environ["SHOAL_FAULTS"] = "save.link:delay=1.5"
    shoal.save(f"saved{attempt}", {"w": numpy.ones(3)}, processes=[0])
    say("saved", attempt)
    time.sleep(600)
    """
    script = HEAD + FAILURE_GRACE.format(survives=textwrap.dedent(survives))
    begun = "while not glob.glob(f'saved{attempt}/data-*'): time.sleep(0.01)"
    once_it_saves = f"if shoal.process_index():\n    import glob\n    {begun}\n    raise ValueError"
    script = script.replace("if shoal.process_index() == 1: raise ValueError", once_it_saves)
    finished = launch.run("-n", "2", "--max-restarts", "2", "--no-prefix", script=script)
    assert finished.code == 1
    assert finished.lines == ["saved 0", "saved 1"], finished.err
    assert all((launch.folder / f"saved{n}" / "COMMIT").exists() for n in (0, 1))


@pytest.mark.usefixtures("forks")
def test_with_progress_it_goes_on_up_to_the_limit(launch):
    script = HEAD + "import shoal\nsay('ran')\nshoal.preemption.mark_saved(attempt)\nsys.exit(4)\n"
    finished = launch.run("--max-restarts", "4", script=script)
    assert finished.code == 4
    assert finished.out.count("ran") == 5
    assert "attempt 4 begins (4 of --max-restarts 4); highest step saved 3\n" in finished.err
    assert "  No new attempt: --max-restarts 4.\n" in finished.err


@pytest.mark.parametrize("after", [True, False], ids=["wanted", "not wanted"])
def test_exit_code_75_starts_again_only_if_wanted(launch, after):
    option = ["--restart-preempted"] if after else ["--max-restarts", "9"]
    script = HEAD + "say('ran')\nif attempt < 2: sys.exit(75)\n"
    finished = launch.run(*option, script=script)
    assert finished.code == (0 if after else 75)
    assert finished.out.count("ran") == (3 if after else 1)
    assert finished.err.count("begins (--restart-preempted)") == (2 if after else 0)


def test_wrong_usage_is_not_tried_again(launch):
    finished = launch.run("--max-restarts", "9", script=HEAD + "say('ran'); sys.exit(2)")
    assert (finished.code, finished.out.count("ran")) == (2, 1)


def test_what_initialize_refuses_is_wrong_usage(launch):
    script = HEAD + "import shoal\nsay('ran')\nshoal.initialize(timeout_s=-1)\n"
    finished = launch.run("--max-restarts", "9", script=script)
    assert (finished.code, finished.out.count("ran")) == (2, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_it_for_good(launch, number):
    script = HEAD + "say('ready')\nif attempt == 0: sys.exit(1)\ntime.sleep(600)\n"
    launch.start("--max-restarts", "9", "--restart-preempted", script=script)
    launch.await_words("ready", 2)
    launch.popen.send_signal(number)
    finished = launch.finish()
    assert finished.code == 128 + number, finished.err
    assert finished.verdict == f"shoal run: interrupted by {number.name}"
    assert launch.leaves_nobody()


def test_all_nodes_go_to_the_next_attempt_together(launchers):
    script = HEAD + (
        "import shoal\nshoal.initialize()\nsay('attempt', attempt, os.environ['SHOAL_TOKEN'])\n"
        "shoal.barrier('here')\n"
        "if attempt == 0 and shoal.process_index() == 1: raise RuntimeError('out of luck')\n"
        "shoal.barrier('on')\n"
    )
    options = ("--devices", "1", "--max-restarts", "1", "--log-dir", "logs", "--no-prefix")
    both = launchers.both(*options, script=script)
    assert codes(both) == [0, 0], said(both)
    tokens = []
    for started in both:
        assert ": process 1 of 2 raised RuntimeError\n" in started.said
        assert "shoal run: attempt 1 begins (1 of --max-restarts 1)" in started.said
        lines = [line.split() for line in started.said.splitlines()]
        tokens.append([line[2] for line in lines if line[:1] == ["attempt"]])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) == 2
    names = {os.path.relpath(path, launchers.folder) for path in launchers.folder.rglob("p*.log")}
    assert names == {f"logs/attempt{a}/p000{p}.log" for a in range(2) for p in range(2)}
    assert launchers.leaves_nobody()


def test_a_log_folder_that_cannot_be_made_ends_all(launchers):
    launchers.write("print('hello')")
    (launchers.folder / "logs").mkdir()
    (launchers.folder / "logs" / "attempt0").touch()  # a file
    options = ["--max-restarts", "1", "--log-dir"]
    waits = launchers.start(0, *options, "others", SHOAL_WARN_AFTER_S="0.2")
    waits.until("not joined")
    fails = launchers.start(1, *options, "logs")
    assert fails.code() == 74, fails.said
    assert "attempt0" in fails.said
    waits.popen.send_signal(signal.SIGINT)
    assert waits.code() == 130, waits.said
    assert "hello" not in waits.said
    assert launchers.leaves_nobody()


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_was_lost_may_come_again(launchers, node):
    script = HEAD + "say('ready', attempt)\nif attempt == 0: time.sleep(600)\n"
    both = launchers.both("--max-restarts", "1", script=script)
    for started in both:
        started.until("ready 0")
    launchers.kill(node)
    both[1 - node].until(f": node {node} (")
    both[1 - node].until("attempt 1 begins")
    again = launchers.start(node, "--max-restarts", "1")
    assert codes([again, both[1 - node]]) == [0, 0], said([again, both[1 - node]])
    for started in (again, both[1 - node]):
        assert "ready 1" in started.said  # though one of them has seen no other attempt
    assert launchers.leaves_nobody()


def test_a_crash_loop_on_several_hosts_ends_on_all(launchers):
    script = HEAD + "say('ran')\nif os.environ['RANK'] == '1': sys.exit(4)\ntime.sleep(600)\n"
    both = launchers.both("--max-restarts", "9", script=script)
    assert codes(both) == [4, 4], said(both)
    for started in both:
        assert started.said.count("| ran") == 3, started.said
        assert verdict(started) == verdict(both[0])
    assert "  No new attempt: a crash loop, 3 failed and noted no step" in both[0].said
    assert launchers.leaves_nobody()


def test_a_signal_after_a_failure_forbids_the_next_attempt(launch):
    script = HEAD + "say('x' * 400_000)\nsys.exit(3)\n"
    popen = launch.start("--max-restarts", "3", "--no-prefix", script=script)
    lines = until(popen.stderr, "Exit code 3. Log:")  # and the output is not taken
    popen.send_signal(signal.SIGTERM)
    lines += until(popen.stderr, "shoal run: SIGTERM: no new attempt\n")
    assert launch.finish().code == 128 + signal.SIGTERM
    assert "begins" not in "".join(lines)
    assert launch.leaves_nobody()


def until(stream, words):
    """Return the lines of a stream up to one that has the words."""
    lines = [stream.readline()]
    while words not in lines[-1]:
        assert lines[-1], lines
        lines.append(stream.readline())
    return lines


def test_a_launcher_of_another_job_does_not_end_one_between_two_attempts(launchers):
    script = HEAD + "say('ready', attempt)\nif attempt == 0: time.sleep(600)\n"
    launchers.write("print('of another job')", "other.py")
    both = launchers.both("--max-restarts", "1", script=script)
    for started in both:
        started.until("ready 0")
    launchers.kill(1)
    both[0].until("attempt 1 begins")
    other = launchers.start(1, "--max-restarts", "1", program=["other.py"])
    assert other.code() == 74
    assert "runs `other.py`, but node 0" in other.said
    both[0].until("refused: node 1")
    again = launchers.start(1, "--max-restarts", "1")
    assert codes([again, both[0]]) == [0, 0], [again.said, both[0].said]
    assert launchers.leaves_nobody()


# Python imports it first: it ends or stops the coordinator of the second attempt, which has not
# begun to listen. If it ends while it waits for the end of the first one, another one is started.
MEDDLER = """
import os, signal, sys
if "shoal.runtime.server.coordinator" in sys.orig_argv:
    with open("begun", "a") as file: file.write("x")
    if os.path.getsize("begun") in {begun}: os.kill(os.getpid(), signal.{number})
"""


@pytest.mark.parametrize(("number", "begun"), [("SIGKILL", (2, 3)), ("SIGSTOP", (2,))])
def test_services_that_fail_between_two_attempts_are_a_failed_attempt(launch, number, begun):
    (launch.folder / "sitecustomize.py").write_text(MEDDLER.format(number=number, begun=begun))
    launch.env |= {"PYTHONPATH": str(launch.folder), "SHOAL_LOST_AFTER_S": "1"}
    script = HEAD + "say('ran', attempt)\nsys.exit(0 if attempt else 3)\n"
    finished = launch.run("--max-restarts", "2", "--no-prefix", script=script)
    assert finished.code == 0, finished
    assert finished.lines == ["ran 0", "ran 2"]
    words = {"SIGKILL": "ended, code -9", "SIGSTOP": "is stopped (SIGSTOP?), for 1 s"}
    assert f": the coordinator {words[number]}\n" in finished.err
    assert "shoal run: attempt 2 begins (2 of --max-restarts 2)" in finished.err
    assert launch.leaves_nobody()


# Process 0 fails once the test holds process 1.
HELD = """
if attempt == 0 and os.environ["SHOAL_PROCESS_ID"] == "1":
    say("pid", os.getpid())
    time.sleep(600)
while attempt == 0 and not os.path.exists("held"):
    time.sleep(0.01)
sys.exit(3 if attempt == 0 else 0)
"""
# `shoal run` that waits no time for a process that SIGKILL has not ended.
IMPATIENT = """
import sys
from shoal.cli.main import main
from shoal.launch import job
job._REAPED_S, sys.argv = 0.0, sys.argv[3:]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PTRACE_SEIZE")
@pytest.mark.parametrize("is_released", [True, False], ids=["in time", "never"])
def test_a_new_attempt_waits_until_every_process_of_the_last_has_ended(launch, is_released):
    """A process whose tracer does not wait for it stays, as one in an uninterruptible wait."""
    launch.env["SHOAL_GRACE_S"] = "0.2"
    before = () if is_released else (sys.executable, "-c", IMPATIENT)
    options = ("-n", "2", "--max-restarts", "1", "--no-prefix")
    popen = launch.start(*options, script=HEAD + HELD, before=before)
    pid = int(popen.stdout.readline().split()[1])
    if ctypes.CDLL(None).ptrace(0x4206, pid, None, None):  # PTRACE_SEIZE
        pytest.skip("this container forbids ptrace")
    (launch.folder / "held").touch()
    who = f"process 1 (pid {pid}, state Z)"
    lines = until(popen.stderr, f"shoal run: SIGKILL has not ended {who} yet: ")
    assert "begins" not in "".join(lines)
    if is_released:
        with pytest.raises(subprocess.TimeoutExpired):  # the grace and 2 s end nothing
            popen.wait(timeout=3.0)
        while not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            pass
    rest = popen.stderr.read()  # of which some was read ahead
    finished = launch.finish()
    if is_released:
        assert finished.code == 0, finished.err
        assert "attempt 1 begins" in rest
    else:
        assert finished.code == 3
        assert f"  No new attempt: SIGKILL has not ended {who}.\n" in rest
        while not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            pass
    assert launch.leaves_nobody()


def prove(connection, secret):
    """Answer the first frames of a launcher as node 0 does."""
    reader = FrameReader(max_header_bytes=1 << 16, max_body_bytes=0)

    def receive():
        while (frame := reader.next()) is None:
            reader.feed(connection.recv(1 << 16))
        return frame.header

    first = receive()
    connection.sendall(pack_frame({"is": "challenge", "nonce": "ours"}))
    assert is_proof(receive()["proof"], secret, "client", "ours", first)
    own = proof(secret, "server", "ours", first)
    connection.sendall(pack_frame({"is": "proof", "proof": own}))


def test_node_0_that_is_lost_between_two_attempts_is_not_waited_for(launchers):
    """The others wait long for one that was lost in an attempt, and may be started again."""
    launchers.write("")
    judged = pack_verdict(Conclusion(3, again=True, next_words="attempt 1 begins"))
    heard = {"is": "heard", "host": "here", "processes": 1, **Limits.of_settings().words}
    with socket.create_server((launchers.host, launchers.port)) as server:
        started = launchers.start(1, "--max-restarts", "1", SHOAL_LOST_AFTER_S="1")
        connection, _ = server.accept()
    prove(connection, launchers.env.get("SHOAL_TOKEN", ""))
    connection.sendall(pack_frame(heard) + judged)
    assert started.code() == 74, started.said
    connection.close()
    words = f"the launcher of node 0 cannot be reached at {launchers.address} after "
    assert words in started.said
    assert "  It was lost between two restart attempts.\n" in started.said


@pytest.fixture
def small_cgroup():
    """Return a control group of 400 MB; its processes must have ended after the test."""
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [row[2] for row in rows if "memory" in row[1].split(",")]
    mounted, limit = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if v1 else (
        "/sys/fs/cgroup", "memory.max"
    )  # fmt: skip
    above = v1 or [row[2] for row in rows if not row[1]]
    group = Path(mounted + (above[0] if above else ""), f"shoal-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (group / limit).write_text("400000000")
        yield group
    except OSError as error:
        pytest.skip(f"a control group takes no limit: {error}")
    finally:
        group.rmdir()


def test_a_kill_for_want_of_memory_counts_as_the_programs_own(launch, small_cgroup):
    script = HEAD + "say('ran')\nx = []\nwhile True: x.append(b'1' * (20 << 20))\n"
    within = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(small_cgroup))
    finished = launch.run("--max-restarts", "9", script=script, before=within)
    assert finished.code == 137, finished.err
    assert finished.out.count("ran") == 3
    assert "  No new attempt: a crash loop, 3 failed" in finished.err
    assert finished.verdict.endswith(": process 0 was killed by SIGKILL (out of memory)")
