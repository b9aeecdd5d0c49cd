"""Which moves go in chunks."""

import pytest

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer.collective import shortest
from shoal.plan.transfer.move_steps import ChunkCut, chunks_of

SHAPE = (1 << 14, 1 << 14)  # float32: 1 GiB


def steps_of(kind, source, target):
    mesh = Mesh({"a": 2, "b": 2}, kind=kind)
    return shortest(Layout(mesh, *source), Layout(mesh, *target), SHAPE, 4)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_a_permute_goes_in_chunks_on_tpus(kind):
    steps = steps_of(kind, ("a", "b"), ("b", "a"))
    assert [step.kind for step in steps] == ["permute"]
    wanted = ChunkCut(dim=0, tiles=2, parts=16, width=512, rest=0) if kind == "tpu" else None
    assert chunks_of(steps, SHAPE, 4) == wanted


@pytest.mark.parametrize("kind", ["cpu", "tpu"])
def test_steps_that_send_nothing_are_not_cut_into_chunks(kind):
    steps = steps_of(kind, ("a", None), ("a", "b"))
    assert len(steps) == 1
    assert chunks_of(steps, SHAPE, 4) is None
    assert chunks_of(steps_of(kind, ("a", None), (None, "a")), SHAPE, 4) is not None
