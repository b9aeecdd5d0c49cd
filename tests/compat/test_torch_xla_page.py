"""The page for users of torch_xla: its program before and after, and torch_xla's own examples."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import OrderedDict

import jax
import numpy as np
import pytest

import shoal.compat.torch_xla as xs
from meta.source import ROOT
from shoal.compat.torch_xla import runtime as xr

PAGE = (ROOT / "docs" / "coming-from" / "torch_xla.md").read_text(encoding="utf-8")


def test_the_program_before_has_the_losses_that_the_page_says(tmp_path):
    pytest.importorskip("torch_xla")
    before, *_ = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    said = re.search(r"assert_allclose\(losses, (\[.*?\])", PAGE)
    done = subprocess.run(
        [sys.executable, "-c", before],
        env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(losses, ast.literal_eval(said[1]), rtol=1e-5)


def test_the_examples_of_torch_xla():
    xr.use_spmd()
    mesh_shape = (4, 2)
    num_devices = xr.global_runtime_device_count()
    device_ids = np.array(range(num_devices))
    mesh = xs.Mesh(device_ids, mesh_shape, ("x", "y"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.shape() == OrderedDict([("x", 4), ("y", 2)])

    tensor = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    tensor = xs.mark_sharding(tensor, mesh, (0, None))  # 4-way data parallel
    assert [shard.data.shape for shard in tensor.addressable_shards] == [(2, 32)] * 8
    linear = xs.EinsumLinear(32, 10, key=jax.random.key(0))
    linear.weight = xs.mark_sharding(linear.weight, mesh, (None, 1))  # 2-way model parallel
    assert linear(tensor).shape == (8, 10)

    new_tensor = xs.MarkShardingFunction.apply(tensor, mesh, ("x", "y"))
    assert xs.wrap_if_sharded(new_tensor).sharding_type == xs.ShardingType.TILED

    mesh1, mesh2 = xs.Mesh(device_ids, (2, 2, 2, 1)), xs.Mesh(device_ids[::-1], (1, 2, 2, 2))
    tensor = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)
    sharded_tensor = xs.mark_sharding(tensor, mesh1, (0, 1, 2, 3))
    custom_sharded = xs.annotate_custom_sharding(sharded_tensor, mesh2, (0, 1, 2, 3))
    assert xs.wrap_if_sharded(custom_sharded).sharding_spec == "{devices=[1,2,2,2]7,6,5,4,3,2,1,0}"
    np.testing.assert_array_equal(custom_sharded, tensor)

    mesh = xs.get_1d_mesh("data")
    assert (mesh.mesh_shape, mesh.axis_names) == ((8,), ("data",))
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh
    xs.set_global_mesh(None)

    t1 = xs.mark_sharding(np.ones((8, 8), np.float32), xs.get_1d_mesh(), (0, None))
    assert not xs.clear_sharding(t1).committed
    xs.visualize_tensor_sharding(t1, use_color=False)
    xs.visualize_sharding("{devices=[2,2]0,1,2,3}", use_color=False)
