"""What the report of a job says of the processes, where no launcher of shoal makes it."""

from __future__ import annotations

import json

import pytest

from shoal.errors import DivergenceError, PeerFailedError, ProcessLostError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.exit.job_report import (
    EndOfThis,
    ProcessState,
    failure_known,
    report_job,
    stopped_line,
)
from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.failures.facts import to_json
from shoal.runtime.failures.last_record import how_of, record_of, record_of_exit
from shoal.runtime.rules.point import Departure, Point

STEP = Point("step", operation="barrier", site="train.py:6 (main)")
AT = {"call": "barrier", "name": "step", "site": "train.py:6 (main)"}


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def row(departure, *, since_s=1.0, end=None, **place):
    facts = {**departure._asdict(), "since_s": since_s, "at": where(**place)}
    return facts if end is None else {**facts, "end": json.dumps(to_json(end))}


def where(step=None, waits=False, **place):
    return {"step": step, "age_s": 0.1, "waits": waits, **(AT | place)}


def here(**place):
    return {"state": "here", "at": where(**place)}


def failed(error, because_of=None, since_s=1.0):
    record = record_of(error, point=STEP, because_of=because_of)
    message, follows = failure_of(error).words, record.because_of is not None
    return row(Departure(message, "failed", how_of(record), follows=follows), since_s=since_s,
               end=record)  # fmt: skip


def lost(since_s=1.0, step=None):
    return row(Departure("x", "lost", why="its connection closed"), since_s=since_s, step=step)


def client(process=0, count=4):
    here = LocalJob(count).clients[process]
    here.progress.begin_wait(STEP, 0.0)
    here.progress.end_wait(STEP)
    return here


def known(error, *rows, peers=None, code=1):
    """Return the report of process 0."""
    states = [ProcessState.of(process, facts) for process, facts in enumerate(rows)]
    return failure_known(client(), EndOfThis(raised(error), code, peers), states)


def test_equal_failures_are_one_and_others_follow():
    same, other = failed(raised(KeyError("adamw"))), failed(raised(OSError("no")), since_s=0.5)
    failure = known(KeyError("adamw"), same, same, other, same)
    assert [cause.processes for cause in failure.causes] == [(0, 1, 3), (2,)]
    assert failure.headline == "processes 0-1, 3 of 4 raised KeyError (1 of 2 errors)"


def test_the_first_failure_is_that_of_the_facts_and_not_that_of_the_error():
    peers = {2: Departure("ValueError: no answer (train.py:9 (load))")}
    error = PeerFailedError("b", failed={2: peers[2].words})
    first = failed(raised(OSError("no space")), since_s=3.0)
    second = failed(raised(ValueError("no answer")), because_of=[1], since_s=2.0)
    failure = known(error, here(), first, second, here(), peers=peers, code=72)
    (cause,) = failure.causes
    assert (cause.processes, cause.error.type) == ((1,), "OSError")
    assert failure.headline == "process 1 of 4 raised OSError"


def test_broken_connection_is_a_consequence_of_the_lost_process():
    torn = raised(RuntimeError("Gloo: Connection closed by peer"))
    failure = known(torn, failed(torn), here(), here(), lost(since_s=0.5), code=1)
    assert [(cause.kind, cause.processes) for cause in failure.causes] == [("lost", (3,))]


def test_process_that_left_while_others_needed_it_is_the_cause():
    gone = row(Departure("left the job", "left"), step=8, call="", name="", site="t.py:9 (main)")
    error = PeerFailedError("b", failed={1: "left the job"})
    peers = {1: Departure("left the job", "left")}
    (cause,) = known(error, here(), gone, here(), here(), peers=peers, code=72).causes
    assert (cause.kind, cause.exit_code, cause.step, cause.processes) == ("exit", 0, 8, (1,))
    assert cause.words == ("It had left the job in order, by t.py:9, and others waited for it.",)


def test_process_that_left_by_sys_exit_is_shown_with_its_line():
    how = Departure("left the job", "left", why="t.py:9 (main)")
    gone = row(how, step=3, call="barrier", name="s", site="t.py:12 (main)")
    error = PeerFailedError("b", failed={1: "left the job"})
    (cause,) = known(error, here(), gone, peers={1: how}, code=72).causes
    by = "sys.exit() at t.py:9"
    assert cause.words == (f"It had left the job in order, by {by}, and others waited for it.",)


def test_a_difference_of_others_is_the_failure_of_one_that_a_connection_ended():
    diverged = failed(raised(DivergenceError("b")), since_s=0.5)
    torn = raised(RuntimeError("Gloo: Connection closed by peer"))
    (cause,) = known(torn, failed(torn), diverged, diverged, here()).causes
    assert (cause.kind, cause.processes) == ("diverged", (1, 2))


def test_report_shows_the_known_states_of_the_other_processes():
    error = PeerFailedError("b", failed={1: "ValueError: no data (train.py:9 (load))"})
    cause = failed(raised(ValueError("no data")), since_s=2.0)
    exits = record_of_exit(9, "exited with code 9", [1], 2)
    exited = row(Departure("exited with code 9", how="exited", follows=True), end=exits)
    waits = here(call="allgather", name="eval", site="train.py:20 (main)", waits=True)
    peers = {1: Departure(error.failed[1], how="raised")}
    failure = known(error, here(), cause, exited, waits, peers=peers, code=72)
    by_process = {p: state for state in failure.others for p in state.processes}
    assert (by_process[2].state, by_process[2].words) == ("ended", "")
    place = by_process[3].place
    assert (by_process[3].state, place.call, place.line) == ("waiting", "allgather", 20)


def test_processes_that_were_lost_alike_are_one_cause():
    departure = Departure("its connection closed (killed?); step 89", "lost", "", "its connection")
    peers = {2: departure, 3: departure}
    error = ProcessLostError("b", lost={2: departure.words, 3: departure.words}, ends=peers)
    gone = lost(step=89)
    (cause,) = known(error, here(), here(), gone, gone, peers=peers, code=71).causes
    assert (cause.processes, cause.kind, cause.step) == ((2, 3), "lost", 89)
    assert cause.words == ("Its connection closed.",)
    assert cause.place.line == 6


def test_without_the_coordinator_the_error_says_it():
    peers = {1: Departure("silent for 10 s; last at 'x'", "lost", why="silent for 10 s")}
    error = ProcessLostError("b", lost={1: peers[1].words}, ends=peers)
    (cause,) = known(error, peers=peers, code=71).causes
    assert (cause.processes, cause.kind, cause.words) == ((1,), "lost", ("Silent for 10 s.",))


def test_a_service_that_is_lost_is_the_cause():
    here = client()
    here.peer_losses.receive(None, "JAX's service", Departure("silent for 2 s", "lost"))
    end = EndOfThis(raised(ProcessLostError("x")), 71, {})
    (cause,) = failure_known(here, end, []).causes
    loss = "JAX's service is lost: silent for 2 s"
    assert (cause.kind, cause.words) == ("service_lost", (f"{loss}.",))
    assert stopped_line(here, end).endswith(f": {loss}")


def test_a_process_that_was_declared_lost_says_so_and_reports_nothing(capsys):
    departure = Departure("silent for 10 s; step 3, last at x", "lost", why="silent for 10 s")
    end = EndOfThis(raised(ProcessLostError("x")), 71, {0: departure})
    assert stopped_line(client(), end).endswith(": it was declared lost: silent for 10 s")
    report_job(client(), end, signals=())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["raised", ""])
def test_secrets_are_hidden_in_the_one_line(how):
    message = "ValueError: bad HF_TOKEN=hf_abc (train.py:9 (load))"
    error = PeerFailedError("b", failed={1: message})
    end = EndOfThis(error, 72, {1: Departure(message, how=how)})
    line = stopped_line(client(), end)
    assert "HF_TOKEN=(hidden)" in line
    assert line.startswith("shoal: process 0 of 4 (")
