"""Calls that send nothing, over real processes: what differs is told where these meet next."""

from __future__ import annotations

import itertools
import os
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np

import shoal
from shoal import Layout
from shoal.errors import DivergenceError
from shoal.testing.cluster import Cluster


class Told:
    """What each meeting of a process told it."""

    def __init__(self):
        self.by_name = {}

    def meet(self, name, meeting=None, again=()):
        """Meet, and note what comes of it; `again`: who must be in step afterwards; (): all."""
        try:
            meeting() if meeting else shoal.barrier("go")
        except DivergenceError as error:
            self.by_name[name] = [str(error), {side: [*who] for side, who in error.sides.items()}]
        else:
            self.by_name[name] = "equal"
        if again is not None:
            shoal.barrier("again", processes=again or None)


def differ_in_every_way(path):
    """Run in each of three processes with two devices each; process 1 differs from the others."""
    index, told = shoal.process_index(), Told()
    odd = index % 2
    mesh = shoal.make_mesh({"x": -1})
    rows, whole = Layout(mesh, "x", None), Layout(mesh, None, None)
    value = np.arange(144, dtype=np.float32).reshape(36, 4)
    own = value[12 * odd : 12 * odd + 12]

    shoal.put({"w": own, "b": value}, {"w": rows, "b": whole})
    told.meet("own rows")

    shoal.put(own, rows, check_values=False)
    shoal.put(value[::2], rows)
    shoal.put(np.asfortranarray(value) if odd else value, rows)
    shoal.compat.pack([value[2 * index : 2 * index + 2]] * 2, rows)
    if index == 0:  # what one process holds alone is its own affair
        shoal.put(value, Layout(shoal.make_mesh({"y": 2}, devices=[0, 1]), "y", None))
    told.meet("equal")

    differ_in_calls(path, told, value, rows, odd=odd)
    large = np.zeros((3 << 16, 4), np.float32)
    large[-1] = odd
    shoal.put(large, rows)
    told.meet("large")

    come_late(index, told, lambda: shoal.put(own, rows))
    beside_the_main_line(told, lambda: shoal.put(own, rows))
    told.meet("the main line")
    if index < 2:
        two = shoal.make_mesh({"x": 4}, devices=jax.devices()[:4])
        shoal.put(value + odd, Layout(two, "x", None))
        told.meet("two", lambda: shoal.barrier("two", processes=[0, 1]), again=[0, 1])
    shoal.put(value + odd, rows)
    told.meet("at the end", shoal.shutdown, again=None)
    return told.by_name


def differ_in_calls(path, told, value, rows, *, odd):
    """Another number of calls, another place, another shape."""
    for _ in range(1 + odd):
        shoal.put(value, rows)
    told.meet("once more", lambda: shoal.broadcast({"secret": 1}))

    if odd:
        shoal.put(value, rows)
    else:
        shoal.put(value, rows)
    told.meet("elsewhere", lambda: shoal.assert_same(3))

    shoal.compat.pack([value[: 2 + 2 * odd]] * 2, rows)
    told.meet("shape", lambda: shoal.save(path, {"step": 1}))
    assert not os.path.exists(path)

    lying = shoal.put(value, Layout(rows.mesh, None, None))
    shoal.relayout(lying, rows if odd else lying.sharding)  # which sends nothing
    told.meet("moved")

    layout = Layout(rows.mesh, None)
    shoal.create(lambda key: jax.random.bits(key, (4,)), jax.random.key(odd), layouts=layout)
    told.meet("created")
    shoal.create(lambda by: by * np.ones(4, np.float32), 1.0 + odd, layouts=layout)
    told.meet("created by a number")
    shoal.create(lambda: np.ones(6, np.float32), layouts=Layout(rows.mesh, "x") if odd else layout)
    told.meet("created elsewhere")
    table, key = np.arange(9, dtype=np.float32) + odd, jax.random.key(odd)
    for name, init in {
        "closed over": lambda: jnp.asarray(table) * 2,
        "closed over deeply": lambda: jax.lax.fori_loop(0, 2, lambda _, c: c + table, table),
        "closed over by a key": lambda: jax.random.normal(key, (4,)),
        "closed over as a number": lambda: jnp.ones(4) * (0.5 + odd),
        "written": (lambda: jnp.ones(4) + 1) if odd else (lambda: jnp.ones(4) - 1),
    }.items():
        shoal.create(init, layouts=layout)
        told.meet(name)
    shoal.create(lambda: jnp.asarray(table - odd) * 2, layouts=layout)
    shoal.barrier("equal programs")


def come_late(index, told, put):
    """Process 2 comes when the others have been told."""
    put()
    beside = {"processes": [0, 2], "lane": "beside"}
    if index == 2:
        shoal.barrier("the others know", **beside)

    def meeting():
        try:
            shoal.barrier("go")
        finally:
            if index == 0:
                shoal.barrier("the others know", **beside)

    told.meet("late", meeting)


def beside_the_main_line(told, put):
    """A thread's calls belong to the lane in which it meets others."""

    def behind():
        shoal.barrier("begin", lane="data")
        put()
        told.meet("lane", lambda: shoal.barrier("go", lane="data"))
        shoal.barrier("end", lane="data")

    thread = threading.Thread(target=behind)
    thread.start()
    thread.join()


CREATED = (
    "created", "created by a number", "created elsewhere", "closed over", "closed over deeply",
    "closed over by a key", "closed over as a number", "written",
)  # fmt: skip
OTHERWISE = ("once more", "elsewhere", "shape", "moved", *CREATED)
MEANT = "To compare only the tree, shapes, dtypes and layouts, pass put(..., check_values=False)."
HERE = "put at tests/processes/test_call_record.py:"


def explained(told, name):
    """Check what all were told; return what the others did, and what process 1 did."""
    versions = {}
    for process, one in enumerate(told):
        text, sides = one.get(name, ["", {}])
        heading, *lines = text.splitlines() or [""]
        if not text:
            continue
        assert heading.startswith(f"process {process} of 3 (")
        assert "): processes gave " in heading or "): processes made different calls" in heading
        assert any("nothing; the difference was found at" in line for line in lines)
        assert (lines[-1] == MEANT) == (name not in OTHERWISE)
        assert all(any(side in line for line in lines) for side in sides)
        place = "" if any(" at tests/" in side for side in sides) else f"{lines[0].strip()}: "
        place = place.partition("   ")[0] + ": " if "   " in place else place
        versions = {processes == [1]: place + side for side, processes in sides.items()}
    return versions[False], versions[True]


def test_differing_calls_raise_at_the_next_synchronization_point(tmp_path):
    with Cluster(3, devices=2, start_method="fork") as cluster:
        told = cluster.run(differ_in_every_way, str(tmp_path / "model.ckpt"))
    for name in ("equal", "the main line"):
        assert [one.pop(name) for one in told] == ["equal"] * 3
    assert [len(one) for one in told] == [18, 18, 17]  # process 2 is none of the two
    pairs = {name: explained(told, name) for name in told[0]}
    for name in ("own rows", "large", "late", "lane", "two", "at the end"):
        texts = [text.rpartition(": values ") for text in pairs[name]]
        assert texts[0][0] == texts[1][0] != ""
        assert texts[0][2] != texts[1][2]
        assert all(text.startswith(HERE) for text in pairs[name])
    assert "): ['w']: float32[12,4] as (x, -): values " in pairs["own rows"][0]
    assert pairs["large"][1].endswith(" (a sample)")
    nothing, once = pairs["once more"]
    assert nothing.startswith(
        "(no call: it reached 'broadcast' (tests/processes/test_call_record.py:"
    )
    assert once.startswith(HERE)
    first, second = (int(text.removeprefix(HERE).split()[0]) for text in pairs["elsewhere"])
    assert first == second + 2
    assert [text.rpartition(": ")[2] for text in pairs["shape"]] == [
        "float32[2,4] as (x, -)",
        "float32[4,4] as (x, -)",
    ]
    assert [text.rpartition(": ")[2] for text in pairs["moved"]] == [
        "float32[36,4] as (-, -)",
        "float32[36,4] as (x, -)",
    ]
    sides = [text.split(": ", 1) for name in CREATED for text in pairs[name]]
    assert all(place.startswith("create at ") for place, _ in sides)
    ends = re.compile(r"(?<=:) values .*|(?<= =) .*|(?<=program:) .*")
    facts = [ends.sub("", fact) for _, fact in sides]
    assert len({fact for _, fact in sides if " = " in fact}) == 2
    assert facts == [
        *["args[0]: key<fry>[] as ():"] * 2,
        *["args[0]: float32[] as () ="] * 2,
        "float32[6] as (-)",
        "float32[6] as (x)",
        *["array 0 of those that the initializer closes over: float32[9]:"] * 2,
        *["array 0 of those that the initializer closes over: float32[9]:"] * 2,
        *["array 0 of those that the initializer closes over: uint32[2]:"] * 2,
        *["the initializer's program:"] * 4,
    ]
    rows = told[2]["late"][0].splitlines()
    assert rows[1:] == told[0]["late"][0].splitlines()[1:], "it is not in the groups"
    assert [row.partition(": ")[0].strip() for row in rows[2:4]] == ["process 0", "process 1"]
    assert rows[4].startswith("  put sends nothing; the difference was found at barrier 'go' (")
    assert told[2]["late"][1] == told[0]["late"][1], "the sides are equal on all"
    assert rows[1].endswith("   come_late(index, told, lambda: shoal.put(own, …")


def never_meet():
    """Make steps, and no call that waits for others."""
    layout = Layout(shoal.make_mesh({"x": -1}), "x")
    shoal.put(np.full(8, shoal.process_index(), np.int32), layout)
    try:
        for number in itertools.count():
            with shoal.step(number):
                pass
    except DivergenceError as error:
        return [str(error), {side: [*who] for side, who in error.sides.items()}]


def test_processes_that_only_make_steps_get_the_difference_by_heartbeats():
    env = {**os.environ, "SHOAL_HEARTBEAT_S": "0.1"}
    with Cluster(2, env=env, start_method="fork") as cluster:
        told = cluster.run(never_meet)
    for process, (text, sides) in enumerate(told):
        assert text.startswith(f"process {process} of 2 (")
        assert "): processes gave put different values\n" in text
        assert "put sends nothing; the difference was found at 'step " in text
        assert text.endswith(MEANT)
        assert [*sides.values()] == [[0], [1]]


def hang_in_programs_of_their_own():
    """Give `put` different values, and run programs that wait for each other without an end.

    Process 0 has also compiled a program alone.
    """
    odd = shoal.process_index()
    mesh = shoal.make_mesh({"x": 2})
    y = shoal.put(np.float32(1), Layout(mesh))
    if not odd:
        print(y / 2)
    while not np.sum(shoal.allgather(len(shoal.job_status().programs))):
        pass
    x = shoal.put(np.arange(16, dtype=np.float32).reshape(4, 4) + odd, Layout(mesh, "x", None))
    target = shoal.named_sharding(Layout(mesh, None, None) if odd else Layout(mesh, None, "x"))
    jax.block_until_ready(jax.jit(lambda x: x * 2, out_shardings=target)(x))


def test_processes_that_hang_in_their_own_programs_end_with_the_call_that_differs(child_env):
    env = child_env | {"SHOAL_HEARTBEAT_S": "0.1", "SHOAL_HANG_TIMEOUT_S": "2"}
    with Cluster(2, devices=1, env=env, start_method="fork") as cluster:
        cluster.start(hang_in_programs_of_their_own)
        ended = cluster.wait()
    for process, one in enumerate(ended):
        assert one.code == 70, one
        headline, evidence, *_ = one.err[one.err.index("shoal: ") :].splitlines()
        assert headline.startswith(f"shoal: process {process} of 2 (")
        assert "processes gave put different values" in headline
        assert evidence.startswith("  process 0 alone has compiled jit(true_divide) for 2 devices")
        assert "put at tests/processes/test_call_record.py:" in one.err
        assert (
            "the main thread has been in native code, at tests/processes/test_call_record"
            in one.err
        )
