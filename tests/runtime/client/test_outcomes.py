"""What is answered, in words: who speaks, who is missing, and no more lines than one reads."""

import pickle
from itertools import starmap

import pytest

from shoal.errors import DeadlineError
from shoal.runtime.client.outcomes import ThisProcess, error_of, waiting_line
from shoal.runtime.rules.meeting_answers import (
    CycleSide,
    FailingSince,
    MeetingSide,
    ProcessesGone,
    SidesDiffer,
    StillMissing,
    TooLate,
    WaitCycle,
)
from shoal.runtime.rules.point import Departure, Fingerprint, Point

ME = ThisProcess(3, [f"host{i}" for i in range(100)])
HINT = "if they are merely slow, raise timeout_s= or SHOAL_TIMEOUT_S"
SAME_CALLS = "All processes of a group must make the same collective calls, in the same order."
POINT = Point("epoch", site="train.py:31 (main)")


def test_a_deadline_spells_out_a_few_and_counts_the_rest():
    missing = list(range(4, 100))
    last_words = [(p, f"step {p}, 1.0 s ago") for p in missing[:64]]
    error = error_of(TooLate(StillMissing(missing, last_words), 3, 10.0), ME, POINT, 10.04)
    assert type(error) is DeadlineError
    lines = str(error).splitlines()
    assert lines[0] == (
        "process 3 of 100 (host3): 'epoch' (train.py:31) waited 10.0 s until its deadline"
        " (10 s); processes 4-99 did not arrive in time"
    )
    assert lines[1] == "  process 4 (host4): step 4, 1.0 s ago"
    assert lines[-2] == "  and 88 more"
    assert lines[-1] == HINT
    assert len(lines) == 11
    assert error.missing == tuple(missing)
    assert len(error.last_words) == 64
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.missing) == (str(error), error.missing)


def test_a_deadline_shows_where_the_main_threads_stand_and_keeps_the_whole():
    frames = [f'  File "/x/train.py", line {n} in f{n}' for n in range(9)]
    head = "Thread 'MainThread' (most recent call first):"
    stack = "\n".join([head, *frames, "", "Thread 'other' (most recent call first):", *frames])
    waiting = StillMissing([4, 5], [(4, "step 7, 1.0 s ago"), (5, "joined, 9.0 s ago")])
    error = error_of(TooLate(waiting, 4, 1.0, stacks=[(4, stack)]), ME, POINT, 1.0)
    assert str(error).splitlines()[1:] == [
        "  process 4 (host4): step 7, 1.0 s ago",
        '    File "/x/train.py", line 0, in f0',
        "  process 5 (host5): joined, 9.0 s ago",
        HINT,
    ]
    assert error.stacks == {4: stack}
    assert pickle.loads(pickle.dumps(error)).stacks == error.stacks


def test_late_arrival_error_names_both_points():
    waiting = StillMissing([3, 5], [(3, "step 7, 1.0 s ago"), (5, "joined, 9.0 s ago")])
    error = error_of(TooLate(waiting, 4, 10.0, "'save' (a.py:1)"), ME, POINT, 0.0)
    assert str(error).splitlines() == [
        "process 3 of 100 (host3): 'epoch' (train.py:31) missed the wait at 'save' "
        "(a.py:1), which had ended after 10 s (the deadline of process 4); process 5 did not "
        "arrive in time either",
        "  process 3 (host3): step 7, 1.0 s ago",
        "  process 5 (host5): joined, 9.0 s ago",
        HINT,
    ]
    sides = [("save", "", "a.py:1 (f)", [1]), ("load", "", "a.py:2 (f)", [2])]
    error = error_of(SidesDiffer(list(starmap(MeetingSide, sides))), ME, POINT, 0.0)
    assert str(error).splitlines() == [
        "process 3 of 100 (host3): processes made different calls",
        "  process 1: 'save' at a.py:1 (f)",
        "  process 2: 'load' at a.py:2 (f)",
        SAME_CALLS,
    ], "as it reads on the others"
    assert error.difference.what == "call"
    assert [side.processes for side in error.difference.sides] == [(1,), (2,)]


def test_calls_that_failed_before_are_named():
    since = FailingSince(3, "barrier 'a' (train.py:7)")
    told = (
        "Their calls have failed since call 3, barrier 'a' (train.py:7). If one made a call more "
        "or less, live_processes() with the same processes= and lane= synchronizes them."
    )
    sides = [MeetingSide(name, "barrier", "a.py:1 (f)", [n]) for n, name in enumerate("bc")]
    for failed, line in ((since, [told]), (None, [])):
        error = error_of(SidesDiffer(sides, failed), ME, POINT, 0.0)
        lines = str(error).splitlines()
        assert error.difference.failed_since == (
            "call 3, barrier 'a' (train.py:7)" if failed else ""
        )
        assert lines[4:] == [*line, "A barrier needs the same name on every process."]
    late = TooLate(StillMissing([5], [(5, "joined, 9.0 s ago")]), 3, 10.0, since=since)
    assert str(error_of(late, ME, POINT, 10.0)).splitlines()[2:] == [f"  {told}", HINT]
    spec = "\n".join(f"leaf {n}" for n in range(90))
    long = [
        MeetingSide("x", "x", "a.py:1 (f)", [n], Fingerprint("", f"90 lines, {n}", spec))
        for n in (0, 1)
    ]
    hidden = error_of(SidesDiffer(long, since), ME, POINT, 0.0)
    assert told in str(hidden).splitlines()
    assert told in str(hidden.explained({0: "int 1", 1: "int 2"})).splitlines()


def test_a_failure_shows_its_headline_first_and_then_its_traceback():
    trace = Departure("Traceback\n  File x\nValueError: no data\n")
    gone = [(1, trace), (2, Departure("left the job", "left"))]
    error = error_of(ProcessesGone("failed", gone), ME, POINT, 0.0)
    assert [str(error), *error.details.splitlines()] == [
        "process 3 of 100 (host3): 'epoch' (train.py:31) cannot complete: process 1 (host1)"
        " raised ValueError: no data (also gone: process 2)",
        "  | Traceback",
        "  |   File x",
        "  | ValueError: no data",
    ]


TRACE = (
    "Traceback (most recent call last):\n  File x\nValueError: no data\n-----\nFor simplicity, JAX"
)


@pytest.mark.parametrize(
    ("words", "how", "told", "lines"),
    [
        (
            f"ValueError: no data (t.py:3 (f))\n{TRACE}",
            "",
            "raised ValueError: no data (t.py:3 (f))",
            5,
        ),
        ("ValueError: no data", "raised", "raised ValueError: no data", 0),
        (TRACE, "", "raised ValueError: no data", 5),
        ("went at 'x', 2.0 s before", "left", "went at 'x', 2.0 s before", 0),
        ("exited: no data (t.py:3 (f))", "exited", "exited: no data (t.py:3 (f))", 0),
        ("it hung, and was ended", "", "is gone: it hung, and was ended", 0),
        ("initialize: no\nset X", "", "is gone: initialize: no", 2),
        ("\x1b[2Jx\rprocess 5 raised\n\u2028y", "", "is gone: [2Jx", 4),
    ],
)
def test_failure_is_one_sentence_and_foreign_text_adds_no_lines(words, how, told, lines):
    departure = Departure(words, "left" if how == "left" else "failed", how)
    error = error_of(ProcessesGone("failed", [(1, departure)]), ME, POINT, 0.0)
    first, more = str(error), error.details.splitlines()
    head = "process 3 of 100 (host3): 'epoch' (train.py:31) cannot complete: "
    assert first.isprintable()
    assert first == f"{head}process 1 (host1) {told}"
    assert len(more) == lines
    assert all(line.startswith("  | ") and line.isprintable() for line in more)
    assert error.failed == {1: words}


def test_a_divergence_shows_what_differs_and_no_more():
    def lines(*sides, lane="main"):
        answer = SidesDiffer(
            [
                MeetingSide(*side, [2 * n, 2 * n + 1], *fingerprint)
                for n, (side, *fingerprint) in enumerate(sides)
            ]
        )
        point = Point("epoch", lane=lane, site="train.py:31 (main)")
        error = error_of(answer, ME, point, 0.0)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.sides) == (str(error), error.sides)
        assert list(error.sides.values()) == [(0, 1), (2, 3)]
        first, *told = str(error).splitlines()
        assert first.startswith("process 3 of 100 (host3): processes ")
        return [first.partition("processes ")[2], *told]

    site = "a.py:1 (f)"
    assert lines([("save", "barrier", site)], [("epoch", "barrier", "")]) == [
        "made different calls",
        "  processes 0-1: barrier 'save' at a.py:1 (f)",
        "  processes 2-3: barrier 'epoch'",
        SAME_CALLS,
    ]
    # a barrier and a broadcast of one name
    broadcast = ("w", "broadcast", site), Fingerprint("", "", "x: int")
    assert lines([("w", "barrier", site)], broadcast) == [
        "made different calls",
        "  processes 0-1: barrier 'w' at a.py:1 (f)",
        "  processes 2-3: broadcast 'w' at a.py:1 (f)",
        SAME_CALLS,
    ]
    spec = "\n".join(f"leaf {n}" for n in range(90))
    versions = [(("x", "x", site), Fingerprint("", "", f"{spec}\n{end}")) for end in ("a", "b")]
    assert lines(*versions, lane="side") == [
        "gave x different values (lane 'side')",
        "  x at a.py:1 (f)",
        "    processes 0-1: a",
        "    processes 2-3: b",
        "x needs equal arguments on every process.",
    ]


def test_named_call_is_distinguished_from_an_unnamed_one():
    call = "assert_same", "assert_same", "a.py:1 (f)"
    named, unnamed = (Fingerprint(site, "", "int") for site in ("", "a.py:1 (f)"))
    sides = [MeetingSide(*call, [0], named), MeetingSide(*call, [1], unnamed)]
    first = ThisProcess(0, ME.hosts)
    error = error_of(SidesDiffer(sides), first, POINT, 0.0)
    assert error.sides == {
        "assert_same 'assert_same' at a.py:1 (f)": (0,),
        "assert_same at a.py:1 (f)": (1,),
    }


def cycle(*groups, names=("pair", "pair"), process=0, point=None):
    """Return the error of a process about waits for each other at barriers."""
    sides = [
        CycleSide(MeetingSide(name, "barrier", f"a.py:{n} (f)", [n]), group, [1 - n])
        for n, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
    point = point or Point("pair", operation="barrier", group=(0, 1), site="a.py:0 (f)")
    return error_of(WaitCycle(sides), ThisProcess(process, ["h"] * 3), point, 0.0)


def test_different_groups_of_one_call_are_reported_as_such():
    error = cycle("processes=[0, 1]", "all 3 processes")
    assert str(error).splitlines() == [
        "process 0 of 3 (h): processes gave barrier 'pair' different groups",
        "  process 0: barrier 'pair' at a.py:0 (f): processes=[0, 1]",
        "  process 1: barrier 'pair' at a.py:1 (f): all 3 processes",
        "Every process of a group must pass the same processes=.",
    ]
    assert (error.difference.what, error.difference.name) == ("group", "pair")
    late = Point("pair", operation="barrier", site="a.py:1 (f)")
    for point in (late, POINT):
        later = cycle("processes=[0, 1]", "all 3 processes", process=2, point=point)
        assert str(later).splitlines()[1:] == str(error).splitlines()[1:]
        assert later.sides == error.sides


def test_different_calls_that_wait_for_each_other_are_named():
    error = cycle("processes=[0, 1]", "all 3 processes", names=("pair", "all"))
    assert str(error).splitlines() == [
        "process 0 of 3 (h): processes wait for each other in a cycle",
        "  process 0: barrier 'pair' at a.py:0 (f): waits for process 1",
        "  process 1: barrier 'all' at a.py:1 (f): waits for process 0",
        SAME_CALLS,
    ]


def test_barriers_that_differ_only_in_name_are_shown_by_their_names():
    sides = [MeetingSide(f"epoch {n}", "barrier", "a.py:1 (f)", [n]) for n in (0, 1)]
    point = Point("epoch 1", operation="barrier", site="a.py:1 (f)")
    error = error_of(SidesDiffer(sides), ThisProcess(2, ME.hosts), point, 0.0)
    assert str(error).splitlines() == [
        "process 2 of 100 (host2): processes gave a barrier different names",
        "  barrier at a.py:1 (f)",
        "    process 0: 'epoch 0'",
        "    process 1: 'epoch 1'",
        "A barrier needs the same name on every process.",
    ]


def test_the_waiting_line_is_one_line():
    waiting = StillMissing([4, 5], [(4, "joined, 9.0 s ago"), (5, "step 7, 1.0 s ago")])
    assert waiting_line(waiting, ME, POINT, 10.2) == (
        "process 3 of 100 (host3): 'epoch' (train.py:31) has waited 10 s for processes 4-5"
        " [process 4 (host4): joined, 9.0 s ago; process 5 (host5): step 7, 1.0 s ago]"
    )
