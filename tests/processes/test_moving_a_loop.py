"""docs/moving-a-loop.md: its two programs have the same losses, and its snippets are theirs."""

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

PAGE = "docs/moving-a-loop.md"
BEFORE, AFTER = ROOT / "examples/moving/before.py", ROOT / "examples/moving/after.py"
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


def after(folder, steps, env, *, is_preempted=False):
    """Run the program with `shoal run`; if asked to, send it SIGTERM after step 20."""
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--devices", "2", "--no-prefix"]
    with subprocess.Popen(
        [*command, str(AFTER), str(folder), str(steps)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        output = ""
        for line in job.stdout:
            output += line
            if is_preempted and line.startswith("step 20 "):
                job.send_signal(signal.SIGTERM)
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
def test_both_have_the_same_losses_also_when_resumed(tmp_path, child_env):
    stopped = after(tmp_path / "after", 100_000, child_env, is_preempted=True)
    saved = max(int(path.name.split("_")[1]) for path in tmp_path.glob("after/run/step_*"))
    steps = saved + 20
    resumed = after(tmp_path / "after", steps, child_env)
    assert max(stopped) <= saved < min(resumed)
    assert {**stopped, **resumed} == before(tmp_path / "before", steps, child_env)
    first = before(tmp_path / "resumed", 21, child_env)
    assert {**first, **before(tmp_path / "resumed", steps, child_env)} == {**stopped, **resumed}
    assert [*first] == [0, 5, 10, 15, 20]


def test_the_page_shows_parts_of_the_programs():
    programs = [path.read_text(encoding="utf-8") for path in (BEFORE, AFTER)]
    shown = list(blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"), "py"))
    assert len(shown) >= 12, "the page shows pairs"
    for number, block in enumerate(shown):
        program = programs[number % 2]
        indented = [textwrap.indent(block.code, " " * 4 * depth) for depth in range(4)]
        assert any(part in program for part in indented), f"{PAGE}:{block.line} is not in it"
