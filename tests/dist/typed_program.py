# pyright: standard
"""A program of a user, whose types mypy and pyright check against the installed wheel."""

from typing import Any, assert_type

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shoal
from shoal import planning, preemption, retention, types
from shoal.errors import CheckpointError

shoal.initialize(virtual_devices=8, timeout_s=60)
assert_type(shoal.__version__, str)
assert_type(shoal.process_index(), int)
assert_type(shoal.is_initialized(), bool)

mesh = shoal.make_mesh({"data": -1, "model": 2})
assert_type(mesh, shoal.Mesh)
assert_type(mesh.size, int)
layout = shoal.Layout(mesh, "data", None)
assert_type(shoal.named_sharding(layout), NamedSharding)
with shoal.use_mesh(mesh):
    x = shoal.put(np.ones((8, 4), np.float32), P("data"))
assert_type(shoal.layout_of(x), shoal.Layout)
print(shoal.describe(x), shoal.plan_relayout(x, layout).steps)

shoal.barrier("ready", timeout_s=60)
assert_type(shoal.preempted(0), bool)
assert_type(shoal.live_processes(), tuple[int, ...])
for member in shoal.job_status().members:
    assert_type(member.step_s, float | None)
preemption.watch(signals=["SIGUSR1"])


def first(state: dict[str, Any]) -> int:
    """Resume, and save some steps."""
    with shoal.Checkpoints("run", keep=2) as checkpoints:
        state, step = checkpoints.resume({"x": layout}, state)
        assert_type(step, int)
        for i in range(step, 3):
            with shoal.step(i):
                assert_type(checkpoints.save(i, state), bool)
        return step


try:
    first({"x": x})
except shoal.ProcessLostError as error:
    assert_type(error.lost, dict[int, str])
except shoal.PeerFailedError as error:
    assert_type(error.failed, dict[int, str])
except CheckpointError as error:
    assert_type(error.exit_code, int)
assert_type(shoal.checkpoint_info("run"), types.CheckpointInfo)
assert_type(preemption.notice(), preemption.Notice | None)
print(planning.place, retention.Best)
