"""Where a feed stands, and feeds that go on from there."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS = {"x": Layout(MESH, "data", "model"), "n": Layout(MESH, "data")}
DATA = {"x": np.arange(88, dtype=np.float32).reshape(44, 2), "n": np.arange(44, dtype=np.int32)}


def parts(*sizes):
    """Batches of so many rows."""
    first = 0
    for size in sizes:
        yield {name: column[first : first + size] for name, column in DATA.items()}
        first += size


def numbers(batches):
    return [np.asarray(batch["n"]).tolist() for batch in batches]


@pytest.mark.parametrize("source", ["in turn", "by number"])
def test_feed_resumes_at_its_row(source):
    def made(start):
        if source == "by number":
            return shoal.feed(DATA, ROWS, batch=8, start=start)
        return shoal.feed(parts(8, 8, 8, 8, 8, 4), ROWS, start=start)

    whole = numbers(made(0))
    for taken in range(6):
        with made(0) as batches:
            before = [next(batches) for _ in range(taken)]
        with made(batches.rows) as after:
            assert numbers(before) + numbers(after) == whole
        assert after.rows == 40


@pytest.mark.parametrize("order", [None, [*range(43, -1, -1)]])
def test_its_state_goes_into_a_checkpoint(tmp_path, order):
    rows = {"order": 0, "rows": 0}
    target = {"w": Layout(MESH, "data"), "feed": rows}
    with shoal.feed(DATA, ROWS, batch=8, order=order, start=rows, prefetch=4) as batches:
        next(batches)
        state = {"w": shoal.put(np.ones(4, np.float32), target["w"]), "feed": batches.state()}
        shoal.save(tmp_path / "state", state)
    for back in (
        shoal.restore(tmp_path / "state", target),
        shoal.restore(tmp_path / "state"),
        {"feed": shoal.put(state["feed"], Layout(MESH))},
    ):
        with shoal.feed(DATA, ROWS, batch=4, order=order, start=back["feed"]) as batches:
            assert batches.rows == 8
            wanted = [8, 9, 10, 11] if order is None else [35, 34, 33, 32]
            assert numbers([next(batches)]) == [wanted]


def test_a_state_is_of_one_order():
    def state(start=8, **options):
        with shoal.feed(DATA, ROWS, start=start, **options) as batches:
            return batches.state()

    by_number = state(batch=8)
    assert by_number == state(batch=4)
    with shoal.feed(parts(8, 8), ROWS, start=8) as batches:
        in_turn = batches.state()
    assert in_turn == {"order": 0, "rows": 8}
    other = state(batch=8, order=[*range(43, -1, -1)])
    assert 0 < other["order"] < 2**31
    for saved, was in ((other, "rows by index in order"), (in_turn, "an iterable")):
        with pytest.raises(
            UsageError, match=f"was saved by a feed of {was}.*\n.*or start=8 to continue"
        ):
            state(saved, batch=8)
    with pytest.raises(UsageError, match="this one is of an iterable"):
        shoal.feed(parts(8), ROWS, start=by_number)
    assert state(other | {"rows": 0}, batch=8)["rows"] == 0, "another epoch may begin"


class Reader:
    """An iterable with a state of its own, as grain or torchdata has it."""

    def __init__(self, name, fails=False):
        self.at, self.fails = {"batch": 0}, fails
        setattr(self, name, self.say)
        self.load_state_dict = self.at.update

    def say(self):
        if self.fails:
            raise NotImplementedError("not of this transformation")
        return self.at

    def __iter__(self):
        while self.at["batch"] < 5:
            self.at["batch"] += 1
            yield [*parts(*[8] * 5)][self.at["batch"] - 1]


@pytest.mark.parametrize("name", ["get_state", "state_dict"])
def test_the_state_of_a_reader_is_that_of_the_last_batch_given(name):
    whole = numbers(shoal.feed(parts(*[8] * 5), ROWS))
    with shoal.feed(Reader(name), ROWS, prefetch=5) as batches:
        with pytest.raises(UsageError, match="no batch was delivered yet"):
            batches.reader_state()
        before = numbers([next(batches), next(batches)])
        own, state = batches.reader_state(), batches.state()
    assert (own, state["rows"]) == ({"batch": 2}, 16)
    for set_to, skip in ((own, False), ({"batch": 0}, True)):
        reader = Reader(name)
        reader.load_state_dict(set_to)
        with pytest.raises(UsageError, match=r"a Reader can be set .*\nskip=False if it was"):
            shoal.feed(reader, ROWS, start=state)
        with shoal.feed(reader, ROWS, start=state, skip=skip) as batches:
            assert before + numbers(batches) == whole
            assert batches.rows == 40
            assert batches.reader_state() == {"batch": 5}


def test_readers_that_cannot_say_where_they_are():
    with shoal.feed(Reader("get_state", fails=True), ROWS) as batches:
        next(batches)
        with pytest.raises(NotImplementedError, match="not of this transformation"):
            batches.reader_state()
    with shoal.feed(parts(8), ROWS) as batches:
        next(batches)
        with pytest.raises(UsageError, match=r"no state of its own .* state\(\) is enough"):
            batches.reader_state()


def test_where_it_cannot_go_on():
    for start, words in (
        (12, "start=12 is not a number of whole batches"),
        (400, "start=400, but the reader ended after 32 rows"),
    ):
        with pytest.raises(UsageError, match=words):
            next(shoal.feed(parts(8, 8, 8, 4), ROWS, start=start))
    with pytest.raises(UsageError, match="ended after 0 rows"):
        next(shoal.feed([], ROWS, start=8))
    assert list(shoal.feed(DATA, ROWS, batch=8, start=400)) == []


def test_filled_up_batches_go_on_where_they_were():
    for sizes in ((8, 5, 8), (5, 8, 8)):
        with shoal.feed(parts(*sizes), ROWS, remainder="pad") as batches:
            whole = [(*numbers([batch]), np.asarray(mask).tolist()) for batch, mask in batches]
        for start in (8, 16, 24):
            if sizes[0] == 8 or start == 24:
                with shoal.feed(parts(*sizes), ROWS, remainder="pad", start=start) as batches:
                    rest = [(*numbers([b]), np.asarray(mask).tolist()) for b, mask in batches]
                assert rest == whole[start // 8 :]
