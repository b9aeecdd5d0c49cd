"""`shoal run` returns 75 when its job was preempted and has saved; and lets it save."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("forks")  # its jobs begin as any do

SAVED = re.compile(r"shoal run: preempted: step \d+ is saved; start it again")
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
        script=HEAD
        + "step = train(); time.sleep(5); shoal.preemption.mark_saved(step); print('saved', step)",
    )
    launch.await_words("trains", 2)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 75, finished.err
    assert len(finished.lines) == 2
    assert len({line.partition("saved")[2] for line in finished.lines}) == 1
    assert "they took it as a preemption notice" in finished.err
    assert SAVED.fullmatch(finished.verdict)


@pytest.mark.parametrize("initialize", ["shoal.initialize()", ""])
def test_a_job_of_one_has_time_to_save_too(launch, initialize):
    launch.env["SHOAL_GRACE_S"] = "2"
    head = HEAD.replace("shoal.initialize()", initialize)
    launch.start(script=head + "step = train(); time.sleep(3); shoal.preemption.mark_saved(step)")
    launch.await_words("trains", 1)
    launch.popen.send_signal(signal.SIGTERM)
    finished = launch.finish()
    assert finished.code == 75, finished.err
    assert SAVED.fullmatch(finished.verdict)


def test_a_job_of_one_that_goes_on_is_not_preempted(launch):
    twice = """
    shoal.preemption.watch()
    for turn in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        shoal.preemption.mark_saved(train())
        if turn < int(sys.argv[1]):
            shoal.preemption.clear()
    """
    script = HEAD + "if True:" + twice
    for rearms, code in (("2", 0), ("1", 75)):
        finished = launch.run(script=script, arguments=(rearms,))
        assert finished.code == code, finished.err


def test_a_save_of_one_process_counts_unless_the_program_went_on(launch):
    launch.env["SHOAL_FAILURE_GRACE_S"] = "100"
    again = (
        "step = train(be_noticed)\n"
        "if here == 0: shoal.preemption.mark_saved(step)\n"
        "shoal.barrier('saved')\n"
    )
    finished = launch.run("-n", "2", script=HEAD + again + "print(shoal.preemption.exit_code())")
    assert (finished.code, finished.lines) == (
        75,
        ["p0| 75", "p0| trains", "p1| 75", "p1| trains"],
    )
    goes_on = again + "shoal.preemption.clear(); print(shoal.preemption.exit_code())"
    finished = launch.run("-n", "2", script=HEAD + goes_on)
    assert (finished.code, finished.err.count("shoal run:")) == (0, 0), finished.err


def test_scripts_that_exit_with_75_by_themselves_have_not_failed(launch):
    """One is long gone when the others end; nobody is told that it failed, nor ends them."""
    launch.env["SHOAL_FAILURE_GRACE_S"] = "0.1"
    ends = """
    shoal.preemption.mark_saved(train(be_noticed))
    if here != 1:
        me = shoal.runtime.process.client()
        while (state := me.members(timeout_s=30)[1].state) == "here":
            pass
        with shoal.step(99):  # raises if somebody has failed
            print(state)
        time.sleep(1)
    sys.exit(shoal.preemption.exit_code())
    """
    finished = launch.run("-n", "2", script=HEAD + "if True:" + ends)
    assert (finished.code, finished.out.count("left")) == (75, 1), finished.err
    assert finished.err.count("shoal run:") == 1
    assert SAVED.fullmatch(finished.verdict)


def test_sigterm_after_a_failure_ends_processes_that_watch_for_notices(launch):
    """It is no notice: nobody who hangs is left to SIGKILL."""
    launch.env |= {
        "SHOAL_GRACE_S": "500",
        "SHOAL_HANG_TIMEOUT_S": "inf",
        "SHOAL_FAILURE_GRACE_S": "2",
    }
    hangs = "shoal.preempted(0); shoal.barrier('watched')\n"
    hangs += "if here == 1: raise ValueError('no data')\n"
    hangs += "while True: signal.pause()\n"
    finished = launch.run("-n", "2", script=HEAD + hangs)
    assert finished.code == 1
    assert finished.verdict.endswith(": process 1 of 2 raised ValueError")
    assert "Process 0 was running, and was ended by shoal run with SIGTERM.\n" in finished.err


LOOP = """
import contextlib, itertools, os, signal, sys
import numpy as np
import shoal
import shoal.checkpoint.history.checkpoints
import shoal.checkpoint.saving.background

def be_taken_away():
    "Get a real notice, and know of it before going on: the watcher passes it on in its own time."
    os.kill(os.getpid(), signal.SIGTERM)
    stop = shoal.runtime.process.client().stop
    while not stop.known:
        stop.wait(0, 60.0)

def loop(folder, order, noticed, asynchronous, end=1000, swallows=False):
    "Train with every=10; return the last step, and the newest that is saved."
    here, count = shoal.process_index(), shoal.process_count()

    def at(step, place):
        if (step, place) == noticed and here == count - 1:
            be_taken_away()

    trouble = contextlib.suppress(Exception) if swallows else contextlib.nullcontext()
    with shoal.Checkpoints(folder, every=10, asynchronous=asynchronous) as ckpts:
        state, first = ckpts.resume(None, {"w": np.zeros(3)})
        for step in range(first, end):
            state = {"w": state["w"] + 1.0}
            if count > 1:
                shoal.barrier("the step is done")
            if order == "evaluates, saves, asks":  # with numbers of its own
                assert not any([shoal.preempted(batch) for batch in range(4)])
            at(step, "before the save")
            stop = shoal.preempted(step) if order == "asks, saves" else None
            with trouble:
                ckpts.save(step, state)
            at(step, "after the save")
            if shoal.preempted(step) if stop is None else stop:
                if order == "saves, asks, saves":
                    with trouble:
                        ckpts.save(step, state, force=True)
                break
        with trouble:
            ckpts.wait()
    return step, ckpts.latest()
"""
ORDERS = ("asks, saves", "saves, asks", "evaluates, saves, asks", "saves, asks, saves")
NOTICED = [(8, "after the save"), (9, "before the save"), (9, "after the save")]
NOTICED += [(13, "before the save")]
SLOW = "save.write#*:delay=0.3"
ROWS = """
codes = []

def await_rows():
    with contextlib.suppress(ChildProcessError):
        while True:
            codes.append(os.waitstatus_to_exitcode(os.wait()[1]))

for number, (order, noticed, asynchronous, faults) in enumerate({rows!r}):
    if number % 4 == 0:
        await_rows()
    if os.fork() == 0:
        os.environ["SHOAL_FAULTS"] = faults
        step, newest = loop(str(number), order, noticed, asynchronous)
        code = shoal.preemption.exit_code()
        row = " ".join(map(str, (order, noticed, asynchronous, faults, step, newest, code)))
        os.write(1, row.encode() + b"\\n")  # in one piece: others write, too
        sys.exit(code)
await_rows()
print("ends:", *codes)
"""


@pytest.mark.faults
def test_the_exit_code_depends_on_no_timing(child_env, tmp_path):
    """One process, without a launcher: the table of real signals, each row in a process."""
    rows = [*itertools.product(ORDERS[:2], NOTICED, (True, False), ("", SLOW))]
    rows += itertools.product(ORDERS[2:], NOTICED, (True,), ("", SLOW))
    script = LOOP + ROWS.format(rows=rows)
    done = run_plainly(script, child_env, tmp_path)
    assert done.returncode == 0, done.stderr
    *lines, ends = done.stdout.splitlines()
    assert len(lines) == len(rows)
    for row in lines:
        *_, last, newest, code = row.split()
        assert (code, newest) == ("75", last), row
    assert ends.split()[1:] == ["75"] * len(rows)
    assert "start it again" not in done.stderr, "nothing is repeated"


def run_plainly(script, env, folder):
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("order", "noticed", "speed"),
    [
        (ORDERS[0], (8, "after the save"), ""),
        (ORDERS[0], (9, "after the save"), SLOW),
        (ORDERS[1], (9, "after the save"), ""),
        (ORDERS[1], (13, "before the save"), SLOW),
        (ORDERS[2], (13, "before the save"), ""),
    ],
)
def test_two_processes_end_with_the_same_code(launch, order, noticed, speed):
    launch.env["SHOAL_FAULTS"] = speed
    script = LOOP + (
        "shoal.initialize()\n"
        f"last, newest = loop('run', {order!r}, {noticed!r}, True)\n"
        "print(last == newest, shoal.preemption.exit_code())\n"
    )
    finished = launch.run("-n", "2", "--no-prefix", script=script)
    assert (finished.code, finished.lines) == (75, ["True 75"] * 2), finished.err
    assert SAVED.fullmatch(finished.verdict)


@pytest.mark.parametrize("count", [1, 2])
def test_a_preempted_job_is_started_again_until_it_has_finished(launch, count):
    """In the middle of two saves, then in its warm-up, then when nothing is left to do."""
    script = LOOP + (
        "shoal.initialize()\n"
        "attempt = int(os.environ['SHOAL_ATTEMPT'])\n"
        "if attempt == 1:\n"
        "    step = 0\n"
        "    while not shoal.preempted(step):\n"
        "        if step == 3 and shoal.process_index() == 0:\n"
        "            be_taken_away()\n"
        "        shoal.barrier('warm-up') if shoal.process_count() > 1 else None\n"
        "        step += 1\n"
        "    sys.exit()\n"
        "noticed = [(13, 'before the save'), None, (39, 'after the save')][attempt]\n"
        "order = 'asks, saves'\n"
        "end = 40 if attempt else 1000\n"
        "print(attempt, *loop('run', order, noticed, True, end), shoal.preemption.exit_code())\n"
    )
    options = ("-n", str(count), "--restart-preempted", "--no-prefix")
    finished = launch.run(*options, script=script)
    assert finished.code == 0, finished.err
    first, *_, final = sorted({tuple(map(int, line.split())) for line in finished.lines})
    assert first[0] == 0
    assert first[1] == first[2] >= 13
    assert first[3] == 75
    assert final == (2, 39, 39, 0), "it had finished before the step at which it was to stop"
    assert finished.err.count(" start it again\n  Exit code 75.\n") == 2
    assert len(re.findall(r" s: step \d+ is saved; start it again\n", finished.err)) == 1
    assert finished.err.count("nothing of this attempt is saved, so it starts over") == 1
    assert finished.err.count("begins (--restart-preempted)") == 2


WARM_UP = f"""{LOOP}
step = 0
while not shoal.preempted(step):
    if step == 3: be_taken_away()
    step += 1
assert shoal.preemption.exit_code() == 75
sys.exit(shoal.preemption.exit_code())
"""


def test_a_notice_in_warm_up_starts_over_and_one_line_says_so(launch, child_env, tmp_path):
    plain = run_plainly(WARM_UP, child_env, tmp_path)
    words = (
        "preempted at step 4: nothing of this attempt is saved, so it starts over where it began: "
        "start it again (exit code 75)"
    )
    assert (plain.returncode, plain.stderr.splitlines()[1:]) == (75, [words])
    finished = launch.run(script=WARM_UP)
    assert finished.code == 75
    assert finished.verdict == f"shoal run: {words.removesuffix(' (exit code 75)')}"


def test_a_line_says_which_steps_are_repeated(launch, child_env, tmp_path):
    """The loop saves what is due alone, and not what it stops at."""
    script = LOOP + (
        "for step in range(100):\n"
        "    if step % 10 == 9: shoal.save(f'step{step}', {'w': step}, step=step)\n"
        "    if step == 13: be_taken_away()\n"
        "    if shoal.preempted(step): break\n"
        "sys.exit(shoal.preemption.exit_code())\n"
    )
    words = (
        "preempted at step 13: step 9 is the newest saved, and work done after it is repeated: "
        "start it again (exit code 75)"
    )
    plain = run_plainly(script, child_env, tmp_path)
    assert (plain.returncode, plain.stderr.splitlines()[1:]) == (75, [words])
    shutil.rmtree(tmp_path / "step9")
    finished = launch.run(script=script)
    assert finished.code == 75
    assert finished.verdict == f"shoal run: {words.removesuffix(' (exit code 75)')}"


FAILED = [
    ((13, "before the save"), "save.parted#2:raise"),
    # In the background, after a while: when the loop has ended, or nearly so.
    ((9, "after the save"), "save.written:delay=0.3;save.parted:raise;save.open#2:raise"),
]
FAILED_ROWS = """
children = []
for row in itertools.product({orders!r}, {failed!r}, (True, False), (True, False)):
    order, (noticed, faults), asynchronous, swallows = row
    if (pid := os.fork()) == 0:
        os.environ["SHOAL_FAULTS"] = faults
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            loop(str(os.getpid()), order, noticed, asynchronous, 40, swallows=swallows)
        sys.exit(shoal.preemption.exit_code())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(0 if swallows else 1, code, *row, flush=True)
"""


@pytest.mark.faults
def test_a_save_that_failed_after_a_notice_is_never_75(child_env, tmp_path):
    """Its error ends the program, or is swallowed by it."""
    script = LOOP + FAILED_ROWS.format(orders=ORDERS[:3], failed=FAILED)
    rows = run_plainly(script, child_env, tmp_path).stdout.splitlines()
    assert len(rows) == 24
    assert [row for row in rows if row[0] != row[2]] == []


@pytest.mark.parametrize(("noticed", "faults"), FAILED)
def test_a_save_that_failed_after_a_notice_has_a_line(launch, noticed, faults):
    launch.env["SHOAL_FAULTS"] = faults
    script = f"{LOOP}loop('run', {ORDERS[1]!r}, {noticed!r}, True, 40, swallows=True)\n"
    finished = launch.run(script=script + "sys.exit(shoal.preemption.exit_code())\n")
    assert finished.code == 0, finished.err
    assert "a save failed after the preemption notice" in finished.err


# What a loop does after a notice in step 13, with every=10; the code and the steps that are saved.
ENDINGS = {
    "ckpts.save(float(step), state)": (0, [9]),
    "ckpts.save(step, state, force='yes')": (0, [9]),
    "ckpts.close(); ckpts.save(step, state)": (0, [9]),
    "ckpts.save(float(step), state)\nckpts.save(step, state)": (75, [9, 13]),
    "ckpts.save(step, state); ckpts.save(step, state); ckpts.save(step, state, force=True)":
        (75, [9, 13]),
}  # fmt: skip
ENDS = """
for number, calls in enumerate({calls!r}):
    if os.fork() == 0:
        ckpts = shoal.Checkpoints(str(number), every=10)
        for step in range(1000):
            state = {{"w": step}}
            if step == 13:
                be_taken_away()
            if shoal.preempted(step):
                break
            ckpts.save(step, state)
        for call in calls.splitlines():
            with contextlib.suppress(shoal.UsageError):
                exec(call)
        ckpts.wait()
        print(list(ckpts.all_steps()), flush=True)
        sys.exit(shoal.preemption.exit_code())
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_refused_save_has_failed_and_a_repeated_one_has_not(child_env, tmp_path):
    done = run_plainly(LOOP + ENDS.format(calls=list(ENDINGS)), child_env, tmp_path)
    lines = [f"{line}" for code, saved in ENDINGS.values() for line in (saved, code)]
    assert done.stdout.splitlines() == lines, done.stderr


FAILED_DUE = """
with shoal.Checkpoints("run", every=10) as ckpts:
    for step in range(1000):
        with contextlib.suppress(Exception):
            ckpts.save(step, {"w": step})
            if step == 19:
                be_taken_away()
        if shoal.preempted(step):
            with contextlib.suppress(Exception):
                ckpts.wait()
            print("again", ckpts.save(step, {"w": step}))
            break
sys.exit(shoal.preemption.exit_code())
"""


def test_a_due_step_whose_save_failed_is_due_again(child_env, tmp_path):
    """Without force: it failed in the background, after the notice."""
    child_env["SHOAL_FAULTS"] = "save.parted#2:raise"
    done = run_plainly(LOOP + FAILED_DUE, child_env, tmp_path)
    assert (done.returncode, done.stdout.split("\n")[-2]) == (75, "again True"), done.stderr


LOGS = """
with shoal.Checkpoints("run", every=10) as ckpts:
    for step in range(40):
        ckpts.save(step, {"w": step})
        if shoal.preempted(step):
            break
        if step == 39:
            be_taken_away()
        shoal.preemption.notice()  # as a logger does
    ckpts.save(40, {"w": step}, force=True)
print(step, shoal.preemption.exit_code())
"""


def test_a_program_that_has_done_its_work_ends_with_0_whatever_it_logs(child_env, tmp_path):
    done = run_plainly(LOOP + LOGS, child_env, tmp_path)
    assert done.stdout == "39 0\n", done.stderr


def test_a_success_does_not_hide_what_fails_when_the_block_ends(launch):
    """`sys.exit(75)` in the block, while the save of the due step still runs, and then fails."""
    launch.env["SHOAL_FAULTS"] = "save.written:delay=0.3;save.parted:raise"
    for code in ("75", "shoal.preemption.exit_code()"):
        script = LOOP + (
            "with shoal.Checkpoints('run') as ckpts:\n"
            "    ckpts.save(9, {'w': 9})\n"
            "    be_taken_away() if shoal.preempted(8) is False else None\n"
            f"    if shoal.preempted(9): sys.exit({code})\n"
        )
        finished = launch.run(script=script)
        assert finished.code == 1, finished.err
        assert "InjectedError" in finished.err
        shutil.rmtree(launch.folder / "run")


def test_a_failure_of_some_is_one_of_all(launch):
    """Process 0 alone has checkpoints; its save fails, and the program goes on."""
    launch.env["SHOAL_FAULTS"] = "save.parted@0:raise"
    script = LOOP + (
        "shoal.initialize()\n"
        "step = 0\n"
        "while not shoal.preempted(step):\n"
        "    shoal.barrier('the step is done')\n"
        "    if step == 3 and shoal.process_index() == 1: be_taken_away()\n"
        "    step += 1\n"
        "if shoal.process_index() == 0:\n"
        "    with contextlib.suppress(Exception):\n"
        "        with shoal.Checkpoints('run', processes=[0]) as ckpts:\n"
        "            ckpts.save(step, {'w': 1})\n"
        "shoal.shutdown()\n"
        "sys.exit(shoal.preemption.exit_code())\n"
    )
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 0, finished.err
    assert "a save failed after the preemption notice" in finished.verdict
    launch.env["SHOAL_FAULTS"] = ""
    shutil.rmtree(launch.folder / "run")
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 75, finished.err
    assert SAVED.fullmatch(finished.verdict)


def test_a_save_that_is_made_good_is_75(launch):
    launch.env["SHOAL_FAULTS"] = "save.parted:raise"
    for words in ("ckpts.save(step, {'w': 1})", "shoal.preemption.mark_saved(step)"):
        script = LOOP + (
            "step = 0\n"
            "while not shoal.preempted(step):\n"
            "    if step == 3: be_taken_away()\n"
            "    step += 1\n"
            "with shoal.Checkpoints('run', every=10) as ckpts:\n"
            "    with contextlib.suppress(Exception): ckpts.save(step, {'w': 1})\n"
            "    assert shoal.preemption.exit_code() == 0\n"
            f"    {words}\n"
        )
        finished = launch.run(script=script)
        assert finished.code == 75, finished.err
        assert SAVED.fullmatch(finished.verdict)
        shutil.rmtree(launch.folder / "run")
