"""The table of a job: every process is in it once, and those in need of attention come first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.draw.amounts import in_bytes, in_seconds
from shoal.draw.media.terminal import plain
from shoal.draw.roll import ORDERS, Roll, ServiceRow, render_roll, rows_of
from shoal.runtime.rules.point import Member

EPOCH, LOAD = "barrier 'epoch' (train.py:31)", "barrier 'load' (data.py:10)"
TABLE = """\
3 processes at a:1 on host0: 2 here, 1 failed; median step time 14.0 ms
rank  state   step   compute time  where                                   since  memory
────────────────────────────────────────────────────────────────────────────────────────
2     failed                       KeyError: 'k'                           9.0 s
1     here      11  18.0 ms, 1.3x  last at barrier 'load' (data.py:10)      61 s
0     here      12  10.0 ms, 0.7x  waits at barrier 'epoch' (train.py:31)  4.0 s   1 GiB
JAX's service (host0): lost: its connection closed (killed?)
another: here"""
STATES = ("here", "stopped", "silent", "absent", "left", "lost", "failed")


def waiting(process: int, **known: object) -> Member:
    facts = {"step": 12, "place": EPOCH, "since_s": 4.0, "is_waiting": True, "step_s": 0.01}
    return Member(process, f"host{process // 8}", "here", "it waits", **facts | known)


def many(count: int, **others: Member) -> Roll:
    """`count` processes that wait for each other, but for those that are given as p3=Member."""
    members = (others.get(f"p{process}", waiting(process)) for process in range(count))
    return Roll("127.0.0.1:8476", tuple(members))


def first_processes(roll: Roll, **options: object) -> list[int]:
    return [row.first.process for row in rows_of(roll, **options)]


members = st.builds(
    Member,
    process=st.just(0),
    host=st.sampled_from(["a", "b", "[red]b"]),
    state=st.sampled_from(STATES),
    last_words=st.sampled_from(["", "it said this", "Traceback:\n  x\nKeyError: 'k'\n"]),
    step=st.none() | st.integers(0, 3),
    place=st.sampled_from(["", EPOCH, LOAD]),
    since_s=st.floats(0, 1e6),
    is_waiting=st.booleans(),
    step_s=st.none() | st.floats(0, 1e4),
    memory_bytes=st.integers(0, 2**45),
)


@given(st.lists(members, max_size=12), st.sampled_from([*ORDERS]), st.booleans())
def test_every_process_is_in_exactly_one_row_and_rows_are_uniform(given, order, fold):
    roll = Roll("a:1", tuple(m._replace(process=p) for p, m in enumerate(given)))
    rows = rows_of(roll, order=order, fold=fold)
    assert sorted(m.process for row in rows for m in row.members) == list(range(len(given)))
    for row in rows:
        assert fold or len(row.members) == 1
        assert len({(m.state, m.step) for m in row.members}) == 1
        if row.first.state in ("here", "silent"):
            assert len({m.place and (m.place, m.is_waiting) for m in row.members}) == 1
    for most_rows in (None, 1, 5):
        lines = plain(render_roll(roll, order=order, most_rows=most_rows), 300).splitlines()
        assert lines[0].startswith(f"{len(given)} process")


def test_lost_silent_slow_and_diverging_processes_come_before_the_majority():
    roll = many(
        512,
        p3=waiting(3, is_waiting=False, place=LOAD, step=11),
        p7=waiting(7)._replace(state="silent"),
        p9=Member(9, "host1", "lost", "stopped (SIGSTOP?), silent for 10 s"),
        p20=waiting(20, step_s=0.03),
        p30=Member(30, "host3", "left", "left the job"),
    )
    rows = rows_of(roll)
    assert [row.first.process for row in rows] == [9, 7, 3, 20, 0, 30]
    assert rows[4].is_majority
    assert len(rows[4].members) == 507


def test_lagging_processes_come_first_unless_most_processes_lag():
    late = {f"p{p}": waiting(p, is_waiting=False, place=LOAD, step=11) for p in range(5)}
    assert first_processes(many(6, **late)) == [5, 0]  # apart from the majority
    late.pop("p4"), late.pop("p3")
    assert first_processes(many(6, **late)) == [0, 3]  # half and half: who lags behind


def test_among_those_apart_the_slow_come_first_then_the_late_then_the_stuck():
    apart = {
        "p1": waiting(1, is_waiting=False, place="'a'", since_s=1.0),
        "p2": waiting(2, is_waiting=False, place="'b'", since_s=60.0),
        "p3": waiting(3, is_waiting=False, place="'c'", step=9),
        "p4": waiting(4, is_waiting=False, place="'d'", step_s=0.1),
    }
    assert first_processes(many(12, **apart)) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("rank", [0, 1, 2]),
        ("host", [1, 2, 0]),
        ("step", [1, 2, 0]),
        ("time", [0, 2, 1]),
        ("since", [2, 0, 1]),
        ("memory", [2, 0, 1]),
    ],
)
def test_orders(order, expected):
    roll = many(
        3,
        p0=Member(0, "c", "here", "", 5, "'x'", 2.0, True, 0.3, 20),
        p1=Member(1, "a", "here", "", None, "'x'", 1.0, True, None, 10),
        p2=Member(2, "b", "here", "", 4, "'x'", 3.0, True, 0.2, 30),
    )
    assert first_processes(roll, order=order) == expected


def test_a_row_shows_the_worst_of_those_in_it():
    (row,) = rows_of(many(3, p1=waiting(1, since_s=9.0, step_s=0.012, memory_bytes=7)))
    assert (row.since_s, row.own_s, row.memory_bytes) == (9.0, 0.012, 7)
    assert row.slowness == pytest.approx(1.2)


def test_the_table_of_a_small_job():
    said = "Traceback (most recent call last):\n  x\nKeyError: 'k', 9.0 s ago"
    members = (
        waiting(0, memory_bytes=1 << 30),
        waiting(1, is_waiting=False, place=LOAD, step=11, since_s=61.0, step_s=0.018),
        Member(2, "host0", "failed", said, since_s=9.0),
    )
    services = (
        ServiceRow("JAX's service", "host0", "lost", "its connection closed (killed?)"),
        ServiceRow("another", "", "here", "serves"),
    )
    text = plain(render_roll(Roll("a:1", members, services), most_rows=20), 200)
    assert text == TABLE


def test_a_long_job_is_folded_and_cut_and_says_so():
    apart = {f"p{p}": waiting(p, place=f"'{p}'", is_waiting=False) for p in range(0, 500, 5)}
    text = plain(render_roll(many(1000, **apart), most_rows=3, note="it is old"), 300)
    assert "\n0     host0  here" in text
    assert "and 997 more processes in 98 rows: --all" in text
    assert text.endswith("it is old")
    unfolded = plain(render_roll(many(1000, **apart)), 300)
    assert len(unfolded.splitlines()) == 3 + 1000


def test_long_lists_of_processes_are_cut():
    apart = {f"p{p}": waiting(p, place=LOAD) for p in range(0, 100, 2)}
    text = plain(render_roll(many(101, **apart), most_rows=5), 300)
    assert "\n0, 2, 4, 6, 8, 10, … (50)  13 hosts" in text
    text = plain(render_roll(many(10, p3=waiting(3, place=LOAD)), most_rows=5), 300)
    assert "\n0-2, 4-9  2 hosts" in text


def test_processes_lost_for_the_same_reason_share_a_row_at_any_age():
    lost = {
        f"p{p}": Member(p, "h", "lost", f"stopped, silent for 1{p} s, {p}.5 s ago", since_s=p + 0.5)
        for p in range(5)
    }
    text = plain(render_roll(many(10, **lost), most_rows=5), 300)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0-4 h lost stopped, silent for 10 s 4.5 s" in lines


def test_position_of_a_process_without_progress_is_shown_before_its_last_call():
    still = "no progress for 312 s, at train.py:12 (main)"
    text = plain(render_roll(many(3, p1=waiting(1, is_waiting=False, still=still))), 300)
    assert "no progress for 312 s, at train.py:12 (main); last at " in text


def test_silent_process_row_shows_duration_and_last_call():
    silent = waiting(1, still="silent for 12.0 s")._replace(state="silent")
    text = plain(render_roll(many(3, p1=silent)), 300)
    assert f"  silent for 12.0 s; waits at {EPOCH}  " in text


def test_stopped_process_is_listed_first_and_marked_stopped():
    stopped = waiting(3, is_waiting=False, still="stopped (SIGSTOP?) for 3.0 s")
    roll = many(5, p3=stopped._replace(state="stopped"))
    assert first_processes(roll) == [3, 0]
    text = plain(render_roll(roll), 300)
    assert ": 4 here, 1 stopped; " in text
    assert f"  stopped    12  10.0 ms, 1.0x  last at {EPOCH}  " in text


def test_slow_process_is_marked_by_its_compute_time_when_all_wait_for_it():
    others = {f"p{p}": waiting(p, step_s=0.05, wait_s=0.03) for p in (0, 1, 3, 4)}
    roll = many(5, p2=waiting(2, step_s=0.05), **others)
    assert (roll.median_step_s, roll.median_own_s) == (0.05, pytest.approx(0.02))
    assert first_processes(roll) == [2, 0]
    text = plain(render_roll(roll), 300)
    assert "; median step time 50.0 ms, compute time 20.0 ms\n" in text
    assert "  50.0 ms, 2.5x  " in text


def test_a_table_that_is_too_wide_folds_the_place_and_loses_nothing_else():
    text = plain(render_roll(many(2)), 60)
    assert "waits at" in text
    assert "'epoch'" in text
    assert all("10.0 ms, 1.0x" in line for line in text.splitlines() if line[:2] in ("0 ", "1 "))


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(100, ""), (77, "memory"), (66, "memory, compute time"), (44, "memory, compute time, host")],
)
def test_narrow_terminal_drops_other_columns_before_the_call_site(width, left_out):
    roll = many(16, p1=waiting(1, memory_bytes=7 << 30))
    lines = plain(render_roll(roll, most_rows=5, width=width), width).splitlines()
    assert any("waits at" in line for line in lines)
    assert not any("\u2026" in line for line in lines)
    assert [line for line in lines if line.startswith("too narrow")] == (
        [f"too narrow for {left_out}"] if left_out else []
    )


def test_lost_processes_are_excluded_from_the_median():
    roll = many(3, p0=waiting(0, step_s=9.0)._replace(state="lost"))
    assert roll.median_step_s == 0.01
    assert many(1, p0=waiting(0, step_s=None)).median_step_s is None
    assert not roll.is_over
    assert many(2, **{f"p{p}": Member(p, "h", "left", "") for p in range(2)}).is_over


def test_amounts():
    assert [in_seconds(s) for s in (2e-6, 0.25, 1.0, 119.0)] == ["2 us", "250 ms", "1.0 s", "119 s"]
    assert [in_bytes(n) for n in (0, 1023, 1 << 50)] == ["0 B", "1023 B", "1024 TiB"]
