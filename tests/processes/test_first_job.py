"""docs/first-job.md: its commands, in order, in one directory, print what the page shows."""

from __future__ import annotations

import pytest

from processes.first_job import PAGE, losses, played, steady, with_shoal


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "first-job"
    folder.mkdir()
    return folder


def test_each_command_prints_what_the_page_shows(folder, child_env):
    text = PAGE.read_text("utf-8")
    (folder.parent / "tmp").mkdir()
    env = with_shoal({**child_env, "TMPDIR": str(folder.parent / "tmp")})
    now = played(text, folder, env)
    assert steady(now) == steady(text)
    assert len(losses(text)) == 8 + 4 + 5
    assert losses(now) == pytest.approx(losses(text), abs=2e-4)


def test_what_a_command_prints_otherwise_is_found(folder, child_env):
    page = "```py\n# a.py\nprint(2)\n```\n```console\n$ cat a.py; exit 3\nprint(1)\n```\n"
    now = played(page, folder, child_env)
    assert now == page.replace("print(1)", "# a.py\nprint(2)")
    assert steady(now) != steady(page)


def test_only_what_varies_is_left_out():
    text = PAGE.read_text("utf-8")
    for words in (
        "epoch 2: loss",
        "SIGKILL",
        "train.py:52",
        "Exit code 137",
        "committed",
        "p0001.log",
    ):
        assert words in steady(text)
        assert steady(text.replace(words, "")) != steady(text)
