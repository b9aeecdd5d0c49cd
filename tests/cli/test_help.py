"""The help texts of all commands, as a terminal of 80 columns shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.main import get_command

from shoal.cli.main import COMMANDS, build

COLUMNS = 80


def command_lines() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, from `shoal` itself to those of `shoal ckpt`."""
    yield ()
    app = get_command(build(COMMANDS))
    for name, command in app.commands.items():
        yield (name,)
        for inner in getattr(command, "commands", ()):
            yield name, inner


@pytest.mark.parametrize("words", [*command_lines()], ids=" ".join)
def test_help_fits_a_terminal_and_no_summary_is_cut(words):
    env = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONUTF8": "1"}
    shown = subprocess.run(
        [sys.executable, "-m", "shoal", *words, "--help"],
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert shown.startswith("Usage: shoal")
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    cut = [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")]
    assert cut == []
