"""Call records that are not at one point are compared as far as both have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator_contract import KillableJob, meet, run_together
from shoal.errors import DivergenceError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.preemption import preempted
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.rules.messages import records_of
from shoal.runtime.rules.record_marks import (
    LaneRecord,
    LatestMarks,
    Marks,
    RecordMarks,
    SharedMarks,
    exact_of,
    lanes_of,
)
from shoal.runtime.step import step
from shoal.runtime.wire.frames import FrameError

LONGEST = 160


def texts():
    """Return the text of the marks after each of LONGEST calls; the digest of n calls says n."""
    marks, after = Marks(), [""]
    for count in range(1, LONGEST + 1):
        marks.add(count, count.to_bytes(16, "big")[8:])
        after.append(marks.text)
    return after


TEXTS = texts()
COUNTS = [[int(mark.split(":")[0]) for mark in text.split()] for text in TEXTS]


def test_records_of_any_two_lengths_share_a_recent_mark():
    for fewer in range(1, LONGEST + 1):
        assert COUNTS[fewer] == sorted({*COUNTS[fewer]})
        assert COUNTS[fewer][-1] == fewer
        assert len(COUNTS[fewer]) <= 3 * fewer.bit_length()
        for more in range(fewer, LONGEST + 1):
            shared = max({*COUNTS[fewer]} & {*COUNTS[more]})
            assert shared >= 1 << fewer.bit_length() - 1
            assert shared > fewer - 2 * (more - fewer) or more == fewer == shared


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=2, max_size=5),
    st.sampled_from(["data", "a\tlane\n", "ä" * 300]),
)
def test_a_difference_is_seen_if_and_only_if_a_shared_mark_lies_behind_it(histories, name):
    """Each has made so many calls, of which those from some number on are its own."""
    shared, known = SharedMarks(), {}
    for process, (count, own_from) in enumerate(histories):
        marks = Marks()
        for number in range(1, count + 1):
            version = process + 1 if number > own_from else 0
            marks.add(number, bytes([number, version]) * 8)

        text = "5:abc" + lanes_of([LaneRecord(name, "", marks.text)])
        assert exact_of(text) == "5:abc"
        difference = shared.add(process, text)
        versions = {n: process + 1 if n > own_from else 0 for n in COUNTS[count]}
        differs = [n for n, version in versions.items() if known.setdefault(n, version) != version]
        assert (difference is not None) == bool(differs)
        if differs:
            assert {int(side.text.partition(":")[0]) for side in difference.versions} == {
                min(differs)
            }
            assert any(process in side.processes for side in difference.versions)
            return


@pytest.mark.parametrize(
    "text",
    ["\n", "\n3\t\t1:y", '\n"data"\t\t', '\n"data"\tb\tx:y :: 3 4:', "\ndata\t\t1:y", "\n" * 100],
)
def test_malformed_marks_are_ignored(text):
    shared = SharedMarks()
    for process in range(3):
        assert shared.add(process, text.replace("y", str(process))) is None


def feed(client, count, own_from=1000, first=0, **more):
    """Make calls in a lane beside the main line; from some number on they are this one's own."""
    for index in range(first, count):
        value = str(index) if index < own_from else f"own {client.process}"
        entry = RecordedCall(
            "put", f"feed.py:{index} (f)", ("check_values=True", "x: f4[8]"), value
        )
        client.call_records.record(entry, **{"group": None, "lane": "data", **more})


def test_threads_that_are_not_equally_far_are_no_divergence(make_job):
    job = make_job(3)
    for first, count in ((0, 0), (0, 3), (3, 17)):
        for client in job.clients:
            process = client.process
            feed(client, count * process, first=first * process)
        assert job.on_all(lambda c: len(meet(c, "go"))) == [3] * 3


@pytest.mark.parametrize("lane", ["data", "a\tlane\nof 'Ä'\\"])
def test_difference_in_another_lane_is_reported_once_when_main_lanes_synchronize(make_job, lane):
    job = make_job(2)
    for client in job.clients:
        feed(client, 40 + client.process, own_from=20, lane=lane)
    errors = job.on_all(lambda c: meet(c, "go", site="train.py:9 (main)"))
    for error in errors:
        assert type(error) is DivergenceError
        heading, *_ = str(error).splitlines()
        assert heading.endswith(f": processes gave put different values (lane {lane!r})")
        assert "the difference was found at 'go' (train.py:9)." in str(error)
        assert error.sides == {
            f"x: f4[8]: values own {process}": (process,) for process in range(2)
        }
    for client in job.clients:
        feed(client, 10, own_from=0, lane=lane)
        feed(client, 10, lane="other")
    assert job.on_all(lambda c: len(meet(c, "go"))) == [2, 2]
    errors = job.on_all(lambda c: meet(c, "go", lane=lane))
    assert [type(error) for error in errors] == [DivergenceError] * 2
    assert job.on_all(lambda c: len(meet(c, "go", lane=lane))) == [2, 2]
    for client in job.clients:
        feed(client, 5, own_from=3, lane=lane)
    errors = job.on_all(lambda c: meet(c, "go"))
    assert [type(error) for error in errors] == [DivergenceError] * 2
    feed(job.clients[0], 1, own_from=0, lane="new")
    feed(job.clients[1], 1, own_from=0, lane="new")
    assert [type(e) for e in job.on_all(lambda c: meet(c, "go"))] == [DivergenceError] * 2


def test_a_lane_is_compared_where_the_same_processes_meet():
    job = LocalJob(3)
    for client in job.clients:
        feed(client, 3, own_from=0, group=(0, 1))
    everybody = [lambda c=c: len(meet(c)) for c in job.clients]
    assert run_together(*everybody) == [3] * 3
    pair = [lambda c=c: len(meet(c, group=(0, 1))) for c in job.clients[:2]]
    assert [type(error) for error in run_together(*pair)] == [DivergenceError] * 2
    assert run_together(*pair) == [2, 2]


def test_process_without_the_differing_calls_also_raises():
    job = LocalJob(3)
    for client in job.clients[1:]:
        feed(client, 3, own_from=0)
    stage = KillableJob(job.clients, job.lose)
    errors = stage.on_all(lambda c: meet(c, "go"))
    assert [type(error) for error in errors] == [DivergenceError] * 3
    for process in (1, 2):
        row = f"\n    process {process}: x: f4[8]: values own {process}"
        assert row in str(errors[0])
    assert "process 0" not in "\n".join(str(errors[0]).splitlines()[1:])
    assert stage.on_all(lambda c: len(meet(c, "go"))) == [3] * 3


def test_a_lane_that_began_anew_is_compared_with_such_ones_alone():
    shared = SharedMarks()
    assert shared.add(0, lanes_of([LaneRecord("data", "", "1:aa")])) is None
    assert shared.add(1, lanes_of([LaneRecord("data", "after", "1:bb")])) is None
    difference = shared.add(2, lanes_of([LaneRecord("data", "after", "1:cc")]))
    assert difference == ([("1:bb", "", "", [1]), ("1:cc", "", "", [2])], "data")


class TestSignsOfLife:
    """Marks of all call records, the main line's too, ride in signs of life."""

    @given(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 12)), max_size=12)
    )
    def test_latest_marks_of_each_process_are_compared_and_reported_once(self, history):
        """Against brute force: each entry is a process that tells again how far it has come."""
        latest, last, is_reported = LatestMarks(), {}, False
        for process, count, own_from in history:
            marks = Marks()
            for number in range(1, count + 1):
                marks.add(number, bytes([number, process if number > own_from else 9]) * 8)
            told = latest.receive(process, RecordMarks(None, "main", "", marks.text))
            last[process] = set(marks.text.split())
            everything = set().union(*last.values())
            counts = [mark.split(":")[0] for mark in everything]
            differs = len(counts) > len({*counts})
            assert (told is not None) == (differs and not is_reported)
            is_reported = is_reported or differs

    def test_restarted_call_record_is_not_compared_with_the_earlier_one(self):
        latest = LatestMarks()
        call_records = [
            (0, None, "main", ""),
            (1, None, "main", "after"),
            (2, (1, 2), "main", "after"),
            (3, None, "side", "after"),
            (4, None, "main", "after"),
        ]
        differences = [latest.receive(p, RecordMarks(*key, f"1:{p}")) for p, *key in call_records]
        assert differences[:4] == [None] * 4
        assert differences[4].versions == [("1:1", "", "", [1]), ("1:4", "", "", [4])]

    def told_by_steps(self, job):
        """Let signs of life travel, and each begin a step; return what each raised."""

        def begin(client):
            with step.on(client, 7):
                return "went on"

        job.members()
        return KillableJob(job.clients, job.lose).on_all(begin)

    def test_processes_that_never_synchronize_raise_at_a_step(self):
        job = LocalJob(2, hosts=["h0", "h1"])
        for client in job.clients:
            feed(client, 9, own_from=5, lane="main")
        errors = self.told_by_steps(job)
        for process, error in enumerate(errors):
            assert type(error) is DivergenceError
            start = f"process {process} of 2 (h{process}): processes gave put different values"
            assert str(error).startswith(start)
            assert "the difference was found at 'step 7'" in str(error)
            assert error.sides == {f"x: f4[8]: values own {p}": (p,) for p in range(2)}
        assert self.told_by_steps(job) == ["went on"] * 2
        meets = [lambda c=c: len(meet(c)) for c in job.clients]
        assert [type(error) for error in run_together(*meets)] == [DivergenceError] * 2
        assert run_together(*meets) == [2, 2]

    def test_difference_raised_at_a_synchronization_is_not_raised_again(self):
        job = LocalJob(2)
        for client in job.clients:
            feed(client, 1, own_from=0, lane="main")
        job.members()
        assert all(c.call_records.found for c in job.clients)
        meets = [lambda c=c: meet(c) for c in job.clients]
        assert [type(error) for error in run_together(*meets)] == [DivergenceError] * 2
        assert self.told_by_steps(job) == ["went on"] * 2
        assert preempted.on(job.clients[0], 3) is False

    def test_equal_calls_of_unequal_number_are_no_difference(self):
        job = LocalJob(3)
        for client in job.clients:
            feed(client, 5 * client.process, lane="main", group=(0, 1, 2))
        assert self.told_by_steps(job) == ["went on"] * 3

    @pytest.mark.parametrize(
        "wrong",
        [3, [3], [[None, "main", "", "", ""]], [[None, "main", "", 3]], [[[1], "main", "", ""]],
         [[[0, 9], "main", "", ""]], [["01", "main", "", ""]]],
    )  # fmt: skip
    def test_heartbeat_with_malformed_call_records_is_refused(self, wrong):
        with pytest.raises(FrameError):
            records_of({"trails": wrong}, 0, 3)

    def test_heartbeat_has_only_records_that_grew_since_the_last(self):
        (first, _) = LocalJob(2).clients
        assert first.call_records.beat() == []
        feed(first, 3)
        (told,) = first.call_records.beat()
        assert told[:3] == (None, "data", "")
        assert records_of({"trails": [[*told]]}, 0, 2) == [told]
        assert first.call_records.beat() == []
        feed(first, 1, lane="main")
        assert [told.lane for told in first.call_records.beat()] == ["main"]
