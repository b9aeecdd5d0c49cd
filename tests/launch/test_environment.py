"""The variables that `shoal run` gives its processes."""

from __future__ import annotations

import pytest

from shoal.launch.environment import Addresses, HostShare, JobStart, variables
from shoal.runtime.system import local_devices

START = JobStart(HostShare(node=1, first=4, processes=2), 6, Addresses("a:1", "a:2", "a:3"), "t")


def of_each(outer, devices=None):
    return [variables(outer, process=i, start=START, devices=devices) for i in (4, 5)]


@pytest.mark.parametrize(
    ("gpus", "devices", "outer", "ids"),
    [
        (2, None, {}, ["0", "1"]),
        (8, None, {}, ["0,1,2,3", "4,5,6,7"]),
        (8, None, {"JAX_LOCAL_DEVICE_IDS": "7"}, ["0,1,2,3", "4,5,6,7"]),  # of an outer job
        (3, None, {}, [None, None]),  # `initialize` says why not
        (0, None, {}, [None, None]),
        (8, 2, {}, [None, None]),
        (8, None, {"JAX_PLATFORMS": "cpu"}, [None, None]),
        (8, None, {"SHOAL_VIRTUAL_DEVICES": "2"}, [None, None]),
    ],
)
def test_each_process_of_a_host_has_its_share_of_the_gpus(monkeypatch, gpus, devices, outer, ids):
    monkeypatch.setattr(local_devices, "devices_seen", lambda platform, env: (gpus, False))
    assert [env.get("JAX_LOCAL_DEVICE_IDS") for env in of_each(outer, devices)] == ids


@pytest.mark.parametrize(
    ("may_restart", "outer", "value"),
    [
        (False, {}, None),
        (True, {}, "1"),
        (True, {"SHOAL_COMPILE_CACHE": ""}, "1"),
        (True, {"SHOAL_COMPILE_CACHE": "0"}, "0"),
        (False, {"SHOAL_COMPILE_CACHE": "/x"}, "/x"),
        (True, {"SHOAL_COMPILE_CACHE": "/x"}, "/x"),
    ],
)
def test_a_job_that_may_start_again_keeps_what_it_compiles(may_restart, outer, value):
    env = variables(outer, process=4, start=START, devices=None, may_restart=may_restart)
    assert env.get("SHOAL_COMPILE_CACHE") == value
