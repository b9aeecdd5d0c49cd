"""The page for users of DTensor: its program before has the losses that the one after has."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import numpy as np
import pytest

from meta.source import ROOT

PAGE = (ROOT / "docs" / "coming-from" / "dtensor.md").read_text(encoding="utf-8")


def test_the_program_before_has_the_losses_that_the_page_says(tmp_path, child_env):
    pytest.importorskip("tensorflow")
    (before,) = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    said = re.search(r"assert_allclose\(losses, (\[.*?\])", PAGE)
    done = subprocess.run(
        [sys.executable, "-c", before],
        env=child_env, cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(losses, ast.literal_eval(said[1]), rtol=1e-5)


def test_the_texts_are_read_by_tensorflow():
    tensorflow = pytest.importorskip("tensorflow.experimental.dtensor")
    from shoal.compat import dtensor

    for kind in ("CPU", "TPU"):
        names = [f"/job:w/replica:0/task:0/device:{kind}:{n}" for n in range(4)]
        ids = np.arange(4).reshape(2, 2)
        mesh = dtensor.Mesh(["x", "y"], ids, [0, 1, 2, 3], names, "m", names)
        theirs = tensorflow.Mesh.from_string(mesh.to_string())
        assert theirs.to_string() == mesh.to_string()
        for specs in (["x", "unsharded"], [], ["match", "y"]):
            layout = dtensor.Layout(specs, mesh)
            for one in (layout, layout.to_parted()):
                read = tensorflow.Layout.from_string(one.to_string())
                assert read.to_string() == one.to_string()
                assert dtensor.Layout.from_string(read.to_string()) == one


def test_the_examples_of_meshes_and_layouts():
    from shoal.compat import dtensor

    devices = [f"CPU:{number}" for number in range(6)]
    mesh = dtensor.create_mesh([("x", 3), ("y", 2)], devices=devices)
    value = dtensor.relayout(
        np.arange(6, dtype=np.int32).reshape(3, 2), dtensor.Layout(["x", dtensor.UNSHARDED], mesh)
    )
    pieces = [piece.tolist() for piece in dtensor.unpack(value)]
    assert pieces == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]], [[4, 5]], [[4, 5]]]
    assert mesh.unravel_index() == {
        number: {"x": number // 2, "y": number % 2} for number in range(6)
    }
    for device in range(6):
        strided = device // np.array(mesh.strides) % mesh.shape()
        assert strided.tolist() == mesh.coords(device).tolist()


def test_the_examples_of_pack():
    from shoal.compat import dtensor

    devices = [f"CPU:{number}" for number in range(6)]
    wide = dtensor.create_mesh([("X", 2), ("Y", 3)], devices=devices)
    for specs, split in ((["X"], 2), (["Y"], 3)):
        rows = np.arange(126, dtype=np.int32)
        parts = np.split(rows, split)
        own = [parts[n // 3 if specs == ["X"] else n % 3] for n in range(6)]
        packed = dtensor.pack(own, dtensor.Layout(specs, wide))
        np.testing.assert_array_equal(packed, rows)
        for piece, given in zip(dtensor.unpack(packed), own, strict=True):
            np.testing.assert_array_equal(piece, given)


def test_the_examples_of_barriers_checkpoints_and_default_meshes(tmp_path):
    from shoal.compat import dtensor

    mesh = dtensor.create_mesh([("x", 3), ("y", 2)], devices=[f"CPU:{n}" for n in range(6)])
    x = [1, 2, 3]
    x = dtensor.relayout(x, dtensor.Layout.batch_sharded(mesh, "x", 1))
    dtensor.barrier(mesh)

    step = dtensor.DVariable(np.int32(0), layout=dtensor.Layout([], mesh), name="step")
    checkpoint = dtensor.DTensorCheckpoint(mesh, step=step)
    assert checkpoint.save(f"{tmp_path}/ckpt") == f"{tmp_path}/ckpt-1"
    checkpoint.restore(f"{tmp_path}/ckpt-1").assert_consumed()
    path = checkpoint.write(f"{tmp_path}/my_checkpoint")
    checkpoint.read(path).assert_consumed()

    with dtensor.default_mesh(mesh):
        other = dtensor.copy_to_mesh(
            np.ones((4, 4), np.float32), dtensor.Layout.replicated(mesh, 2)
        )
    y = dtensor.relayout_like(np.ones(other.shape, np.float32), other)
    assert dtensor.fetch_layout(other + y).mesh == mesh
