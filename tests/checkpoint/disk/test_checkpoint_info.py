"""What was saved, looked at from Python: the same that the command prints, without JAX."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from shoal.checkpoint.store.step_names import step_name
from shoal.cli.main import build
from shoal.errors import CorruptCheckpointError, NotCommittedError, UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.client.in_process import LocalJob

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")


def state():
    w = shoal.put(np.ones((8, 4), np.float32), Layout(MESH, "x", None))
    far = shoal.named_sharding(Layout(MESH, "x", None)).with_memory_kind("pinned_host")
    return {
        "w": w,
        "far": jax.device_put(w, far),
        "b": np.ones(3, ml_dtypes.bfloat16),
        "key": jax.random.key(0),
        "step": 10**30,
        "rate": float("nan"),
        "name": "blue\x1b[2J",
        "none": None,
        "own": shoal.PerProcess({"at": 3}),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("checkpoint_info") / "saved"
    shoal.save(where, state(), user={"commit": "a1"})
    return where


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint_info") / "run"
    with shoal.Checkpoints(root) as ckpts:
        for step, loss in ((3, 0.5), (5, 0.25), (9, float("nan"))):
            ckpts.save(step, {"w": np.zeros(step)}, metrics={"loss": loss, "acc": step % 4})
        ckpts.save(12, {"w": np.zeros(12)})
    return root


def shown(*words):
    result = CliRunner().invoke(build(["ckpt"]), ["ckpt", "show", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def finite(value):
    """JSON has no NaN: the command prints text."""
    return json.loads(json.dumps(value).replace("NaN", '"nan"'))


def test_checkpoint_info_matches_the_show_command(path, run):
    assert finite(shoal.checkpoint_info(path).to_json()) == shown(path)
    assert finite(shoal.checkpoint_info(run, step=9).to_json()) == shown(run, "--step", 9)
    assert finite(shoal.checkpoint_info(run).to_json()) == shown(run)


def test_leaves_by_name(path):
    found = shoal.checkpoint_info(path)
    assert list(found.leaves) == sorted(state())
    w, far, leaves = found.leaves["w"], found.leaves["far"], found.leaves
    assert (w.kind, w.dtype, w.shape, w.bytes) == ("array", "float32", (8, 4), 128)
    assert Layout.parse(w.layout) == Layout(MESH, "x", None)
    assert (w.memory, far.memory, far.layout) == ("", "pinned_host", w.layout)
    assert (leaves["step"].value, leaves["name"].value) == (10**30, "blue\x1b[2J")
    assert np.isnan(leaves["rate"].value)
    assert (leaves["key"].kind, leaves["key"].impl) == ("key", "threefry2x32")
    assert (leaves["own"].kind, leaves["none"].value) == ("per_process", None)
    assert (found.user, found.step, found.processes, found.pinned) == (
        {"commit": "a1"},
        None,
        1,
        False,
    )
    assert Mesh.parse(found.mesh) == MESH
    assert np.dtype(leaves["b"].dtype) == ml_dtypes.bfloat16


def test_a_target_made_of_it(path):
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.kind == "array" else leaf.value
        for name, leaf in shoal.checkpoint_info(path).leaves.items()
    }
    target |= {"key": "stored", "own": 0}  # what is no array comes back as saved; None stays None
    back = shoal.restore(path, target)
    assert back["w"].shape == (8, 4)
    assert type(back["own"]) is shoal.PerProcess


def test_checkpoint_info_can_be_copied_pickled_and_dumped_as_json(tmp_path):
    user = {"a": {"b": [1, 2.5, {"c": None}], "d": True}, "name": "blue"}
    with shoal.Checkpoints(tmp_path) as ckpts:
        ckpts.save(1, {"w": np.ones(2), "n": 3}, user=user, metrics={"loss": 0.5, "hits": 3})
        found = ckpts.info()
    assert json.loads(json.dumps(found.user)) == user
    assert json.loads(json.dumps(found.metrics)) == {"loss": 0.5, "hits": 3}
    assert json.loads(json.dumps(found.by)) == found.by
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert copied == found
        assert str(copied) == str(found)
        copied.user["a"]["b"].append(4)
    assert found.user == ckpts.info().user == user


def test_checkpoint_info_prints_as_a_table(path):
    found = shoal.checkpoint_info(path)
    lines = str(found).splitlines()
    assert lines[0].startswith(f"{path}: 9 leaves, ")
    assert lines[-1].split(maxsplit=2)[:2] == ["w", "float32[8,4]"]
    assert "\x1b" not in str(found)
    assert "SavedLeaf" not in repr(found)


def test_the_newest_step_or_one(run):
    assert shoal.checkpoint_info(run).step == 12
    assert shoal.checkpoint_info(run, step=5).leaves["w"].shape == (5,)
    assert shoal.checkpoint_info(run / step_name(5)).metrics == {"loss": 0.25, "acc": 1}
    with pytest.raises(NotCommittedError, match="step 4 is not saved; saved are 3, 5, 9, 12"):
        shoal.checkpoint_info(run, step=4)
    with pytest.raises(UsageError, match="is not a history: omit step=3"):
        shoal.checkpoint_info(run / step_name(5), step=3)
    with pytest.raises(UsageError, match="checkpoint_info: step='3' must be a whole number"):
        shoal.checkpoint_info(run, step="3")


def test_checkpoint_info_raises_where_nothing_is_saved(tmp_path):
    with pytest.raises(NotCommittedError, match="nothing is saved there"):
        shoal.checkpoint_info(tmp_path / "none")
    (tmp_path / "run" / step_name(3)).mkdir(parents=True)
    with pytest.raises(NotCommittedError, match="no step is saved"):
        shoal.checkpoint_info(tmp_path / "run")
    with pytest.raises(UsageError, match="checkpoint_info: path=3"):
        shoal.checkpoint_info(3)


def test_damage_is_an_error(tmp_path):
    shoal.save(tmp_path / "one", {"w": 3})
    (file,) = (tmp_path / "one").glob("manifest-*")
    file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"'))
    with pytest.raises(CorruptCheckpointError):
        shoal.checkpoint_info(tmp_path / "one")


def test_without_jax(path):
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import shoal\n"
        f"found = shoal.checkpoint_info({str(path)!r})\n"
        "assert found.leaves['w'].shape == (8, 4) and str(found), found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- a history


def history(root):
    return shoal.Checkpoints(root, client=LocalJob(1).clients[0], recover=False)


def test_steps_with_metrics_and_the_best(run):
    ckpts = history(run)
    found = ckpts.all_metrics()
    assert list(found) == [3, 5, 9, 12]
    assert (found[3], found[12]) == ({"loss": 0.5, "acc": 3}, {})
    assert ckpts.best_step("loss") == 5
    assert ckpts.best_step("loss", "max") == 3
    assert ckpts.best_step("acc") == 9, "of equal ones the newest"
    assert ckpts.info().step == 12
    assert ckpts.info(5).metrics == {"loss": 0.25, "acc": 1}


def test_a_metric_that_no_step_has(run, tmp_path):
    with pytest.raises(UsageError, match="no step has it, but acc, loss; did you mean 'loss'"):
        history(run).best_step("los")
    with pytest.raises(UsageError, match="mode='most' must be 'min' or 'max'"):
        history(run).best_step("loss", "most")
    empty = history(tmp_path / "new")
    assert (empty.best_step("loss"), empty.all_metrics()) == (None, {})
    with pytest.raises(NotCommittedError, match="no step is saved"):
        empty.info()


def test_best_step_ignores_nan(tmp_path):
    with shoal.Checkpoints(tmp_path) as ckpts:
        ckpts.save(1, {"w": 1}, metrics={"loss": float("nan")})
        ckpts.wait()
        assert ckpts.best_step("loss") is None


def test_whether_a_save_runs(tmp_path, monkeypatch):
    go = threading.Event()
    with shoal.Checkpoints(tmp_path) as ckpts:
        assert not ckpts.is_saving
        retain = ckpts._saver._retain
        monkeypatch.setattr(ckpts._saver, "_retain", lambda *a: (go.wait(60), retain(*a)))
        ckpts.save(1, {"w": np.ones(3)})
        assert ckpts.is_saving
        go.set()
        ckpts.wait()
        assert not ckpts.is_saving
