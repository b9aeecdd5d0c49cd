"""The call record: calls that send nothing are compared where their processes meet anyway."""

import logging
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator_contract import PATIENCE_S, KillableJob, meet, run_together
from shoal.errors import DeadlineError, DivergenceError, ProcessLostError, UsageError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.barrier import barrier
from shoal.runtime.client import record_search
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.failures.comparison import shown_line
from shoal.runtime.failures.facts import CallPlace
from shoal.runtime.rules.call_record import CallRecord, CallRecords, RecordedCall
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.spec_lines import SpecLine
from shoal.runtime.step import step

SPEC = (
    "check_values=True",
    SpecLine(path="['w']", dtype="float32", shape="[8,4]", layout="(x, -)").packed,
    SpecLine(path="['b']", dtype="float32", shape="[4]", layout="(-)").packed,
)


def put(client, values="3f2a\n77aa", site="train.py:12 (main)", spec=SPEC, **more):
    """Leave what `put` leaves."""
    more = {"group": None, "lane": "main", **more}
    client.call_records.record(RecordedCall("put", site, spec, values), **more)


def local_job(processes=2):
    return LocalJob(processes, hosts=[f"h{p}" for p in range(processes)])


def meet_all(job, name="go", **more):
    """Let all meet at one point after the other; return what each got or raised."""
    more = {"site": "train.py:20 (main)", "timeout_s": PATIENCE_S, **more}
    return run_together(*(lambda c=c: len(meet(c, name, **more)) for c in job.clients))


FOUND = "  put sends nothing; the difference was found at 'go' (train.py:20)."
EQUAL = "put needs equal values on every process; from_host_local joins each process's own rows."
NO_VALUES = (
    "To compare only the tree, shapes, dtypes and layouts, pass put(..., check_values=False)."
)
SAME_CALLS = (
    "All processes must make the same put, pack, create, from_host_local, relayout and feed calls, "
    "in the same order, at the same lines."
)


def texts(errors, heading):
    """Check that all have the same error but for who speaks; return its lines after the first."""
    assert [type(error) for error in errors] == [DivergenceError] * len(errors)
    for process, error in enumerate(errors):
        first, *lines = str(error).splitlines()
        me = f"process {process} of {len(errors)} (h{process})"
        assert first == f"{me}: processes {heading}"
        assert lines == str(errors[0]).splitlines()[1:]
        assert error.sides == errors[0].sides
        assert error.difference == errors[0].difference
        assert error.difference.found_at == CallPlace(name="go", file="train.py", line=20)
    return lines


def differing(*leave, heading="made different calls"):
    """Let each process leave what its function does, and meet; return the error's lines."""
    job = local_job(len(leave))
    for call, client in zip(leave, job.clients, strict=True):
        call(client)
    lines = texts(meet_all(job), heading)
    assert meet_all(job) == [len(leave)] * len(leave)  # all are in step again
    return lines


def test_equal_calls_pass_and_cost_nothing_afterwards(make_job):
    job = make_job(3)
    for client in job.clients:
        for index in range(5):
            put(client, str(index) + "\n")
    for _ in range(3):
        assert job.on_all(lambda c: len(meet(c, "go"))) == [3] * 3
    first = job.clients[0].call_records.arrive(Point("go"))
    put(job.clients[0])
    assert first.call_record.startswith("5:")
    assert job.clients[0].call_records.arrive(Point("go")).call_record.startswith("6:")
    assert job.clients[0].call_records.arrive(Point("go", lane="other")).call_record == ""
    assert job.clients[0].call_records.arrive(Point("go", group=(0, 1))).call_record == ""


def test_other_values_name_the_leaf_and_what_was_meant():
    other = "3f2a\n91bc"
    assert differing(put, lambda c: put(c, other), heading="gave put different values") == [
        "  put at train.py:12 (main)",
        "    process 0: ['b']: float32[4] as (-): values 77aa",
        "    process 1: ['b']: float32[4] as (-): values 91bc",
        FOUND,
        EQUAL,
        NO_VALUES,
    ]


def test_recorded_calls_with_different_shapes_are_shown():
    other = (*SPEC[:2], SPEC[2].replace("[4]", "[6]"))
    assert differing(put, lambda c: put(c, spec=other), heading="gave put different shapes") == [
        "  put at train.py:12 (main)",
        "    process 0: ['b']: float32[4] as (-)",
        "    process 1: ['b']: float32[6] as (-)",
        FOUND,
        EQUAL,
    ]


@pytest.mark.parametrize(
    "other", [("put", "train.py:14 (main)", SPEC), ("put", "train.py:12 (main)", SPEC[:2])]
)
def test_the_step_of_the_first_call_that_differs_is_known(other):
    job = local_job()
    for client in job.clients:
        for step_number in range(5, 20):
            entry = RecordedCall("put", "train.py:12 (main)", SPEC, step=step_number)
            if step_number == 7 and client.process == 1:
                entry = RecordedCall(*other, step=step_number)
            client.call_records.record(entry, group=None, lane="main")
    assert [error.difference.step for error in meet_all(job)] == [7, 7]


def test_the_promise_about_values_must_be_equal_too():
    other = ("check_values=False", *SPEC[1:])
    assert differing(
        put, lambda c: put(c, "", spec=other), heading="gave put different values"
    ) == [
        "  put at train.py:12 (main)",
        "    process 0: check_values=True",
        "    process 1: check_values=False",
        FOUND,
        EQUAL,
        NO_VALUES,
    ]


def test_recorded_calls_at_different_call_sites_are_shown():
    assert differing(put, lambda c: put(c, site="train.py:14 (main)")) == [
        "  process 0: put at train.py:12 (main)",
        "  process 1: put at train.py:14 (main)",
        FOUND,
        SAME_CALLS,
    ]


def test_a_call_that_one_side_does_not_make():
    assert differing(lambda c: None, put) == [
        "  process 0: (no call: it reached 'go' (train.py:20) first)",
        "  process 1: put at train.py:12 (main)",
        FOUND,
        SAME_CALLS,
    ]


@pytest.mark.parametrize("number", [0, 1, 63, 64, 500, 999])
def test_the_first_of_many_calls_is_found(number):
    def calls(at):
        return lambda c: [
            put(c, "\n", site=f"a.py:{n + 1000 * (n >= at)} (f)") for n in range(1000)
        ]

    first, second, *_ = differing(calls(10_000), calls(number))
    assert first == f"  process 0: put at a.py:{number} (f)"
    assert second == f"  process 1: put at a.py:{number + 1000} (f)"


def test_difference_before_the_kept_calls_is_reported_as_such():
    def calls(first):
        return lambda c: [put(c, "\n", site=s) for s in [first, *["a.py:1 (f)"] * 2000]]

    first, second, _, advice = differing(calls("b.py:1 (f)"), calls("c.py:1 (f)"))
    assert first.startswith("  process 0: 2001 calls, digest ")
    assert second.startswith("  process 1: 2001 calls, digest ")
    assert advice == "They differ before call 977: earlier calls are not kept on all."


def test_where_one_has_forgotten_more_the_first_difference_is_found_all_the_same():
    sites = ["same"] * 1500

    def calls(more):
        return lambda c: [put(c, "\n", site=site) for site in [*sites, *more]]

    first, second, *_ = differing(calls(["x"]), calls([*["y"] * 600]))
    assert (first, second) == ("  process 0: put at x", "  process 1: put at y")


def test_calls_on_which_all_agreed_are_forgotten_and_counted():
    job = local_job()
    for client in job.clients:
        put(client)
    assert meet_all(job) == [2, 2]
    put(job.clients[1], site="late.py:1 (f)")
    first, second, *_ = texts(meet_all(job), "made different calls")
    assert first == "  process 0: (no call: it reached 'go' (train.py:20) first)"
    assert second == "  process 1: put at late.py:1 (f)"


def test_record_difference_is_reported_before_the_name_difference_it_causes():
    job = local_job()
    put(job.clients[1])
    errors = run_together(*(lambda c=c: meet(c, f"point {c.process}") for c in job.clients))
    for error in errors:
        assert list(error.sides) == ["(no call: it reached 'point 0' first)",
                                     "put at train.py:12 (main)"]  # fmt: skip


def test_late_process_gets_the_same_difference_and_is_in_step(make_job):
    job = make_job(3)
    for process, client in enumerate(job.clients):
        put(client, f"{process}\n")
    first = [job.start(lambda c=c: meet(c, "go")) for c in job.clients[:2]]
    errors = [wait() for wait in first]
    errors.append(run_together(lambda: meet(job.clients[2], "go"))[0])
    assert [type(error) for error in errors] == [DivergenceError] * 3
    sides = [f"{shown_line(SPEC[1])}: values {p}" for p in (0, 1)]
    assert errors[0].sides == errors[1].sides == {sides[0]: (0,), sides[1]: (1,)}
    assert errors[2].sides == errors[0].sides
    assert str(errors[2]).splitlines()[1:] == str(errors[0]).splitlines()[1:]
    for client in job.clients:
        put(client)
    assert job.on_all(lambda c: len(meet(c, "go"))) == [3] * 3


def test_record_difference_is_raised_by_every_kind_of_synchronization(make_job):
    job = make_job(2)
    call = Call("allgather", "x", "a.py:1 (f)", tuple(map(str, range(100))))
    ways = [
        lambda c: barrier.on(c, "go"),
        lambda c: agree(c, call, b"secret", timeout_s=PATIENCE_S),
    ]
    for way in ways:
        put(job.clients[1])
        for error in job.on_all(way):
            assert type(error) is DivergenceError
            assert error.sides["put at train.py:12 (main)"] == (1,)
        assert not any(isinstance(result, Exception) for result in job.on_all(way))


def test_only_the_group_and_the_lane_of_a_call_are_compared(make_job):
    job = make_job(3)
    put(job.clients[0], group=(1, 0))
    put(job.clients[0], group=(0, 2), lane="data")
    put(job.clients[1], group=(0, 2))  # it is none of them
    put(job.clients[1], group=(1,))
    assert job.on_all(lambda c: len(meet(c, "all"))) == [3] * 3
    for lane, members in (("main", (0, 1)), ("data", (2, 0))):
        clients = [job.clients[p] for p in members]
        calls = [lambda c=c, m=members, n=lane: meet(c, group=m, lane=n) for c in clients]
        assert [type(error) for error in run_together(*calls)] == [DivergenceError] * 2
        assert [len(answers) for answers in run_together(*calls)] == [2, 2]


def test_other_errors_leave_the_call_record_unchanged(make_job):
    job = make_job(2)
    first, second = job.clients
    for client in job.clients:
        put(client)
    with pytest.raises(DeadlineError):
        meet(first, "go", timeout_s=0.05)
    with pytest.raises(DeadlineError):
        meet(second, "go")
    names = job.on_all(lambda c: meet(c, f"name {c.process}"))
    assert [type(error) for error in names] == [DivergenceError] * 2
    assert "processes made different calls" in str(names[0])
    put(second)
    assert [type(error) for error in job.on_all(lambda c: meet(c, "go"))] == [DivergenceError] * 2
    assert job.on_all(lambda c: len(meet(c, "go"))) == [2, 2]


def test_survivors_start_again(make_job):
    job = make_job(3)
    first, _, third = job.clients
    for lane in ("main", "data"):
        put(first, lane=lane, group=(0, 2))
    put(first)
    job.kill(1)
    for survivor in (first, third):
        with pytest.raises(ProcessLostError):
            meet(survivor)
    pair = {"group": (0, 2)}
    for name, more in (
        ("who", {"survivors": True}),
        ("on", pair),
        ("on", {"lane": "data", **pair}),
    ):
        other = job.start(lambda n=name, m=more: meet(first, n, **m))
        assert meet(third, name, **more).keys() == other().keys() == {0, 2}
    put(third, group=(0, 2))
    errors = run_together(lambda: meet(first, **pair), lambda: meet(third, **pair))
    assert [type(error) for error in errors] == [DivergenceError] * 2


def diverged(answers):
    return [type(answer) for answer in answers] == [DivergenceError] * len(answers)


def test_a_difference_that_one_process_has_from_a_step_is_raised_on_all_where_they_meet(
    monkeypatch,
):
    monkeypatch.setattr(record_search, "_SEARCH_S", 0.2)  # the others take no step, and do not come
    job = local_job(3)
    for _ in range(2):
        for client in job.clients:
            put(client, f"{client.process}\n77aa")
        job.members()  # heartbeats
        with pytest.raises(DivergenceError), step.on(job.clients[0], 7):
            pass
        assert diverged(meet_all(job))
        assert meet_all(job) == [3] * 3


def test_survivors_of_no_loss_are_compared_and_in_step_at_the_second_turn(make_job):
    job = make_job(3)
    live = partial(meet, name="who", survivors=True, timeout_s=PATIENCE_S)
    for _ in range(2):
        for client in job.clients:
            put(client, f"{client.process}\n77aa")
        assert diverged(job.on_all(live))
        assert [len(met) for met in job.on_all(live)] == [3] * 3
    for client in job.clients:
        put(client)
    assert [len(met) for met in job.on_all(live)] == [3] * 3
    put(job.clients[2])
    assert diverged(job.on_all(meet))


def test_survivors_that_meet_again_and_again_after_a_loss_are_compared():
    job = local_job(3)
    first, second, _ = job.clients
    put(first)
    job.lose(2)
    live = partial(meet, name="who", survivors=True, timeout_s=PATIENCE_S)
    both = [partial(live, first), partial(live, second)]
    assert [len(met) for met in run_together(*both)] == [2] * 2  # not compared: the loss
    put(first, group=(0, 1))
    put(second, group=(0, 1))
    assert [len(met) for met in run_together(*both)] == [2] * 2
    put(second)
    assert diverged(run_together(*both))
    assert [len(met) for met in run_together(*both)] == [2] * 2


def test_divergence_is_raised_even_if_the_search_for_the_cause_fails():
    """Another process is elsewhere in the lane in which the cause is looked for."""
    job = local_job()
    first, second = job.clients
    put(first)
    stage = KillableJob(job.clients, job.lose)
    elsewhere = Point("elsewhere", (0, 1), "main: the trail")
    stray = stage.start(lambda: second.arrive(elsewhere, timeout_s=PATIENCE_S))
    stage.until_waiting(1)
    errors = meet_all(job)
    assert type(stray()) is DivergenceError
    for error in errors:
        assert type(error) is DivergenceError
        assert "process 0: 1 call, digest" in str(error)
        assert "process 1: no call; then it reached 'go' (train.py:20)" in str(error)


@pytest.mark.parametrize("group", [[0, "1"], [0, [1]], [0, 0, 1], [0, 1.5]])
def test_invalid_groups_are_refused_after_recorded_calls(group):
    first, _ = local_job().clients
    put(first)
    with pytest.raises(UsageError):
        meet(first, group=group)


def test_a_job_of_one_leaves_nothing():
    (alone,) = LocalJob(1).clients
    put(alone)
    assert alone.call_records.arrive(Point("go")) == Point("go")


class TestLanes:
    """Which line of execution a call without `lane=` belongs to."""

    def in_thread(self, *functions):
        def run():
            return [function() for function in functions][-1]

        (result,) = run_together(run)
        return result

    def test_the_thread_that_made_it_runs_the_main_line(self):
        call_records = CallRecords(0, 2)
        assert call_records.lane == "main"
        call_records.arrive(Point("x", lane="side"))
        assert call_records.lane == "main"
        assert self.in_thread(lambda: call_records.lane) is None

    def test_thread_that_arrives_in_the_main_lane_becomes_its_thread(self):
        call_records = CallRecords(0, 2)
        assert (
            self.in_thread(lambda: call_records.arrive(Point("x")), lambda: call_records.lane)
            == "main"
        )
        assert call_records.lane is None
        call_records.arrive(Point("x"))
        assert call_records.lane == "main"

    def test_a_thread_belongs_to_the_lane_in_which_it_last_met_others(self):
        call_records = CallRecords(0, 2)
        lanes = ["data", "data: the first difference", "data: the trail"]
        comes = [lambda lane=lane: call_records.arrive(Point("x", lane=lane)) for lane in lanes]
        assert self.in_thread(*comes, lambda: call_records.lane) == "data"
        assert self.in_thread(*comes, lambda: call_records.arrive(Point("x", lane="b")),
                              lambda: call_records.lane) == "b"  # fmt: skip

    def test_a_thread_that_never_met_others_is_warned_once(self, caplog):
        job = local_job()
        first, _ = job.clients
        caplog.set_level(logging.WARNING, "shoal")
        for _ in range(2):
            self.in_thread(lambda: put(first, lane=None))
        (record,) = caplog.records
        assert "process 0 of 2: put at train.py:12 (main): this thread has never synchronized" in (
            record.getMessage()
        )
        assert meet_all(job) == [2, 2]


@given(st.lists(st.text(max_size=3), max_size=8), st.lists(st.text(max_size=3), max_size=8))
def test_call_records_are_equal_exactly_if_the_calls_are(one, other):
    def call_record(sites):
        call_record = CallRecord()
        for site in sites:
            call_record.add(RecordedCall("put", site, ()))
        return call_record.text

    assert (call_record(one) == call_record(other)) == (one == other)


def test_what_is_kept_is_bounded_in_bytes():
    """What calls share of their specifications counts once; the last call is kept in any case."""
    call_record = CallRecord()
    leaves = tuple(f"leaf {index}" for index in range(1000))
    for _ in range(300):
        call_record.add(
            RecordedCall("put", "a.py:1 (f)", leaves, "\n".join(["3f2a91bc00112233"] * 1000))
        )
    assert 0 < call_record.count - call_record.first_kept < 70
    call_record.add(RecordedCall("put", "a.py:2 (f)", ("y" * (2 << 20),)))
    assert call_record.first_kept == 300
    assert call_record.entry(300).site == "a.py:2 (f)"
