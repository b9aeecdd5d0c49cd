"""The facts of a failure, from how the processes of a job ended."""

from __future__ import annotations

import dataclasses
import json
import signal

import pytest

from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    SaveAbortedError,
    UsageError,
)
from shoal.launch.conclusion import Facts, Loss, conclude
from shoal.launch.diagnose import ExitedJob
from shoal.launch.news import News
from shoal.runtime.client.outcomes import ThisProcess, speakers
from shoal.runtime.exit.first_failure import Gone, LastCall, ProcessExit, stalled_cause
from shoal.runtime.failures.exception_text import is_torn
from shoal.runtime.failures.facts import (
    CallPlace,
    Difference,
    DivergenceSide,
    Memory,
    ProcessSet,
    StackFrame,
)
from shoal.runtime.failures.headline import advice_of
from shoal.runtime.failures.last_record import LastRecord, cause_of, record_of
from shoal.runtime.failures.rendering import plain_text
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.programs import CompiledProgram, Differences, ProgramDifference
from shoal.runtime.rules.stalls import IN_JAX, IN_PROGRAM, IN_SHOAL, LEFT, Stall, StalledGroup
from shoal.runtime.system.progress_file import StepProgress

BARRIER = Point("step", operation="barrier", site="train.py:6 (main)")
TERM = (signal.SIGTERM,)


def ended(process, error=None, *, code=1, because_of=None, failed_s=2.0, speakers=(), **more):
    record = None
    if error is not None:
        cause = cause_of(error, process=process, step=3, point=BARRIER, speakers=speakers)
        peers = None if because_of is None else ProcessSet(because_of)
        torn = is_torn(error)
        record = LastRecord(pid=1, at_s=failed_s, cause=cause, because_of=peers, is_torn=torn)
    log = f"/logs/p{process:04d}.log"
    return ProcessExit(process, code, failed_s, log=log, record=record, ended_s=failed_s, **more)


def failure_of(*exits):
    job = ExitedJob(exits, len(exits), 1.0)
    return job.of_processes(exits[:1], exits[0].code if exits[0].code > 0 else 1)


def learned(process, of):
    return ended(process, PeerFailedError("b", failed={of: "x"}), code=72, because_of=[of])


def test_the_others_waited_or_went_on_to_an_error_of_their_own():
    own = ended(3, KeyError("cleanup"), because_of=[0])
    failure = failure_of(ended(0, ValueError("no data")), learned(1, 0), learned(2, 0), own)
    assert failure.headline == "process 0 of 4 raised ValueError"
    waiting, later = failure.others
    assert (waiting.processes, waiting.state, waiting.place.call) == ((1, 2), "waiting", "barrier")
    assert (later.processes, later.words) == ((3,), "then raised KeyError: 'cleanup'")


def test_error_of_a_waiting_process_shows_in_full_which_process_is_missing():
    where = "/home/me/" + "a-long-name-of-a-run/" * 6
    error = SaveAbortedError(
        f"process 1 of 2 (node1): save('{where}step_9') was ended because process 0 did not call "
        "it: every process must call save\nnothing of it is kept, and earlier saves are "
        f"unaffected\nprocess 1 of 2 (node1): save (train.py:8) cannot complete: {'x' * 200}"
    )
    failure = failure_of(ended(0, code=1), ended(1, error, code=72, because_of=[0]))
    text = " ".join(plain_text(failure).split())
    assert "because process 0 did not call it: every process must call save Exit code" in text
    assert "characters" not in text


def test_a_survivor_that_joined_by_jax_alone_is_apart_from_the_others():
    killed = {"code": -signal.SIGKILL, "sent": (*TERM, signal.SIGKILL), "joined_by_jax": True}
    parted = {"code": 0, "sent": TERM, "joined_by_jax": True}  # it was done
    failure = failure_of(ended(0, ValueError("x")), ended(1, **killed), ended(2, **parted))
    by_kill, by_term = failure.others
    assert (by_kill.processes, by_kill.ended_by, by_kill.joined_by_jax) == ((1,), "SIGKILL", True)
    assert (by_term.processes, by_term.ended_by, by_term.joined_by_jax) == ((2,), "SIGTERM", False)


def test_failures_that_are_alike_are_one_and_others_of_their_own_follow():
    alike = [ended(p, KeyError("adamw"), failed_s=2.0 + p) for p in (0, 2)]
    other = ended(1, OSError("no space"), failed_s=2.5)
    failure = failure_of(alike[0], other, alike[1])
    assert [cause.processes for cause in failure.causes] == [(0, 2), (1,)]
    assert [cause.first for cause in failure.causes] == [0, None]
    assert failure.headline.endswith("(1 of 2 errors)")
    assert failure.failed_after_s == 1.0
    assert failure.others == ()


@pytest.mark.parametrize("names", [(0, 1), (0, 0)], ids=["each its own", "one for all"])
def test_errors_that_begin_with_the_name_of_a_process_are_alike(names):
    hosts = ["a", "b"]
    both = [ThisProcess(process, hosts) for process in names]
    rows = [
        ended(process, UsageError(f"{name}: put: w has no rows"), speakers=speakers(hosts))
        for process, name in enumerate(both)
    ]
    (cause,) = failure_of(*rows).causes
    assert (cause.processes, cause.error.message) == ((0, 1), f"{both[0]}: put: w has no rows")


def test_process_ended_while_it_exits_shares_the_cause():
    error = KeyError("adamw")
    failure = failure_of(ended(0, error), ended(1, error, code=-signal.SIGTERM, sent=TERM))
    (cause,) = failure.causes
    assert (cause.processes, cause.exit_code) == ((0, 1), 1)


def test_jax_error_after_the_loss_of_a_peer_is_no_cause_of_its_own():
    torn = ended(1, RuntimeError("Gloo: Connection closed by peer"), failed_s=2.1)
    failure = failure_of(ended(0, code=-9), torn)
    assert [cause.kind for cause in failure.causes] == ["signal"]
    assert failure.others[0].words.startswith("raised RuntimeError")


def test_without_a_record_it_is_as_the_others_know_it():
    at = LastCall(7, CallPlace(call="barrier", name="x", file="train.py", line=6), True)
    gone = Gone("failed", "ValueError: no data", 2.0, at=at)
    sent = gone._replace(record=record_of(ValueError("no data")))
    (cause,) = failure_of(ended(0, gone=sent)).causes
    assert (cause.error.type, cause.error.message) == ("ValueError", "no data")
    assert (cause.step, cause.place) == (7, at.place)
    (cause,) = failure_of(ended(0, gone=gone)).causes
    assert cause.words == ("It had reported: ValueError: no data",)
    (cause,) = failure_of(ended(0, code=3)).causes
    assert (cause.kind, cause.error) == ("exit", None)
    assert cause.words[0].startswith("No exception and no sys.exit was recorded: ")


def test_a_process_that_ended_at_no_call_of_shoal_was_last_seen_after_one():
    place = CallPlace(call="initialize", file="train.py", line=1, age_s=2.0)
    for is_waiting in (False, True):
        gone = Gone("lost", "its connection closed", 2.0, at=LastCall(4, place, is_waiting))
        (cause,) = failure_of(ended(0, code=3, gone=gone)).causes
        assert cause.step == 4
        assert (cause.place, cause.last_met) == ((place, None) if is_waiting else (None, place))


def test_the_last_output_leaves_out_what_gloo_printed_also_mixed_by_its_threads():
    mixed = "1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    output = f"loss 2.1\n[Gloo] Rank {mixed}\n[Gloo] Rank [Gloo] Rank {mixed}\n{mixed}\n"
    (cause,) = failure_of(ended(0, code=3, output=output)).causes
    assert cause.last_output == ("loss 2.1",)


def test_processes_that_did_not_arrive_were_running_if_they_had_to_be_ended():
    error = DeadlineError("late", name="ready", waited_s=6.0, missing=[1], last_words={1: "?"})
    waited = ended(0, error, code=73)
    failure = failure_of(waited, ProcessExit(1, -15, None, TERM))
    assert failure.causes[0].words == ("Process 1 was still running.",)
    assert failure.advice[0].startswith("If process 1 is only slow, raise timeout_s of this call")
    assert failure_of(waited, ProcessExit(1, 0, None)).causes[0].words == ()
    cause = dataclasses.replace(cause_of(OSError("b.bin")), thread="loader")
    loader = LastRecord(pid=1, at_s=1.5, cause=cause)
    (cause,) = failure_of(waited, ProcessExit(1, -15, None, TERM, threads=(loader,))).causes
    assert (cause.thread, cause.thread_age_s) == ("loader", 0.5)
    assert cause.error.message == "b.bin"


def stall(*places):
    """Return a stall, of one process at each place."""
    groups = [StalledGroup((process,), *rest) for process, *rest in places]
    return Stall(is_final=True, idle_s=3.0, groups=tuple(groups), places=len(groups))


def as_sent(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(("set_to", "limits"), [("3", ["--stalled-after"]), ("", ["within_s"])])
@pytest.mark.parametrize("has_left", [False, True])
def test_the_advice_on_a_stall_names_the_limits_that_apply(monkeypatch, set_to, limits, has_left):
    monkeypatch.setenv("SHOAL_STALLED_AFTER_S", set_to)
    odd = LEFT if has_left else IN_PROGRAM
    cause, _ = stalled_cause(stall((1, odd, "", ""), (0, IN_SHOAL, "", "")))
    (advice,) = advice_of([cause])
    if has_left:
        limits = [*(one for one in limits if set_to), "SHOAL_HANG_TIMEOUT_S"]
    names = ("--stalled-after", "SHOAL_HANG_TIMEOUT_S", "within_s")
    assert [name for name in names if name in advice] == limits


def test_a_process_that_did_not_end_by_itself_says_so():
    (cause,) = failure_of(ended(0, ValueError("x"), code=-15, sent=TERM)).causes
    assert cause.words == ("Did not end by itself: shoal run sent SIGTERM.",)
    assert cause.exit_code is None


def test_the_memory_of_the_cgroup_is_shown_only_if_that_ended_it():
    counted = Memory(peak_bytes=5, cgroup_oom_kills=1, cgroup_peak_bytes=7, cgroup_limit_bytes=8)
    (cause,) = failure_of(ended(0, code=-9, memory=counted)).causes
    assert cause.memory == counted
    (cause,) = failure_of(
        ended(0, code=-9, memory=Memory(peak_bytes=5, cgroup_oom_kills=0, cgroup_peak_bytes=7))
    ).causes
    assert cause.memory == Memory(peak_bytes=5, cgroup_oom_kills=0)


def test_a_crash_has_its_line_and_a_signal_from_outside_has_none():
    at = (StackFrame(file="train.py", line=5, function="f"),)
    (crash,) = failure_of(ended(0, code=-11, crashed_at=at)).causes
    assert (crash.frames, crash.sent_by_launcher) == (at, None)
    (killed,) = failure_of(ended(0, code=-9, crashed_at=at)).causes
    assert (killed.frames, killed.sent_by_launcher) == ((), False)


def test_the_log_of_another_host_is_named_where_it_is():
    failure = failure_of(ended(0, ValueError("x"), host="b"))
    assert failure.causes[0].log == "b:/logs/p0000.log"
    assert failure.hosts == {"b": (0,)}


def test_processes_that_arrived_after_a_difference_are_named():
    rows = [DivergenceSide(processes=ProcessSet([n]), said=f"f4[{n}]") for n in (0, 1)]
    found = Difference(what="shape", call="put", sides=tuple(rows))
    failure = failure_of(
        *(ended(n, DivergenceError("b", difference=found), code=70) for n in range(4))
    )
    (cause,) = failure.causes
    assert cause.processes == (0, 1, 2, 3)
    assert cause.difference == found
    assert cause.error is None
    assert failure.headline == "processes gave put different shapes, found in step 3"
    assert "Processes 2-3 raised the same error." in plain_text(failure, "shoal run")


@pytest.mark.parametrize(("step", "said"), [(1, " in step 1, found in step 3"), (3, " in step 3")])
def test_a_call_that_sends_nothing_has_its_own_step_and_that_in_which_it_was_found(step, said):
    found = Difference(what="shape", call="put", found_at=CallPlace(call="barrier"), step=step)
    failure = failure_of(*(ended(n, DivergenceError("b", difference=found)) for n in range(2)))
    assert failure.headline == f"processes gave put different shapes{said}"


def test_processes_that_arrived_after_a_difference_are_on_the_sides_that_they_recorded():
    rows = [DivergenceSide(processes=ProcessSet([n]), said=f"f4[{n}]") for n in (0, 1)]
    found = Difference(what="shape", call="put", sides=tuple(rows))
    late = [
        DivergenceSide(processes=ProcessSet([n]), said=said)
        for n, said in ((2, "f4[1]"), (3, "f4[7]"))
    ]
    known = [found, found, *(dataclasses.replace(found, late=side) for side in late)]
    known.append(dataclasses.replace(found, what="value"))
    failure = failure_of(
        *(
            ended(n, DivergenceError("b", difference=difference), code=70)
            for n, difference in enumerate(known)
        )
    )
    (cause,) = failure.causes
    assert [(side.processes, side.said) for side in cause.difference.sides] == [
        ((0,), "f4[0]"),
        ((3,), "f4[7]"),
        ((1, 2), "f4[1]"),
    ]
    assert "Process 4 raised the same error." in plain_text(failure, "shoal run")


def test_a_stall_is_the_conclusion_only_if_it_has_ended_a_process():
    """An exception of its own, or Ctrl-C, may end the job in the moment of that decision."""
    news = News(2)
    here = (1, IN_PROGRAM, "train.py:3", "queue.get()")
    news.receive({"stalled": as_sent(stall(here, (0, IN_JAX, "train.py:9", "")))})
    own, stuck = ended(0, ValueError("no data")), ended(1, code=77)
    raised = conclude(Facts([own, learned(1, 0)], news, 2, 0.0))
    assert (raised.code, raised.failure.kind) == (1, "exception")
    by_hand = [ended(p, code=-2, sent=TERM) for p in (0, 1)]
    stopped = conclude(Facts(by_hand, news, 2, 0.0, interrupted=signal.SIGINT))
    assert (stopped.code, stopped.failure.kind) == (130, "interrupted")
    ends = conclude(Facts([stuck, ended(0, code=77)], news, 2, 0.0))
    assert ends.code == 77
    assert ends.failure.headline == "no process has moved for 3 s; process 1 is elsewhere"
    (odd,) = ends.failure.causes[0].wait.missing
    assert odd.place == CallPlace(file="train.py", line=3, source="queue.get()")


def test_a_process_at_an_unknown_place_is_elsewhere():
    _, headline = stalled_cause(stall((0, IN_PROGRAM, "", ""), (1, IN_PROGRAM, "train.py:3", "")))
    assert headline == "no process has moved for 3 s; process 0 is elsewhere"


def test_programs_that_only_some_have_compiled_are_in_reports_that_they_may_explain():
    news = News(2)
    sent = as_sent(stall(*((p, IN_PROGRAM, f"train.py:{p}", "") for p in (0, 1))))
    for name in ("f", "of_the_end"):
        program = CompiledProgram("d", f"jit({name})", "f32[8]", 2, "eval.py:31 (main)")
        found = Differences((ProgramDifference(program, ((0, 0),), ((1, 1),), ((0, 1),), None),))
        news.receive({"stalled": sent, "programs": as_sent(found)})
    stalled = conclude(Facts([ended(p, code=77) for p in (0, 1)], news, 2, 0.0)).failure
    (line,) = stalled.programs
    assert line.startswith("process 0 alone has compiled jit(f) for 2 devices")
    assert "  Process 0 alone has compiled jit(f)" in plain_text(stalled).splitlines()[1]
    raised = conclude(Facts([ended(0, ValueError("no data")), learned(1, 0)], news, 2, 0.0))
    assert raised.failure.programs == ()


def thread_record(error, name="loader", because_of=None, at_s=1.5):
    cause = dataclasses.replace(cause_of(error), thread=name)
    return LastRecord(pid=1, at_s=at_s, cause=cause, because_of=because_of)


def test_the_exception_of_a_thread_stands_with_the_failure_of_its_process():
    raised = thread_record(OSError("no shard 3"))
    (cause,) = failure_of(ended(0, KeyError("x"), threads=(raised,))).causes
    assert cause.words == ("Thread 'loader' had raised OSError: no shard 3.",)
    learns = thread_record(PeerFailedError("b", failed={1: "x"}))
    (cause,) = failure_of(ended(0, KeyError("x"), threads=(learns,))).causes
    assert cause.words == ()


def test_the_exception_of_a_thread_stands_with_a_stall_of_its_process():
    news = News(2)
    places = [(odd, IN_PROGRAM, f"train.py:{3 + odd}", "") for odd in (1, 0)]
    news.receive({"stalled": as_sent(stall(*places))})
    stuck = ended(1, code=77, threads=(thread_record(OSError("no shard 3")),))
    (cause,) = conclude(Facts([ended(0, code=77), stuck], news, 2, 0.0)).failure.causes
    assert (cause.thread, cause.error.message) == ("loader", "no shard 3")


def test_a_lost_host_was_last_seen_where_all_of_its_processes_were():
    def lost(process, step, line=6):
        at = LastCall(step, CallPlace(call="barrier", name="x", file="train.py", line=line), True)
        return Gone("lost", "no sign of life", 3.0, at=at)

    def cause_of_loss(*gone):
        news = News(4)
        news.gone = dict(enumerate(gone, 2))
        loss = Loss("node 1 (b)", "no sign of life", 3.0, (2, 3))
        ends = Facts([learned(0, 2), learned(1, 2)], news, 4, 1.0, losses=[loss])
        (cause,) = conclude(ends).failure.causes
        return cause

    one = cause_of_loss(lost(2, 89), lost(3, 89))
    assert (one.step, one.place.name) == (89, "x")
    apart = cause_of_loss(lost(2, 89), lost(3, 90, line=7))
    assert (apart.step, apart.place) == (None, None)
    assert cause_of_loss().place is None


def test_a_preempted_job_names_the_step_that_is_saved():
    news = News(1)
    news.receive({"notice": True, "saved": True, "words": ""})
    end = Facts([ended(0, code=75)], news, 1, 0.0, progress=StepProgress(7, 6, 6))
    assert conclude(end).failure.headline == "preempted: step 6 is saved; start it again"
    unnumbered = end._replace(progress=StepProgress(7))
    assert conclude(unnumbered).failure.headline == "preempted, and saved: start it again"
    unasked = end._replace(news=News(1), progress=StepProgress(7))
    words = "exit code 75, without a preemption notice: start it again"
    assert conclude(unasked).failure.headline == words
