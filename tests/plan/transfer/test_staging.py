"""The chunks of a move through host memory: every item once, none too large."""

import math
import random

import numpy as np
import pytest

from plan.transfer.collectives_by_hand import all_layouts, numbered, shards
from shoal.plan.mesh import Mesh
from shoal.plan.transfer import staging
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.staging import staging_of

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
MIXED = Mesh({"x": 2, "y": 3})
CASES = [(CUBE, (16,)), (CUBE, (8, 56)), (CUBE, (8, 8, 24)), (MIXED, (6, 66)), (MIXED, (30, 12, 6))]


@pytest.mark.parametrize(("mesh", "shape"), CASES)
@pytest.mark.parametrize("most", [4, 96, 1 << 20])
def test_chunk_by_chunk_the_shards_become_what_they_shall(mesh, shape, most, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK_BYTES", 4 * most)
    layouts = all_layouts(mesh, len(shape))
    whole = numbered(shape)
    for source, target in random.Random(1).sample([(a, b) for a in layouts for b in layouts], 12):
        plan = plan_transfer(source, target, shape, 4)
        chunks = staging_of(plan)
        held = {d: s.copy() for d, s in shards(source, whole).items()}
        assembled = {d: np.full_like(s, -1) for d, s in shards(target, whole).items()}
        boxes = list(chunks.boxes())
        largest = max(math.prod(chunks.shape_of(box)) for box in boxes)
        assert math.prod(chunks.shape_of(boxes[0])) == largest
        for box in boxes:
            part = chunks.shape_of(box)
            assert plan_transfer(source, target, part, 4).sends is None
            tiles = {d: chunks.view(s, source, box) for d, s in held.items()}
            chunk = np.full(part, -1)
            for device, region in shards(source, numbered(part)).items():
                chunk.flat[region] = tiles[device].reshape(region.shape)
            for device, region in shards(target, chunk).items():
                there = chunks.view(assembled[device], target, box)
                assert (there == -1).all()
                there[...] = region.reshape(there.shape)
        for device, wanted in shards(target, whole).items():
            np.testing.assert_array_equal(assembled[device], wanted)
        least = max(math.prod(chunks.tiles) // _shards(end) for end in (source, target)) * 4
        assert all(_bytes(end, chunks, boxes[0]) <= max(most, least) for end in (source, target))


def _shards(layout):
    return math.prod(map(layout.num_shards, range(layout.rank)))


def _bytes(layout, chunks, box):
    return math.prod(layout.shard_shape(chunks.shape_of(box))) * 4
