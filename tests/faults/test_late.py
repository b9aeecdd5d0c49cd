"""A process that is merely late: it is named, with where it is; and it may still come in time."""

from __future__ import annotations

import json

import pytest

from faults import programs

WARN_AFTER_S, LATE_S = 0.5, 1.5


@pytest.fixture
def ended(cluster, child_env):
    """Return a function that lets process 2 come late, to a point with the given deadline."""

    def run(timeout_s):
        bench = cluster(
            3,
            devices=2,
            faults=f"late@2:delay={LATE_S}",
            env=child_env | {"SHOAL_WARN_AFTER_S": str(WARN_AFTER_S), "SHOAL_HEARTBEAT_S": "0.1"},
        )
        bench.start(programs.come_late, timeout_s)
        return bench.wait()

    return run


def test_one_line_names_the_late_process_and_all_continue(ended):
    rows = ended(60.0)
    assert [one.code for one in rows] == [0, 0, 0], rows
    assert rows[2].err.count("'saved'") == 0, rows[2].err
    lines = [(one, line) for one in rows[:2] for line in one.err.splitlines() if "'saved'" in line]
    ((one, line),) = lines  # both wait at one place
    assert line.startswith(f"process {one.process} of 3 (")
    assert "has waited 0 s for process 2 [process 2 (" in line or "1 s for process 2 [" in line
    assert "): step 7, last at step (faults/programs.py:" in line


def test_with_a_shorter_deadline_all_learn_where_it_is(ended):
    rows = ended(LATE_S / 2)
    assert [one.code for one in rows] == [73, 73, 73], rows
    assert [one.kind for one in rows] == ["DeadlineError"] * 3
    for one in rows:
        told = json.loads(one.out.partition("deadline ")[2].splitlines()[0].partition(" ")[2])
        assert told["missing"] == [2]
        assert told["name"] == "saved"
        (stack,) = told["stacks"].values()
        assert "in come_late" in stack
        assert "time.sleep" in stack or "_let_happen" in stack
    for one in rows[:2]:
        assert "step 7" in one.error
    assert "missed the wait at" in rows[2].error
