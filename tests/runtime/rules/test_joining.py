"""The rules of joining under a clock that the test turns."""

import importlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attacks import stranger
from meta.source import ROOT
from shoal.runtime.failures.joining_text import refusal_text
from shoal.runtime.rules.joining import (
    PROTOCOL,
    Hello,
    Joining,
    Refusal,
    host_runs,
    hosts_of,
    parse_hello,
    refusal_of_row,
)
from shoal.runtime.wire.frames import FrameError


def hello(process, **more):
    fields = {
        "protocol": PROTOCOL,
        "process": process,
        "num_processes": 3,
        "host": f"host{process}",
        "pid": 100 + process,
        "incarnation": f"run{process}",
        "versions": "shoal 1",
        "jax_service": "",
        "timeout_s": 10.0,
    }
    return Hello(**{**fields, **more})


def told(replies):
    """Return what each one reads, once its refusal has been sent."""
    return {reply.to: None if reply.refusal is None else text_of(reply) for reply in replies}


def text_of(reply):
    refusal = refusal_of_row(json.loads(json.dumps(reply.refusal)))
    assert refusal == reply.refusal
    return refusal_text(refusal)


def test_no_process_is_welcomed_before_all_have_joined():
    joining = Joining(3)
    assert joining.hello(0.0, hello(2), "c") == []
    assert joining.hello(0.0, hello(0), "a") == []
    assert told(joining.hello(0.0, hello(1), "b")) == {"a": None, "b": None, "c": None}
    assert joining.hosts == ["host0", "host1", "host2"]
    assert joining.tick(1e9) == []


def test_any_process_may_bring_the_address_of_jax_and_the_servers_own_wins():
    joining = Joining(1)
    joining.hello(0.0, hello(0, num_processes=1, jax_service="h:1"), "a")
    assert joining.jax_service == "h:1"
    joining = Joining(1, jax_service="h:2")
    joining.hello(0.0, hello(0, num_processes=1, jax_service="h:1"), "a")
    assert joining.jax_service == "h:2"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hello(1, num_processes=4), "says that the job has 4 processes, the coordinator"),
        (hello(0, pid=7), "two processes have the index 0: process 0 (host0, pid 100) and"),
        (hello(3), "process 3 (host3, pid 103) does not exist: the job has processes 0..2"),
        (hello(-1), "does not exist"),
        (hello(1, versions="shoal 2"), "runs shoal 1, but process 1 (host1, pid 101) runs shoal 2"),
        (hello(1, protocol=99), f"speaks protocol 99, the coordinator {PROTOCOL}"),
    ],
)
def test_one_invalid_hello_ends_joining_for_all_and_for_later_processes(wrong, words):
    joining = Joining(3)
    joining.hello(0.0, hello(0), "right")
    refusals = told(joining.hello(1.0, wrong, "wrong"))
    assert set(refusals) == {"right", "wrong"}
    assert len(set(refusals.values())) == 1
    assert words in refusals["right"]
    assert told(joining.hello(2.0, hello(2), "late")) == {"late": refusals["right"]}


def test_refusal_lists_every_problem_of_a_hello():
    refusal = told(Joining(3).hello(0.0, hello(9, num_processes=8, protocol=99), "x"))["x"]
    assert refusal.count(";") == 2


def test_earliest_deadline_ends_joining_and_names_all_missing_processes():
    joining = Joining(3)
    joining.hello(0.0, hello(0, timeout_s=9), "a")
    joining.hello(2.0, hello(2, timeout_s=5), "c")
    assert joining.tick(6.9) == []
    replies = joining.tick(7.0)
    assert {reply.to for reply in replies} == {"a", "c"}
    assert {reply.refusal.missing for reply in replies} == {(1,)}
    assert "process 1 of 3 did not join within 5 s (the deadline of process 2)" in text_of(
        replies[0]
    )
    late = joining.hello(8.0, hello(1), "b")
    assert late[0].refusal == replies[0].refusal


def test_a_process_that_dies_while_others_wait_ends_it():
    joining = Joining(3)
    joining.hello(0.0, hello(0), "a")
    joining.hello(0.0, hello(1), "b")
    [reply] = joining.depart(0.0, 1)
    assert (reply.to, reply.refusal.missing) == ("a", (1,))
    assert "process 1 (host1, pid 101) died" in text_of(reply)


def test_abandoned_coordinator_refuses_the_waiting_processes():
    joining = Joining(3)
    joining.hello(0.0, hello(1), "b")
    [reply] = joining.abandon(1.0)
    assert (reply.to, reply.refusal.missing) == ("b", (0, 2))
    assert "processes 0, 2 never joined" in text_of(reply)
    assert joining.abandon(2.0) == []


def test_wrong_token_does_not_end_joining_but_is_mentioned_at_the_deadline():
    joining = Joining(2)
    header = {"process": 1, "nonce": "x"}
    wrong = joining.refuse_stranger(header, "1.2.3.4", "a")
    assert ("token is wrong" in text_of(wrong), wrong.refusal.reason) == (True, "token")
    old = joining.refuse_stranger({"token": "x"}, "5.6.7.8", "a")
    assert "another version of shoal" in text_of(old)
    joining.hello(0.0, hello(0, num_processes=2), "a")
    [reply] = joining.tick(10.0)
    assert "refused because its token is wrong: process 1 from 1.2.3.4" in text_of(reply)


def test_when_all_are_here_another_one_is_refused_alone():
    joining = Joining(1)
    joining.hello(0.0, hello(0, num_processes=1), "a")
    for other in (hello(0, pid=9), hello(1), hello(0, num_processes=7)):
        refusals = told(joining.hello(1.0, other, "b"))
        assert set(refusals) == {"b"}
        assert "the job is complete" in refusals["b"]
    assert joining.knows(0, "run0")
    assert not joining.knows(0, "another")


@pytest.mark.parametrize(("timeout_s", "stands_s"), [(5.0, 5.0), (300.0, 10.0)])
def test_a_refusal_is_spent_when_all_have_heard_it_or_after_a_while(timeout_s, stands_s):
    joining = Joining(3)
    joining.hello(0.0, hello(0, timeout_s=timeout_s), "a")
    joining.hello(0.0, hello(1, num_processes=2, timeout_s=400), "b")
    assert not joining.is_finished(stands_s - 0.1)
    assert [joining.was_refused(process) for process in range(3)] == [True, True, False]
    assert joining.is_finished(stands_s)
    joining.hello(1.0, hello(2), "c")
    assert joining.is_finished(1.0)
    assert not Joining(1).is_finished(1e9)


WRONG_REFUSALS = {
    "no list": {"reason": "late"},
    "too short": ["late", ""],
    "a number for a text": Refusal("late")._replace(words=7),
    "a text for a process": Refusal("late")._replace(missing=["1"]),
    "a boolean for a process": Refusal("late")._replace(here=[True]),
    "a stranger without an origin": Refusal("late")._replace(strangers=[[1]]),
    "a problem of numbers": Refusal("wrong")._replace(problems=[[1, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize("name", WRONG_REFUSALS)
def test_malformed_refusal_raises_frame_error(name):
    with pytest.raises(FrameError):
        refusal_of_row(json.loads(json.dumps(WRONG_REFUSALS[name])))


def test_a_reason_of_a_later_version_is_another_version():
    assert "another version of shoal" in refusal_text(Refusal("of tomorrow"))


def test_a_hello_needs_all_its_fields():
    header = {
        "protocol": 1, "process": 0, "processes": 1, "host": "h", "pid": 1, "incarnation": "r",
        "versions": "", "jax_service": "", "timeout_s": 1,
    }  # fmt: skip
    assert parse_hello(header).num_processes == 1
    assert parse_hello({**header, "timeout_s": None}).timeout_s == float("inf")
    for name in header:
        with pytest.raises(FrameError, match=name):
            parse_hello({key: value for key, value in header.items() if key != name})
    newest = {**header, "protocol": PROTOCOL, "host_id": "h1"}
    assert parse_hello(newest).host_id == "h1"
    for name in newest:
        with pytest.raises(FrameError, match=name):
            parse_hello({key: value for key, value in newest.items() if key != name})
    for wrong in ({"timeout_s": 0}, {"process": True}, {"host": None}):
        with pytest.raises(FrameError):
            parse_hello({**header, **wrong})


def test_benchmarks_and_attacks_say_a_whole_hello(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    control_scale = importlib.import_module("control_scale")
    for header in (control_scale.hello(0, 1), stranger.HELLO):
        assert parse_hello(header).protocol == PROTOCOL


@given(st.lists(st.sampled_from(["a", "b", ""])))
def test_hosts_travel_as_runs_without_a_change(hosts):
    runs = host_runs(hosts)
    assert hosts_of(runs) == tuple(hosts)
    assert all(before != after for (before, _), (after, _) in pairwise(runs))
