"""Which process reports the failure of its job, and what it says of the others."""

from __future__ import annotations

import pytest

from shoal.errors import DivergenceError, PeerFailedError, ProcessLostError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.exit.causes import UNHEARD
from shoal.runtime.exit.job_report import EndOfThis, failure_known, makes_report, stopped_line
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.system.failure_words import failure_of

STEP = Point("step", fingerprint="barrier", site="train.py:6 (main)")
WAITED = "barrier 'step' (train.py:6)"


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def member(process, state="here", words="", **more):
    ago = f"{words}, 0.1 s ago" if state in ("lost", "left", "failed") else words
    return Member(process, "h", state, ago, **more)


def failed(process, error, **more):
    return member(process, "failed", failure_of(error).words, **more)


def followed(process):
    words = f"shoal.errors.PeerFailedError: process {process} of 4 (h): {WAITED} cannot complete: "
    return member(process, "failed", f"{words}process 1 (h) raised ValueError (train.py:6 (main))")


def coordinator(process=0, count=4):
    here = LocalJob(count).coordinators[process]
    here.progress.begin_wait(STEP, 0.0)
    here.progress.end_wait(STEP)
    return here


def known(error, *members, peers=None, code=1, process=0):
    return failure_known(coordinator(process), EndOfThis(raised(error), code, peers), members)


def lost(process):
    return member(process, "lost", "its connection closed (killed?)")


@pytest.mark.parametrize(
    ("members", "reports"),
    [
        ([member(0), member(1)], False),
        ([lost(0), member(1)], False),
        ([lost(0), lost(1), member(3)], True),
        ([lost(0), member(1, "left", "left the job")], True),
        ([lost(0), failed(1, raised(KeyError("x")))], False),  # it has reported
        ([lost(0), member(1, "failed", "exited with code 3 (train.py:3 (main))")], True),
        ([member(0, "lost", UNHEARD), member(1, "lost", UNHEARD)], False),
    ],
)
def test_the_lowest_that_ends_and_can_say_so_reports(members, reports):
    members = [one._replace(last_words=one.last_words.replace(f"{UNHEARD}, 0.1 s ago", UNHEARD))
               for one in members]  # fmt: skip
    end = EndOfThis(PeerFailedError("x", failed={3: "y"}), 72, {3: "y"})
    assert makes_report(coordinator(2), end, members) is reports


def test_of_what_a_few_were_given_the_lowest_of_these_reports():
    sides = {"a": (2,), "b": (3,)}
    end = EndOfThis(DivergenceError("x", sides=sides), 70, None)
    assert makes_report(coordinator(2), end, [member(0), member(1), member(3)])
    assert not makes_report(coordinator(3), end, [member(0), member(1), member(2)])
    late = member(0, "failed", "shoal.errors.DivergenceError: x (train.py:6 (main))")
    assert not makes_report(coordinator(2), end, [late, member(1), member(3)])


def test_equal_failures_are_one_and_others_follow():
    same = [failed(p, raised(KeyError("adamw"))) for p in (1, 3)]
    own = raised(KeyError("adamw"))
    failure = failure_known(
        coordinator(), EndOfThis(own, 1, None), [same[0], failed(2, raised(OSError("no"))), same[1]]
    )
    assert [cause.processes for cause in failure.causes] == [(0, 1, 3), (2,)]
    assert failure.headline == "processes 0-1, 3 of 4 raised KeyError (1 of 2 errors)"


def test_what_the_others_did_is_said_as_far_as_it_is_known():
    error = PeerFailedError("b", failed={1: "ValueError: no data (train.py:9 (load))"})
    failure = known(error, member(1), followed(2), member(3), peers=error.failed, code=72)
    (cause,) = failure.causes
    assert (cause.error.type, cause.error.message) == ("ValueError", "no data")
    by_process = {p: one for one in failure.others for p in one.processes}
    assert (by_process[2].state, by_process[2].place.call) == ("waiting", "barrier")
    assert 3 not in by_process
    elsewhere = member(3, place="allgather 'eval' (train.py:20)", is_waiting=True)
    (_, other) = known(error, member(1), elsewhere, peers=error.failed).others
    assert (other.state, other.place.call, other.place.line) == ("waiting", "allgather", 20)


def test_processes_that_were_lost_alike_are_one_cause():
    words = "its connection closed (killed?); step 89, last at barrier 'step' (train.py:3), 0.1 s b"
    error = ProcessLostError("b", lost={2: words, 3: words})
    (cause,) = known(error, member(1), lost(2), lost(3), peers=error.lost).causes
    assert (cause.processes, cause.kind, cause.step) == ((2, 3), "lost", 89)
    assert cause.words == ("Its connection closed.",)
    assert cause.place.line == 3


def test_a_service_that_is_lost_is_the_cause():
    here = coordinator()
    here.troubles.receive(None, "JAX's service", "lost", "silent for 2 s")
    end = EndOfThis(raised(ProcessLostError("x")), 71, {})
    (cause,) = failure_known(here, end, []).causes
    words = "JAX's service is lost: silent for 2 s"
    assert (cause.kind, cause.words) == ("service_lost", (f"{words}.",))
    assert stopped_line(here, end).endswith(f": {words}")


def test_a_process_that_was_declared_lost_says_so_and_reports_nothing():
    reason = "silent for 10 s; step 3, last at barrier 'step' (train.py:6), 9.0 s before"
    end = EndOfThis(raised(ProcessLostError("x", lost={0: reason})), 71, {0: reason})
    assert stopped_line(coordinator(), end).endswith(": it was declared lost: silent for 10 s")
    assert not makes_report(coordinator(), end, [])


def test_secrets_are_hidden_in_the_one_line():
    words = "ValueError: bad HF_TOKEN=hf_abc (train.py:9 (load))"
    error = PeerFailedError("b", failed={1: words})
    line = stopped_line(coordinator(), EndOfThis(error, 72, error.failed))
    assert "HF_TOKEN=(hidden)" in line
    assert line.startswith("shoal: process 0 of 4 (")
