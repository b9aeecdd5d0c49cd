"""The report of a failure: as in `reports.txt`, and for whatever facts there are."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.failures.example_failures import at, example_failures, failed, raised, these, waiting
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.failures.facts import (
    BystanderState,
    CallPlace,
    Cause,
    CheckpointFacts,
    Difference,
    DivergenceSide,
    ErrorFacts,
    JobFailure,
    Memory,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
    of_json,
    to_json,
)
from shoal.runtime.failures.headline import job_headline, raised_words
from shoal.runtime.failures.rendering import (
    Style,
    facts_without_secrets,
    laid_out,
    plain_text,
    process_ranges,
    report,
    without_secrets,
)
from shoal.runtime.failures.shortening import columns, printable

EXAMPLES = example_failures()
REPORTS = dict(re.findall(
    r"^# ([^\n]+)\n(.*?)(?=\n\n# |\n*\Z)",
    (Path(__file__).parent / "reports.txt").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE,
))  # fmt: skip
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (60, 80, 120)


# The examples.


def test_every_example_has_its_report():
    assert list(EXAMPLES) == list(REPORTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_report_of_an_example(name):
    assert plain_text(EXAMPLES[name]) == REPORTS[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_facts_of_an_example_are_json(name):
    text = json.dumps(to_json(EXAMPLES[name]))
    assert of_json(JobFailure, json.loads(text)) == EXAMPLES[name]


def test_facts_that_are_zero_or_false_are_not_absent():
    cause = Cause(
        processes=these(0), kind="signal", sent_by_launcher=False, step=0, at_s=0.0,
        memory=Memory(cgroup_oom_kills=0),
    )  # fmt: skip
    data = to_json(cause)
    assert (data["sent_by_launcher"], data["step"], data["at_s"]) == (False, 0, 0.0)
    assert data["memory"] == {"cgroup_oom_kills": 0}
    assert of_json(Cause, data) == cause


# The headline.


@pytest.mark.parametrize(
    ("cause", "n", "expected"),
    [
        (raised(4, error="KeyError", message="", frames=()), 8, "process 4 of 8 raised KeyError"),
        (raised(0, error="KeyError", message="", frames=()), 1, "process 0 raised KeyError"),
        (raised(0, 1, error="OSError", message=""), 2, "both processes raised OSError"),
        (Cause(processes=these(0, 1), kind="not_joined"), 2, "neither process joined"),
        (Cause(processes=these(0, 1, 2), kind="not_joined"), 3, "no process joined"),
        (raised(0, 2, 3, error="OSError", message=""), 8, "processes 0, 2-3 of 8 raised OSError"),
        (Cause(processes=these(1, 2), kind="signal", signal="SIGKILL"), 4,
         "processes 1-2 of 4 were killed by SIGKILL"),
        (Cause(processes=these(1), kind="lost"), 4, "process 1 of 4 was lost"),
        (Cause(processes=these(1), kind="new kind"), 4, "process 1 of 4 failed"),
        (Cause(processes=these(), kind="service_lost"), 4, "a service of the job was lost"),
    ],
)  # fmt: skip
def test_headlines(cause, n, expected):
    assert failed(cause.kind, 1, 1.0, cause, n=n).headline == expected


@pytest.mark.parametrize(
    ("kills", "signal", "by_launcher", "is_told"),
    [
        (1, "SIGKILL", False, True),
        (0, "SIGKILL", False, False),
        (None, "SIGKILL", False, False),
        (1, "SIGTERM", False, False),
        (1, "SIGKILL", True, False),
    ],
)
def test_out_of_memory_is_shown_only_if_counted(kills, signal, by_launcher, is_told):
    cause = Cause(
        processes=these(1), kind="signal", signal=signal, sent_by_launcher=by_launcher,
        memory=Memory(cgroup_oom_kills=kills),
    )  # fmt: skip
    text = plain_text(failed("signal", 137, 1.0, cause))
    assert ("out of memory" in text) == is_told


@pytest.mark.parametrize(
    ("kills", "expected"),
    [
        (0, "  shoal run did not send the signal, and the cgroup recorded no OOM kill."),
        (None, "  shoal run did not send the signal."),
    ],
)
def test_unknown_oom_count_of_the_cgroup_is_not_shown(kills, expected):
    cause = Cause(
        processes=these(1), kind="signal", signal="SIGKILL", sent_by_launcher=False,
        memory=Memory(cgroup_oom_kills=kills),
    )  # fmt: skip
    assert report(failed("signal", 137, 1.0, cause), Style())[1] == expected


def test_a_table_that_is_too_wide_has_its_last_column_below():
    place = CallPlace(file="a/long/path/to/the/program/train.py", line=1, source="shoal.barrier()")
    groups = [ProcessSet(range(0, 900, 9)), ProcessSet(range(1, 900, 9))]
    wait = Wait(call="barrier", arrived=(Waiting(processes=groups[0], place=place),))
    cause = Cause(processes=groups[1], kind="deadline", wait=wait)
    lines = report(failed("deadline", 73, 1.0, cause, n=1024), Style(60))
    index = next(i for i, line in enumerate(lines) if line.startswith("  arrived"))
    assert lines[index] == "  arrived   100 processes (0 and others)"
    assert lines[index + 1] == "      …/to/the/program/train.py:1   shoal.barrier()"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (90, ["{} after 6.2 s: process 3 of 4 (beta) did not reach barrier 'epoch'", "  arr"]),
        (70, ["{}: process 3 of 4 (beta) did not reach barrier 'epoch'", "  arr"]),
        (66, ["{}: process 3 of 4 did not reach barrier 'epoch'", "  On host beta."]),
        (60, ["{}: process 3 did not reach barrier 'epoch'", "  On host beta."]),
    ],
)
def test_a_headline_that_is_too_wide_loses_time_then_host_then_total(width, expected):
    standing = Waiting(processes=these(0), place=at(1))
    wait = Wait(call="barrier", name="epoch", arrived=(standing,))
    cause = Cause(processes=these(3), kind="deadline", wait=wait)
    hosts = {"alpha": these(0, 1), "beta": these(2, 3)}
    lines = report(failed("deadline", 73, 6.2, cause, n=4, hosts=hosts), Style(width))
    assert lines[0] == expected[0].format("shoal run: failed")
    assert lines[1].startswith(expected[1])
    assert ("after 6.2 s" in lines[-1]) == (width < 90)


def test_a_headline_wraps_at_a_space_and_is_not_cut():
    headline = " ".join(f"word{i}" for i in range(30))
    lines = report(dataclasses.replace(EXAMPLES["13"], headline=headline), Style(60))
    assert " ".join(line.strip() for line in lines).startswith(f"shoal run: failed: {headline} ")


def test_process_ranges_end_with_a_count():
    many = range(0, 40, 2)
    assert process_ranges(many) == "processes 0, 2, 4, 6, 8 and 15 more"
    assert process_ranges([0, 1, 2, 4]) == "processes 0-2, 4"


# The style.


@pytest.mark.parametrize(
    ("is_terminal", "at_columns", "env", "width"),
    [
        (True, 100, {}, 100),
        (True, 40, {}, 60),
        (True, 300, {"COLUMNS": "70"}, 120),
        (False, 0, {}, 80),
        (False, 0, {"CI": "1"}, 120),
        (False, 0, {"COLUMNS": "132", "CI": "1"}, 132),
        (False, 0, {"COLUMNS": "20"}, 80),
        (False, 0, {"COLUMNS": "9" * 99}, 80),
        (False, 0, {"COLUMNS": "wide"}, 80),
    ],
)
def test_the_width_of_a_stream(is_terminal, at_columns, env, width):
    assert Style.for_stream(is_terminal, at_columns, env, "utf-8").width == width


@pytest.mark.parametrize(
    ("is_terminal", "env", "colour"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "0"}, False),
    ],
)
def test_the_colour_of_a_stream(is_terminal, env, colour):
    assert Style.for_stream(is_terminal, 80, env, "utf-8").colour is colour


@pytest.mark.parametrize(
    ("encoding", "is_ascii"),
    [("utf-8", False), ("UTF8", False), ("latin-1", True), ("no such", True), (None, True)],
)
def test_a_stream_that_is_not_utf_8_gets_ascii(encoding, is_ascii):
    assert Style.for_stream(True, 80, {}, encoding).ascii is is_ascii


def test_styled_report_colors_headline_and_verdicts():
    lines = report(EXAMPLES["01"], Style(80, colour=True))
    assert lines[0].startswith("\x1b[1mshoal run: \x1b[0m\x1b[1;31mfailed\x1b[0m\x1b[1m after")
    assert "  \x1b[2m… 1 frame in numpy\x1b[0m" in lines
    assert lines[-1].startswith("  \x1b[2mExit code \x1b[0m1\x1b[2m. Log")
    assert "\x1b[1;33minterrupted\x1b[0m" in report(EXAMPLES["25"], Style(80, colour=True))[0]
    assert "\x1b[1;32mpreempted\x1b[0m" in report(EXAMPLES["21"], Style(80, colour=True))[0]
    assert "\x1b[1mprocess 0\x1b[0m" in report(EXAMPLES["13"], Style(80, colour=True))[2]


def test_ascii_has_three_dots_and_escapes_letters():
    cause = raised(0, error="ValueError", message="café …", frames=(), left_out={"jax": 2})
    lines = report(failed("exception", 1, 1.0, cause, n=2), Style(ascii=True))
    assert lines[1:3] == ["  ... 2 frames in jax", "  ValueError: caf\\u00e9 ..."]


def test_a_process_of_the_job_prints_no_log():
    lines = report(EXAMPLES["01"], Style(), program="shoal")
    assert lines[0].startswith("shoal: failed after 1.1 s: process 1 of 3")
    assert lines[-1] == "  Exit code 1 (of this process)."


def test_a_report_that_cannot_be_laid_out_leaves_headline_and_code():
    broken = dataclasses.replace(EXAMPLES["01"], causes=(None,))
    assert report(broken, Style(colour=True)) == [
        "shoal run: failed: process 1 of 3 raised FileNotFoundError",
        "  Exit code 1.",
    ]


# What is left out.


def lines_of_message(message: str, **more) -> list[str]:
    error = ErrorFacts(type="ValueError", message=message, **more)
    cause = Cause(processes=these(0), kind="exception", error=error)
    return report(failed("exception", 1, 1.0, cause, n=2), Style())[1:-1]


def test_a_long_message_keeps_its_beginning_and_its_last_line():
    message = "\n".join(["the first line", *("x" * 70 for _ in range(117)), "the last line"])
    lines = lines_of_message(message)
    assert lines[0] == "  ValueError: the first line"
    assert "    … 114 lines, 8,082 characters …" in lines
    assert lines[-2:] == ["    the last line", ""]
    assert len(lines) <= 8


def test_a_message_counts_the_characters_that_the_facts_do_not_hold():
    lines = lines_of_message("y" * 8192, message_characters=10_000)
    assert "    … 9,680 characters …" in lines


def test_the_last_output_of_a_logger_shows_what_it_says():
    said = (
        "I1125 10:31:02.345678 140234567890 train.py:133] step 120, loss 2.1931, 1.234 s per step, "
        "12345 tokens/s",
        "done",
    )
    killed = Cause(processes=these(1), kind="signal", signal="SIGKILL", last_output=said)
    assert report(failed("signal", 137, 1.0, killed), Style())[-4:-1] == [
        "  Its last output:",
        "    step 120, loss 2.1931, 1.234 s per step, 12345 tokens/s",
        "    done",
    ]


def test_notes_causes_and_leaves_of_an_error():
    lines = lines_of_message(
        "shards failed (5 sub-exceptions)",
        notes=("of epoch 3",),
        caused_by=(ErrorFacts(type="KeyError", message="'lr'", place="conf.py:12"),),
        leaves=tuple(ErrorFacts(type="OSError", message=f"disk {i}") for i in range(5)),
    )
    assert lines == [
        "  ValueError: shards failed (5 errors)",
        "    of epoch 3",
        "    OSError: disk 0",
        "    OSError: disk 1",
        "    … 3 more",
        "  caused by KeyError: 'lr' (conf.py:12)",
        "",
    ]


def test_frames_in_the_middle_are_counted():
    frames = tuple(
        StackFrame(file="a.py", line=i, function=f"f{i}", source="g()") for i in range(42)
    )
    error = ErrorFacts(type="RecursionError", message="too deep", repeats=995)
    cause = Cause(processes=these(0), kind="exception", error=error, frames=frames)
    lines = report(failed("exception", 1, 1.0, cause, n=2), Style())
    assert [line for line in lines if "File" in line or "frame" in line] == [
        '  File "a.py", line 0, in f0',
        "  … 38 frames …",
        '  File "a.py", line 39, in f39',
        '  File "a.py", line 40, in f40',
        '  File "a.py", line 41, in f41',
        "  … the same frame 995 times",
    ]


def test_long_values_are_shown_around_their_first_difference():
    rest = '"a": 1, ' * 12
    said = [f'{{{rest}"warmup": {n}, "lr": 0.1, {rest}}}' for n in (50, 500)]
    sides = tuple(
        DivergenceSide(processes=these(i), said=text, place=at(3)) for i, text in enumerate(said)
    )  # fmt: skip
    cause = Cause(
        processes=these(0, 1), kind="diverged",
        difference=Difference(what="value", call="assert_same", sides=sides),
    )  # fmt: skip
    lines = report(failed("diverged", 70, 1.0, cause, n=2), Style())
    assert lines[2].startswith('    process 0   …"warmup": 50, "lr": 0.1')
    assert lines[3].startswith('    process 1   …"warmup": 500, "lr": 0.1')


def test_a_bug_of_shoal_and_its_own_frames():
    cause = raised(0, error="KeyError", message="1", is_bug=True, left_out={"shoal": 3, "jax": 1})
    assert report(failed("exception", 1, 1.0, cause, n=2), Style())[1:4] == [
        "  … 1 frame in jax, 3 in shoal (SHOAL_TRACEBACK=full shows them)",
        "  KeyError: 1",
        "  This is a bug in shoal: please report it, with the log.",
    ]


def test_more_than_two_errors():
    causes = [raised(i, error=f"Error{i}", message="no", log=f"p{i}.log") for i in range(4)]
    assert report(failed("exception", 1, 1.0, *causes, n=8), Style()) == [
        "shoal run: failed after 1.0 s: process 0 of 8 raised Error0 (1 of 4 errors)",
        "  process 0, first:",
        "    Error0: no",
        "  process 1, on its own:",
        "    Error1: no",
        "  … 2 more errors: process 2 raised Error2; process 3 raised Error3",
        "  Exit code 1. Logs: logs",
    ]


def test_processes_that_waited_at_one_place_share_a_sentence():
    step, end = at(6, "barrier", "step"), at(9, "barrier", "end")
    others = [waiting(0, place=step, exit_code=72), waiting(3, place=end, exit_code=9)]
    others.append(waiting(2, 4, place=step, exit_code=9, peak_bytes=7))
    cause = raised(1, error="ValueError", message="no")
    shown = plain_text(failed("exception", 1, 1.0, cause, n=5, others=tuple(others)))
    assert shown.splitlines()[3:5] == [
        "  Processes 0, 2, 4 were waiting at barrier 'step' (train.py:6).",
        "  Process 3 was waiting at barrier 'end' (train.py:9).",
    ]


def test_long_report_drops_advice_first():
    frames = tuple(
        StackFrame(file="a.py", line=i, function=f"f{i}", source="g()") for i in range(9)
    )
    cause = raised(
        1, error="ValueError", message="\n".join("abcde"), frames=frames,
        words=tuple(f"Fact {i}." for i in range(6)), last_output=("loss 1", "loss 2"),
    )  # fmt: skip
    others = tuple(waiting(i, place=at(i, "barrier")) for i in range(2, 6))
    facts = failed("exception", 1, 1.0, cause, n=8, advice=("Do this.",), others=others)
    lines = report(facts, Style())
    assert len(lines) <= 24
    assert "  Do this." not in lines
    assert "    loss 1" not in lines
    assert '  File "a.py", line 8, in f8' in lines
    assert [line for line in lines if "other" in line]


# Secrets.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://me:pass@host/x", "s3://(hidden)@host/x"),
        ("HF_TOKEN=hf_abc and more", "HF_TOKEN=(hidden) and more"),
        ("{'AWS_SECRET_ACCESS_KEY': 'a b'}", "{'AWS_SECRET_ACCESS_KEY': (hidden)}"),
        ('password="p\\"w" x', "password=(hidden) x"),
        ("?api_key=12&n=1", "?api_key=(hidden)&n=1"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer (hidden)"),
        ("KeyError: 'adamw'", "KeyError: 'adamw'"),
        ("tokens=4096, key=rng", "tokens=4096, key=rng"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("mail me@host: now", "mail me@host: now"),
    ],
)
def test_secrets_are_hidden(text, expected):
    assert without_secrets(text) == expected


def test_values_of_leaves_that_name_a_secret_are_hidden():
    sides = (
        DivergenceSide(processes=these(0), said="'abc'", dtype="str", value="'abc'"),
        DivergenceSide(processes=these(1), said="'abd'"),
    )
    cause = Cause(
        processes=these(0, 1), kind="diverged",
        difference=Difference(what="value", call="assert_same", path="['api_key']", sides=sides),
    )  # fmt: skip
    facts = failed("diverged", 70, 1.0, cause, n=2)
    assert "abc" not in plain_text(facts)
    assert "abc" not in json.dumps(to_json(facts_without_secrets(facts)))


# Any facts at all.

LETTERS = st.one_of(
    st.characters(codec="ascii"),
    st.characters(),
    st.sampled_from("\x1b\r\n\t\x07\x00\u202e\u2066\u2028\ufeff…日本語é́ "),
)
SHORT = st.text(LETTERS, max_size=30)
TEXT = st.one_of(
    SHORT,
    st.builds(lambda text, n: (text * n)[:10_000], st.text(LETTERS, min_size=1, max_size=90),
              st.sampled_from([1, 1, 2, 7, 1_000])),
)  # fmt: skip
WHATS = ["call", "name", "tree", "shape", "dtype", "value", "group", "program", "layout"]
KINDS = [
    "exception", "exit", "signal", "diverged", "deadline", "stalled", "not_joined", "checkpoint",
    "host_lost", "service_lost", "lost", "preempted", "interrupted", "another",
]  # fmt: skip
TIMES = st.none() | st.floats(0, 1e6)
COUNTS = st.integers(0, 10**7)
PAIR = st.tuples(st.integers(0, 50), st.integers(0, 90))
EXPRESSION = st.just(()) | PAIR.map(lambda ends: tuple(sorted(ends)))
PLACES = st.none() | st.builds(
    CallPlace, call=SHORT, name=TEXT, file=TEXT, line=COUNTS, source=TEXT, age_s=TIMES,
    columns=EXPRESSION,
)  # fmt: skip
FRAMES = st.lists(
    st.builds(StackFrame, file=TEXT, line=COUNTS, function=SHORT, source=TEXT, columns=EXPRESSION),
    max_size=9,
).map(tuple)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
PLAIN_ERRORS = st.builds(ErrorFacts, type=SHORT, message=TEXT, place=SHORT)
CHAINS = st.lists(PLAIN_ERRORS, max_size=3).map(tuple)
ERRORS = st.builds(
    ErrorFacts, type=TEXT, message=TEXT, notes=TEXTS, caused_by=CHAINS, leaves=CHAINS,
    repeats=COUNTS, message_characters=st.none() | COUNTS,
)  # fmt: skip
NUMBERS = st.none() | st.integers(0, 1 << 45)
MEMORIES = st.builds(
    Memory, peak_bytes=NUMBERS, cgroup_oom_kills=st.none() | st.integers(0, 3),
    cgroup_peak_bytes=NUMBERS, cgroup_limit_bytes=NUMBERS,
)  # fmt: skip


def facts_of(num_processes: int) -> st.SearchStrategy[JobFailure]:
    """Return failures of a job, of any kind."""
    several = st.lists(
        st.tuples(st.integers(0, num_processes - 1), st.integers(1, num_processes)), max_size=8
    ).map(lambda runs: ProcessSet(n for a, k in runs for n in range(a, min(a + k, num_processes))))
    sides = st.lists(
        st.builds(DivergenceSide, processes=several, said=TEXT, place=PLACES), max_size=7
    )
    whats = st.sampled_from(WHATS)
    differences = st.builds(
        Difference, what=whats, call=SHORT, path=SHORT, name=SHORT, sides=sides.map(tuple),
        found_at=PLACES, step=st.none() | st.integers(0), failed_since=st.just("") | TEXT,
    )  # fmt: skip
    standing = st.lists(
        st.builds(Waiting, processes=several, place=PLACES, frames=FRAMES, last_met=PLACES,
                  words=SHORT),
        max_size=4,
    ).map(tuple)  # fmt: skip
    waits = st.builds(
        Wait, call=SHORT, name=TEXT, limit_s=TIMES, arrived=standing, missing=standing
    )
    checkpoints = st.builds(
        CheckpointFacts, path=TEXT, file=SHORT, leaf=TEXT, damage=SHORT, read_well=several,
        offset_bytes=st.none() | COUNTS, step=st.none() | COUNTS,
    )  # fmt: skip
    kinds = st.sampled_from(KINDS)
    causes = st.builds(
        Cause, processes=several, kind=kinds, at_s=TIMES, signal=st.sampled_from(["", "SIGKILL"]),
        sent_by_launcher=st.none() | st.booleans(), error=st.none() | ERRORS,
        is_bug=st.booleans(), thread=st.just("") | TEXT, thread_age_s=TIMES, frames=FRAMES,
        left_out=st.dictionaries(SHORT, COUNTS, max_size=3), step=st.none() | COUNTS,
        place=PLACES, last_met=PLACES, memory=st.none() | MEMORIES,
        difference=st.none() | differences, wait=st.none() | waits,
        checkpoint=st.none() | checkpoints, words=TEXTS, last_output=TEXTS, log=SHORT,
        first=st.none() | st.integers(0, num_processes - 1),
    )  # fmt: skip
    states = st.sampled_from(["waiting", "running", "left", "ended", "stopped", "unknown"])
    others = st.builds(
        BystanderState, processes=several, state=states, place=PLACES, step=st.none() | COUNTS,
        ended_by=SHORT, words=st.just("") | TEXT, peak_bytes=NUMBERS,
    )  # fmt: skip
    half = num_processes // 2
    hosts = {"node0": ProcessSet(range(half)), "node-1": ProcessSet(range(half, num_processes))}
    return st.builds(
        JobFailure, kind=kinds, headline=SHORT, exit_code=st.integers(0, 255),
        failed_after_s=TIMES, ended_after_s=TIMES, num_processes=st.just(num_processes),
        hosts=st.sampled_from([{}, hosts]), causes=st.lists(causes, max_size=3).map(tuple),
        others=st.lists(others, max_size=5).map(tuple), advice=TEXTS, logs=SHORT,
        as_before=st.booleans(), step=st.none() | COUNTS,
    ).map(lambda facts: dataclasses.replace(facts, headline=job_headline(facts)))  # fmt: skip


FAILURES = st.sampled_from([1, 2, 8, 64, 1024]).flatmap(facts_of)
STYLES = st.builds(Style, st.sampled_from(WIDTHS), st.just(False), st.booleans())


def text_of(facts: JobFailure, style: Style) -> list[str]:
    """Return the report, which must have been laid out."""
    spans = laid_out(facts, style)
    lines = report(facts, style)
    assert lines == ["".join(span.text for span in line).rstrip(" ") for line in spans]
    return lines


@settings(max_examples=60)
@given(FAILURES, STYLES)
def test_a_report_fits_whatever_the_facts(facts, style):
    lines = text_of(facts, style)
    painted = report(facts, style._replace(colour=True))
    assert [COLOUR.sub("", line) for line in painted] == lines
    assert 2 <= len(lines) <= 24
    assert lines[0].startswith("shoal run: ")
    assert f"Exit code {facts.exit_code}" in " ".join(line.strip() for line in lines[-6:])
    for at_line, line in enumerate(lines):
        assert line.isprintable()
        assert line.isascii() or not style.ascii
        if columns(line) > style.width:  # only ever one word, in the headline or the last line
            assert at_line < 6 or at_line >= len(lines) - 6
            assert max(map(columns, line.split())) > style.width - 30


@settings(max_examples=30)
@given(FAILURES)
def test_facts_survive_json(facts):
    assert of_json(JobFailure, json.loads(json.dumps(to_json(facts)))) == facts


@given(TEXT, st.integers(0, 3), st.sampled_from(WIDTHS))
def test_the_beginning_of_a_message_and_the_failing_frame_are_never_cut(message, more, width):
    frames = tuple(
        StackFrame(file=f"a{i}.py", line=i, function="f", source="g()") for i in range(9)
    )
    cause = raised(0, error="ValueError", message=message, frames=frames, words=("Yes.",) * more)
    others = tuple(waiting(i, place=at(i, "barrier")) for i in range(1, 6))
    facts = failed("exception", 1, 1.0, cause, n=8, others=others)
    whole = squeezed("".join(report(facts, Style(width))))
    # Of 240 letters, the last word may be left out: it has up to 40.
    begin = printable(without_secrets(message), keeps_lines=True)[:200]
    assert squeezed(begin) in whole
    assert 'File"a8.py",line8,inf' in whole


WORDY = st.lists(st.text("qxz", min_size=2, max_size=12), min_size=1, max_size=300).map(" ".join)


@settings(max_examples=60)
@given(*[WORDY] * 6, st.sampled_from(WIDTHS), st.booleans())
def test_no_report_cuts_a_word_and_marks_hide_more_than_they_take(
    message, said, output, advice, source, name, width, is_ascii
):
    frame = StackFrame(file="a.py", line=3, function="f", source=source)
    error = raised(
        0, error="ValueError", message=message, frames=(frame,), words=(said,),
        last_output=(output,),
    )  # fmt: skip
    sides = [
        DivergenceSide(processes=these(p), said=f"{value} {said}", place=at(3, "put"))
        for p, value in ((0, name), (1, f"{name} zx"))
    ]
    difference = Difference(what="value", call="put", sides=tuple(sides), failed_since=advice)
    differs = Cause(processes=these(0, 1), kind="diverged", difference=difference)
    others = (waiting(1, place=at(4, "barrier", name)),)
    given_words = {*f"{message} {said} {output} {advice} {source} {name}".split(), "zx"}
    for cause in (error, differs):
        facts = failed(cause.kind, 1, 1.0, cause, n=2, others=others, advice=(advice,))
        text = " ".join(" ".join(report(facts, Style(width, ascii=is_ascii))).split())
        assert {*re.findall(r"[qxz]{2,}", text.lower())} <= given_words, text
        for mark, count in re.findall(r"(?:…|\.\.\.)( ([\d,]+) characters )", text):
            assert len(mark) <= int(count.replace(",", ""))


def squeezed(text: str) -> str:
    """Return a text without spaces, and without newlines, escaped ones included."""
    return re.sub(r"\s", "", text).replace("\\n", "")


def test_equal_errors_of_several_processes_have_equal_words():
    hosts = ["h0", "h1", "h2"]
    said = ": save was ended\n."
    errors = [
        ErrorFacts(type="SaveAbortedError", message=f"{me}{said}", speaker=me.speaker)
        for me in (ThisProcess(process, hosts) for process in (1, 2))
    ]
    ends = [Cause(processes=these(1), kind="exception", error=error) for error in errors]
    assert {raised_words(cause) for cause in ends} == {"raised SaveAbortedError: save was ended"}
