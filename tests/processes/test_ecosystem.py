"""Programs of flax, optax and equinox: saved, killed, and resumed on another mesh."""

from __future__ import annotations

import signal
from importlib.util import find_spec

import numpy as np
import pytest

from processes import ecosystem
from shoal.testing.cluster import Cluster


# Looked for, not imported: an imported equinox changes what errors of later tests propose.
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("flax", "optax", "equinox")),
    reason="the environment of the newest Python has flax, optax and equinox",
)
@pytest.mark.timeout(360)  # fifteen processes, which compile as users do
def test_they_are_saved_killed_and_resumed_on_another_mesh(tmp_path, child_env):
    for name in ecosystem.PROGRAMS:
        with Cluster(2, devices=2, env=child_env, start_method="fork") as cluster:
            cluster.start(ecosystem.train, name, str(tmp_path / name), is_killed=True)
            survivor, killed = cluster.wait()
        assert (survivor.kind, killed.code) == ("ProcessLostError", -signal.SIGKILL), survivor
    with Cluster(1, devices=8, env=child_env, start_method="fork") as cluster:
        (trained,) = cluster.run(ecosystem.resume_all, str(tmp_path))
    for name, ((first, resumed), (_, undisturbed)) in trained.items():
        assert first == ecosystem.KILLED_AT + 1, name
        assert len(resumed) > 4, name
        np.testing.assert_allclose(resumed, undisturbed, rtol=2e-4, atol=1e-6, err_msg=name)
