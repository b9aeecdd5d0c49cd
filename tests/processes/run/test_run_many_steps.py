"""Programs that start many steps before they look at one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("forks")  # its jobs begin as any do

STEPS = """
    import numpy as np
    import jax
    import shoal

    shoal.initialize(%s)
    layout = shoal.Layout(shoal.make_mesh({"data": -1}), "data")
    ones = shoal.put(np.ones(8, np.float32), layout)
    step = jax.jit(lambda total, x: total + x.sum())
    total = shoal.put(np.float32(0), layout.replicated(layout.mesh, 0))
    for _ in range(300):
        total = step(total, ones)
    print(f"total {int(total)}")
    shoal.shutdown()
"""


@pytest.mark.parametrize(
    ("processes", "arguments", "options"),
    [
        (2, ("--devices", "4"), ""),
        (1, (), "virtual_devices=8"),
        (2, ("--devices", "1"), "virtual_devices=4"),  # which wins, with as many threads
        (2, (), ""),  # as many as the environment says
    ],
)
def test_steps_in_flight_do_not_wait_for_each_other(launch, processes, arguments, options):
    if not (arguments or options):
        launch.env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    finished = launch.run("-n", str(processes), *arguments, script=STEPS % options)
    assert finished.code == 0, finished.err
    both = "initialize(virtual_devices=4) overrides SHOAL_VIRTUAL_DEVICES=1"
    assert finished.err.count(both) == int(bool(arguments and options))
    assert finished.out.count("total 2400") == processes  # among what gloo's threads print
