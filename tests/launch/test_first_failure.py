"""Which of several failures was the first, and the exit code of the job."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import (
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
)
from shoal.launch.conclusion import dead_host_agent
from shoal.launch.news import HostAgentNews, News
from shoal.runtime.exit.first_failure import (
    Gone,
    ProcessExit,
    cause_of,
    exit_code,
    first_failures,
    is_from_outside,
)
from shoal.runtime.failures.exception_text import is_torn
from shoal.runtime.failures.facts import Memory, ProcessSet
from shoal.runtime.failures.last_record import LastRecord, record_of
from shoal.runtime.failures.last_record import cause_of as cause_of_error


def first_failure(exits):
    return next(iter(first_failures(exits)), None)


CODES = st.sampled_from([0, 1, 3, 70, 71, 72, 73, 74, -6, -9, -15])
TIMES = st.one_of(st.none(), st.floats(1, 100))
EXITS = st.lists(st.tuples(CODES, TIMES), max_size=5).map(
    lambda rows: [ProcessExit(i, code, failed_s) for i, (code, failed_s) in enumerate(rows)]
)


@given(EXITS)
def test_first_failure_is_the_earliest_that_does_not_follow_another(exits):
    failures = [e for e in exits if e.code != 0 and e.failed_s is not None]
    own = [e for e in failures if e.code not in range(70, 75)]
    found = [e for e in failures if e.code in (70, 73)]  # by all that met: it explains the others
    roots = own or found or failures
    root = first_failure(exits)
    if not roots:
        assert root is None
    else:
        assert root in roots
        assert root.failed_s == min(e.failed_s for e in roots)


def test_process_that_raised_and_was_ended_is_first_only_if_others_follow_it():
    stuck = ProcessExit(1, -15, 2.0, (signal.SIGTERM,))
    assert first_failure([ProcessExit(0, 72, 3.0), stuck]) == stuck
    assert first_failure([ProcessExit(0, -9, 3.0), stuck]) == ProcessExit(0, -9, 3.0)
    # It logged a traceback a moment ago, and then somebody pressed Ctrl-C.
    assert first_failure([ProcessExit(0, 0, None), stuck]) is None


def test_a_frozen_process_is_what_the_others_lost():
    frozen = ProcessExit(1, -9, None, (signal.SIGTERM, signal.SIGKILL), was_frozen=True)
    survivors = [ProcessExit(0, 71, 3.0), ProcessExit(2, 71, 4.0)]
    assert first_failure([*survivors, frozen]) == frozen
    assert exit_code(frozen) == 71
    raised = ProcessExit(0, 1, 3.0)  # not because of it
    assert first_failure([raised, frozen]) == raised
    assert first_failure([frozen]) is None  # somebody froze it, and pressed Ctrl-C


def ended(error, code=None, *, process=1, because_of=None, failed_s=1.0, **more):
    """Return the end of a process that has recorded an exception."""
    cause = cause_of_error(error)
    code = cause.exit_code if code is None else code
    peers = None if because_of is None else ProcessSet(because_of)
    torn = peers is None and is_torn(error)
    record = LastRecord(pid=1, at_s=failed_s, cause=cause, because_of=peers, is_torn=torn)
    return ProcessExit(process, code, failed_s, record=record, **more)


def failed(at_s, words="exited with code 3", *, follows=False, error=None):
    record = None if error is None else record_of(error)
    return Gone("failed", words, at_s, follows=follows, record=record)


def test_the_coordinators_order_counts_and_not_that_of_the_ends():
    learned = ProcessExit(0, 9, 3.0, gone=failed(2.5))
    root = ProcessExit(1, 3, 4.0, gone=failed(2.0))
    assert first_failure([learned, root]) == root
    # Without the coordinator it is that of the ends.
    rows = [process_exit._replace(gone=None) for process_exit in (learned, root)]
    assert first_failure(rows) == rows[0]


def test_consequence_is_not_the_first_failure_even_if_reported_first():
    for code in (70, 71, 72, 73, 74):
        rows = [ProcessExit(0, code, 1.5, gone=failed(1.0)), ProcessExit(1, 1, 2.0)]
        assert first_failure(rows) == rows[1]


def test_failed_process_that_exited_0_is_the_cause_of_later_consequences():
    caught = ProcessExit(1, 0, 4.0, gone=failed(2.0, "ValueError: no data"))
    follows = ProcessExit(0, 72, 3.0, gone=failed(2.5))
    assert first_failure([follows, caught]) == caught
    assert exit_code(caught) == 71
    vanished = caught._replace(gone=Gone("lost", "its connection closed", 2.0))
    follows = follows._replace(code=71)
    assert first_failure([follows, vanished]) == vanished
    assert exit_code(vanished) == 71
    exits = ProcessExit(0, 9, 3.0, gone=failed(2.5, "exited with code 9", follows=True))
    assert first_failure([exits, vanished]) == vanished, "it was the first"
    assert first_failure([follows._replace(gone=failed(1.5)), vanished]).process == 0
    assert first_failure([vanished, ProcessExit(0, 0, None)]) is None  # nobody minds
    assert first_failure([vanished, ProcessExit(0, 1, 9.0)]).process == 0


FOLLOWS = "shoal.errors.PeerFailedError: process 2 of 3 (host): 'b' cannot complete"


def test_exit_marked_as_following_is_not_the_first_failure_whatever_its_code():
    root = ProcessExit(1, 1, 2.0, gone=failed(2.0, "KeyError: 'own' (train.py:1 (main))"))
    for words in ("exited with code 9 (train.py:2 (main))", "ValueError: no answer", FOLLOWS):
        # It had handled and logged an exception before.
        followed = ProcessExit(2, 9, 1.0, gone=failed(3.0, words, follows=True))
        assert first_failure([root, followed]) == root


def test_an_exception_of_its_own_is_the_first_however_long_its_process_takes_to_end():
    own = ProcessExit(
        1, -15, None, (signal.SIGTERM,), gone=failed(2.0, "KeyError: 'own' (a.py:1 (f))")
    )
    later = ProcessExit(2, 1, 3.0, gone=failed(2.5, "ValueError: no answer (a.py:2 (f))"))
    assert first_failure([own, later]) == own
    assert exit_code(own) == 1
    # One of JAX's runtime may have come from another's end.
    torn = own._replace(gone=failed(2.0, error=GLOO))
    killed = ProcessExit(2, -9, 2.1)
    assert first_failure([torn, killed]) == killed


@pytest.mark.parametrize("code", [71, 72, 75])
def test_codes_of_its_own_choice_are_its_own(code):
    own = ended(SystemExit(code), code, failed_s=2.0, gone=failed(2.0))
    later = ProcessExit(2, 9, 3.0, gone=failed(2.5, "exited with code 9 (a.py:2 (f))"))
    follows = ProcessExit(0, 72, 3.0, gone=failed(2.2, FOLLOWS, follows=True))
    assert first_failure([follows, own, later]) == own
    assert exit_code(own) == (72 if code == 75 else code)


def test_process_that_the_others_lost_is_the_first_failure_whatever_the_codes():
    gone = Gone("lost", "silent for 60 s", 2.0, is_dismissed=True)
    lost = ProcessExit(1, -15, None, (signal.SIGTERM,), gone=gone, is_lost=True)
    for rows in (
        [ProcessExit(0, 0, None), lost],
        [ProcessExit(0, 9, 3.0), lost],
        [ProcessExit(0, 71, 2.5), lost],
    ):
        assert first_failure(rows) == lost
        assert exit_code(lost) == 71
    assert first_failure([ProcessExit(0, 9, 1.0), lost]).process == 0  # before it was lost
    assert first_failure([lost._replace(code=0)]).process == 1  # it takes SIGTERM as a notice


def test_a_dead_host_agent_is_blamed_for_what_jax_aborts_and_for_nothing_else():
    aborted = [
        ProcessExit(p, -6, 5.0, gone=Gone("lost", "its connection closed", 4.0)) for p in (0, 1)
    ]
    host_agent = HostAgentNews(77, "vm", (0, 1), gone_s=3.0, code=-9)
    unknown = host_agent._replace(code=None)
    assert dead_host_agent(aborted[0], [host_agent]) == host_agent
    assert dead_host_agent(aborted[0], [unknown]) == unknown
    assert dead_host_agent(aborted[0], [unknown._replace(gone_s=4.5)]) is None  # after them
    assert dead_host_agent(aborted[0], [host_agent._replace(code=0)]) is None  # its work was done
    assert dead_host_agent(aborted[0], [host_agent._replace(processes=(2,))]) is None
    assert dead_host_agent(aborted[0]._replace(code=-11), [host_agent]) is None


def test_news_are_of_the_newest_job_and_name_absent_processes():
    news = News(3)
    assert news.absent_words().endswith("these are 3 separate programs")
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


def test_a_process_that_joins_shoal_has_not_joined_by_jax_alone():
    news = News(3)
    for process, by_jax in ((0, True), (1, True), (1, False), (2, False), (2, True)):
        news.receive({"joined": process, "by_jax": by_jax})
    assert (news.joined, news.joined_by_jax) == ({0, 1, 2}, {0})


def test_codes_are_those_of_a_shell():
    assert exit_code(ProcessExit(0, -11, 1.0)) == 139
    assert exit_code(ProcessExit(0, 5, 1.0)) == 5
    assert exit_code(ProcessExit(0, -15, 1.0, (signal.SIGTERM,))) == 1


def test_the_cause_is_the_exception_and_its_place_in_the_program():
    try:
        json.loads("{")
    except ValueError as error:
        root = ended(error)
    line = test_the_cause_is_the_exception_and_its_place_in_the_program.__code__.co_firstlineno + 2
    assert cause_of(root) == f"JSONDecodeError at test_first_failure.py:{line}"
    assert cause_of(root._replace(record=None)) == ""
    assert cause_of(root._replace(code=-11)) == ""
    assert cause_of(root._replace(code=-15, sent=(signal.SIGTERM,))) == cause_of(root)
    assert [cause_of(root._replace(code=code)) for code in (71, 72, 73, 74)] == [""] * 4
    assert cause_of(root._replace(code=70))
    assert cause_of(root._replace(code=3)) == ""  # it goes on after an exception, then exits
    assert cause_of(ended(SystemExit(1))) == ""


def test_the_cause_of_an_error_in_the_syntax_is_its_line():
    with pytest.raises(SyntaxError) as raised:
        compile("x = 1\ny = = 1\n", "/home/me/train.py", "exec")
    assert cause_of(ended(raised.value)) == "SyntaxError at train.py:2"


def test_cause_without_a_record_is_that_of_the_report_to_the_others():
    with pytest.raises(SyntaxError) as raised:
        compile("x = 1\ny = = 1\n", "/home/me/train.py", "exec")
    for error, cause in ((raised.value, "SyntaxError at train.py:2"), (SystemExit(1), "")):
        assert cause_of(ProcessExit(0, 1, 1.0, gone=failed(1.0, error=error))) == cause
    assert cause_of(ProcessExit(0, 1, 1.0, gone=failed(1.0))) == ""


def test_is_from_outside_is_true_for_kills_and_losses():
    def is_outside(code, **more):
        return is_from_outside(ProcessExit(0, code, 1.0, **more))

    assert all(is_outside(-number) for number in (1, 2, 9, 15))
    assert not any(is_outside(-number) for number in (4, 6, 7, 8, 11))
    assert not is_outside(1)
    assert not is_outside(143)
    assert is_outside(-9, was_frozen=True)
    assert is_outside(1, is_lost=True)
    assert not is_outside(-15, sent=(signal.SIGTERM,))  # it raised, and did not end
    assert not is_from_outside(ProcessExit(0, -9, 1.0, memory=Memory(cgroup_oom_kills=1)))
    others = [ProcessExit(0, 1, 1.0), ProcessExit(0, -9, None, (signal.SIGTERM, signal.SIGKILL))]
    assert not any(
        process_exit._replace(memory=Memory(cgroup_oom_kills=1)).is_oom for process_exit in others
    )


def test_a_host_agent_of_another_host_may_have_the_pid_of_a_child():
    news = News(4)
    for host, processes in (("a", [0, 1]), ("b", [2, 3])):
        news.receive({"keeper": f"id of {host}", "pid": 77, "host": host, "processes": processes})
    news.note_end(77, -9, [2, 3])
    assert {host_agent.host: host_agent.code for host_agent in news.host_agents.values()} == {
        "a": None,
        "b": -9,
    }


# ---- Ways to end in which the first to end, or to fail, is not the root.


class JaxRuntimeError(RuntimeError):
    """As JAX's own is called."""


GLOO = RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")


def caught(error):
    """Return SystemExit(9) of a program that has caught an error."""
    try:
        try:
            raise error
        except RuntimeError:
            sys.exit(9)
    except SystemExit as exited:
        return exited


def left(process, at_s, code=0):
    return ProcessExit(process, code, None, left=Gone("left", "left the job", at_s))


def test_shared_failure_precedes_the_connections_that_break_with_it():
    """Also where the all-reduce breaks before the others have ended."""
    for error in (
        DivergenceError("assert_same"),
        DeadlineError("b", name="b", missing=[1], waited_s=3.0),
    ):
        torn = ended(GLOO, failed_s=1.0)
        found = ended(error, process=0, failed_s=1.1)
        assert first_failures([torn, found]) == [found]
        assert exit_code(found) == error.exit_code
    learned = ended(PeerFailedError("b", failed={1: "x"}), process=0, because_of=[1], failed_s=0.5)
    assert first_failures([torn, learned]) == [torn]


def test_a_death_by_a_signal_comes_before_what_breaks_with_it():
    for error in (GLOO, caught(GLOO)):
        torn = ended(error, failed_s=1.0)
        killed = ProcessExit(2, -9, 1.2)
        assert first_failures([torn, killed]) == [killed]
        assert exit_code(killed) == 137


@pytest.mark.parametrize("error", [GLOO, caught(GLOO), PeerFailedError("b", failed={1: "left"})])
def test_processes_that_left_in_order_are_the_cause_of_failures_without_them(error):
    peers = [1, 2] if isinstance(error, PeerFailedError) else None
    waits = [ended(error, process=p, because_of=peers, failed_s=5.0) for p in (0, 3)]
    rows = [waits[0], left(1, 4.0), left(2, 3.0), waits[1]]
    assert [one.process for one in first_failures(rows)] == [2, 1]
    assert exit_code(rows[1]) == PeerFailedError.exit_code
    later = [waits[0], left(1, 6.0), left(2, 7.0), waits[1]]
    assert first_failures(later) == [waits[0]]
    own = ended(ValueError("no data"), process=4, failed_s=6.0)
    assert first_failures([*rows, own]) == [own]


def test_process_named_by_others_has_failed_by_its_failed_thread():
    reads = ended(OSError("shard 3")).record
    reads = dataclasses.replace(reads, cause=dataclasses.replace(reads.cause, thread="shoal feed"))
    waits = ended(PeerFailedError("b", failed={1: "x"}), process=0, because_of=[1], failed_s=1.2)
    learned = ended(PeerFailedError("b", failed={0: "x"}), because_of=[0], failed_s=1.5)
    sent = {"code": -15, "failed_s": None, "sent": (signal.SIGTERM,), "record": None}
    for last in (learned, learned._replace(**sent)):
        (root,) = first_failures([waits, last._replace(threads=(reads,))])
        assert (root.process, exit_code(root)) == (1, 1)


def test_an_error_that_names_others_is_not_of_those_that_left():
    waits = ended(PeerFailedError("b", failed={2: "x"}), process=0, because_of=[2])
    assert first_failures([waits, left(1, 0.5)]) == [waits]


def asked(process_exit):
    return process_exit._replace(asked_s=0.5)


@pytest.mark.parametrize("code", [0, 75, -15, 143, 130])
def test_processes_that_end_as_asked_have_not_failed(code):
    obeys = asked(ProcessExit(0, code, 0.9, ended_s=0.9))
    follows = asked(ended(PeerFailedError("b", failed={0: "x"}), because_of=[0]))
    assert first_failures([obeys, follows, asked(ended(GLOO, process=2))]) == []


@pytest.mark.parametrize(
    "own",
    [
        ended(OSError("disk full")),
        ended(SystemExit(5)),
        ended(DivergenceError("b")),
        ProcessExit(1, -9, 1.0, gone=Gone("lost", "its connection closed", 0.9)),
        ProcessExit(1, -11, 1.0),
        ProcessExit(1, 5, 1.0),
    ],
    ids=["raises", "exits", "diverges", "killed", "crashes", "exits natively"],
)
def test_own_failure_after_a_request_to_end_is_the_first_failure(own):
    obeys = asked(ProcessExit(0, -15, 0.9))
    follows = asked(ended(PeerFailedError("b", failed={1: "x"}), process=2, because_of=[1]))
    assert first_failures([obeys, asked(own), follows]) == [asked(own)]
    # One that had to be killed has not failed by itself.
    killed = asked(ProcessExit(1, -9, None, (signal.SIGKILL,), sent_s=1.0))
    assert first_failures([obeys, killed]) == []


def test_failure_before_the_request_to_end_stays_the_first():
    raised = ended(ValueError("no data"), -15, failed_s=0.2)
    follows = asked(ended(PeerFailedError("b", failed={1: "x"}), process=0, because_of=[1]))
    assert first_failures([asked(raised), follows]) == [asked(raised)]
    assert exit_code(asked(raised)) == 1
    waits = asked(ended(PeerFailedError("b", failed={1: "left"}), process=0, because_of=[1]))
    waits = waits._replace(failed_s=0.3)
    assert [one.process for one in first_failures([waits, left(1, 0.1)])] == [1]


def test_an_error_of_the_programs_own_connections_is_its_own():
    for error in (BrokenPipeError(32, "Broken pipe"), ConnectionError("Connection closed by peer")):
        own = asked(ended(error))
        assert first_failures([asked(ProcessExit(0, -15, 0.9, ended_s=0.9)), own]) == [own]


def test_an_error_of_xla_that_names_no_connection_is_not_of_those_that_left():
    own = ended(JaxRuntimeError("INTERNAL: CpuCallback error calling callback"), failed_s=5.0)
    assert first_failures([own, left(0, 1.0)]) == [own]
    gone = ended(JaxRuntimeError("UNAVAILABLE: the slice is gone"), failed_s=5.0)
    assert [one.process for one in first_failures([gone, left(0, 1.0)])] == [0]


def test_following_process_that_has_to_be_ended_is_not_the_first_failure():
    follows = ended(PeerFailedError("b", failed={0: "left"}), -15, process=2, because_of=[0],
                    failed_s=3.0, sent=(signal.SIGTERM,), sent_s=4.0,
                    gone=failed(3.1, FOLLOWS, follows=True))  # fmt: skip
    also = ended(PeerFailedError("b", failed={0: "left"}), process=1, because_of=[0], failed_s=3.2)
    assert [one.process for one in first_failures([left(0, 1.0), follows, also])] == [0]


def test_the_code_is_that_of_its_own_end_where_the_launcher_had_to_end_it():
    sent = {"code": -15, "sent": (signal.SIGTERM,)}
    assert exit_code(ended(SystemExit(9), **sent)) == 9
    assert exit_code(ended(SystemExit("no data"), **sent)) == 1
    assert exit_code(ended(KeyError("own"), **sent)) == 1
    assert exit_code(ended(CorruptCheckpointError("x"), **sent)) == 76
    assert exit_code(ended(UsageError("before initialize"), 1)) == 2


def test_a_process_that_lives_on_without_its_connection_was_lost():
    gone = Gone("lost", "its connection closed", 2.0)
    apart = ProcessExit(1, -15, None, (signal.SIGTERM,), sent_s=3.0).with_report(gone)
    learned = ended(ProcessLostError("b", lost={1: "x"}), process=0, because_of=[1], failed_s=2.1)
    assert first_failures([learned, apart]) == [apart]
    assert exit_code(apart) == ProcessLostError.exit_code
    assert not ProcessExit(1, -11, 2.0).with_report(gone).is_lost


def test_a_host_agent_that_the_launcher_killed_is_not_blamed():
    aborted = ProcessExit(1, -6, 5.0)
    assert dead_host_agent(aborted, [HostAgentNews(77, "vm", (0, 1), code=-9)]) is None


# ---- Random jobs, of which it is chosen what happens first, and how the others end then.

TERM = (signal.SIGTERM,)
CLOSED = Gone("lost", "its connection closed", 0.0)
FIRST = {  # of the process and the time: how it ends, and the exit code of the job
    "raises": lambda p, s: (ended(ValueError("x"), process=p, failed_s=s, gone=failed(s)), 1),
    "exits": lambda p, s: (ended(SystemExit(5), process=p, failed_s=s, gone=failed(s)), 5),
    "exits natively": lambda p, s: (
        ProcessExit(p, 6, s, ended_s=s, gone=CLOSED._replace(at_s=s)), 6,
    ),
    "is killed": lambda p, s: (ProcessExit(p, -9, s, ended_s=s, gone=CLOSED._replace(at_s=s)), 137),
    "crashes": lambda p, s: (ProcessExit(p, -11, s, ended_s=s), 139),
    "cannot end": lambda p, s: (
        ended(ValueError("x"), -15, process=p, failed_s=s, gone=failed(s), sent=TERM, sent_s=s + 9),
        1,
    ),
    "is lost": lambda p, s: (
        ProcessExit(p, -15, None, TERM, sent_s=s + 9).with_report(CLOSED._replace(at_s=s)), 71,
    ),
    "leaves": lambda p, s: (left(p, s), 72),
    "finds": lambda p, s: (ended(DivergenceError("b"), process=p, failed_s=s), 70),
}  # fmt: skip
AFTER = {  # of the process, the time, and the one behind it
    "learns": lambda p, s, of: learns(p, s, of, PeerFailedError("b", failed={of: "x"})),
    "learns, and exits": lambda p, s, of: learns(p, s, of, SystemExit(9)),
    "learns, and raises": lambda p, s, of: learns(p, s, of, KeyError("batch")),
    "is torn": lambda p, s, of: ended(GLOO, process=p, failed_s=s, ended_s=s),
    "is torn, and exits": lambda p, s, of: ended(caught(GLOO), process=p, failed_s=s, ended_s=s),
    "leaves": lambda p, s, of: left(p, s),
    "is ended": lambda p, s, of: ProcessExit(p, -15, None, TERM, sent_s=s),
}
ON_REQUEST = ("raises", "exits", "exits natively", "is killed", "crashes", "finds")


def learns(process, at_s, of, error):
    gone = failed(at_s, follows=True)
    return ended(error, process=process, because_of=[of], failed_s=at_s, gone=gone)


def random_job(chance):
    """Return what happens, the process that is the first, and the exit code."""
    count, how, at_s = chance.randint(2, 6), chance.choice([*FIRST]), 10.0
    first, *others = chance.sample(range(count), count)
    root, code = FIRST[how](first, at_s)
    told, rows = [f"{first} {how}"], [root]
    for number, process in enumerate(others):
        choices = [*AFTER]
        if how == "leaves" and not number:  # one needs it
            choices = ["learns", "is torn", "is torn, and exits"]
        after = chance.choice(choices)
        # XLA may hear of a closed connection before the coordinator and the launcher do.
        early_s = 0.2 if "torn" in after and how != "leaves" else 0.0
        told.append(f"{process} {after}")
        rows.append(AFTER[after](process, at_s + 0.01 - early_s + chance.random(), first))
    if how in ON_REQUEST and chance.random() < 0.3:
        told.append("after a request to end")
        rows = [row._replace(asked_s=at_s - 1.0) for row in rows]
    return told, chance.sample(rows, count), first, code


def test_the_first_failure_of_2000_random_jobs():
    chance = random.Random(20261130)
    for _ in range(2000):
        told, exits, first, code = random_job(chance)
        root = first_failure(exits)
        assert root is not None, told
        assert (root.process, exit_code(root)) == (first, code), told
