"""What every job client promises: one suite, run over threads and over a real coordinator."""

import time

import pytest

from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.barrier import barrier
from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.rules.point import Fingerprint, Point
from shoal.runtime.wire.frames import MAX_PAYLOAD_BYTES

LONG_S = 60.0  # a deadline that no test here waits for


def meet(client, name="x", timeout_s=LONG_S, payload=b"", **more):
    return client.arrive(Point(name, **more), payload, timeout_s=timeout_s)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_process_gets_all_payloads(make_job, processes):
    job = make_job(processes)
    payloads = {p: bytes(range(p)) * p for p in range(processes)}
    results = job.on_all(lambda c: dict(meet(c, payload=payloads[c.process])))
    assert results == [payloads] * processes
    assert job.on_all(lambda c: dict(meet(c))) == [dict.fromkeys(payloads, b"")] * processes


def test_large_payloads_arrive_whole(make_job):
    job = make_job(3)
    payloads = {p: bytes([p + 1]) * (3_000_000 + p) for p in range(3)}
    results = job.on_all(lambda c: dict(meet(c, payload=payloads[c.process])) == payloads)
    assert results == [True] * 3


def test_the_same_name_serves_again_at_once(make_job):
    job = make_job(3)

    def loop(client):
        return [list(meet(client, payload=bytes([i])).values()) for i in range(50)]

    assert job.on_all(loop) == [[[bytes([i])] * 3 for i in range(50)]] * 3


def test_a_group_meets_without_the_others(make_job):
    job = make_job(3)
    first, _, third = job.clients
    waits = job.start(lambda: dict(meet(first, group=(2, 0), payload=b"a")))
    assert dict(meet(third, group=(0, 2), payload=b"b")) == waits() == {0: b"a", 2: b"b"}


def test_the_order_in_which_a_group_is_named_does_not_matter(make_job):
    job = make_job(2)
    results = job.on_all(lambda c: dict(meet(c, group=(c.process, 1 - c.process))))
    assert results == [{0: b"", 1: b""}] * 2


def test_different_names_raise_on_all_with_both_sides(make_job):
    job = make_job(3)
    names = ["save", "evaluate", "save"]
    sites = ["train.py:31 (main)", "train.py:44 (main)", "train.py:31 (main)"]
    errors = job.on_all(lambda c: meet(c, names[c.process], site=sites[c.process]))
    for process, error in enumerate(errors):
        assert type(error) is DivergenceError
        assert str(error).startswith(f"process {process} of 3 (")
        assert (
            set(error.sides)
            == {
                "'save' at train.py:31 (main)",
                "'evaluate' at train.py:44 (main)",
            }
            or len(error.sides) == 2
        )
        assert all(side in str(error) for side in error.sides)
    assert job.on_all(lambda c: len(meet(c, "next"))) == [3] * 3


def test_different_fingerprints_raise_on_all(make_job):
    job = make_job(2)
    lines = ["float32[8]", "bfloat16[8]"]
    errors = job.on_all(lambda c: meet(c, fingerprint=Fingerprint("", "", lines[c.process])))
    assert [type(error) for error in errors] == [DivergenceError] * 2
    assert errors[0].sides == {"float32[8]": (0,), "bfloat16[8]": (1,)}


def test_cycle_of_waits_raises_at_once(make_job):
    job = make_job(3)
    names = [("pair", (0, 1)), ("all", None)]
    waits = [
        job.start(lambda c=c, n=n, g=g: meet(c, n, group=g))
        for c, (n, g) in zip(job.clients, names, strict=False)
    ]
    errors = [wait() for wait in waits]
    assert [type(error) for error in errors] == [DivergenceError] * 2
    assert "in a cycle" in str(errors[0])
    assert "process 0: 'pair': waits for process 1" in str(errors[1])


def test_the_earliest_deadline_ends_it_for_all_and_the_next_point_works(make_job):
    job = make_job(4)
    timeouts = {0: LONG_S, 2: Allowance(0.2, 4.0)}  # what is left of 4 s
    waits = [
        job.start(lambda p=p: meet(job.clients[p], "epoch", timeouts[p], site="t.py:3 (f)"))
        for p in timeouts
    ]
    errors = [wait() for wait in waits]
    errors += [meeting_error(job, p, "other") for p in (1, 3)]  # at once, though LONG_S is theirs
    for process, error in zip((0, 2, 1, 3), errors, strict=True):
        assert type(error) is DeadlineError
        assert isinstance(error, TimeoutError)
        assert error.missing == (1, 3)
        assert error.name == ("other" if process in (1, 3) else "epoch")
        assert set(error.last_words) == {1, 3}
        assert error.last_words[1].startswith("joined, ")
        assert str(error).startswith(f"process {process} of 4 (")
    assert "its deadline (4 s); processes 1, 3 did not arrive" in str(errors[1])
    assert "the deadline of process 2 (4 s); processes 1, 3 did not arrive" in str(errors[0])
    assert (
        "'other' missed the wait at 'epoch' (t.py:3), which had ended after 4 s"
        " (the deadline of process 2); process 3 did not arrive in time either"
    ) in str(errors[2])
    assert job.on_all(lambda c: len(meet(c, "next"))) == [4] * 4


def meeting_error(job, process, name="x", **more):
    started = time.monotonic()
    try:
        return meet(job.clients[process], name, **more)
    except Exception as error:  # noqa: BLE001 - the tests look at it
        assert time.monotonic() - started < LONG_S / 2
        return error


def test_a_lost_process_ends_waits_now_and_later_but_not_those_of_others(make_job):
    job = make_job(3)
    first, _, third = job.clients
    waits = job.start(lambda: meet(first))
    job.until_reported(0, "waits at 'x'")
    job.kill(1)
    errors = [waits(), meeting_error(job, 2), meeting_error(job, 2, "later")]
    assert [type(error) for error in errors] == [ProcessLostError] * 3
    assert [set(error.lost) for error in errors] == [{1}] * 3
    assert "process 1 (" in str(errors[0])
    pair = job.start(lambda: len(meet(first, lane="pair", group=(0, 2))))
    assert len(meet(third, lane="pair", group=(0, 2))) == pair() == 2


def test_a_failed_process_ends_waits_with_its_traceback(make_job):
    job = make_job(3)
    waits = job.start(lambda: meet(job.clients[0]))
    job.until_reported(0, "waits at")
    text = "Traceback (most recent call last):\n  File ...\nValueError: no such data"
    job.clients[1].report("failed", text)
    error = waits()
    assert type(error) is PeerFailedError
    assert error.failed == {1: text}
    assert "raised ValueError: no such data" in str(error)
    assert "Traceback" not in str(error)
    assert error.__notes__ == [error.details]
    assert error.details.startswith("  | Traceback (most recent call last):")
    job.kill(1)  # its end says nothing new
    assert meeting_error(job, 2).failed == {1: text}
    assert [m.state for m in job.clients[0].members(timeout_s=5)] == ["here", "failed", "here"]


def test_a_process_that_left_ends_the_waits_for_it(make_job):
    job = make_job(2)
    waits = job.start(lambda: meet(job.clients[0]))
    job.until_reported(0, "waits at")
    job.clients[1].close()
    error = waits()
    assert type(error) is PeerFailedError
    assert error.failed == {1: "left the job"}
    assert type(meeting_error(job, 0, "later")) is PeerFailedError


def test_closing_twice_is_fine_and_a_call_afterwards_is_refused(make_job):
    job = make_job(2)
    job.clients[1].close()
    job.clients[1].close()
    with pytest.raises(UsageError, match="has left the job"):
        meet(job.clients[1])


def test_lanes_meet_independently_in_threads_of_one_process(make_job):
    job = make_job(2)
    lanes = [f"lane{i}" for i in range(4)]

    def all_lanes(client):
        def loop(lane):
            return [
                list(meet(client, lane, lane=lane, payload=bytes([i])).values()) for i in range(10)
            ]

        order = lanes if client.process else lanes[::-1]
        waits = {lane: job.start(lambda lane=lane: loop(lane)) for lane in order}
        return {lane: wait() for lane, wait in waits.items()}

    expected = {lane: [[bytes([i])] * 2 for i in range(10)] for lane in lanes}
    assert job.on_all(all_lanes) == [expected] * 2


def test_two_threads_in_one_lane_are_refused(make_job):
    job = make_job(2)
    waits = job.start(lambda: len(meet(job.clients[0], "first")))
    job.until_reported(0, "waits at 'first'")
    error = meeting_error(job, 0, "second")
    assert type(error) is UsageError
    assert "another thread waits in lane 'main'" in str(error)
    assert len(meet(job.clients[1], "first")) == waits() == 2


def test_each_thread_of_a_job_of_one_process_has_the_lane(make_job):
    job = make_job(1)
    (alone,) = job.clients

    def fail():
        with alone.call("second"):
            meet(alone, "second")
            raise UsageError("only here")

    with alone.call("first"):
        for _ in range(3):
            meet(alone, "first")
            assert str(job.start(fail)()) == "only here"
            assert job.start(lambda: len(meet(alone, "third")))() == 1
    assert len(meet(alone, "fourth")) == 1


def test_members_have_the_state_of_each_process(make_job):
    job = make_job(3)
    job.clients[1].report("doing", "step 7")
    job.clients[2].close()
    job.until_reported(2, "left")
    said = job.until_reported(1, "step 7")
    members = job.clients[0].members(timeout_s=5)
    assert [m.process for m in members] == [0, 1, 2]
    assert [m.state for m in members] == ["here", "here", "left"]
    assert said.last_words.endswith(" s ago")


def test_report_refuses_unknown_kinds(make_job):
    job = make_job(1)
    with pytest.raises(UsageError, match="'doing' and 'ending'"):
        job.clients[0].report("failled", "x")


def test_a_long_wait_is_logged_once_and_then_succeeds(make_job, shoal_log):
    job = make_job(3, warn_after_s=0.05)
    shoal_log.forget()  # a long joining is logged, too
    job.clients[2].report("doing", "step 41")
    job.until_reported(2, "step 41")
    waits = job.start(lambda: len(meet(job.clients[0], "epoch", site="t.py:3 (f)")))
    assert shoal_log.has_line.wait(LONG_S)
    rest = [job.start(lambda c=c: len(meet(c, "epoch"))) for c in job.clients[1:]]
    assert [waits(), rest[0](), rest[1]()] == [3] * 3
    [(level, line)] = [row for row in shoal_log.lines if row[1].startswith("process 0 ")]
    assert level == "WARNING"
    assert "'epoch' (t.py:3) has waited 0 s for processes 1-2" in line
    assert ": step 41, " in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"group": (1,)}, "process 0 (this one) is not among"),
        ({"group": (0, 5)}, "processes 0..1, not [5]"),
        ({"group": (0, 1, 1)}, "more than once: [1]"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"payload": bytes(MAX_PAYLOAD_BYTES + 1)}, "the payload has"),
        ({"operation": "f" * 40_000}, "operation 40000, site 0, fingerprint 0 characters"),
    ],
)
def test_a_wrong_point_is_refused_before_anything_is_sent(make_job, wrong, told):
    job = make_job(2)
    with pytest.raises(UsageError) as caught:
        meet(job.clients[0], **wrong)
    assert told in str(caught.value)
    assert job.on_all(lambda c: len(meet(c))) == [2] * 2


def test_every_problem_of_a_point_is_reported_at_once(make_job):
    with pytest.raises(UsageError, match="4 problems") as caught:
        meet(make_job(2).clients[0], group=(7, 7), timeout_s=-1)
    assert "timeout_s=-1" in str(caught.value)


def test_barrier_names_its_callers_line(make_job):
    job = make_job(2)

    def come(client):
        if client.process:
            barrier.on(client, "here", timeout_s=LONG_S)
        else:
            barrier.on(client, "there", timeout_s=LONG_S)

    for error in job.on_all(come):
        assert type(error) is DivergenceError
        assert {"barrier 'here'", "barrier 'there'"} == {
            side.partition(" at ")[0] for side in error.sides
        }
        assert str(error).count("test_coordinator_contract.py:") == 2
        assert "(test_barrier_names_its_callers_line.<locals>.come)" in str(error)


def test_barrier_over_some_and_over_all(make_job):
    job = make_job(3)
    pair = [job.start(lambda p=p: barrier.on(job.clients[p], "pair", processes=[0, 2]))
            for p in (0, 2)]  # fmt: skip
    assert [wait() for wait in pair] == [None, None]
    assert job.on_all(lambda c: barrier.on(c, "all")) == [None] * 3


def test_barrier_refuses_invalid_arguments(make_job):
    client = make_job(1).clients[0]
    for arguments in ({"name": 3}, {"name": "x", "timeout_s": "9"}, {"name": "x", "lane": None}):
        with pytest.raises(UsageTypeError):
            barrier.on(client, **arguments)
    with pytest.raises(UsageTypeError, match="integers"):
        barrier.on(client, "x", processes=["0"])
    with pytest.raises(UsageError, match="must not be empty"):
        barrier.on(client, "")
