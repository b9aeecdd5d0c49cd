"""Devices that do not start: what it is called, and who is told. The hardware is made up."""

from __future__ import annotations

import pickle
import threading

import jax  # noqa: F401 (what platforms it was told is read from it)
import pytest

from shoal.errors import (
    DeadlineError,
    DeviceStartError,
    InitializeError,
    NoDevicesError,
    PeerFailedError,
)
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.rules.point import Departure
from shoal.runtime.startup import device_start
from shoal.runtime.system import local_devices

BROKEN = "INTERNAL: TPU initialization failed: Failed to reset device 2"
NO_PLUGIN = "Unknown backend: 'tpu' requested, but no platforms that are instances of tpu"


@pytest.fixture
def failing(monkeypatch):
    """Return a function that lets JAX fail, on a host that shows devices or none."""

    def fail(error, *, attached=True, started=False):
        def devices(platform):
            raise error

        monkeypatch.setattr(jax_runtime, "devices", devices)
        monkeypatch.setattr(jax_runtime, "backend_exists", lambda: started)
        monkeypatch.setattr(device_start, "are_attached", lambda platform: attached)

    return fail


@pytest.mark.parametrize(
    ("error", "attached", "kind", "words"),
    [
        (RuntimeError(BROKEN), True, DeviceStartError, "a likely hardware fault of there"),
        (RuntimeError(BROKEN), False, NoDevicesError, "no TPU device was found: INTERNAL"),
        (RuntimeError(NO_PLUGIN), True, NoDevicesError, "run on a host that has some"),
        (AssertionError(), False, NoDevicesError, "no TPU device was found: AssertionError"),
        (AssertionError(), True, DeviceStartError, "the TPU devices failed to start: Assert"),
    ],
)
def test_device_start_error_has_its_type_and_message(failing, error, attached, kind, words):
    failing(error, attached=attached)
    (alone,) = LocalJob(1, hosts=["there"]).clients
    with pytest.raises(DeviceStartError, match=words) as caught:
        device_start.start_devices(alone, "tpu", 1.0)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("process 0 of 1 (there): ")
    assert caught.value.__cause__ is error
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.platform, again.process, again.host) == ("tpu", 0, "there")
    assert (again.exit_code, isinstance(again, InitializeError)) == (74, True)


def test_failed_device_start_raises_peer_failed_on_the_others(failing):
    failing(RuntimeError(BROKEN))
    first, second = LocalJob(2).clients
    with pytest.raises(DeviceStartError):
        device_start.start_devices(second, None, 30.0)
    with pytest.raises(PeerFailedError, match=r"process 1 .* raised .*DeviceStartError"):
        first.check("going on")


def test_missing_second_platform_is_not_reported_as_a_failure(failing):
    failing(RuntimeError(NO_PLUGIN), started=True)
    first, second = LocalJob(2).clients
    with pytest.raises(NoDevicesError):
        device_start.start_devices(second, "tpu", 30.0)
    first.check("going on")


def test_error_names_the_requested_jax_platforms(failing, monkeypatch):
    failing(RuntimeError(NO_PLUGIN))
    monkeypatch.setattr(jax_runtime, "platforms", lambda: "tpu,cpu")
    (alone,) = LocalJob(1).clients
    with pytest.raises(NoDevicesError, match=r"no TPU device .*\nJAX_PLATFORMS=tpu,cpu requests"):
        device_start.start_devices(alone, None, 1.0)


def test_the_platform_that_failed_is_named(failing, monkeypatch):
    failing(RuntimeError(f"Unable to initialize backend 'tpu': {NO_PLUGIN}"))
    monkeypatch.setattr(jax_runtime, "platforms", lambda: "cpu,tpu")
    (alone,) = LocalJob(1).clients
    with pytest.raises(NoDevicesError, match="no TPU device was found") as caught:
        device_start.start_devices(alone, None, 1.0)
    assert caught.value.platform == "tpu"


def test_failed_start_is_not_mistaken_for_one_that_left_only_the_cpu(failing, monkeypatch):
    """JAX starts the CPU before the others, and has it after their failure."""
    failing(RuntimeError(BROKEN))
    first, second = LocalJob(2).clients
    start = device_start.DeviceStart()
    for _ in range(2):
        with pytest.raises(DeviceStartError, match="a likely hardware fault"):
            device_start.start_devices(second, None, 30.0, start)
        monkeypatch.setattr(jax_runtime, "backend_exists", lambda: True)
        monkeypatch.setattr(jax_runtime, "devices", lambda platform: ["cpu"])
    with pytest.raises(PeerFailedError, match=r"process 1 .* raised .*DeviceStartError"):
        first.check("going on")


def test_a_start_under_way_is_waited_for_by_every_call(monkeypatch):
    """Another platform may be there already; the deadline of each call counts."""
    ended = threading.Event()
    monkeypatch.setattr(jax_runtime, "devices", lambda platform: ended.wait(60) or [])
    monkeypatch.setattr(jax_runtime, "backend_exists", lambda: False)
    first, _ = LocalJob(2).clients
    start = device_start.DeviceStart()
    with pytest.raises(DeadlineError):
        device_start.start_devices(first, None, 0.2, start)
    monkeypatch.setattr(jax_runtime, "backend_exists", lambda: True)
    with pytest.raises(DeadlineError):
        device_start.start_devices(first, None, 0.2, start)
    ended.set()
    assert device_start.start_devices(first, None, 30.0, start)


def test_a_process_that_left_the_job_ends_the_wait(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(jax_runtime, "devices", lambda platform: ended.wait(60) or [])
    monkeypatch.setattr(jax_runtime, "backend_exists", lambda: False)
    job = LocalJob(2)
    job.depart(1, Departure("left the job", "left"))
    with pytest.raises(PeerFailedError, match=r"process 1 .* left the job") as caught:
        device_start.start_devices(job.clients[0], None, 30.0)
    ended.set()
    assert set(caught.value.failed) == {1}


def test_a_host_shows_its_devices(monkeypatch, tmp_path):
    chip = local_devices._Accelerators((), (), (f"{tmp_path}/chip[0-9]*",), "tpu")
    monkeypatch.setattr(local_devices, "_ACCELERATORS", (chip,))
    assert not local_devices.are_attached("tpu")
    (tmp_path / "chip0").touch()
    assert local_devices.are_attached("tpu")
    assert local_devices.are_attached("gpu"), "nothing is known of GPUs here"
