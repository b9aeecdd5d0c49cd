"""The programs of docs/why.md that its transcripts do not show: rows of its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes.transcripts import ROOT, run, steady, transcripts

PROGRAMS = ROOT / "examples" / "why"
SHOWN = re.compile(r"^```py\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("name", "shown"), SHOWN.findall(Path(ROOT, "docs/why.md").read_text("utf-8"))
)
def test_the_page_shows_the_end_of_its_programs(name, shown):
    assert (PROGRAMS / name).read_text("utf-8").endswith(shown)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python alone.py 4 value_jax.py", "exit code 0 after 1.0 s replicated: True value: 0.1 "),
        ("shoal run -n 4 --log-dir logs value_shoal.py", "gave put different values"),
        ("shoal run -n 4 --log-dir logs shape_shoal.py", "gave allgather different shapes"),
        ("shoal run -n 4 --log-dir logs late_shoal.py", "process 1 of 4 did not reach barrier"),
    ],
)
def test_rows_of_the_table(command, words, child_env):
    page = f"<!-- run in examples/why -->\n```console\n$ {command}\n```\n"
    (one,) = transcripts("page.md", page)
    printed = " ".join(steady(run(one, child_env)[0]))
    assert words in printed
