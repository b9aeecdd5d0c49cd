"""What all say of a batch → what all do: the same on every process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.arrays.feeding.batch_verdict import LAST, BatchId, Status, judge
from shoal.errors import DivergenceError, PeerFailedError, ShoalError, UsageError
from shoal.runtime.client.outcomes import ThisProcess

FAILED = "ValueError: no\nTraceback (most recent call last):\nValueError: no"
LEAF = "['x']: float32[rows] as (data)"


def asked(process, count, remainder="drop", size=12, leaves=LEAF):
    return BatchId(
        ThisProcess(process, ["host"] * count),
        "batch 3 of feed (a.py:1 (f))",
        remainder,
        size,
        leaves,
    )


@st.composite
def statuses(draw: st.DrawFn) -> Status:
    kind = draw(st.sampled_from(["rows"] * 8 + ["closed", "failed"]))
    rows = draw(st.integers(0, 4)) if kind == "rows" else 0
    return Status(
        kind,
        rows,
        rows * 3,
        leaves=draw(st.sampled_from([LEAF] * 6 + ["other"])) if kind == "rows" else "",
        words="ValueError: no",
        digests=draw(st.sampled_from([{}, {"0,1": ["a"]}, {"0,1": ["a"]}, {"0,1": ["b"]}])),
    )


@given(st.lists(statuses(), min_size=1, max_size=4), st.sampled_from(LAST), st.booleans())
def test_all_come_to_the_same_end(said, last, is_first):
    heard = {p: Status.unpack(status.pack()) for p, status in enumerate(said)}
    ends = []
    for process, own in heard.items():
        if own.kind == "failed":
            continue  # raises its own error
        try:
            ends.append(judge(asked(process, len(said), last, 0 if is_first else 12), heard).size)
        except ShoalError as error:
            ends.append(type(error).__name__)
        if own.kind == "closed" and not any(status.kind == "failed" for status in said):
            assert ends.pop() == 0
    assert len(set(ends)) <= 1
    if set(ends) == {12} and not is_first:
        full = all(status.rows == 4 for status in said)
        assert full or (last == "pad" and any(status.rows for status in said))


def test_verdict_at_each_end_of_the_data():
    whole, short, over = Status("rows", 4, 12, leaves="="), Status("rows", 3, 9), Status()
    assert judge(asked(0, 2), {0: whole, 1: whole}) == (12, LEAF)
    assert judge(asked(0, 2), {0: over, 1: over}).size == 0
    assert judge(asked(0, 2), {0: whole, 1: short}).size == 0
    padded = short._replace(leaves=LEAF)
    assert judge(asked(0, 2, "pad"), {0: whole, 1: padded}).size == 12
    assert judge(asked(0, 2, "pad"), {0: whole, 1: over._replace(leaves="=")}).size == 12
    with pytest.raises(UsageError, match="0 rows of process 1, 4 rows of process 0"):
        judge(asked(0, 2, "error"), {0: whole, 1: over})
    with pytest.raises(UsageError, match="8 rows of process 1, more than in the first batch"):
        judge(asked(0, 2, "pad"), {0: whole, 1: Status("rows", 8, 24)})
    with pytest.raises(PeerFailedError, match=r"process 1 .host. raised ValueError: no") as caught:
        judge(asked(0, 2), {0: whole, 1: Status("failed", words=FAILED)})
    assert caught.value.failed == {1: FAILED}
    with pytest.raises(DivergenceError, match="process 1: closed its feed after 2 batches"):
        judge(asked(0, 2), {0: whole, 1: Status("closed", batches=2)})
    assert judge(asked(1, 2), {0: whole, 1: Status("closed", batches=2)}).size == 0


def test_the_first_batch_says_the_size():
    one, other = Status("rows", 4, 12, leaves=LEAF), Status("rows", 2, 6, leaves=LEAF)
    first = asked(0, 2, size=0, leaves="")
    assert judge(first, {0: one, 1: one}) == (12, LEAF)
    assert judge(first._replace(remainder="pad"), {0: one, 1: other}).size == 12
    with pytest.raises(UsageError, match="must be whole: 2 rows of process 1, 4 rows of process 0"):
        judge(first, {0: one, 1: other})
    with pytest.raises(UsageError, match="the reader of process 1 is empty"):
        judge(first._replace(remainder="pad"), {0: one, 1: Status()})


def test_the_line_that_differs_is_shown():
    one, other = f"a\n{LEAF}", "a\nb"
    said = {0: Status("rows", 4, 12, leaves="="), 1: Status("rows", 4, 12, leaves=other)}
    with pytest.raises(DivergenceError) as caught:
        judge(asked(0, 2, leaves=one), said)
    assert caught.value.sides == {LEAF: (0,), "b": (1,)}
    said[1] = said[1]._replace(leaves="a")
    with pytest.raises(DivergenceError, match="2 leaves"):
        judge(asked(0, 2, leaves=one), said)
