"""What an exception is in one line, whatever it is, and what is read from the texts of others."""

from __future__ import annotations

import json
import re

import jax
import pytest

from shoal.runtime.failures.exception_text import Failure, exit_words, failure_of, fate_of
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.point import Departure
from shoal.runtime.system.foreign_text import headline_of, particulars_of

FILE = "tests/runtime/failures/test_exception_text.py"


class Unsayable(Exception):
    def __str__(self):
        raise KeyboardInterrupt


def failure(raising) -> Failure:
    try:
        raising()
    except BaseException as error:  # noqa: BLE001 (SystemExit, too)
        return failure_of(error)
    raise AssertionError("nothing was raised")


def loss(rate):
    raise ValueError("rate must be positive\nrate=0\nsee the manual")


def plain():
    loss(0)


def jitted():
    jax.jit(loss)(0)


def of_jax():
    jax.jit(lambda x: x @ jax.numpy.ones(3))(jax.numpy.ones(4))


def with_notes():
    error = KeyError("lr")
    error.add_note("in config.toml\nline 7")
    raise error


def chained():
    try:
        loss(0)
    except ValueError as error:
        raise RuntimeError("no more training") from error


def grouped():
    inner = failure_group("rows", [ZeroDivisionError("row 3"), KeyError("row 4")])
    raise ExceptionGroup("two loaders failed\nof nine", [inner, OSError("disk")])


def failure_group(message, errors):
    try:
        raise errors[0]
    except ZeroDivisionError:
        return ExceptionGroup(message, errors)


def in_the_library():
    json.loads("{")


def unsayable():
    raise Unsayable


def exits():
    raise SystemExit("no such file\nin /data")


def of_a_group_in_a_group():
    raise BaseExceptionGroup("a", [BaseExceptionGroup("b", [KeyboardInterrupt(), KeyError(1)])])


def on_many_lines():
    raise RuntimeError(
        "\n\n  \x1b[31mred\u2028 alert\r\nTraceback (most recent call last):\n  | forged"
    )


def in_a_callback():
    jax.pure_callback(loss, jax.ShapeDtypeStruct((), "float32"), 0.0).block_until_ready()


def long():
    raise RuntimeError("x" * 10**6)


CASES = {
    plain: "ValueError: rate must be positive, loss",
    jitted: "ValueError: rate must be positive, loss",
    of_jax: "TypeError: dot_general requires contracting dimensions to have the same shape, got "
    "(4,) and (3,)., of_jax.<locals>.<lambda>",
    with_notes: "KeyError: 'lr', with_notes",
    chained: "RuntimeError: no more training, chained",
    grouped: "ExceptionGroup: two loaders failed: ZeroDivisionError: row 3, failure_group",
    of_a_group_in_a_group: "BaseExceptionGroup: a (1 sub-exception): KeyboardInterrupt, "
    "of_a_group_in_a_group",
    in_the_library: "json.decoder.JSONDecodeError: Expecting property name enclosed in double "
    "quotes: line 1 column 2 (char 1), in_the_library",
    unsayable: f"{Unsayable.__module__}.Unsayable: <exception str() failed>, unsayable",
    exits: "exited: no such file, exits",
    on_many_lines: "RuntimeError:  [31mred, on_many_lines",
    in_a_callback: "jax.errors.JaxRuntimeError: INTERNAL: CpuCallback error calling callback: "
    "ValueError: rate must be positive, in_a_callback",
    long: f"RuntimeError: {'x' * 183}..., long",
}


@pytest.mark.parametrize("raising", CASES, ids=lambda raising: raising.__name__)
def test_the_headline_is_the_type_the_message_and_the_programs_own_frame(raising):
    headline, text = told = failure(raising)
    said, _, place = CASES[raising].rpartition(", ")
    assert re.sub(r"\.py:[0-9]+ ", ".py:N ", headline) == f"{said} ({FILE}:N ({place}))"
    assert headline_of(told.words) == headline
    assert particulars_of(told.words) == text.strip("\n")
    assert text.startswith(("Traceback (most recent", "  + Exception Group Traceback"))
    assert len(told.words) < 40_000
    is_end = raising is exits
    how = "exited" if is_end else ""
    fate = headline if is_end else f"raised {headline}"
    assert fate_of(Departure(told.words, how=how)) == fate


@pytest.mark.parametrize("raising", [c for c in CASES if c not in (unsayable, exits, long)])
def test_the_headline_of_a_bare_traceback_is_the_line_of_the_exception(raising):
    headline = headline_of(failure(raising).text)
    said = CASES[raising].rpartition(", ")[0].partition(": ")[0]
    assert headline.startswith(said)
    assert fate_of(Departure(failure(raising).text)) == f"raised {headline}"


@pytest.mark.parametrize(
    ("words", "headline", "fate"),
    [
        ("", "", "is gone"),
        ("its disk is full", "its disk is full", "is gone: its disk is full"),
        (
            "initialize: no service\nset X",
            "initialize: no service",
            "is gone: initialize: no service",
        ),
        ("ok\x1b[2J\x00\u202e\rX\nprocess 2 raised", "ok [2J", None),
        ("Traceback (most recent call last):", None, None),
    ],
)
def test_texts_of_others_have_a_headline_of_one_printable_line(words, headline, fate):
    found = headline_of(words)
    assert found.isprintable()
    if headline is not None:
        assert found == headline
    if fate is not None:
        assert fate_of(Departure(words)) == fate
    assert len(headline_of("x" * 10**6)) <= 800


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "exited with code 0 (t.py:1 (f))"),
        (True, "exited with code 1 (t.py:1 (f))"),
        (75, "exited with code 75 (t.py:1 (f))"),
        ("no data", "exited: no data (t.py:1 (f))"),
        (("a", 1), "exited: ('a', 1) (t.py:1 (f))"),
        ("no data\nin /x", "exited: no data (t.py:1 (f))\nno data\nin /x"),
        (Unsayable(), "exited: <exception str() failed> (t.py:1 (f))"),
    ],
)
def test_exit_words_show_the_code_or_text(status, words):
    assert exit_words(status, "t.py:1 (f)") == words
    assert fate_of(Departure(words, how="exited")) == words.partition("\n")[0]


def test_in_a_call_that_the_program_made_the_place_is_its_line():
    """The frames of the exception are those within the call: of shoal and the standard library."""
    try:
        json.loads("{")
    except ValueError as error:
        seen = error.with_traceback(error.__traceback__.tb_next)
    assert " (json/" in failure_of(seen).headline
    assert failure_of(seen, "t.py:3 (main)").headline.endswith(" (t.py:3 (main))")
    with pytest.raises(ValueError, match="rate") as caught:
        loss(0)
    assert failure_of(caught.value, "t.py:3 (main)").headline.endswith(" (loss))")


def test_an_exception_that_was_never_raised_has_no_place():
    headline, text = failure_of(OSError("disk"))
    assert headline == "OSError: disk"
    assert text.splitlines() == ["Traceback (no frames are known):", "OSError: disk"]


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        ([3], "process 3"),
        ([2, 0, 1], "processes 0-2"),
        ([5, 0, 1, 9, 7, 8], "processes 0-1, 5, 7-9"),
    ],
)
def test_processes_are_listed_in_runs(processes, told):
    assert listed(processes) == told
