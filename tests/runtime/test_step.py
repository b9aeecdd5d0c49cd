"""`step` labels and times what the main line does, and tells it who is gone."""

import numpy as np
import pytest

from shoal.errors import PeerFailedError, ProcessLostError, UsageError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.progress import Progress
from shoal.runtime.job_status import JobStatus, job_status
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.step import step
from shoal.testing.clock import Clock


@pytest.fixture
def clock():
    return Clock(50.0)


@pytest.fixture
def pair(clock):
    return LocalJob(2, hosts=["a", "b"], clock=clock)


def test_a_step_is_the_label_and_is_timed(pair, clock):
    first = pair.clients[0]
    for number in (7, 8, 9):
        with step.on(first, number):
            assert first.progress.step == number
            clock.advance(number)
    assert first.progress.step == 9  # the last one that began
    assert first.progress.step_s == 8
    assert first.progress.place.startswith("step (tests/runtime/test_step.py:")


@pytest.mark.parametrize("number", [0, 2**62, np.int64(5)])
def test_any_whole_number_is_a_step(pair, number):
    with step.on(pair.clients[0], number):
        assert pair.clients[0].progress.step == int(number)
    assert type(pair.clients[0].progress.step) is int


def test_invalid_step_numbers_are_refused(pair):
    for wrong in ("3", 1.0, None, True):
        with pytest.raises(UsageTypeError, match=r"step: number=.* must be a whole number"):
            step.on(pair.clients[0], wrong)
    with pytest.raises(UsageError, match="step: number=-1 must be at least 0"):
        step.on(pair.clients[0], -1)
    with pytest.raises(UsageError, match="64 bits"):
        step.on(pair.clients[0], 2**63)
    assert pair.clients[0].progress.step is None


def test_an_exception_passes_through_and_its_time_does_not_count(pair, clock):
    first = pair.clients[0]
    with pytest.raises(KeyError), step.on(first, 1):  # noqa: PT012
        clock.advance(100)
        raise KeyError
    assert first.progress.step_s is None
    with step.on(first, 2):
        clock.advance(3)
    assert first.progress.step_s == 3


def test_of_steps_inside_each_other_the_inner_ones_are_timed(pair, clock):
    progress = pair.clients[0].progress
    with step.on(pair.clients[0], 100):  # an epoch, say
        for number in (1, 2):
            with step.on(pair.clients[0], number):
                assert progress.step == number
                clock.advance(2)
            assert progress.step == 100
    assert progress.step_s == 2
    assert progress.step == 100


def test_the_same_object_may_be_used_again_also_inside_itself(pair, clock):
    progress = pair.clients[0].progress
    again = step.on(pair.clients[0], 4)
    with again:
        clock.advance(1)
        with again:
            clock.advance(2)
    with again:
        clock.advance(4)
    assert progress.step_s == 3  # the median of 2 and 4


def test_loss_is_raised_at_each_step_and_the_block_does_not_run(pair):
    first = pair.clients[0]
    pair.lose(1, "killed")
    for _ in range(2):
        with pytest.raises(ProcessLostError) as caught, step.on(first, 3):
            pytest.fail("the block runs")
        assert caught.value.lost == {1: "killed"}
        told = str(caught.value)
        assert told.startswith("process 0 of 2 (a): step 3 (tests/runtime/test_step.py:")
        assert told.endswith("cannot continue: process 1 (b) is lost: killed")
    first.peer_losses.acknowledge([1])
    with step.on(first, 4):
        pass
    assert first.progress.ended == 1


def test_failure_of_a_peer_is_raised_with_its_traceback(pair):
    pair.clients[1].report("failed", "Traceback\nValueError: no data")
    with (
        pytest.raises(PeerFailedError, match="ValueError: no data"),
        step.on(pair.clients[0], 3),
    ):
        pytest.fail("the block runs")


def test_process_that_left_in_order_raises_no_error(pair):
    pair.clients[1].close()
    with step.on(pair.clients[0], 3):
        pass


def test_process_declared_lost_itself_raises_process_lost(pair):
    pair.lose(1, "silent for 60 s")
    with pytest.raises(ProcessLostError, match="this process was declared lost: silent for 60 s"):
        step.on(pair.clients[1], 3).__enter__()


def test_a_process_alone_has_steps_too():
    with step(5):
        pass
    call = job_status()
    assert [member.process for member in call.members] == [0]
    assert call.members[0].step == 5
    assert call.median_step_s is not None


def test_job_status_ranks_processes_by_step_time_against_the_median(clock):
    job = LocalJob(4, hosts=list("abcd"), clock=clock)
    for client, seconds in zip(job.clients, (1.0, 1.0, 5.0), strict=False):
        with step.on(client, 12):
            clock.advance(seconds)
    job.lose(3, "killed")
    call = job_status.on(job.clients[0])
    assert isinstance(call, JobStatus)
    assert call.median_step_s == 1.0
    slow = call.slowest()
    assert [(member.process, ratio) for member, ratio in slow] == [(2, 5.0), (0, 1.0), (1, 1.0)]
    assert len(call.slowest(1)) == 1
    lines = str(call).splitlines()
    assert lines[0] == "3 of 4 processes are here; median step time 1 s"
    odd, lost, alike = lines[1:]
    assert odd.startswith("  process 2 (c): here: step 12, last at step (tests/")
    assert "; compute time 5 s (5.00x)" in odd
    assert lost.startswith("  process 3 (d): lost: killed, 0.0 s ago")
    assert alike.startswith("  processes 0-1 (2 hosts): here: step 12, last at step (tests/")
    assert ", up to 6.0 s ago; compute time up to 1 s (1.00x)" in alike


def test_slow_process_is_found_by_compute_time_when_the_others_wait_for_it(clock):
    """All steps take equally long there: the others wait inside the step."""
    job = LocalJob(3, hosts=list("abc"), clock=clock)
    for client, own_s in zip(job.clients, (2.0, 8.0, 2.0), strict=True):
        with step.on(client, 1), step.on(client, 2):
            clock.advance(own_s)
            _wait(client.progress, clock, 10.0 - own_s)
    call = job_status.on(job.clients[0])
    assert [m.step_s for m in call.members] == [10.0] * 3
    assert [m.wait_s for m in call.members] == [8.0, 2.0, 8.0]
    assert (call.median_step_s, call.median_own_s) == (10.0, 2.0)
    assert [(m.process, ratio) for m, ratio in call.slowest(2)] == [(1, 4.0), (0, 1.0)]
    lines = str(call).splitlines()
    assert lines[0] == "3 of 3 processes are here; median step time 10 s, compute time 2 s"
    assert "; compute time 8 s (4.00x)" in lines[1]


def test_only_waits_within_a_step_count(pair, clock):
    first = pair.clients[0]
    _wait(first.progress, clock, 100.0)
    with step.on(first, 1):
        clock.advance(3)
    _wait(first.progress, clock, 100.0)
    assert (first.progress.step_s, first.progress.wait_s) == (3.0, 0.0)
    with pytest.raises(KeyError), step.on(first, 2):  # noqa: PT012
        _wait(first.progress, clock, 5.0)
        raise KeyError
    assert first.progress.wait_s == 0.0


def _wait(progress, clock, seconds):
    """Do what a meeting does that takes so long."""
    point = Point("epoch", site="t.py:3 (f)")
    progress.begin_wait(point, clock())
    clock.advance(seconds)
    progress.end_wait(point)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_job_status_wants_a_positive_timeout(pair, timeout_s):
    with pytest.raises(UsageError, match="timeout_s"):
        job_status.on(pair.clients[0], timeout_s=timeout_s)


def test_a_limit_of_its_own_follows_a_mark(pair):
    """The watcher may look between any two lines: no time before it counts by the new limit."""
    marks = []

    class Marked(Progress):
        def __setattr__(self, name, value):
            if name == "within_s" and hasattr(self, "turns"):
                marks.append(self.mark)
            super().__setattr__(name, value)

    client = pair.clients[0]
    client.progress = Marked(client.progress._clock)
    before = client.progress.mark
    with step.on(client, 1, within_s=0.5):
        assert client.progress.within_s == 0.5
        inside = client.progress.mark
    assert client.progress.within_s is None
    begun, ended = marks[-2:]
    assert before < begun == inside < ended


def test_processes_that_wait_elsewhere_are_not_one_and_no_words_are_changed():
    waits = [
        Member(p, "h", "here", f"waits at barrier 'warm {3 + p % 2} s' (t.py:3) for {p}.5 s",
               place=f"barrier 'warm {3 + p % 2} s' (t.py:3)", is_waiting=True, since_s=p + 0.5)
        for p in range(4)
    ]  # fmt: skip
    gone = [
        Member(p, "h", "failed", f"RuntimeError: budget of {p} s exceeded, 1.0 s ago", since_s=1.0)
        for p in (4, 5)
    ]
    assert str(JobStatus((*waits, *gone))).splitlines()[1:] == [
        "  process 4 (h): failed: RuntimeError: budget of 4 s exceeded, 1.0 s ago",
        "  process 5 (h): failed: RuntimeError: budget of 5 s exceeded, 1.0 s ago",
        "  processes 0, 2 (h): here: waits at barrier 'warm 3 s' (t.py:3) for up to 2.5 s",
        "  processes 1, 3 (h): here: waits at barrier 'warm 4 s' (t.py:3) for up to 3.5 s",
    ]


def test_a_line_of_many_processes_is_short():
    members = tuple(
        Member(p, "h", "here", "last at x, 1.0 s ago", place=f"x{p % 3}") for p in range(1024)
    )
    assert all(len(line) < 120 for line in str(JobStatus(members)).splitlines())
