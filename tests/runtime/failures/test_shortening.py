"""Texts made safe to print, and cut to a number of columns."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.failures.shortening import (
    breaks,
    columns,
    message_parts,
    path_end,
    printable,
    shortened,
    shortened_log,
    source_part,
    values_from_difference,
    without_secrets,
)
from shoal.runtime.system.foreign_text import one_line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31m\r\x07\x00", r"\x1b[31m\r\x07\x00"),
        ("a\tb", "a b"),
        ("a\nb", r"a\nb"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\x9b\xa0", r"\x9b\xa0"),
        ("\u2028\U000e0001", r"\u2028\U000e0001"),
        ("é 日本", "é 日本"),
        ("\udc80", r"\udc80"),
    ],
)
def test_control_characters_and_marks_of_direction_are_escaped(text, expected):
    assert printable(text) == expected


def test_letters_outside_ascii_are_escaped_on_request():
    assert printable("é…\U0001f600\xff", only_ascii=True) == r"\u00e9...\U0001f600\u00ff"


def test_lines_are_kept_on_request():
    assert printable("a\r\nb\rc\n\x1b", keeps_lines=True) == "a\nb\\rc\n\\x1b"


def test_a_wide_letter_has_two_columns_and_a_mark_none():
    assert [columns(text) for text in ("abc", "日本", "é", "e\u0301", "ｱ", "Ａ")] == [
        3,
        4,
        1,
        1,
        1,
        2,
    ]


@pytest.mark.parametrize("limit", range(60))
@pytest.mark.parametrize("text", ["x" * 100, "日本" * 50, "a日" * 30, "/data/x" * 20])
def test_nothing_is_wider_than_its_limit(text, limit):
    for cut in (shortened, path_end):
        assert columns(cut(text, limit)) <= limit
        assert columns(cut(text, limit, "...")) <= max(limit, 0)
    assert columns(source_part(text, (3, 9), max(limit, 4))) <= max(limit, 4)
    for part in values_from_difference([text, text + "!"], max(limit, 4)):
        assert columns(part) <= max(limit, 4)


@pytest.mark.parametrize(
    "prefix",
    [
        "I1125 10:31:02.345678 140234567890 train.py:133] ",
        "E0000 00:00:1764066662.345678   12345 agent.cc:345] ",
        "I20251125 10:31:02.345678 12345 agent.cc:345] ",
        "2025-11-25 10:31:02.345678: E external/xla/cuda.cc:12] ",
        "WARNING:absl:",
        "WARNING:2025-11-25 10:31:02,345:jax._src.xla_bridge:794: ",
        "2025-11-25 10:31:02,345 - trainer - INFO - ",
    ],
)
def test_the_prefix_of_a_line_of_a_log_goes_first(prefix):
    said = "step 120 of 1000 has the loss 2.1"
    assert shortened_log(f"{prefix}{said}", 40) == said
    assert shortened_log(f"{prefix}{said}", 100) == f"{prefix}{said}"


def test_whole_words_of_a_line_of_a_log_go_from_its_middle():
    line = "Polled an error from the service, " + "which was, " * 9 + "at 10.0.0.1:1234: refused"
    assert shortened_log(line, 60) == "Polled an error from … 131 characters … refused"
    assert shortened_log("x" * 100, 40) == "xxxxxxxxxx … 80 characters … xxxxxxxxxx"
    for length in range(60, 90):
        line = ("one two " * 12)[:length].strip()
        short = shortened_log(line, 60)
        assert short == line or len(short) <= min(60, len(line) - 10)


def test_words_of_a_message_stay_whole_and_a_mark_hides_more_than_it_takes():
    message = "jit's it is " * 40
    (head,), left_out, tail = message_parts(message, None, is_whole=False)
    assert (head, left_out) == (message[:240], "163 characters")
    assert tail == message[-78:].strip()
    message = "jit's " * 53 + "done"
    assert message_parts(message, None, is_whole=False) == ([message], "", "")


WORDS = st.lists(st.text("abcdé日", min_size=1, max_size=60), min_size=1, max_size=30).map(" ".join)


@given(WORDS, st.integers(0, 200), st.sampled_from(["…", "..."]))
def test_a_cut_is_between_words_and_its_mark_is_shorter_than_what_it_hides(text, limit, dots):
    short = shortened(text, limit, dots)
    if short == text or limit < 8:
        return
    mark = re.search(rf"{re.escape(dots)}( [\d,]+ characters {re.escape(dots)})?", short)
    head, tail = short[: mark.start()], short[mark.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    hidden = text[len(head) : len(text) - len(tail)]
    assert columns(mark[0]) <= columns(hidden)
    assert mark[1] is None or mark[1].startswith(f" {len(hidden):,} ")
    for cut, is_outer in ((len(head), " " not in head), (len(text) - len(tail), " " not in tail)):
        if text[:cut] and text[cut:] and " " not in text[cut - 1 : cut + 1]:
            word = (text[:cut].rpartition(" ")[2]) + text[cut:].partition(" ")[0]
            assert is_outer or len(word) > 40


@given(WORDS, st.integers(8, 200))
def test_a_line_is_cut_between_words(text, limit):
    short = one_line(text, limit)
    assert len(short) <= limit
    if short != text:
        kept = short.removesuffix("...")
        word = kept.rpartition(" ")[2] + text[len(kept) :].partition(" ")[0]
        assert text.startswith(kept)
        assert text[len(kept) :].startswith(" ") or " " not in kept or len(word) > 40


def test_what_fits_is_not_cut():
    assert shortened("日本", 4) == "日本"
    assert path_end("/a/b", 4) == "/a/b"
    assert source_part("f(x)", (), 4) == "f(x)"
    assert values_from_difference(["ab", "ac"], 2) == ["ab", "ac"]


@pytest.mark.parametrize(
    ("text", "width", "hanging", "is_hard", "lines"),
    [
        ("one two three", 8, 2, True, ["one two", "three"]),
        ("one  two", 4, 0, True, ["one", "two"]),
        ("  abcdefgh", 6, 2, True, ["  abcd", "efgh"]),
        ("a bcdefghij k", 6, 0, False, ["a", "bcdefghij", "k"]),
        ("日本語 日本", 6, 0, True, ["日本語", "日本"]),
        ("日本語日本", 7, 1, True, ["日本語", "日本"]),
        ("", 6, 0, True, [""]),
        ("a   ", 2, 0, True, ["a"]),
    ],
)
def test_lines_break_at_spaces_and_words_only_if_they_must(text, width, hanging, is_hard, lines):
    parts = breaks(text, width, hanging, is_hard=is_hard)
    assert [text[start:end] for start, end in parts] == lines


def test_an_expression_in_the_middle_of_a_long_line_is_shown():
    source = "if " + "x and " * 20 + 'load("data") and ' + "y and " * 20 + "z: f()"
    begin = source.index("load")
    part = source_part(source, (begin, begin + len('load("data")')), 30)
    assert part.startswith('… load("data")')
    assert columns(part) <= 30


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("node 1 fails: password=hunter2x", "node 1 fails: password=(hidden)"),
        ("login failed: API_KEY=sk-live-1", "login failed: API_KEY=(hidden)"),
        ("os.environ['HF_TOKEN'] = 'hf'", "os.environ['HF_TOKEN'] = (hidden)"),
        ("['--token', 'abc']", "['--token', (hidden)]"),
        ("setdefault('HF_TOKEN', 'abc')", "setdefault('HF_TOKEN', (hidden))"),
        ("fetch --token S3CRET --steps 3", "fetch --token (hidden) --steps 3"),
        ("curl -u me:S3CRET host", "curl -u me:(hidden) host"),
        ("['curl', '--user', 'me:S3CRET']", "['curl', '--user', 'me:(hidden)']"),
        ("train --token $TOKEN --tokens 4096", "train --token $TOKEN --tokens 4096"),
        ("invalid token, in line 3: max_tokens=5", "invalid token, in line 3: max_tokens=5"),
    ],
)
def test_a_secret_is_hidden_wherever_it_stands_and_once(text, hidden):
    assert without_secrets(text) == hidden
    assert without_secrets(hidden) == hidden
