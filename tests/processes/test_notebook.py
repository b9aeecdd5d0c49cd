"""examples/first_job.ipynb: its cells run one after the other, and show what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meta.documents import blocks
from meta.source import ROOT

NOTEBOOK = json.loads((ROOT / "examples/first_job.ipynb").read_text(encoding="utf-8"))
CELLS = {
    cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"
}
# As a notebook runs them: files are written, `!` starts a shell, the rest shares its variables.
KERNEL = """
import json, os, subprocess, sys

names = {}
for cell, code in json.load(sys.stdin).items():
    print(f"\\n## {cell}", flush=True)
    if code.startswith("%%writefile "):
        head, _, text = code.partition("\\n")
        open(head.split()[1], "w").write(text)
    elif code.startswith("!"):
        subprocess.run(code[1:], shell=True, stderr=subprocess.STDOUT)
    else:
        exec(code, names)
"""


def test_notebook_is_stored_without_outputs():
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_its_script_is_that_of_the_page():
    page = (ROOT / "docs/first-job.md").read_text(encoding="utf-8")
    (script,) = [block.code for block in blocks("", page, "py") if block.code.startswith("# train")]
    assert CELLS["script"] == "%%writefile train.py\n" + script.rstrip("\n")


@pytest.mark.timeout(240)  # two jobs, which compile as users do
def test_its_cells_run(tmp_path, child_env):
    command = tmp_path / "bin/shoal"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(CELLS), cwd=tmp_path, capture_output=True, text=True, timeout=220,
        env={**child_env, "PATH": f"{command.parent}:{child_env['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stdout.split("\n## ")[1:])
    assert "process 1 of 2 was killed by SIGKILL" in said["killed"], done.stdout
    assert [line.split()[:2] for line in said["steps"].splitlines()[1:]] == [
        [str(step), "committed"] for step in range(3)
    ]
    assert "mesh: {'data': 4, 'model': 2}" in said["resumed"]
    assert "step 7: loss 0.009" in said["resumed"]
    assert "step 7: 3 leaves" in said["info"]
