"""Processes that would silently compute wrong numbers are told so, all of them, and where.

Those that make other calls than the rest are in step again once `live_processes` has returned.
"""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json
import numpy as np
import shoal
initialize(virtual_devices=4)
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def told(call):
    try:
        call()
    except DivergenceError as error:
        sides = {side: list(processes) for side, processes in error.sides.items()}
        return [str(error).partition("): ")[2], sides]

def spread(shape, spec, value_of, axes=("p", "d")):
    # What each process makes by itself: nothing compares the values.
    mesh = Mesh(np.array(jax.devices()).reshape(3, 4), axes)
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(shape, sharding, value_of)

def filled(shape, value):
    return lambda where: np.full(shape, value, np.float32)[where]

results = []
note = results.append
# a "replicated" array that differs: JAX says is_fully_replicated, and each reads its own
ok = spread((4, 6), (), filled((4, 6), 1))
bad = spread((4, 6), (), filled((4, 6), index))
assert bad.is_fully_replicated
note(told(lambda: shoal.assert_same({"w": ok})))
note(told(lambda: shoal.assert_same({"ok": ok, "w": bad})))
# rows are each process's own: they may differ. Across the devices of one they are replicated
rows = spread((3, 8), ("p",), filled((3, 8), index))
note(told(lambda: shoal.assert_same(rows)))
# columns are held by all three, another one by each of their devices; one of them differs
def columns(where):
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    values[2, 5] = -1 if index == 2 else values[2, 5]
    return values[where]
note(told(lambda: shoal.assert_same([rows, spread((3, 8), (None, "d"), columns)])))
# regions that two of three processes hold
two = Mesh(np.array([d for d in jax.devices() if d.process_index != 1]).reshape(2, 4), ("p", "d"))
half = jax.make_array_from_callback(
    (8,), NamedSharding(two, P("d")), filled((8,), index), dtype=np.float32)
note(told(lambda: shoal.assert_same([ok, half])))
# a replica that differs on one device of one process
def uneven(value):
    last = jax.local_devices()[3]
    pieces = [jax.device_put(np.full(6, float(value and d == last), "f4"), d)
              for d in jax.local_devices()]
    return jax.make_array_from_single_device_arrays((6,), ok.sharding.update(spec=P()), pieces)
here = told(lambda: shoal.assert_same(uneven(index == 1)))
note([here[0], list(here[1].values()), [side.count("device") for side in here[1]]])
# keys, and bits that few programs see, in an array of all processes
keys = jax.jit(lambda: jax.random.split(jax.random.key(5), (3, 2)), out_shardings=rows.sharding)()
tiny = spread((3, 8), (), lambda where: np.full((3, 8), 1, "int4")[where])
note(told(lambda: shoal.assert_same([keys, tiny, spread((6,), (), filled((6,), np.nan))])))
# layouts that differ
turned = spread((3, 8), (None, "d"), filled((3, 8), 0))
note(told(lambda: shoal.assert_same(rows if index else turned, name="layout"))[1])
first = Mesh(np.array(jax.devices()[:4]), ("d",))
alone = jax.make_array_from_callback(
    (8,), NamedSharding(first, P("d")), filled((8,), 1), dtype=np.float32)
note(told(lambda: shoal.assert_same(alone, name="alone"))[1])
# host values: bits count
nan = np.array([0x7fc00001], np.uint32).view(np.float32)
note(told(lambda: shoal.assert_same({"nan": nan, "zero": -0.0})))
note(told(lambda: shoal.assert_same({"nan": nan, "zero": 0.0 if index else -0.0})))
note(told(lambda: shoal.assert_same(np.random.default_rng(index < 2).integers(0, 99, 10**6))))
# another constant under jit: it would run, and sum wrongly
step = jax.jit(lambda x: (x * (1 + (index == 1))).sum())
note(told(lambda: shoal.assert_same_program(step, rows)))
note(told(lambda: shoal.assert_same_program(jax.jit(lambda x: (x * 2).sum()), rows)))
# calls that would be matched by their order alone
first, second = {"a": np.float32(index)}, {"b": np.int32(index)}
note(told(lambda: [shoal.assert_same(t) for t in (first, second)[:: -1 if index == 1 else 1]])[1])
shoal.assert_same("all are well", name="end")
say(json.dumps(results))
"""


def test_what_would_be_silently_wrong_is_an_error_on_every_process(job, said):
    # one file name on all, as programs have: calls are told apart by where they are
    ended = job.run(3, f"exec(compile({SCRIPT!r}, 'train.py', 'exec'))")
    for one in ended:
        assert one.code == 0, "\n".join(each.err for each in ended)
    results, *others = [json.loads(said(one).splitlines()[-1]) for one in ended]
    assert others == [results] * 2
    (
        fine, replicated, rows, columns, half, uneven, keys, layouts, alone,
        bits, zero, large, program, same_program, swapped,
    ) = results  # fmt: skip
    assert [fine, rows, keys, bits, same_program] == [None] * 5
    assert "first difference, in ['w']: float32[4,6]:" in replicated[0]
    assert replicated[1] == {f"['w'][0, 0] = {n}.0": [n] for n in range(3)}
    assert columns[1] == {"[1][2, 5] = 21.0": [0, 1], "[1][2, 5] = -1.0": [2]}
    assert half[1] == {"[1][0] = 0.0": [0], "[1][0] = 2.0": [2]}
    assert "replicas differ within a process" in uneven[0]
    assert uneven[1:] == [[[1]], [2]]
    for sides in (layouts, alone):
        assert any(" as P(" in side for side in sides)
        assert len(sides) == 2
    assert zero[1] == {"['zero'] = -0.0": [0], "['zero'] = 0.0": [1, 2]}
    assert sorted(large[1].values()) == [[0, 1], [2]]
    assert "first difference, line" in program[0]
    assert sorted(program[1].values()) == [[0, 2], [1]]
    assert sorted(map(len, swapped.values())) in ([1, 1], [1, 2])


APART = """
import threading
import numpy as np
import shoal
initialize()
side = {"lane": "side", "timeout_s": 1}

def ended(call):
    try:
        call()
    except (DivergenceError, DeadlineError) as error:
        return type(error).__name__
    return "met"

def odd():
    # what process 0 does where the others meet in their main threads
    if sys.argv[4] == "thread":
        thread = threading.Thread(target=lambda: ended(lambda: barrier("step 0", **side)))
        thread.start()
        thread.join()
    elif sys.argv[4] == "group":
        barrier("step 0", processes=[0, 1], timeout_s=1)
    elif sys.argv[4] == "pair":
        barrier("step 0", processes=[0, 1])

ends = [ended(lambda: odd() if index == 0 else barrier(
    "step 0", processes=[1, 2] if sys.argv[4] == "pair" else None))]
for number in range(1, 4):
    ends.append(ended(lambda: barrier(f"step {number}")))
while ended(shoal.live_processes) != "met":
    pass
ends += [ended(lambda: barrier(f"at last {number}")) for number in range(3)]
right = []
for number in range(3):
    value = np.full(3, number if index == number else -1)
    right.append(shoal.broadcast(value, number, name="value").tolist())
right.append(shoal.allgather(np.uint8(index), name="all").tolist())
say(" ".join(ends))
say(right)
"""


@pytest.mark.parametrize("odd", ["thread", "group", "pair", "less"])
def test_after_calls_of_other_lanes_and_groups_live_processes_leaves_all_in_step(job, said, odd):
    ended = job.run(3, APART, odd)
    for one in ended:
        assert one.code == 0, "\n".join(each.err for each in ended)
    lines = [said(one).splitlines() for one in ended]
    ends = [line[0].split() for line in lines]
    assert [line[1] for line in lines] == ["[[0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 1, 2]]"] * 3
    assert [names[-3:] for names in ends] == [["met"] * 3] * 3
    assert "DivergenceError" in ends[1]


TWICE = """
import shoal
initialize()
errors = []
for value in (1, None) if index else ("1", 0):  # the second call of process 0 equals the first of 1
    try:
        shoal.allgather(value)
    except DivergenceError as error:
        errors.append(str(error))
barrier("other", lane="report")
say(shoal.allgather(index, name="at last").tolist())
say("\\n".join(errors))
"""


def test_two_differences_in_a_row_leave_both_in_step(job, said):
    ended = job.run(2, TWICE)
    for one in ended:
        assert one.code == 0, "\n".join(each.err for each in ended)
        at_last, *errors = said(one).splitlines()
        assert at_last == "[0, 1]"
        assert sum("processes gave allgather different" in line for line in errors) == 2
        since = [line for line in errors if line.startswith("Their calls have failed since call ")]
        assert len(since) == 1
