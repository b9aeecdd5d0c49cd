"""docs/recipes.md: its programs are saved, killed, and resumed on another mesh."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from meta.documents import blocks
from meta.source import ROOT
from processes import ecosystem
from shoal.testing.cluster import Cluster

PAGE = "docs/recipes.md"
ABSL = ROOT / "examples/absl_flags.py"
STEPS = 6
# Process 1 is killed once the third step is committed.
KILLED = "save.announced@1#3:kill"


# Looked for, not imported: an imported equinox changes what errors of later tests propose.
needs_libraries = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("flax", "optax", "equinox")),
    reason="the environment of the newest Python has flax, optax and equinox",
)


@needs_libraries
@pytest.mark.timeout(360)  # nine processes, which compile as users do
def test_recipes_resume_on_another_mesh_after_a_kill(tmp_path, child_env):
    for name in ecosystem.RECIPES:
        with Cluster(2, devices=2, env=child_env, start_method="fork", faults=KILLED) as cluster:
            cluster.start(ecosystem.train, name, str(tmp_path / name), STEPS)
            survivor, killed = cluster.wait()
        assert (survivor.kind, killed.code) == ("ProcessLostError", -signal.SIGKILL), survivor
        assert max(tmp_path.glob(f"{name}/step_*")).name.endswith("2"), name
    with Cluster(1, devices=8, env=child_env, start_method="fork") as cluster:
        (trained,) = cluster.run(ecosystem.resume_all, str(tmp_path), STEPS)
    for name, (resumed, undisturbed) in trained.items():
        assert len(resumed) > 4, name
        np.testing.assert_allclose(resumed, undisturbed, rtol=2e-4, atol=1e-6, err_msg=name)


@needs_libraries
@pytest.mark.timeout(360)
@pytest.mark.parametrize(("kind", "count"), [("Auto", 3), ("Explicit", 1)])
def test_states_from_tx_init_resume_and_train_on(tmp_path, child_env, kind, count):
    """Leaves such as Adam's count are uncommitted: JAX refuses them once they are not."""
    with Cluster(
        count, devices=6 // count, env=child_env, start_method="fork", deadline_s=340
    ) as cluster:
        found = cluster.run(ecosystem.resumed_losses, str(tmp_path), kind)
    for losses_of in found:
        assert len(losses_of) > 20
        for name, (losses, undisturbed) in losses_of.items():
            assert len(losses) == 6, name
            assert losses == undisturbed, name


@pytest.mark.skipif(find_spec("absl") is None, reason="optax brings absl-py")
def test_a_program_of_absl_runs_and_has_the_same_flags_everywhere(tmp_path, child_env):
    """The processes of one job, each with another rate; then those of one with the same."""
    program = ["run", "-n", "2", "--devices", "1", "--no-python", "sh", "-c"]
    for rate, code, words in (("0.$((1+RANK))", 70, "['rate']"), ("0.5", 0, "step 2 w 1.2500")):
        line = f"exec {sys.executable} {ABSL} --folder run --steps 3 --rate {rate}"
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *program, line],
            cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert words in done.stderr
    assert max(tmp_path.glob("run/step_*")).name.endswith("2")


def test_the_page_shows_parts_of_the_programs():
    programs = [path.read_text(encoding="utf-8") for path in ecosystem.RECIPES.values()]
    loops = [text.partition("def batch_of")[2] for text in programs]
    # The specs in an nnx model need JAX's mesh in force.
    loops = [text.replace("jax.set_mesh", "shoal.use_mesh") for text in loops]
    assert len(set(loops)) == 1, "one loop for all"
    shown = list(blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"), "py"))
    shown = [block for block in shown if not block.code.startswith("# ")]  # of a transcript
    assert len(shown) == 1 + len(programs) + 1
    programs.append(ABSL.read_text(encoding="utf-8"))
    for block in shown:
        assert any(block.code in program for program in programs), f"{PAGE}:{block.line}"
