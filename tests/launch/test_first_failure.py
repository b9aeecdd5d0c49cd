"""Which of several failures was the first, and the words for it."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.news import Gone, KeeperNews, News
from shoal.launch.report import (
    Ending,
    cause_of,
    dead_host_keeper,
    describe_end,
    describe_failure,
    describe_host_keeper,
    exit_code,
    first_failure,
    is_from_outside,
)

CODES = st.sampled_from([0, 1, 3, 70, 71, 72, 73, 74, -6, -9, -15])
TIMES = st.one_of(st.none(), st.floats(1, 100))
ENDINGS = st.lists(st.tuples(CODES, TIMES), max_size=5).map(
    lambda rows: [Ending(i, code, failed_s) for i, (code, failed_s) in enumerate(rows)]
)


@given(ENDINGS)
def test_the_root_is_the_earliest_that_blames_nobody_else(endings):
    failures = [e for e in endings if e.code != 0 and e.failed_s is not None]
    roots = [e for e in failures if e.code not in range(70, 75)] or failures
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
    assert exit_code(frozen, survivors) == 71
    assert describe_failure(frozen, [*survivors, frozen], 1.0)[1] == (
        "process 1 of 3 was lost to the others: frozen (by SIGSTOP?), then ended by "
        "shoal run with SIGKILL"
    )
    raised = Ending(0, 1, 3.0)  # not because of it
    assert first_failure([raised, frozen]) == raised
    assert first_failure([frozen]) is None  # somebody froze it, and pressed Ctrl-C


def failed(at_s, words="exited with code 3", *, follows=False):
    return Gone("failed", words, at_s, follows=follows)


def test_the_meeting_places_order_counts_and_not_that_of_the_ends():
    learned = Ending(0, 9, 3.0, gone=failed(2.5))
    root = Ending(1, 3, 4.0, gone=failed(2.0))
    assert first_failure([learned, root]) == root
    assert describe_failure(root, [learned, root], 1.0)[1] == (
        "process 1 of 2 failed first, 1.0 s after the start: exit code 3"
    )
    # Without the meeting place it is that of the ends.
    rows = [ending._replace(gone=None) for ending in (learned, root)]
    assert first_failure(rows) == rows[0]


def test_a_consequence_is_no_root_though_it_was_told_first():
    for code in (70, 71, 72, 73, 74):
        rows = [Ending(0, code, 1.5, gone=failed(1.0)), Ending(1, 1, 2.0)]
        assert first_failure(rows) == rows[1]


def test_who_failed_but_ended_with_0_is_blamed_for_consequences_that_came_after():
    caught = Ending(1, 0, 4.0, gone=failed(2.0, "ValueError: no data"))
    follows = Ending(0, 72, 3.0, gone=failed(2.5))
    assert first_failure([follows, caught]) == caught
    assert exit_code(caught, [follows, caught]) == 71
    assert describe_failure(caught, [follows, caught], 1.0)[1] == (
        "process 1 of 2 failed first, 1.0 s after the start: ended with code 0 before it left the "
        "job, after it had reported to the others: ValueError: no data"
    )
    vanished = caught._replace(gone=Gone("lost", "its connection closed", 2.0))
    follows = follows._replace(code=71)
    assert first_failure([follows, vanished]) == vanished
    assert exit_code(vanished, [follows, vanished]) == 71
    assert (
        "ended with code 0 before it left the job"
        in describe_failure(vanished, [follows, vanished], 1.0)[1]
    )
    exits = Ending(0, 9, 3.0, gone=failed(2.5, "exited with code 9", follows=True))
    assert first_failure([exits, vanished]) == vanished, "it was the first"
    assert first_failure([follows._replace(gone=failed(1.5)), vanished]).process == 0
    assert first_failure([vanished, Ending(0, 0, None)]) is None  # nobody minds
    assert first_failure([vanished, Ending(0, 1, 9.0)]).process == 0


FOLLOWS = "shoal.errors.PeerFailedError: process 2 of 3 (host): 'b' cannot complete"


def test_who_says_that_it_followed_others_is_not_the_first_whatever_its_code():
    root = Ending(1, 1, 2.0, gone=failed(2.0, "KeyError: 'own' (train.py:1 (main))"))
    for words in ("exited with code 9 (train.py:2 (main))", "ValueError: no answer", FOLLOWS):
        # It had handled and logged an exception before.
        followed = Ending(2, 9, 1.0, gone=failed(3.0, words, follows=True))
        assert first_failure([root, followed]) == root


def test_an_exception_of_its_own_is_the_first_however_long_its_process_takes_to_end():
    own = Ending(1, -15, None, (signal.SIGTERM,), gone=failed(2.0, "KeyError: 'own' (a.py:1 (f))"))
    later = Ending(2, 1, 3.0, gone=failed(2.5, "ValueError: no answer (a.py:2 (f))"))
    assert first_failure([own, later]) == own
    assert exit_code(own, [own, later]) == 1
    assert describe_failure(own, [own, later], 1.0)[1].endswith(
        "could not end by itself, ended by shoal run with SIGTERM: KeyError: 'own' (a.py:1 (f))"
    )
    # One of JAX's runtime may have come from another's end.
    torn = own._replace(gone=failed(2.0, "jax.errors.JaxRuntimeError: UNKNOWN: Gloo (a.py:1 (f))"))
    killed = Ending(2, -9, 2.1)
    assert first_failure([torn, killed]) == killed


@pytest.mark.parametrize("code", [71, 72, 75])
def test_codes_of_its_own_choice_are_its_own(code):
    own = Ending(1, code, 2.0, gone=failed(2.0, f"exited with code {code} (a.py:1 (f))"))
    later = Ending(2, 9, 3.0, gone=failed(2.5, "exited with code 9 (a.py:2 (f))"))
    follows = Ending(0, 72, 3.0, gone=failed(2.2, FOLLOWS, follows=True))
    assert first_failure([follows, own, later]) == own
    assert exit_code(own, [own]) == (72 if code == 75 else code)
    said = describe_failure(own, [follows, own, later], 1.0)[1]
    assert (
        "exited with 75 without a notice" in said if code == 75 else f"exit code {code} (a" in said
    )


def test_what_the_others_lost_is_the_root_whatever_its_code_and_theirs():
    gone = Gone("lost", "silent for 60 s", 2.0, is_dismissed=True)
    lost = Ending(1, -15, None, (signal.SIGTERM,), gone=gone, is_lost=True)
    for rows in ([Ending(0, 0, None), lost], [Ending(0, 9, 3.0), lost], [Ending(0, 71, 2.5), lost]):
        assert first_failure(rows) == lost
        assert exit_code(lost, rows) == 71
        assert describe_failure(lost, rows, 1.0)[1] == (
            "process 1 of 2 was lost to the others: silent for 60 s, then ended by shoal run with "
            "SIGTERM"
        )
    assert first_failure([Ending(0, 9, 1.0), lost]).process == 0  # before it was lost
    assert first_failure([lost._replace(code=0)]).process == 1  # it takes SIGTERM as a notice


def test_a_dead_keeper_is_blamed_for_what_jax_aborts_and_for_nothing_else():
    aborted = [Ending(p, -6, 5.0, gone=Gone("lost", "its connection closed", 4.0)) for p in (0, 1)]
    keeper = KeeperNews(77, "vm", (0, 1), gone_s=3.0, code=-9)
    sentence = describe_host_keeper(keeper, aborted[0], aborted, 1.0)[1]
    assert sentence == (
        "the keeper of host vm (pid 77), through which its processes reach JAX's service, was "
        "killed by SIGKILL, which shoal run did not send (the out-of-memory killer?), 2.0 s after "
        "the start: without it JAX aborted processes 0-1"
    )
    unknown = keeper._replace(code=None)
    assert dead_host_keeper(aborted[0], [keeper]) == keeper
    assert dead_host_keeper(aborted[0], [unknown]) == unknown
    assert " died, 2.0 s" in describe_host_keeper(unknown, aborted[0], aborted, 1.0)[1]
    assert dead_host_keeper(aborted[0], [unknown._replace(gone_s=4.5)]) is None  # after them
    assert dead_host_keeper(aborted[0], [keeper._replace(code=0)]) is None  # its work was done
    assert dead_host_keeper(aborted[0], [keeper._replace(processes=(2,))]) is None
    assert dead_host_keeper(aborted[0]._replace(code=-11), [keeper]) is None


def test_news_are_of_the_newest_job_and_say_who_is_absent():
    news = News(3)
    assert news.absent_words().endswith("these were 3 separate programs")
    for process in (0, 1):
        news.receive({"joined": process})
    assert news.absent_words().startswith("process 2 of 3 never joined the job: each must call ")
    news.receive({"dismissed": 1})
    news.receive({"gone": 1, "state": "lost", "words": "silent for 60 s", "at_s": 2.0})
    assert news.gone == {1: Gone("lost", "silent for 60 s", 2.0, is_dismissed=True)}
    news.receive({"gone": 0, "state": "left", "words": "left the job", "at_s": 3.0})
    news.receive({"joined": 1})  # the next one
    news.receive({"gone": 1, "state": "lost", "words": "its connection closed", "at_s": 4.0})
    assert news.gone[1] == Gone("lost", "its connection closed", 4.0, is_missed=False)
    assert News(1).absent_words() == ""


def test_words_and_codes():
    assert describe_end(Ending(0, 3, 1.0)) == "exit code 3"
    assert describe_end(Ending(0, 73, 1.0)) == "exit code 73 (deadline exceeded)"
    assert describe_end(Ending(0, -11, 1.0)) == "killed by SIGSEGV"
    assert "out-of-memory" in describe_end(Ending(0, -9, 1.0))
    assert describe_end(Ending(0, -9, None, (signal.SIGTERM, signal.SIGKILL))) == (
        "ended by shoal run with SIGKILL"
    )
    assert describe_end(Ending(0, -11, None, (signal.SIGTERM,))) == "killed by SIGSEGV"
    assert describe_end(Ending(0, -63, 1.0)) == "killed by signal 63"
    assert exit_code(Ending(0, -11, 1.0), ()) == 139
    assert exit_code(Ending(0, 5, 1.0), ()) == 5
    assert exit_code(Ending(0, -15, 1.0, (signal.SIGTERM,)), ()) == 1


TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    main()
  File "/home/me/net.py", line 7, in forward
    return jnp.dot(x, w)
  File "{library}", line 12, in dot
    raise {error}
{error}: what it says: 0x7f01
"""


@pytest.mark.parametrize(
    "library", ["/opt/env/lib/python3.11/site-packages/jax/numpy.py", os.__file__, "<frozen runpy>"]
)
def test_the_cause_is_the_exception_and_its_place_in_the_program(library):
    stderr = TRACE.format(library=library, error="jax.errors.TypeError")
    root = Ending(0, 1, 1.0, stderr=f"noise\n{stderr}")
    assert cause_of(root) == "jax.errors.TypeError at net.py:7"
    assert cause_of(root._replace(stderr="killed\n")) == ""
    assert cause_of(root._replace(code=-11)) == ""
    assert cause_of(root._replace(code=-15, sent=(signal.SIGTERM,))) == cause_of(root)
    assert [cause_of(root._replace(code=code)) for code in (71, 72, 73, 74)] == [""] * 4
    assert cause_of(root._replace(code=70))
    assert cause_of(root._replace(code=3)) == ""  # it goes on after an exception, then exits
    syntax = (
        '  File "/home/me/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    )
    assert cause_of(root._replace(stderr=syntax)) == "SyntaxError at train.py:3"


def test_the_place_in_the_program_is_found_however_deep_the_library():
    library = '  File "/opt/env/site-packages/jax/a.py", line 5, in f\n    f()\n' * 30
    own = '  File "/home/me/train.py", line 30, in <module>\n    f()\n'
    stderr = f"Traceback (most recent call last):\n{own}{library}TypeError: no\n"
    assert cause_of(Ending(0, 1, 1.0, stderr=stderr)) == "TypeError at train.py:30"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 30, in <module>
  |     main()
  | ExceptionGroup: 2 of 8 (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/net.py", line 7, in forward
    |     1 / 0
    | ZeroDivisionError: division by zero
    +---------------- 2 ----------------
    | KeyError: 2
    +------------------------------------
"""


def test_the_cause_of_a_group_is_where_the_group_was_raised():
    root = Ending(0, 1, 1.0, stderr=GROUP)
    assert cause_of(root) == "ExceptionGroup at train.py:30"
    assert describe(GROUP)[1].endswith("exit code 1: ExceptionGroup: 2 of 8 (2 sub-exceptions)")


@pytest.mark.parametrize("library", [os.__file__])
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("exited with code 1 (train.py:31 (main))", ""),
        ("exited: no data (train.py:31 (main)) while handling KeyError: 2 (t.py:3 (f))", ""),
        ("ValueError: of (two) (pkg/net.py:7 (Net.f.<locals>.g))", "ValueError at net.py:7"),
        ("jax.errors.TypeError (net.py:7 (<module>))", "jax.errors.TypeError at net.py:7"),
        ("ValueError: without a place", "KeyError at net.py:7"),
        ("shutdown: a process is late", "KeyError at net.py:7"),
    ],
)
def test_the_process_knows_better_than_its_stderr_what_ended_it(library, words, cause):
    handled = TRACE.format(library=library, error="KeyError")
    root = Ending(0, 1, 1.0, stderr=handled, gone=failed(1.0, words))
    assert cause_of(root) == cause
    left = Gone("left", "left the job by SystemExit (exit code unknown), at t.py:3 (main)", 1.0)
    assert cause_of(Ending(0, 1, 1.0, stderr=handled).with_report(left)) == ""
    in_order = Gone("left", "left the job", 1.0)
    assert cause_of(Ending(0, 1, 1.0, stderr=handled).with_report(in_order))
    drawn = "╭─ Traceback (most recent call last) ─╮\n│ raise KeyError │\nKeyError: 2\n"
    assert cause_of(root._replace(stderr=drawn)) == ("" if cause.startswith("KeyError") else cause)


def test_what_comes_from_outside():
    def is_outside(code, **more):
        return is_from_outside(Ending(0, code, 1.0, **more))

    assert all(is_outside(-number) for number in (1, 2, 9, 15))
    assert not any(is_outside(-number) for number in (4, 6, 7, 8, 11))
    assert not is_outside(1)
    assert not is_outside(143)
    assert is_outside(-9, was_frozen=True)
    assert is_outside(1, is_lost=True)
    assert not is_outside(-15, sent=(signal.SIGTERM,))  # it raised, and did not end
    killed = Ending(0, -9, 1.0).if_out_of_memory()
    assert not is_from_outside(killed)
    assert describe_end(killed) == "killed by SIGKILL: out of memory, by the count of its cgroup"
    others = [Ending(0, 1, 1.0), Ending(0, -9, None, (signal.SIGTERM, signal.SIGKILL))]
    assert not any(ending.if_out_of_memory().is_oom for ending in others)


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


SYNTAX = '  File "/x/train.py", line 2\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'


def test_an_error_in_the_syntax_is_quoted_with_its_place():
    """In the script itself it has no traceback's heading; in what it imports it has."""
    heading = 'Traceback (most recent call last):\n  File "/x/run.py", line 9, in <module>\n'
    for before in ("", "noise\n", heading, f"{heading}KeyError: 3\n"):
        lines, sentence = describe(before + SYNTAX)
        assert "        x = = 1" in lines
        assert ("    noise" in lines, "    KeyError: 3" in lines) == (False, False)
        assert sentence.endswith("exit code 1: SyntaxError: invalid syntax (train.py, line 2)")
    _, sentence = describe(f"{heading}SyntaxError: raised by hand\n")
    assert sentence.endswith("SyntaxError: raised by hand (run.py, line 9)")


def test_what_aborts_in_cpp_is_quoted_and_not_its_stack():
    fatal = "F1122 11:54:51.623318   16465 client.h:80] Terminating process because …"
    stack = "*** Check failure stack trace: ***\n" + "    @     0x7f std::f()\n" * 30
    lines, sentence = describe(f"noise\n{fatal}\n{stack}", -6)
    assert lines[1] == f"    {fatal}"
    assert sentence.endswith(f"killed by SIGABRT: {fatal}")


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
    assert sentence.endswith("exit code 1; its last line on stderr: line 29")
    assert describe("a warning\n", -9)[1].endswith("(the out-of-memory killer?)")


def test_silence_is_told_as_silence():
    lines, sentence = describe("")
    assert lines[0] == "p0-p1, p3: exit code 72 (another process failed)"
    assert sentence.endswith("exit code 1")


def test_a_keeper_of_another_host_may_have_the_pid_of_a_child():
    news = News(4)
    for host, processes in (("a", [0, 1]), ("b", [2, 3])):
        news.receive({"keeper": f"id of {host}", "pid": 77, "host": host, "processes": processes})
    news.note_end(77, -9, [2, 3])
    assert {keeper.host: keeper.code for keeper in news.host_keepers.values()} == {
        "a": None,
        "b": -9,
    }
