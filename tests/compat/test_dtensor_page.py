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
