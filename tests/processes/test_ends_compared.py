"""Programs that make calls that send nothing, and end without `shutdown`: compared at their end."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from shoal.testing.cluster import Cluster

HEAD = """
import sys, threading, time
import jax, jax.numpy as jnp, numpy as np, shoal

def until(state, process):  # the coordinator knows it
    while shoal.job_status().members[process].state != state:
        time.sleep(0.01)

def mean(x):
    print(float(jax.jit(jnp.mean)(x)), flush=True)

shoal.initialize()
me, odd = shoal.process_index(), shoal.process_index() % 2
mesh = shoal.make_mesh({"x": -1})
rows, whole = shoal.Layout(mesh, "x"), shoal.Layout(mesh, None)
ones = np.ones(8, np.float32)
"""
PUT = "mean(shoal.put(ones + odd, whole))"
DIFFERENT = {
    "put": (PUT, "processes gave put different values"),
    "create": (
        "mean(shoal.create(lambda: jnp.ones(8) * (1 + odd), layouts=whole))",
        "processes gave create different values",
    ),
    "from_host_local": (
        "shoal.from_host_local(np.ones(4 + 4 * odd, np.float32), rows)",
        "processes gave from_host_local different shapes",
    ),
    "sys.exit(0)": (f"{PUT}; sys.exit(0)", "processes gave put different values"),
    "a hook that raises": (f"sys.excepthook = lambda *what: 1 / 0\n{PUT}", ""),
}


def play(path):
    """Run a program in a fork, as `python` does."""
    runpy.run_path(path, run_name="__main__")


def ended(tmp_path, script, processes=2, only=None):
    path = tmp_path / "train.py"
    path.write_text(HEAD + script + "\n")
    with Cluster(processes, start_method="fork") as cluster:
        cluster.start(play, str(path), initialize=False)
        return cluster.wait(only=only)


@pytest.mark.parametrize("how", DIFFERENT)
def test_calls_that_differ_end_all_with_the_code_of_a_divergence(how, tmp_path):
    script, words = DIFFERENT[how]
    all_ended = ended(tmp_path, script)
    assert [one.code for one in all_ended] == [70, 70], all_ended
    texts = " ".join("".join(one.err for one in all_ended).split())
    assert all(words in one.err for one in all_ended), texts
    if words:
        assert texts.count("shoal: failed after ") == 1, texts
        assert "the difference was found at the end of the program." in texts
        assert "train.py:" in texts


@pytest.mark.parametrize("calls", ["range(1 + odd)", "range(odd)"])
def test_programs_that_end_apart_are_compared_as_far_as_both_went(calls, tmp_path):
    """A signal, or Ctrl-C, may have ended one of them a call before the other."""
    all_ended = ended(tmp_path, f"for _ in {calls}: shoal.put(ones, whole)")
    assert [one.code for one in all_ended] == [0, 0], all_ended


def launched(path, env):
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--devices", "1", str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_the_report_of_shoal_run_shows_the_call(tmp_path, child_env):
    path = tmp_path / "train.py"
    path.write_text(HEAD + PUT)
    job = launched(path, child_env)
    assert job.returncode == 70, job
    assert job.stderr.count("failed after") == 1, job.stderr
    assert "processes gave put different values" in job.stderr
    assert f"train.py:{len(HEAD.splitlines()) + 1} " in job.stderr
    assert "Traceback" not in job.stderr


def test_equal_calls_end_as_before(tmp_path, child_env):
    equal = PUT.replace("odd", "1")
    assert [(one.code, one.err) for one in ended(tmp_path, equal)] == [(0, ""), (0, "")]
    job = launched(tmp_path / "train.py", child_env)
    assert (job.returncode, job.stdout.count("| 2.0")) == (0, 2), job


def test_later_exit_finds_the_difference_and_the_first_exit_stands(tmp_path):
    first, second = ended(tmp_path, f"until('left', 0) if me else None\n{PUT}; print('last')")
    assert (first.code, second.code) == (0, 70), (first, second)
    assert "process 1 1 call, digest " in (said := " ".join(second.err.split()))
    assert ", the last put at train.py:" in said


def test_exit_does_not_wait_for_a_process_that_never_ends(tmp_path):
    (one,) = ended(tmp_path, f"if me: threading.Event().wait()\n{PUT}", only=[0])
    assert (one.code, one.err) == (0, "")


def test_difference_in_a_group_fails_only_its_processes(tmp_path):
    script = """
two = shoal.Layout(shoal.make_mesh({"x": 2}, devices=jax.devices()[:2]), None)
if me < 2: shoal.put(ones + odd, two)
"""
    all_ended = ended(tmp_path, script, processes=3)
    assert [one.code for one in all_ended] == [70, 70, 0], all_ended


def test_after_an_exception_nothing_is_compared(tmp_path):
    script = f"if odd: raise ValueError('no data')\nuntil('failed', 1)\n{PUT}"
    first, second = ended(tmp_path, script)
    assert (first.code, second.code) == (0, 1), (first, second)
    assert "differ" not in first.err + second.err
