"""Which of several failures was the first, and the words for it."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.report import Ending, describe_failure, exit_code, first_failure, how

CODES = st.sampled_from([0, 1, 3, 70, 71, 72, 73, -6, -9, -15])
TIMES = st.one_of(st.none(), st.floats(1, 100))
ENDINGS = st.lists(st.tuples(CODES, TIMES), max_size=5).map(
    lambda rows: [Ending(i, code, failed_s) for i, (code, failed_s) in enumerate(rows)]
)


@given(ENDINGS)
def test_the_root_is_the_earliest_that_blames_nobody_else(endings):
    failures = [e for e in endings if e.code != 0 and e.failed_s is not None]
    roots = [e for e in failures if e.code not in (71, 72, 73)] or failures
    root = first_failure(endings)
    if not roots:
        assert root is None
    else:
        assert root in roots
        assert root.failed_s == min(e.failed_s for e in roots)


def test_who_raised_and_had_to_be_ended_is_blamed_only_for_consequences():
    stuck = Ending(1, -15, 2.0, (signal.SIGTERM,))
    assert first_failure([Ending(0, 72, 3.0), stuck]) == stuck
    assert first_failure([Ending(0, -9, 3.0), stuck]) == Ending(0, -9, 3.0)
    # It logged a traceback a moment ago, and then somebody pressed Ctrl-C.
    assert first_failure([Ending(0, 0, None), stuck]) is None


def test_a_frozen_process_is_what_the_others_lost():
    frozen = Ending(1, -9, None, (signal.SIGTERM, signal.SIGKILL), was_frozen=True)
    survivors = [Ending(0, 71, 3.0), Ending(2, 71, 4.0)]
    assert first_failure([*survivors, frozen]) == frozen
    assert exit_code(frozen) == 71
    assert describe_failure(frozen, [*survivors, frozen], 1.0)[1] == (
        "process 1 of 3 is what the others lost: frozen (by SIGSTOP?), then ended by "
        "shoal run with SIGKILL"
    )
    raised = Ending(0, 1, 3.0)  # not because of it
    assert first_failure([raised, frozen]) == raised
    assert first_failure([frozen]) is None  # somebody froze it, and pressed Ctrl-C


def test_words_and_codes():
    assert how(Ending(0, 3, 1.0)) == "exit code 3"
    assert how(Ending(0, 73, 1.0)) == "exit code 73 (waited in vain)"
    assert how(Ending(0, -11, 1.0)) == "killed by SIGSEGV"
    assert "out-of-memory" in how(Ending(0, -9, 1.0))
    assert how(Ending(0, -9, None, (signal.SIGTERM, signal.SIGKILL))) == (
        "ended by shoal run with SIGKILL"
    )
    assert how(Ending(0, -11, None, (signal.SIGTERM,))) == "killed by SIGSEGV"
    assert how(Ending(0, -63, 1.0)) == "killed by signal 63"
    assert exit_code(Ending(0, -11, 1.0)) == 139
    assert exit_code(Ending(0, 5, 1.0)) == 5
    assert exit_code(Ending(0, -15, 1.0, (signal.SIGTERM,))) == 1


def describe(stderr: str, code: int = 1) -> tuple[list[str], str]:
    root = Ending(2, code, 5.0, (), stderr, "logs/p0002.log")
    others = [Ending(i, 72, 6.0) for i in (0, 1, 3)] + [Ending(4, 0, None)]
    return describe_failure(root, [root, *others], 3.0)


def test_the_last_traceback_is_told_and_its_reason_comes_last():
    lines, sentence = describe(
        "noise\nTraceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'first'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "\x1b[1mTraceback (most recent call last):\x1b[0m\n"
        '  File "b.py", line 2, in <module>\n    f()\n'
        "ValueError: second\nof two lines\n"
    )
    assert lines == [
        "the end of what process 2 wrote to stderr:",
        "    Traceback (most recent call last):",
        '      File "b.py", line 2, in <module>',
        "        f()",
        "    ValueError: second",
        "    of two lines",
        "p0-p1, p3: exit code 72 (another process failed)",
        "p4: exit code 0",
        "log of process 2: logs/p0002.log",
    ]
    assert sentence == (
        "process 2 of 5 failed first, 2.0 s after the start: exit code 1: ValueError: second"
    )


def test_a_traceback_that_a_message_quotes_is_not_the_last():
    lines, sentence = describe(
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
        "shoal.errors.PeerFailedError: process 1 is gone\n  its traceback:\n"
        '  | Traceback (most recent call last):\n  |   File "b.py", line 2\n  | KeyError: 3\n',
        code=72,
    )
    assert '      File "a.py", line 1, in <module>' in lines
    assert "      | KeyError: 3" in lines
    assert sentence.endswith("PeerFailedError: process 1 is gone")


def test_a_deep_traceback_keeps_its_end():
    frames = "".join(f'  File "a.py", line {n}, in f\n    f()\n' for n in range(50))
    lines, _ = describe(f"Traceback (most recent call last):\n{frames}RecursionError: deep\n")
    assert lines[2] == "      … 84 lines"
    assert '      File "a.py", line 49, in f' in lines
    assert "    RecursionError: deep" in lines
    assert len(lines) < 25


def test_a_crash_of_the_interpreter_is_told():
    stack = 'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in f\n'
    lines, sentence = describe(f"Fatal Python error: Segmentation fault\n\n{stack}", -11)
    assert "    Fatal Python error: Segmentation fault" in lines
    assert sentence.endswith("killed by SIGSEGV: Fatal Python error: Segmentation fault")


def test_without_a_traceback_the_last_lines_are_told():
    lines, sentence = describe("".join(f"line {n}\n" for n in range(30)))
    assert lines[1:3] == ["    line 20", "    line 21"]
    assert sentence.endswith("exit code 1")


def test_silence_is_told_as_silence():
    lines, sentence = describe("")
    assert lines[0] == "p0-p1, p3: exit code 72 (another process failed)"
    assert sentence.endswith("exit code 1")
