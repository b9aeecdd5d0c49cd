"""docs/topology.md shows what its command draws."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from shoal.cli.main import build

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND = re.compile(r"^\$ (shoal mesh .* --svg docs/wires\.svg)$", re.MULTILINE)


def test_the_picture_is_what_the_command_draws(tmp_path, monkeypatch):
    (line,) = COMMAND.findall((DOCS / "topology.md").read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build(["mesh"]), shlex.split(line)[1:])
    assert result.exit_code == 0
    drawn = (tmp_path / "docs" / "wires.svg").read_text(encoding="utf-8")
    assert drawn == (DOCS / "wires.svg").read_text(encoding="utf-8"), f"run {line}"
