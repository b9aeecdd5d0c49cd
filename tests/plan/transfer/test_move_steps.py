"""Which steps of a move send between processes, beside what each process holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.mesh import Mesh
from shoal.plan.shards import region
from shoal.plan.transfer.move_steps import spans_processes
from shoal.plan.transfer.plan import plan_transfer
from shoal.testing.strategies import layouts

PROCESSES = ([0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4, [0] * 8, [*range(8)])
SHAPE = (8, 8)


@st.composite
def moves(draw):
    """Two layouts of rank 2 over eight devices of a few processes, in any order."""
    processes = draw(st.sampled_from(PROCESSES))
    ids = draw(st.permutations(range(8)) | st.just(list(range(8))))
    meshes = [
        Mesh({"a": 2, "b": 2, "c": 2}, device_ids=[*range(8)], processes=processes),
        Mesh({"x": 4, "y": 2}, device_ids=ids, processes=[processes[device] for device in ids]),
    ]
    ends = [draw(layouts(draw(st.sampled_from(meshes)), max_rank=2)) for _ in range(2)]
    rank = min(end.rank for end in ends)
    return [type(end)(end.mesh, *end.dims[:rank]) for end in ends], processes


def mask(layout, device):
    """Return which items a device holds."""
    held = np.zeros(SHAPE[: layout.rank], bool)
    held[region(layout, held.shape, device)] = True
    return held


@given(moves())
def test_where_no_step_spans_processes_each_holds_what_it_needs(move):
    (source, target), processes = move
    plan = plan_transfer(source, target, SHAPE[: source.rank], 4)
    devices = range(8)
    lacks = False
    for process in set(processes):
        own = [device for device in devices if processes[device] == process]
        held = np.logical_or.reduce([mask(source, device) for device in own])
        lacks |= any((mask(target, device) & ~held).any() for device in own)
    sends = any(map(spans_processes, plan.steps))
    assert sends or not lacks
    if len(set(processes)) == 1:
        assert not sends
