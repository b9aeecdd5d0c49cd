"""What docs/why.md shows is what its programs do, with and without shoal."""

from __future__ import annotations

import pytest

from processes import why

TRANSCRIPTS = why.transcripts()


def test_the_page_has_transcripts():
    assert len(TRANSCRIPTS) == 6


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda text: text.splitlines()[0])
def test_a_transcript_is_what_its_programs_print(transcript, child_env):
    if not why.can_run(transcript):
        pytest.skip("orbax is not installed")
    now = why.run(transcript, why.environment(child_env))
    assert why.steady(now) == why.steady(transcript), now


@pytest.mark.parametrize("name", ["killed_jax.py", "killed_shoal.py", "metrics_jax.py"])
def test_the_page_shows_the_end_of_its_programs(name):
    assert (why.PROGRAMS / name).read_text("utf-8").endswith(why.programs()[name])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python alone.py 4 value_jax.py", "exit code 0 replicated: True value: 0.1 "),
        ("shoal run -n 4 --log-dir logs value_shoal.py", "gave put different values"),
        ("shoal run -n 4 --log-dir logs shape_shoal.py", "gave allgather different shapes"),
        ("shoal run -n 4 --log-dir logs late_shoal.py", "process 1 of 4 did not reach barrier"),
    ],
)
def test_rows_of_the_table(command, words, child_env):
    printed = why.run(f"$ {command}\n", why.environment(child_env))
    assert words in " ".join(why.steady(printed)), printed


def test_what_a_transcript_shows_counts():
    assert why.steady("after 2.5 s: killed") == why.steady("after 11.0 s: killed")
    assert why.steady("exit code 0 after 2.5 s") != why.steady("exit code 1 after 2.5 s")
