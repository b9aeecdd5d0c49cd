"""The programs and reports of docs/gallery.md: each is run as the page says.

`python tests/processes/run/gallery.py` rewrites the reports; a test compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gallery.md"
HEAD = "import glob, numpy as np, os, shoal, time\n"
START = "shoal.initialize(); p = shoal.process_index()\n"
_PART = re.compile(
    r"### `(?P<name>\w+)`\n.*?```py\n(?P<program>.*?)```\n\n"
    r"```console\n\$ (?P<command>.*?)\n(?P<report>.*?)```\n",
    re.DOTALL,
)
_VARIES = (  # between two runs of a program
    (re.compile(r"\b(after|silent for|moved for) \d+(\.\d+)? s\b"), r"\1 1.0 s"),
    (re.compile(r"\b\d+(\.\d+)? s before"), "1.0 s before"),
    (re.compile(r"\b[0-9a-f]{12}\b"), "5447d6786ecf"),
    # Which of several equal failures was the first.
    (re.compile(r"(both processes raised .*)p0000\.log", re.DOTALL), r"\1p0001.log"),
    (re.compile(r"(both processes raised .*)process 0 of 2", re.DOTALL), r"\1process 1 of 2"),
    (re.compile(r"process 0 was the first"), "process 1 was the first"),
)
_HOST = re.compile(r"(process \d(?: of \d)?) \((?!train)[^)\n]+\)")


class Exhibit(NamedTuple):
    """A program that fails, and what is printed."""

    name: str  # of the error class
    program: str
    command: str
    report: str


def exhibits() -> list[Exhibit]:
    """Return those of the page."""
    return [Exhibit(**part.groupdict()) for part in _PART.finditer(PAGE.read_text("utf-8"))]


def report_of(one: Exhibit, env: Mapping[str, str]) -> str:
    """Run a program; return what it prints, with other names for its folder and host."""
    program = one.program if "initialize" in one.program else START + one.program
    with tempfile.TemporaryDirectory(prefix="job") as folder:
        Path(folder, "train.py").write_text(HEAD + program, "utf-8")
        variables, _, options = one.command.partition("shoal run ")
        given = dict(pair.split("=") for pair in variables.split())
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "run", *options.split()],
            cwd=folder, env={**env, **given}, text=True, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return _HOST.sub(r"\1 (a)", done.stdout.replace(os.path.realpath(folder), "/runs"))


def steady(text: str) -> str:
    """Return a report without what differs between two runs."""
    for pattern, same in _VARIES:
        text = pattern.sub(same, text)
    return text


def main() -> None:
    """Rewrite the reports."""
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS")}

    def rewritten(part: re.Match[str]) -> str:
        one = Exhibit(**part.groupdict())
        print(one.name)
        return f"{part[0][: part.start('report') - part.start()]}{report_of(one, env)}```\n"

    PAGE.write_text(_PART.sub(rewritten, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
