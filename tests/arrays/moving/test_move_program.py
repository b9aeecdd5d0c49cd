"""Planned moves as compiled programs: bit for bit, and with exactly the bytes that were planned."""

import random

import jax
import numpy as np
import pytest

from arrays.planned_moves import as_it_lies, run, whole
from plan.transfer.collectives_by_hand import all_layouts
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.moving.move_program import stages
from shoal.plan.compiled import received_bytes_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.collective import shortest
from shoal.plan.transfer.move_steps import received_bytes

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
SIX = Mesh({"a": 2, "b": 3})
MESHES = {
    "one mesh": (CUBE, CUBE),
    "other axes": (Mesh({"x": 2, "y": 4}), Mesh({"x": 4, "y": 2})),
    "no common digits": (SIX, Mesh({"x": 3, "y": 2})),
    "another order": (CUBE, Mesh({"x": 4, "y": 2}, device_ids=[3, 1, 4, 0, 5, 2, 7, 6])),
    "neither": (SIX, Mesh({"x": 3, "y": 2}, device_ids=[3, 1, 4, 0, 5, 2])),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_move_is_right_and_receives_what_was_planned(name, rank):
    here, there = MESHES[name]
    pairs = [(a, b) for a in all_layouts(here, rank) for b in all_layouts(there, rank)]
    shape = (24, 48, 24)[:rank]
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for source, target in random.Random(rank).sample(pairs, min(len(pairs), 4)):
        steps = shortest(source, target, shape, 4)
        moved, texts = run(jax.device_put(values, sharding_of(source)), source, target, steps)
        assert moved.sharding == sharding_of(target)
        np.testing.assert_array_equal(np.asarray(moved), values)
        if len(texts) == 1:
            planned = sum((received_bytes(s, shape, 4) for s in steps), np.zeros(here.size, int))
            assert received_bytes_of(texts[0], here.size) == planned.max()


def test_pending_sums():
    grid = jax.make_mesh((2, 4), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2)
    mesh = Mesh({"x": 2, "y": 4}, axis_types="explicit")
    with jax.set_mesh(grid):
        spec = jax.sharding.PartitionSpec
        rows = jax.device_put(np.arange(64.0, dtype="f4").reshape(8, 8), spec("x", "y"))
        ones = jax.device_put(np.ones((8, 8), np.float32), spec("y", None))
        terms = jax.jit(
            lambda a, b: jax.lax.dot_general(
                a, b, (((1,), (0,)), ((), ())), out_sharding=spec("x", None, unreduced={"y"})
            )
        )(rows, ones)
        wanted = np.asarray(rows).sum(1, keepdims=True) * np.ones((1, 8), np.float32)
    source = Layout(mesh, "x", None, partial={"y": "sum"})
    for target in (Layout(mesh, "x", "y"), Layout(mesh, None, None), Layout(mesh, "y", "x")):
        steps = shortest(source, target, (8, 8), 4)
        (stage,) = stages(steps, source, target, (8, 8), 4)
        program = jax.jit(stage.run, in_shardings=stage.takes, out_shardings=stage.gives)
        lying = as_it_lies(terms, stage.takes, whole((4, 8), stage.takes))
        # Of CPU devices it is wrong in silence, from some MiB on (jax-ml/jax#40830).
        assert "reduce-scatter" not in program.lower(lying).compile().as_text()
        moved = program(lying)
        np.testing.assert_array_equal(np.asarray(moved), wanted)
