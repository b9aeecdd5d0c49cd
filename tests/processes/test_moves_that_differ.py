"""Processes that disagree about a move among the same devices: an error on all, and no hang."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import shoal
from shoal import Layout
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
    return shoal.enter_manual(s.array, s.either(s.columns, s.whole))


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


def maps(s):
    x = shoal.put(VALUES, s.columns)
    return shoal.linear(x, x, layout=s.either(s.rows, s.columns))


def told_by(call, s):
    """Return the kind of error and its text; the processes are in step again afterwards."""
    try:
        made = call(s)
        for each in made if inspect.isgenerator(made) else [made]:
            jax.block_until_ready(each)
    except shoal.ShoalError as error:
        told = [type(error).__name__, str(error)]
    else:
        told = ["none", ""]
    shoal.barrier("again")
    return told


WAYS = {one.__name__: one for one in (
    targets, dtypes, trees, sources, nothing_to_send, meshes, another_call, donated, staged, keys,
    under_grad, entered, constrained, constrained_under_vmap, regions, maps,
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


@pytest.mark.parametrize("names", [[*WAYS]], ids=["in turn"])
def test_processes_that_disagree_about_a_move_get_an_error_on_all(child_env, tmp_path, names):
    first, second = both(disagree, child_env, tmp_path, names)
    for name in names:
        assert [told[name][0] for told in (first, second)] == ["DivergenceError"] * 2, name
