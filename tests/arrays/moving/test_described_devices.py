"""Layouts on devices of a list, and plans for TPUs that are only described (these need libtpu)."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.moving.plan_relayout import plan_relayout
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.move_steps import CHUNK_BYTES

PAIR = Mesh({"x": 2}, device_ids=[5, 3])
PROGRAM = """
import itertools, json
import jax, jax.numpy as jnp
from jax.experimental import topologies
import shoal
from shoal.plan.compiled import received_bytes_of
from shoal.plan.placement import place
from shoal.plan.topology import from_devices

devices = topologies.get_topology_desc("v5p:2x2x2", "tpu").devices
mesh = place(from_devices(devices), {"a": 2, "b": 2, "c": 2})

def lies(shape, layout):
    sharding = shoal.named_sharding(layout, devices=devices)
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

def described(plan):
    text = plan.program().as_text()
    return {"way": plan.way, "kinds": [step.kind for step in plan.steps],
            "received": plan.received_bytes, "counted": received_bytes_of(text, 8),
            "bound": plan.bound_bytes, "peak": plan.peak_bytes,
            "held": sum(plan.transfer.shard_bytes), "xla": plan.default_peak_bytes}

pairs = [(("a", None), (None, "a")), ((None, ("b", "c")), ("c", None)), (("a", "b"), ("b", "a")),
         (("c", "b"), (("c", "b", "a"), None))]
moves = []
for source, target in pairs:
    ends = [shoal.Layout(mesh, *dims) for dims in (source, target)]
    fewest = min(end.num_shards(0) * end.num_shards(1) for end in ends)
    x = lies((8192, 8192 * fewest), ends[0])
    plan = shoal.plan_relayout(x, ends[1])
    assert plan == shoal.plan_relayout(x, shoal.named_sharding(ends[1], devices=devices))
    moves.append(described(plan))

small, rows = shoal.Layout(mesh, "c", "b"), shoal.Layout(mesh, ("c", "b", "a"), None)
x = lies((64, 64), small)
plan = shoal.plan_relayout(x, rows)
half = shoal.Layout(shoal.Mesh({"d": 4}, device_ids=[0, 1, 2, 3], [0] * 4, kind="tpu"), "d", None)
other = shoal.plan_relayout(x, half)

def mended(x):
    return (shoal.constrain(jnp.sin(x), rows, via=plan) ** 2).sum()

def hidden(x):
    there = shoal.named_sharding(rows, devices=devices)
    return jax.lax.with_sharding_constraint(jnp.sin(x), there) + 1

reports = [shoal.explain_program(jax.jit(fn), x) for fn in (mended, jax.grad(mended), hidden)]
print(json.dumps({"moves": moves, "other": [
    other.way, other.received_bytes, received_bytes_of(other.program().as_text(), 8)], "reports": [
    [sorted({one.kind for one in report.movements}), len(report.hidden)] for report in reports]}))
"""


@pytest.fixture(scope="module")
def described():
    libtpu = pytest.importorskip("libtpu")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
           "TPU_LIBRARY_PATH": libtpu.get_library_path()}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_compiled_for_tpus_a_move_receives_what_was_planned_and_needs_a_chunk(described):
    assert {kind for move in described["moves"] for kind in move["kinds"]} == {
        "all_to_all", "all_gather", "exchange", "permute",
    }  # fmt: skip
    for move in described["moves"]:
        assert move["way"] == "collectives"
        assert move["counted"] == move["received"] == move["bound"]
        assert move["peak"] <= move["held"] + CHUNK_BYTES < move["xla"]


def test_between_described_devices_that_differ(described):
    assert described["other"] == ["permutes", 64 * 64, 64 * 64]


def test_programs_for_described_devices_are_planned_and_explained(described):
    value, gradient, hidden = described["reports"]
    assert "written" in value[0]
    assert value[1] == gradient[1] == 0
    assert hidden == [["gathered"], 1]


def test_devices_of_a_list_stand_in_the_order_of_the_mesh():
    devices = jax.devices()[2:7]
    mesh = jax_mesh(PAIR, devices=devices)
    assert [device.id for device in mesh.devices] == [5, 3]
    assert mesh == jax_mesh(PAIR)
    layout = Layout(PAIR, "x", None)
    assert layout_of(sharding_of(layout, devices=devices)) == layout


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh({"x": 2}, device_ids=[5, 7]), "no cpu device has the id 7; devices= has 5: 2..6"),
        (Mesh({"x": 2}, device_ids=[5, 3], processes=[0, 1]), "processes that do not own them: 3"),
        (
            Mesh({"x": 2}, device_ids=[5, 3], kind="tpu"),
            "no tpu device has the id 3,5; devices= has 0",
        ),
    ],
)
def test_devices_that_the_list_lacks(mesh, words):
    with pytest.raises(UsageError) as error:
        sharding_of(Layout(mesh, "x"), devices=jax.devices()[2:7])
    assert words in str(error.value)


def test_devices_that_are_here_are_not_kept_in_a_plan():
    x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding_of(Layout(PAIR, "x", None)))
    assert plan_relayout(x, Layout(PAIR, None, "x")).devices is None
