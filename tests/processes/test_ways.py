"""Meshes and layouts given to the public functions in every way, in a job of two processes."""

from __future__ import annotations

import pytest

from arrays import ways
from shoal.testing.cluster import Cluster


@pytest.mark.faults
def test_meshes_and_layouts_are_taken_in_every_way(tmp_path):
    with Cluster(2, devices=4, start_method="fork", deadline_s=240) as cluster:
        assert cluster.run(ways.play, tmp_path) == [[], []]
