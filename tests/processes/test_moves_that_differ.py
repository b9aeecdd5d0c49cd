"""Processes that disagree about a move among the same devices: an error on all, and no hang."""

from __future__ import annotations

import inspect
import json
import logging
import os
import weakref
from functools import partial
from pathlib import Path

import jax
import numpy as np

import shoal
from shoal import Layout
from shoal.runtime.uses_client import client_here
from shoal.testing.cluster import Cluster

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)


class Sides:
    """The arguments of both processes, as they make their calls."""

    def __init__(self, odd):
        self.odd = odd
        self.mesh = shoal.make_mesh({"x": -1})
        ids = [device.id for device in jax.devices()]
        self.turned = shoal.make_mesh({"x": -1}, devices=ids[::-1])
        self.rows, self.columns = Layout(self.mesh, "x", None), Layout(self.mesh, None, "x")
        self.whole = Layout(self.mesh, None, None)
        self.long = Layout(self.mesh, "x", None, None)  # of more dims than the arrays
        self.array = shoal.put(VALUES, self.rows)
        self.keys = shoal.put(jax.random.split(jax.random.key(0), 8), Layout(self.mesh, "x"))

    def either(self, one, other):
        return other if self.odd else one


def targets(s):
    return shoal.relayout(s.array, s.either(s.columns, s.whole))


def dtypes(s):
    x = shoal.put(VALUES.astype(s.either("float32", "int16")), s.rows)
    return shoal.relayout(x, s.columns)


def trees(s):
    return shoal.relayout({"a": s.array, **s.either({}, {"b": s.array})}, s.columns)


def sources(s):
    """Process 1 cuts its columns from the whole, and goes on to its next call."""
    x = s.either(s.array, shoal.put(VALUES, s.whole))
    yield shoal.relayout(x, s.columns)
    shoal.barrier("next")


def nothing_to_send(s):
    yield shoal.relayout(s.array, s.either(s.columns, s.rows))
    shoal.barrier("next")


def meshes(s):
    return shoal.relayout(s.array, s.either(s.columns, Layout(s.turned, "x", None)))


def another_call(s):
    call = s.either(lambda: shoal.relayout(s.array, s.columns), lambda: shoal.barrier("other"))
    return call()


def donated(s):
    return shoal.relayout(shoal.put(VALUES, s.rows), s.columns, donate=bool(s.odd))


def staged(s):
    return shoal.relayout(s.array, s.columns, staged=bool(s.odd))


def keys(s):
    return shoal.relayout(s.keys, s.either(Layout(s.mesh, None), Layout(s.turned, "x")))


def under_grad(s):
    layout = s.either(s.columns, s.whole)
    return jax.grad(lambda x: (shoal.relayout(x, layout) ** 2).sum())(s.array)


def entered(s):
    return shoal.compat.enter_manual(s.array, s.either(s.columns, s.whole))


def constrained(s):
    return shoal.constrain(s.array, s.either(s.columns, s.whole))


def constrained_under_vmap(s):
    layout = Layout(s.mesh, s.either(None, "x"))
    return jax.vmap(lambda x: shoal.constrain(x, layout))(shoal.put(VALUES, s.columns))


def regions(s):
    summed = shoal.manual(
        lambda x: jax.lax.psum(x.sum(), "x"), s.either(s.rows, s.columns), Layout(s.mesh)
    )
    return summed(s.array)


def functions(s):
    def total(x):
        return jax.lax.psum(x.sum(), "x")

    def largest(x):
        return jax.lax.pmax(x.max(), "x")

    return shoal.manual(s.either(total, largest), s.rows, Layout(s.mesh))(s.array)


def closures(s):
    factor = 2.0 + s.odd
    return shoal.manual(lambda x: x * factor, s.rows, s.rows)(s.array)


def closed_over(s):
    factors = jax.numpy.ones(8) * (2.0 + s.odd)
    return shoal.manual(lambda x: x * factors, s.rows, s.rows)(s.array)


def maps(s):
    x = shoal.put(VALUES, s.columns)
    return shoal.compat.linear(x, x, layout=s.either(s.rows, s.columns))


def weights(s):
    return shoal.compat.linear(shoal.put(VALUES, s.columns), VALUES + s.odd, layout=s.rows)


def weights_of_replicas(s):
    y = shoal.compat.linear(shoal.put(VALUES, s.whole), VALUES + s.odd)  # which sends nothing
    shoal.barrier("after it")
    return y


def initializers(s):
    table = VALUES + s.odd
    made = shoal.create(lambda: table * 2, layouts=s.rows)
    shoal.barrier("after it")
    return made


def told_by(call, s):
    """Return the kind of error and its text; the processes are in step again afterwards."""
    try:
        made = call(s)
        for each in made if inspect.isgenerator(made) else [made]:
            jax.block_until_ready(each)
    except (shoal.ShoalError, TypeError) as error:
        told = [type(error).__name__, str(error)]
    else:
        told = ["none", ""]
    shoal.barrier("again")
    return told


WAYS = {one.__name__: one for one in (
    targets, dtypes, trees, sources, nothing_to_send, meshes, another_call, donated, staged, keys,
    under_grad, entered, constrained, constrained_under_vmap, regions, functions, closures,
    closed_over, maps, weights, weights_of_replicas, initializers,
)}  # fmt: skip


def disagree(names, path):
    sides = Sides(shoal.process_index())
    told = {name: told_by(WAYS[name], sides) for name in names}
    Path(path, f"{shoal.process_index()}.json").write_text(json.dumps(told), encoding="utf-8")


def both(program, env, path, *arguments):
    """Run a program in two processes of two devices; return what each wrote."""
    with Cluster(2, start_method="fork", devices=2, env=env) as cluster:
        cluster.start(program, *arguments, str(path))
        ended = cluster.wait()
    assert [one.code for one in ended] == [0, 0], [one.error for one in ended]
    return [json.loads((path / f"{n}.json").read_text(encoding="utf-8")) for n in range(2)]


def test_processes_that_disagree_about_a_move_get_an_error_on_all(child_env, tmp_path):
    for told in both(disagree, child_env, tmp_path, [*WAYS]):
        assert {name: kind for name, (kind, _) in told.items()} == dict.fromkeys(
            WAYS, "DivergenceError"
        )
        texts = {name: text for name, (_, text) in told.items()}
        check_texts(texts)


def check_texts(texts):
    """Both sides are shown, and what an earlier put made different is told of that put."""
    for name in ("targets", "under_grad", "entered", "constrained"):
        assert "process 0: float32[8,8] as (-, x) from (x, -)" in texts[name], name
        assert "process 1: float32[8,8] as (-, -) from (x, -)" in texts[name], name
    assert "processes gave put different dtypes" in texts["dtypes"]
    assert "process 1: ['b']: float32[8,8] as (-, x) from (x, -)" in texts["trees"]
    assert "donate=True, staged=False" in texts["donated"]
    assert "donate=False, staged=True" in texts["staged"]
    for name in ("sources", "nothing_to_send"):
        assert "process 1: relayout at tests/" in texts[name]
    assert "constrain needs the same tree" in texts["constrained_under_vmap"]
    assert "manual needs the same function" in texts["regions"]
    assert "process 1: the function's program: values " in texts["closures"]
    assert "those that the function closes over: float32[8]: values " in texts["closed_over"]
    assert "process 1: the result: float32[8,8] as (-, x)" in texts["maps"]
    assert "process 1: weight: float32[8, 8]: values " in texts["weights"]
    assert "process 1: weight: float32[8,8] as (-, -): values " in texts["weights_of_replicas"]
    assert "initializer closes over: float32[8,8]: values " in texts["initializers"]


def close_over(path):
    sides = Sides(0)
    factors = jax.numpy.ones(8)
    kept = weakref.ref(factors)
    shoal.manual(partial(jax.numpy.multiply, factors), sides.rows, sides.rows)(sides.array)
    del factors
    Path(path, f"{shoal.process_index()}.json").write_text(json.dumps(kept() is None))


def test_what_a_function_closes_over_is_freed_with_it(child_env, tmp_path):
    assert both(close_over, child_env, tmp_path) == [True, True]


REFUSED = {  # what process 1 alone gets wrong
    "a dim that does not divide": lambda s: shoal.relayout(s.either(s.array, s.six), s.columns),
    "a host value": lambda s: shoal.relayout(s.either(s.array, VALUES), s.columns),
    "a number": lambda s: shoal.relayout(s.either(s.array, 5), s.columns),
    "half a tree": lambda s: shoal.relayout([s.array, s.either(s.array, VALUES)], s.columns),
    "no layout": lambda s: shoal.relayout(s.array, s.either(s.columns, 3)),
    "a flag": lambda s: shoal.relayout(s.array, s.columns, donate=s.either(False, "no")),
    "an argument": lambda s: shoal.relayout(s.array, s.columns, **s.either({}, {"quick": True})),
    "constrain": lambda s: shoal.constrain(s.array, s.either(s.columns, s.long)),
    "manual": lambda s: shoal.manual(
        lambda x: jax.lax.psum(x.sum(), "x"), s.either(s.rows, s.long), Layout(s.mesh)
    )(s.array),
    "constrain a set": lambda s: shoal.constrain(s.either(s.array, {1}), s.columns),
    "manual of a set": lambda s: shoal.manual(
        lambda x: jax.lax.psum(x.sum(), "x"), s.rows, Layout(s.mesh)
    )(s.either(s.array, {1})),
    "manual, by name": lambda s: shoal.manual(
        lambda x: jax.lax.psum(x.sum(), "x"), s.rows, Layout(s.mesh)
    )(*s.either([s.array], []), **s.either({}, {"x": s.array})),
    "linear": lambda s: shoal.compat.linear(s.array, s.either(s.array, s.six)),
    "manual, while it is traced": lambda s: shoal.manual(
        lambda x: x @ x if s.odd else x, s.rows, s.rows
    )(s.array),
}


def refuse(path):
    s = Sides(shoal.process_index())
    s.six = shoal.put(np.ones((8, 6), np.float32), s.whole)
    told = {name: told_by(call, s) for name, call in REFUSED.items()}
    Path(path, f"{s.odd}.json").write_text(json.dumps(told), encoding="utf-8")


def test_arguments_that_one_process_gets_wrong_fail_the_call_for_the_others(child_env, tmp_path):
    first, second = both(refuse, child_env, tmp_path)
    assert {name: kind for name, (kind, _) in first.items()} == dict.fromkeys(
        REFUSED, "PeerFailedError"
    )
    assert {kind for kind, _ in second.values()} <= {"UsageError", "UsageTypeError", "TypeError"}
    for name, (_, text) in first.items():
        assert "process 1" in text, name


def agreed(path):
    """Count what each call sends to agree: the first calls nothing, the others once."""
    s, me = Sides(shoal.process_index()), shoal.process_index()
    client = client_here()
    hosts = shoal.make_mesh({"host": 2, "own": -1})
    arrive, names = client.arrive, []

    def noted(point, *args, **kwargs):
        names.append(point.name)
        return arrive(point, *args, **kwargs)

    whole, grid = shoal.put(VALUES, s.whole), shoal.put(VALUES, Layout(hosts, "host", "own"))
    keys = shoal.put(jax.random.split(jax.random.key(0), 8), Layout(s.mesh, None))
    client.arrive = noted
    copies = [
        shoal.relayout(whole, s.rows),
        shoal.relayout({"a": whole, "b": s.array}, {"a": s.columns, "b": s.rows}),
        shoal.relayout(keys, Layout(s.mesh, "x")),
        shoal.relayout(s.array, Layout(hosts, ("host", "own"), None)),
        shoal.relayout(grid, Layout(hosts, "host", None)),  # within each process
        shoal.constrain(whole, s.rows),
        shoal.constrain(VALUES, s.rows),
        shoal.compat.linear(whole, whole),
        jax.jit(lambda x: shoal.constrain(x, s.columns))(s.array),
    ]
    assert names == [], names
    summed = shoal.manual(lambda x: jax.lax.psum(x.sum(), "x"), s.rows, Layout(s.mesh))
    for name, call in {
        "relayout": lambda: shoal.relayout([s.array, s.keys], [s.columns, Layout(s.mesh, None)]),
        "constrain": lambda: shoal.constrain([s.array, s.array], [s.columns, s.whole]),
        "linear": lambda: shoal.compat.linear(copies[1]["a"], copies[1]["a"], layout=s.rows),
        "manual": lambda: summed(s.array),
    }.items():
        jax.block_until_ready(call())
        assert names == [f"{name} among processes 0-1"], names
        names.clear()
    assert compiled(lambda: jax.jit(lambda x: x + 1)(s.array))
    for call in (
        lambda: summed(s.array),
        lambda: shoal.constrain(s.array, s.columns),
        lambda: shoal.relayout(s.array, s.columns),
        lambda: shoal.compat.linear(copies[1]["a"], copies[1]["a"], layout=s.rows),
    ):
        call()
        assert compiled(call) == []
    client.arrive = arrive
    np.testing.assert_array_equal(shoal.allgather(copies[4], tiled=True), VALUES)
    Path(path, f"{me}.json").write_text("true", encoding="utf-8")


def compiled(call):
    """Return what JAX logs of programs that it traces and compiles in a call."""
    kept, logger, handler = [], logging.getLogger("jax"), logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    logger.addHandler(handler)
    with jax.log_compiles():
        jax.block_until_ready(call())
    logger.removeHandler(handler)
    return [one for one in kept if "ompil" in one or "racing" in one]


def test_a_call_that_sends_agrees_once_and_a_copy_never(child_env, tmp_path):
    assert both(agreed, child_env, tmp_path) == [True, True]


def late(fifo, path):
    """Process 1 comes when process 0 has given up, after its own time-out."""
    s = Sides(shoal.process_index())
    if s.odd:
        open(fifo, "rb").close()
    try:
        shoal.relayout(s.array, s.columns, timeout_s=s.either(0.5, 50))
    except shoal.DeadlineError as error:
        told = str(error)
    if not s.odd:
        open(fifo, "wb").close()
    shoal.barrier("again")
    moved = shoal.relayout(s.array, s.columns, timeout_s=50)
    np.testing.assert_array_equal(shoal.allgather(moved, tiled=True), VALUES)
    Path(path, f"{s.odd}.json").write_text(json.dumps(told), encoding="utf-8")


def test_the_time_out_of_a_call_ends_it_for_all(child_env, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    first, second = both(late, child_env, tmp_path, str(tmp_path / "fifo"))
    assert "relayout among processes 0-1" in first
    assert "0.5 s" in first
    assert "relayout among processes 0-1" in second
