"""The contract of job clients, as a test suite for each of them.

The tests check types and attributes of errors, not messages. They run N job clients in threads
of one process, and wait for events instead of sleeping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    UsageError,
)
from shoal.runtime.client.interface import JobClient
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.rules.stopping import Notice, ReceivedNotice
from shoal.runtime.wire.frames import MAX_PAYLOAD_BYTES

__all__ = ["PATIENCE_S", "CoordinatorContract", "KillableJob", "MakeStage", "meet", "run_together"]

PATIENCE_S = 30.0  # deadline of the test itself: reached only if something is broken
_LONG_S = 60.0  # a deadline that no test here reaches

Call = Callable[[], Any]


def run_together(*functions: Call) -> list[Any]:
    """Run each function in a thread of its own; return what each returned or raised."""
    results: list[Any] = [None] * len(functions)

    def run(index: int, function: Call) -> None:
        try:
            results[index] = function()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call hangs"
    return results


def meet(client: JobClient, name: str = "x", payload: bytes = b"", **more: Any) -> dict[int, bytes]:
    """Arrive at a point; `more` are its fields, and `timeout_s`."""
    timeout_s = more.pop("timeout_s", _LONG_S)
    return dict(client.arrive(Point(name, **more), payload, timeout_s=timeout_s))


class KillableJob:
    """N job clients, one for each process of a job, and a function to kill one."""

    def __init__(self, clients: Sequence[JobClient], kill: Callable[[int], object]) -> None:
        """`kill(p)` simulates a sudden death of process p: its connections close without notice."""
        self.clients, self.kill = list(clients), kill

    def on_all(self, function: Callable[[Any], object]) -> list[Any]:
        """Call `function(client)` on all processes at once."""
        return run_together(*(lambda c=c: function(c) for c in self.clients))

    def start(self, function: Call) -> Call:
        """Start one call; return a function that waits for its result or error."""
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.extend(run_together(function)), daemon=True)
        thread.start()

        def result() -> Any:
            thread.join(PATIENCE_S)
            assert box, "it hangs"
            return box[0]

        return result

    def until_reported(self, process: int, words: str) -> Member:
        """Return once `process` is known to have reported a message that begins with `words`."""
        return self._until(process, lambda member: member.last_words.startswith(words))

    def until_waiting(self, process: int) -> Member:
        """Return once `process` is known to wait for others."""
        return self._until(process, lambda member: member.is_waiting)

    def until_settled(self, process: int) -> Notice:
        """Return once `process` knows of a notice and of the agreed step."""
        stop = self.clients[process].stop
        give_up = time.monotonic() + PATIENCE_S
        while True:
            changes, notice = stop.changes, stop.notice()
            if notice is not None and notice.step is not None:
                return notice
            assert time.monotonic() < give_up, f"no step was agreed on: {notice}"
            stop.wait(changes, PATIENCE_S)

    def _until(self, process: int, is_so: Callable[[Member], bool]) -> Member:
        give_up = time.monotonic() + PATIENCE_S
        other = next(c for c in self.clients if c.process != process)
        while True:
            member = other.members(timeout_s=PATIENCE_S)[process]
            if is_so(member):
                return member
            assert time.monotonic() < give_up, f"that state was never reached: {member}"


MakeStage = Callable[..., KillableJob]


def _error(call: Call) -> Any:
    """Return the error raised by a call at once: long before its own deadline."""
    began = time.monotonic()
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the tests look at it
        assert time.monotonic() - began < _LONG_S / 2
        return error


class CoordinatorContract:
    """Subclass it with a fixture `stage`: a function that makes a `KillableJob` of N processes."""

    @pytest.mark.parametrize("processes", [1, 2, 4])
    def test_every_process_gets_all_payloads(self, stage: MakeStage, processes: int) -> None:
        job = stage(processes)
        payloads = {p: bytes(range(p)) * p for p in range(processes)}
        results = job.on_all(lambda c: meet(c, payload=payloads[c.process]))
        assert results == [payloads] * processes
        assert job.on_all(meet) == [dict.fromkeys(payloads, b"")] * processes

    def test_large_payloads_arrive_whole(self, stage: MakeStage) -> None:
        payloads = {p: bytes([p + 1]) * (3_000_000 + p) for p in range(3)}
        results = stage(3).on_all(lambda c: meet(c, payload=payloads[c.process]) == payloads)
        assert results == [True] * 3

    def test_the_same_name_serves_again_at_once(self, stage: MakeStage) -> None:
        def loop(client: JobClient) -> list[list[bytes]]:
            return [list(meet(client, payload=bytes([i])).values()) for i in range(50)]

        assert stage(3).on_all(loop) == [[[bytes([i])] * 3 for i in range(50)]] * 3

    def test_a_group_meets_without_the_others_named_in_any_order(self, stage: MakeStage) -> None:
        job = stage(3)
        first, _, third = job.clients
        waits = job.start(lambda: meet(first, group=(2, 0), payload=b"a"))
        assert meet(third, group=(0, 2), payload=b"b") == waits() == {0: b"a", 2: b"b"}

    @pytest.mark.parametrize("field", ["name", "operation"])
    def test_divergence_is_raised_on_all(self, stage: MakeStage, field: str) -> None:
        job = stage(3)
        values = ["one", "other", "one"]
        errors = job.on_all(lambda c: meet(c, **{"name": "x", field: values[c.process]}))
        for error in errors:
            assert type(error) is DivergenceError
            smaller, larger = sorted(error.sides.values(), key=lambda side: 1 in side)
            assert larger == (1,)
            assert set(smaller) <= {
                0,
                2,
            }  # reported at the first difference: not all need have arrived
        assert job.on_all(lambda c: len(meet(c, "next"))) == [3] * 3

    @pytest.mark.parametrize("lane", ["main", "side"])
    @pytest.mark.parametrize("meets_in", ["main", "side"])
    def test_call_record_difference_is_raised_once_on_all(
        self, stage: MakeStage, lane: str, meets_in: str
    ) -> None:
        job = stage(3)
        for client in job.clients:
            for value, here in (("equal", meets_in), (str(client.process == 1), lane)):
                entry = RecordedCall("put", "train.py:12 (main)", ("x: float32[8]",), value)
                client.call_records.record(entry, group=None, lane=here)
        outcomes = job.on_all(lambda c: meet(c, "go", lane=meets_in))
        if (lane, meets_in) == ("main", "side"):
            assert [len(answers) for answers in outcomes] == [
                3
            ] * 3  # the main lane has yet to meet
            return
        for error in outcomes:
            assert type(error) is DivergenceError
            smaller, larger = sorted(error.sides.values(), key=lambda side: 1 in side)
            assert larger == (1,)
            assert set(smaller) <= {0, 2}
        assert job.on_all(lambda c: len(meet(c, "go", lane=meets_in))) == [3] * 3

    def test_cycle_of_waits_is_raised_at_once(self, stage: MakeStage) -> None:
        job = stage(3)
        first, second, _ = job.clients
        waits = [job.start(lambda: meet(first, group=(0, 1))), job.start(lambda: meet(second))]
        assert [type(wait()) for wait in waits] == [DivergenceError] * 2

    def test_the_earliest_deadline_ends_it_for_all(self, stage: MakeStage) -> None:
        job = stage(4)
        waits = [
            job.start(partial(meet, job.clients[p], "epoch", timeout_s=s))
            for p, s in {0: _LONG_S, 2: 0.2}.items()
        ]
        errors = [wait() for wait in waits]
        errors += [_error(partial(meet, job.clients[p], "epoch")) for p in (1, 3)]
        for error in errors:  # a late process gets it at once, although its own deadline is far
            assert type(error) is DeadlineError
            assert (error.name, error.missing) == ("epoch", (1, 3))
            assert set(error.last_words) == {1, 3}
        assert job.on_all(lambda c: len(meet(c, "next"))) == [4] * 4

    def test_a_lost_process_ends_waits_now_and_later(self, stage: MakeStage) -> None:
        job = stage(3)
        first, _, third = job.clients
        waits = job.start(lambda: meet(first))
        job.until_waiting(0)
        job.kill(1)
        errors = [waits(), *(_error(partial(meet, third, n)) for n in ("x", "later"))]
        assert [type(error) for error in errors] == [ProcessLostError] * 3
        assert [set(error.lost) for error in errors] == [{1}] * 3
        pair = job.start(lambda: len(meet(first, lane="pair", group=(0, 2))))
        assert len(meet(third, lane="pair", group=(0, 2))) == pair() == 2

    def test_survivors_meet_and_go_on(self, stage: MakeStage) -> None:
        job = stage(3)
        first, _, third = job.clients
        job.kill(1)
        for name, survivors in (("who", True), ("next", False)):
            more: dict[str, Any] = {"survivors": survivors, "group": None if survivors else (0, 2)}
            other = job.start(partial(meet, first, name, **more))
            assert meet(third, name, **more).keys() == other().keys() == {0, 2}

    def test_a_failed_process_ends_waits_with_its_words(self, stage: MakeStage) -> None:
        job = stage(3)
        waits = job.start(lambda: meet(job.clients[0]))
        job.until_waiting(0)
        text = "Traceback (most recent call last):\n  File ...\nValueError: no such data"
        job.clients[1].report("failed", text)
        error = waits()
        assert type(error) is PeerFailedError
        assert error.failed == {1: text}
        job.kill(1)  # its end is already known
        assert _error(lambda: meet(job.clients[2])).failed == {1: text}

    @pytest.mark.parametrize("points", [0, 1])
    def test_a_call_that_one_process_leaves_fails_for_all_and_the_next_is_one_again(
        self, stage: MakeStage, points: int
    ) -> None:
        made = stage(3)

        def act(client: JobClient) -> tuple[Any, Any]:
            def work() -> None:
                with client.call("work"):
                    for index in range(2):
                        if client.process == 2 and index == points:
                            raise KeyError("no data")
                        meet(client, f"part {index}")

            return _error(work), meet(client, "next")

        first, second, guilty = made.on_all(act)
        assert isinstance(guilty[0], KeyError)
        for error, _ in (first, second):
            assert type(error) is PeerFailedError
            assert list(error.failed) == [2]
            assert "no data" in error.failed[2]
        assert all(met == dict.fromkeys(range(3), b"") for _, met in (first, second, guilty))

    @pytest.mark.parametrize("odd", [{"lane": "side"}, {"group": (0, 1)}], ids=["lane", "group"])
    def test_after_a_call_that_the_others_do_not_make_survivors_leave_all_in_step(
        self, stage: MakeStage, odd: dict[str, Any]
    ) -> None:
        def act(client: JobClient) -> list[str]:
            def outcome(name: str, **more: Any) -> str:
                return type(_error(lambda: meet(client, name, **more))).__name__

            more = {"timeout_s": 0.2, **odd} if client.process == 0 else {}
            ends = [outcome("call", **more), outcome("a")]
            while "dict" not in (end := outcome("live", survivors=True)):
                ends.append(end)
            return [*ends, outcome("b"), outcome("c")]

        outcomes = stage(3).on_all(act)
        assert [names[-2:] for names in outcomes] == [["dict", "dict"]] * 3
        kinds = {name for names in outcomes for name in names}
        assert kinds <= {"dict", "DivergenceError", "DeadlineError"}

    def test_a_process_that_left_ends_the_waits_for_it(self, stage: MakeStage) -> None:
        job = stage(2)
        waits = job.start(lambda: meet(job.clients[0]))
        job.until_waiting(0)
        job.clients[1].close()
        job.clients[1].close()  # idempotent
        for error in (waits(), _error(lambda: meet(job.clients[0], "later"))):
            assert type(error) is PeerFailedError
            assert set(error.failed) == {1}
        with pytest.raises(UsageError):
            meet(job.clients[1])

    def test_lanes_meet_independently_in_threads_of_one_process(self, stage: MakeStage) -> None:
        job = stage(2)
        lanes = [f"lane{i}" for i in range(4)]

        def loop(client: JobClient, lane: str) -> list[list[bytes]]:
            rounds = (meet(client, lane, bytes([i]), lane=lane) for i in range(10))
            return [list(payloads.values()) for payloads in rounds]

        def all_lanes(client: JobClient) -> Mapping[str, Any]:
            order = lanes if client.process else lanes[::-1]
            waits = {n: job.start(partial(loop, client, n)) for n in order}
            return {lane: wait() for lane, wait in waits.items()}

        expected = {lane: [[bytes([i])] * 2 for i in range(10)] for lane in lanes}
        assert job.on_all(all_lanes) == [expected] * 2

    def test_two_threads_in_one_lane_are_refused(self, stage: MakeStage) -> None:
        job = stage(2)
        waits = job.start(lambda: len(meet(job.clients[0], "first")))
        job.until_waiting(0)
        assert type(_error(lambda: meet(job.clients[0], "second"))) is UsageError
        assert len(meet(job.clients[1], "first")) == waits() == 2

    @pytest.mark.parametrize("processes", [1, 3])
    def test_a_notice_makes_all_stop_at_one_step(self, stage: MakeStage, processes: int) -> None:
        job = stage(processes)
        for client in job.clients:
            for step in range(0, 7 * (client.process + 1), 7):
                assert client.stop.should_stop(step) is False
        given = ReceivedNotice("Terminated", "SIGTERM", 30.0)
        job.clients[-1].give_notice(given)
        for client in job.clients:
            agreed = 7 * (processes - 1) + 1
            notice = job.until_settled(client.process)
            assert notice[:3] == ("Terminated", "SIGTERM", processes - 1)
            assert 0 <= (notice.deadline_s or -1) <= 30.0
            assert (notice.step, notice.others) == (agreed, ())
            assert [client.stop.should_stop(agreed + i) for i in (-1, 0, 2**70)] == [
                False,
                True,
                True,
            ]
            assert client.awaited(timeout_s=PATIENCE_S) == ()

    def test_lost_process_is_not_waited_for_in_a_notice(self, stage: MakeStage) -> None:
        job = stage(3)
        for client in job.clients:
            assert client.stop.should_stop(client.process) is False
        job.kill(2)
        job._until(2, lambda member: member.state == "lost")
        job.clients[0].give_notice(ReceivedNotice("Terminated", "SIGTERM"))
        assert {job.until_settled(p).step for p in (0, 1)} == {2}

    def test_members_have_the_state_of_each_process(self, stage: MakeStage) -> None:
        job = stage(3)
        job.clients[1].report("doing", "something")
        job.until_reported(1, "something")
        job.clients[2].close()
        job._until(2, lambda member: member.state == "left")
        members = job.clients[0].members(timeout_s=PATIENCE_S)
        assert [(m.process, m.state) for m in members] == [(0, "here"), (1, "here"), (2, "left")]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"group": (1,)},
            {"group": (0, 5)},
            {"group": (0, 1, 1)},
            {"timeout_s": 0},
            {"timeout_s": float("nan")},
            {"payload": bytes(MAX_PAYLOAD_BYTES + 1)},
            {"operation": "f" * 40_000},
        ],
        ids=["alone", "outside", "twice", "no time", "no number", "large", "long"],
    )
    def test_a_wrong_point_is_refused_before_anything_is_sent(
        self, stage: MakeStage, wrong: dict[str, Any]
    ) -> None:
        job = stage(2)
        with pytest.raises(UsageError):
            meet(job.clients[0], **wrong)
        assert job.on_all(lambda c: len(meet(c))) == [2] * 2
