"""Programs that must keep the interpreter as it is, and programs with hooks of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from processes.run.test_run_failures import WAIT

# What `initialize` changes, as the program sees it: by name.
CHANGES = """
import atexit, os, signal, sys, threading
import jax, shoal
callbacks = []
for module, name in ((atexit, "register"), (os, "register_at_fork")):
    def note(*args, _own=getattr(module, name), _name=name, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("shoal"):
            callbacks.append(_name)
        return _own(*args, **options)
    setattr(module, name, note)
def state():
    [line] = [line for line in open("/proc/self/status") if line.startswith("SigCgt:")]
    mask = int(line.split()[1], 16)  # with those that the C library keeps for its threads
    caught = [number for number in signal.valid_signals() if mask >> (number - 1) & 1]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    threads = {thread.name for thread in threading.enumerate()}
    return {
        "sys.excepthook": sys.excepthook, "threading.excepthook": threading.excepthook,
        "sys.exit": sys.exit, "signals": caught, "wakeup": fd,
        "guard": "shoal exit guard" in threads, "meta_path": list(sys.meta_path),
    } | {name: callbacks.count(name) for name in ("register", "register_at_fork")}
before = state()
shoal.initialize(virtual_devices=1, hooks=HOOKS)
after = state()
with open(f"changed{shoal.process_index()}", "w") as file:
    file.write(" ".join(name for name in after if after[name] != before[name]))
shoal.barrier("seen")
shoal.initialize()  # by a library, which makes sure of the job
assert HOOKS or state() == after
shoal.shutdown()
"""
OF_ALL = {"sys.excepthook", "threading.excepthook", "sys.exit", "register"}
OF_MANY = {"guard", "signals", "register_at_fork"}


@pytest.mark.parametrize("processes", [1, 2])
def test_without_hooks_the_interpreter_stays_as_it_is(launch, processes):
    for hooks in (True, False):
        script = CHANGES.replace("HOOKS", str(hooks))
        finished = launch.run("-n", str(processes), script=script)
        assert finished.code == 0, finished.err
        for process in range(processes):
            changed = {*(launch.folder / f"changed{process}").read_text().split()}
            expected = OF_ALL | OF_MANY if processes > 1 else OF_ALL
            assert changed == (expected if hooks else set())


ENDS = {  # what process 1 does: the exit code of the job, its headline, other words of the report
    "raise KeyError('own')": (1, "process 1 of 2 raised KeyError", "if me == 1: raise"),
    "sys.exit(9)": (9, "process 1 of 2 ended with exit code 9", "if me == 1: sys.exit(9)"),
    "sys.exit()": (71, "process 1 of 2 ended with exit code 0", "without shutdown()"),
    "shoal.barrier('b')": (70, "processes made different calls", "if me == 1: shoal.barrier('b')"),
}


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("ends", ENDS)
def test_without_hooks_the_others_learn_of_the_end_and_the_report_comes(launch, ends):
    launch.env["SHOAL_FAILURE_GRACE_S"] = "20"
    script = WAIT + (
        "import shoal; shoal.initialize(virtual_devices=1, hooks=False)\n"
        "mesh = shoal.make_mesh({'x': -1})\n"
        f"if me == 1: {ends}\n"
        "try: shoal.barrier('a')\n"
        "except shoal.ShoalError as error: print(type(error).__name__); raise\n"
    )
    finished = launch.run("-n", "2", "--log-dir", "logs", script=script)
    code, headline, words = ENDS[ends]
    assert (finished.code, headline in finished.verdict) == (code, True), finished.err
    assert words in " ".join(finished.err.split())
    kind = "DivergenceError" if "barrier" in ends else "ProcessLostError"
    assert f"p0| {kind}" in finished.lines
    failure = json.loads((launch.folder / "logs" / "failure.json").read_text())
    assert failure["exit_code"] == code


@pytest.mark.usefixtures("forks")
def test_without_hooks_a_process_that_hangs_says_so_and_is_not_ended(launch):
    """Process 1 is lost while process 0 computes: only the job's launcher ends that."""
    launch.env |= {"SHOAL_FAILURE_GRACE_S": "60", "SHOAL_HANG_TIMEOUT_S": "0.5"}
    script = WAIT + (
        "import logging, pathlib, shoal\n"
        "hung = pathlib.Path('hung')\n"
        "class Handler(logging.Handler):\n"
        "    def emit(self, record): hung.write_text(record.getMessage())\n"
        "logging.getLogger('shoal').addHandler(Handler())\n"
        "shoal.initialize(virtual_devices=1, hooks=False)\n"
        "shoal.barrier('here')\n"
        "if me == 1: os._exit(3)\n"
        "while not hung.exists(): pass\n"
        "sys.exit(4)\n"
    )
    finished = launch.run("-n", "2", script=script)
    said = (launch.folder / "hung").read_text()
    assert "it hangs, and is not ended, because initialize(hooks=False) forbids it" in said
    assert finished.code == 3, finished.err
    assert "    SystemExit: 4" in finished.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("processes", [1, 2])
def test_stall_without_hooks_is_logged_and_raised_but_ends_no_process(launch, processes):
    launch.env["SHOAL_STALLED_AFTER_S"] = "0.5"
    script = """
    import logging, pathlib, threading, shoal
    stalled = threading.Event()
    class Handler(logging.Handler):
        def emit(self, record):
            if "no process has moved" in record.getMessage(): stalled.set()
    logging.getLogger("shoal").addHandler(Handler())
    shoal.initialize(virtual_devices=1, hooks=False)
    shoal.barrier("here")
    stalled.wait()
    for number in range(1000):  # until the decision has come
        try:
            with shoal.step(number): threading.Event().wait(0.01)
        except shoal.errors.StalledError as error:
            print("raised:", error)
            break
    """
    finished = launch.run("-n", str(processes), "--no-prefix", script=script)
    assert finished.code == 0, finished.err
    assert finished.out.count("raised: ") == processes


def test_without_hooks_the_end_of_a_process_is_noticed_though_a_fork_of_it_lives(launch):
    script = WAIT + (
        "import pathlib, shoal; shoal.initialize(virtual_devices=1, hooks=False)\n"
        "shoal.barrier('here')\n"
        "if me == 1:\n"
        "    if (pid := os.fork()) == 0: time.sleep(600)\n"
        "    pathlib.Path('fork.pid').write_text(str(pid)); os._exit(3)\n"
        "try: shoal.barrier('never', timeout_s=60)\n"
        "except shoal.ProcessLostError as error: print(error)\n"
        "os._exit(0)\n"
    )
    launch.env["SHOAL_FAILURE_GRACE_S"] = "20"
    finished = launch.run("-n", "2", script=script)
    assert finished.verdict.endswith("process 1 of 2 was lost"), finished.err
    assert "it ended with exit code 3" in finished.err
    assert "is lost: its process ended without leaving the job" in finished.out


@pytest.mark.usefixtures("forks")
def test_without_hooks_the_report_of_a_stall_blames_no_process_that_waits(launch):
    script = (
        "import shoal, time\nshoal.initialize(hooks=False)\n"
        "if shoal.process_index() == 1: time.sleep(600)\n"
        "shoal.barrier('x')\nshoal.shutdown()\n"
    )
    finished = launch.run("-n", "2", "--devices", "1", "--stalled-after", "2s", script=script)
    assert finished.code == 77, finished.err
    assert finished.verdict.endswith("; process 0 waits for process 1")
    assert "  process 1   script.py:3   if shoal.process_index() == 1: time.sleep(" in finished.err
    assert "are in the logs" not in finished.err, "process 1 has written none"


def test_hooks_once_installed_stay(launch):
    script = """
    import shoal
    shoal.initialize(virtual_devices=1)
    shoal.shutdown()
    try: shoal.initialize(hooks=False)
    except shoal.InitializeError as error: print(error)
    """
    finished = launch.run("-n", "1", "--no-prefix", script=script)
    assert finished.out.splitlines() == [
        "initialize(hooks=False): an earlier initialize() of this process has installed hooks",
        "pass hooks=False to the first one",
    ]


def own_hook(body):
    return (
        f"def hook(*what):\n    print('sent', file=sys.stderr)\n    {body}\nsys.excepthook = hook"
    )


HOOKS = {  # the program's own: what it prints, the exit code that Python alone gives
    "rich": ("import rich.traceback; rich.traceback.install()", "ValueError: own", 1),
    "ipython": ("import IPython.core.ultratb as tb; sys.excepthook = tb.VerboseTB()", "own", 1),
    "calls the one before it": ("before = sys.excepthook\n" + own_hook("before(*what)"), "sent", 1),
    "calls none": (own_hook("pass"), "sent", 1),
    "raises": (own_hook("1 / 0"), "Error in sys.excepthook:", 1),
    "exits": (own_hook("sys.exit(9)"), "sent", 9),
    "ends the process": (own_hook("sys.stderr.flush(); os._exit(9)"), "sent", 9),
}


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_program_runs_and_the_report_comes_all_the_same(launch, hook):
    """One installed before `initialize` is called by shoal's; a later one may not call shoal's."""
    if hook == "ipython":
        pytest.importorskip("IPython")
    source, words, code = HOOKS[hook]
    join = "import shoal; shoal.initialize(virtual_devices=1)"
    launch.env["SHOAL_FAILURE_GRACE_S"] = "20"  # each process ends by itself
    for first, second in ((source, join), (join, source)):
        fails = "if me == 1: raise ValueError('own')\nshoal.barrier('all')"
        script = WAIT + f"{first}\n{second}\n{fails}"
        finished = launch.run("-n", "2", "--log-dir", "logs", script=script)
        live, report = finished.err.split("shoal run: failed after ")
        lines = (finished.out + live).splitlines()
        assert [line for line in lines if line.startswith("p1| ") and words in line], lines
        assert report.splitlines()[0].endswith(" s: process 1 of 2 raised ValueError")
        assert "    if me == 1: raise ValueError('own')\n  ValueError: own\n" in report
        assert f"  Exit code {code}. Log: logs/p0001.log\n" in report
        assert finished.code == code
        assert "guard.py" not in finished.err
        assert "child.py" not in finished.err
        failure = json.loads((launch.folder / "logs" / "failure.json").read_text())
        assert failure["exit_code"] == code


def parts_of(job):
    """Return the command line of each process that `ps` shows with this job, by its name."""
    parts = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            if f"--job={job}" in words:
                parts[(folder / "comm").read_text().strip()] = words
        except OSError:  # it has ended
            pass
    return parts


def test_ps_shows_the_job_and_the_part_of_each_process_of_shoal(launch):
    launch.env["SHOAL_TOKEN"] = "a secret of this job"
    script = "import shoal; shoal.initialize(virtual_devices=1)\n"
    script = WAIT + script + "print('ready', flush=True); time.sleep(600)"
    launch.start("-n", "2", script=script, arguments=("--key", "of-user"))
    launch.await_words("ready", 2)
    parts = parts_of(f"shoal-run-{launch.popen.pid}")
    supervisor = parts.pop("shoal-supervise")
    assert supervisor[:2] == ["shoal-supervise", f"--job=shoal-run-{launch.popen.pid}"]
    assert not any(supervisor[2:])
    assert launch.pids(" run ") == [launch.popen.pid]
    assert {*parts} == {"shoal-coord", "shoal-jax", "shoal-agent"}
    for words in parts.values():
        assert words[:3] == [sys.executable, "-P", "-m"]
        assert not {"a secret of this job", "of-user", "script.py"} & {*words}
    launch.popen.terminate()
    launch.finish()
    assert launch.leaves_nobody()


def test_ps_shows_the_address_of_a_job_without_a_launcher(job):
    script = "initialize(); say('ready'); signal.pause()"
    for index in range(2):
        job.start(index, 2, script, SHOAL_TOKEN="a secret of this job")
    for process in job.processes:
        process.until_said("ready")
    parts = parts_of(job.address)
    assert {*parts} == {"shoal-services", "shoal-coord", "shoal-agent"}
    assert not any("a secret of this job" in words for words in parts.values())
    assert {words[0] for words in parts.values()} == {sys.executable}
    for process in job.processes:
        process.kill()
    job.wait()
    assert job.leaves_no_orphan()
    assert parts_of(job.address) == {}
