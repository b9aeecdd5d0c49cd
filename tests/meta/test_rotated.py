"""Who failed first, exit codes and facts do not depend on how anything is worded."""

from __future__ import annotations

import importlib

import pytest

from meta.rotated import decisions, library, rotated

TESTS = {
    "launch/test_first_failure.py": ("first_failures", "exit_code", "is_from_outside", "cause_of"),
    "launch/test_diagnose.py": ("failure_of", "conclude"),
    "runtime/exit/test_job_report.py": ("failure_known",),
    "runtime/client/test_outcomes.py": ("error_of",),
}


@pytest.fixture(scope="module")
def plain():
    return decisions(TESTS, rotates=False)


def test_all_decisions_are_the_same_in_another_language(plain):
    found = decisions(TESTS, rotates=True)
    assert len(plain) > 70
    assert sum(map(len, plain.values())) > 150
    assert {name: found[name] for name in plain if found[name] != plain[name]} == {}


def test_texts_of_the_other_language_are_said():
    with library({}, rotates=True):
        errors = importlib.import_module("shoal.errors")
        words = importlib.import_module("shoal.runtime.exit.first_failure").left_cause(None).words
    assert issubclass(errors.ShoalError, Exception)
    assert words == ("Vg unq yrsg gur wbo va beqre, naq bguref jnvgrq sbe vg.",)


def test_the_other_language_is_another():
    assert rotated("it left the job") == "vg yrsg gur wbo"
    assert rotated("left") == "left"


READING = {
    "follows by a text": (
        "runtime/exit/first_failure.py",
        "if gone is not None and gone.follows:",
        'if gone is not None and "cannot complete" in gone.words:',
    ),
    "an exit by a text": (
        "runtime/exit/first_failure.py",
        'if cause.kind == "exit" and process_exit.gone is not None:',
        'if process_exit.gone is not None and process_exit.gone.words.startswith("exited with"):',
    ),
}


@pytest.mark.parametrize("how", READING)
def test_a_decision_by_a_text_is_found(how):
    file, old, new = READING[how]
    edits = {file: (old, new)}
    tests = {"launch/test_first_failure.py": TESTS["launch/test_first_failure.py"]}
    long = ("test_the_first_failure_of_2000_random_jobs",)
    before, after = (
        decisions(tests, edits, rotates=rotates, without=long) for rotates in (False, True)
    )
    assert before != after
