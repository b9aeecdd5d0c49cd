"""docs/moving-a-loop.md, coming-from/orbax.md: programs of equal losses, shown as they are."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest

from meta.documents import blocks
from meta.source import ROOT
from quiet_ports import quiet_row

MOVING = ROOT / "examples/moving"
BEFORE, AFTER, CONVERT = (MOVING / name for name in ("before.py", "after.py", "from_orbax.py"))
LOSS = re.compile(r"step (\d+) loss (\S+)\n")
DEADLINE_S = 120.0


def before(folder, steps, env):
    """Run the program as two tasks of a Slurm step, without shoal."""
    host, port = quiet_row(1)
    env = env | {"JAX_NUM_CPU_DEVICES": "2", "JAX_COORDINATOR_PORT": str(port)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": host, "SLURM_STEP_NUM_NODES": "1"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(BEFORE), str(folder), str(steps)],
            env=env | {"SLURM_NTASKS": "2", "SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [task.communicate(timeout=DEADLINE_S)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.communicate()
    assert [task.returncode for task in tasks] == [0, 0], outputs
    return losses(outputs[0])


def shoal_run(processes, devices, program, *arguments):
    """Return the command line of a launch."""
    command = [sys.executable, "-m", "shoal", "run", "-n", str(processes), "--no-prefix"]
    return [*command, "--devices", str(devices), str(program), *map(str, arguments)]


def after(folder, steps, env, *, is_preempted=False):
    """Run the program with `shoal run`; if asked to, send it SIGTERM after step 20."""
    with subprocess.Popen(
        shoal_run(2, 2, AFTER, folder, steps),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        output = ""
        try:
            for line in job.stdout:
                output += line
                if is_preempted and line.startswith("step 20 "):
                    job.send_signal(signal.SIGTERM)
        finally:
            job.kill()  # a time-out of the test must not wait for it
    assert job.returncode == (75 if is_preempted else 0), output
    return losses(output)


def losses(output):
    """Return step → loss, as printed: Python prints all bits of a float."""
    return {int(step): loss for step, loss in LOSS.findall(output)}


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("optax", "orbax")),
    reason="the environment of the newest Python has optax and orbax",
)
@pytest.mark.timeout(500)
def test_both_have_the_same_losses_resumed_and_converted(tmp_path, child_env):
    stopped = after(tmp_path / "after", 100_000, child_env, is_preempted=True)
    saved = max(int(path.name.split("_")[1]) for path in tmp_path.glob("after/run/step_*"))
    steps = saved + 20
    resumed = after(tmp_path / "after", steps, child_env)
    assert max(stopped) <= saved < min(resumed)
    whole = before(tmp_path / "before", steps, child_env)
    assert {**stopped, **resumed} == whole

    begun = before(tmp_path / "begun", 21, child_env)  # orbax saves the steps 0, 10 and 20
    runs = tmp_path / "begun/run", tmp_path / "converted/run"
    subprocess.run(shoal_run(1, 8, CONVERT, *runs), env=child_env, check=True, timeout=DEADLINE_S)
    assert [path.name for path in runs[1].iterdir()] == ["step_000000000020"]
    assert {**begun, **after(tmp_path / "converted", steps, child_env)} == whole


def shown(page):
    """Yield the code that a page shows without its being run there."""
    for block in blocks(page, (ROOT / page).read_text(encoding="utf-8"), "py"):
        yield f"{page}:{block.line}", block.code


def is_part(code, program):
    """Is this a verbatim part of a program, at any indentation?"""
    text = program.read_text(encoding="utf-8")
    return any(textwrap.indent(code, " " * 4 * depth) in text for depth in range(5))


def test_the_page_shows_parts_of_both_programs_in_turn():
    parts = list(shown("docs/moving-a-loop.md"))
    assert len(parts) >= 12
    for number, (place, code) in enumerate(parts):
        assert is_part(code, (BEFORE, AFTER)[number % 2]), place
    page = (ROOT / "docs/moving-a-loop.md").read_text(encoding="utf-8")
    labels = re.findall(r"^\*\*(\w+):\*\*\n\n```py$", page, re.MULTILINE)
    assert labels == ["Before", "After"] * (len(parts) // 2)


def test_the_page_of_orbax_shows_the_program_that_converts():
    assert [is_part(code, CONVERT) for _, code in shown("docs/coming-from/orbax.md")] == [True]


def test_code_that_is_no_part_is_found():
    assert not is_part("shoal.initialize(1)\n", AFTER)
