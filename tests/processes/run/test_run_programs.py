"""Programs that are no Python scripts: scripts of a shell, and commands."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest

PYTHON = shlex.quote(sys.executable)
FAILS = """
    import shoal
    shoal.initialize(virtual_devices=1)
    shoal.barrier("both")
    if shoal.process_index() == 1:
        raise ValueError("as it is")
    shoal.barrier("never")
"""


def write_script(launch, text: str) -> None:
    """Write run.sh, executable."""
    path = launch.folder / "run.sh"
    path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
    path.chmod(0o755)


def run(launch, *words: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run `shoal run` with these words, in the folder of the launch."""
    (launch.folder / "script.py").write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "shoal", "run", *words],
        cwd=launch.folder, env=launch.env, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["./run.sh", "run.sh"])
def test_a_script_of_a_shell_gets_its_arguments_and_its_place(launch, name):
    write_script(launch, 'echo "$RANK of $SHOAL_NUM_PROCESSES at $SHOAL_COORDINATOR: $*"')
    ended = run(launch, "-n", "2", name, "--devices", "a b")
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    assert [line.partition(" at ")[0] for line in lines] == ["p0| 0 of 2", "p1| 1 of 2"]
    assert {line.rpartition(": ")[2] for line in lines} == {"--devices a b"}


def test_a_command_is_started_as_it_is(launch):
    code = "import json, os, sys; print(json.dumps([os.environ['RANK'], *sys.argv[1:]]))"
    words = ("-n", "2", "--no-prefix", "--no-python", sys.executable, "-c", code, "-n", "x")
    ended = run(launch, *words)
    assert ended.returncode == 0, ended.stderr
    said = sorted(json.loads(line) for line in ended.stdout.splitlines())
    assert said == [["0", "-n", "x"], ["1", "-n", "x"]]


def report(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the report, without times and places of logs."""
    lines = ended.stderr[ended.stderr.index("shoal run: failed") :].splitlines()
    return [lines[0].partition(" s: ")[2], *(line.partition(". Log: ")[0] for line in lines[1:])]


@pytest.mark.parametrize("command", ["exec", "", "false ||"])
def test_a_program_that_a_script_starts_is_reported_like_one_of_python(launch, command):
    write_script(launch, f"{command} {PYTHON} script.py")
    by_script = run(launch, "-n", "2", "./run.sh", script=FAILS)
    by_python = run(launch, "-n", "2", "script.py", script=FAILS)
    assert by_python.returncode == by_script.returncode == 1
    assert report(by_script) == report(by_python)
    assert by_script.stdout == by_python.stdout == ""
    assert "Traceback" not in by_script.stderr
    assert launch.leaves_nobody()


def test_how_a_command_ends_is_reported(launch):
    ended = run(launch, "--no-python", "sh", "-c", "echo the reason >&2; exit 3")
    assert ended.returncode == 3
    assert report(ended) == [
        "process 0 ended with exit code 3",
        "  Its last output:",
        "    the reason",
        "  Exit code 3",
    ]
    ended = run(launch, "--no-python", "sh", "-c", "kill -9 $$")
    assert ended.returncode == 128 + 9
    assert report(ended)[0] == "process 0 was killed by SIGKILL"


def test_a_script_that_execs_gets_a_notice(launch):
    write_script(launch, f"exec {PYTHON} script.py")
    script = """
        import os, signal
        import shoal
        shoal.initialize(virtual_devices=1)
        shoal.preempted(0)
        shoal.barrier("all watch for notices")
        if shoal.process_index() == 0:
            print("ready", flush=True)
        step = 1
        while not shoal.preempted(step):
            shoal.barrier("step")
            step += 1
        raise SystemExit(75)
    """
    launch.start("-n", "2", "./run.sh", script=script)
    launch.await_words("ready", 1)
    launch.popen.send_signal(signal.SIGTERM)
    ended = launch.finish()
    assert (ended.code, "preempted" in ended.verdict) == (75, True), ended


def test_a_launcher_as_the_command_leaves_nothing_of_the_outer_job(launch):
    script = """
        import os, subprocess, sys
        import shoal
        shoal.initialize(virtual_devices=1)
        print("outer", os.environ.get("SHOAL_PROCESS_ID"), flush=True)
        child = "from shoal.runtime.startup.launchers import numbers_of; import os; "
        subprocess.run([sys.executable, "-c", child + "print(*numbers_of(os.environ))"])
        raise ValueError(shoal.process_count())
    """
    launch.env["SHOAL_FAILURE_GRACE_S"] = "60"  # both end by themselves
    inner = ("env", "PMI_RANK=0", "PMI_SIZE=1", sys.executable, "script.py")
    words = ("-n", "2", "--no-prefix", "--no-python", *inner)
    ended = run(launch, *words, script=script)
    assert sorted(ended.stdout.splitlines()) == ["0 1", "0 1", "outer None", "outer None"]
    assert "ValueError: 1" in ended.stderr  # recorded all the same
