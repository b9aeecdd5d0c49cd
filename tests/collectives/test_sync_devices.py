"""`sync_devices` in one process: what it waits for, what it refuses, what it says."""

from __future__ import annotations

import contextlib
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.arrays.bridge.devices import jax_mesh
from shoal.collectives import sync_devices as module
from shoal.collectives.sync_devices import sync_devices
from shoal.errors import DeadlineError, DivergenceError, UsageError, UsageTypeError
from shoal.plan.mesh import Mesh
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob


@pytest.fixture
def mesh():
    return shoal.make_mesh({"x": 4, "y": 2})


class Held:
    """An array that is computed when the test says so: JAX's own begin to run when they like."""

    def __init__(self, device):
        self.device, self.is_done = device, threading.Event()

    def devices(self):
        return {self.device}

    def is_deleted(self):
        return False

    def is_ready(self):
        return self.is_done.is_set()

    def block_until_ready(self):
        assert self.is_done.wait(PATIENCE_S)


@pytest.fixture
def held(monkeypatch, mesh):
    """Return an array on the sixth device that is not computed yet."""
    array = Held(jax_mesh(mesh).devices.flat[5])
    live_arrays = jax.live_arrays
    monkeypatch.setattr(jax, "live_arrays", lambda platform: [*live_arrays(platform), array])
    yield array
    array.is_done.set()


def test_sync_devices_returns_after_issued_work(mesh, held):
    threading.Timer(0.1, held.is_done.set).start()
    sync_devices(mesh, timeout_s=PATIENCE_S)
    assert held.is_ready()


def test_computations_are_done_after_it(mesh):
    x = jnp.ones((300, 300), jnp.float32)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, a: jnp.tanh(a @ a), x))
    placed = [jax.device_put(x, device) for device in jax_mesh(mesh).devices.flat]
    issued = [program(array) for array in placed]
    sync_devices(mesh, timeout_s=PATIENCE_S)
    assert all(array.is_ready() for array in issued)


def test_effects_are_done_after_it(mesh):
    seen = []
    jax.jit(lambda x: jax.debug.callback(seen.append, x))(1)
    sync_devices(mesh)
    assert len(seen) == 1


def test_at_the_deadline_the_busy_devices_are_named(mesh, held):
    with pytest.raises(DeadlineError) as told:
        sync_devices(mesh, name="epoch", timeout_s=0.2)
    assert told.value.name == "epoch"
    assert f"{held.device} not finished" in str(told.value)
    assert "collectives/test_sync_devices.py:" in str(told.value)
    assert str(jax_mesh(mesh).devices.flat[4]) not in str(told.value)
    held.is_done.set()
    sync_devices(mesh, timeout_s=PATIENCE_S)


def test_other_devices_are_not_waited_for(mesh, held):
    first = shoal.make_mesh({"z": 4}, devices=list(jax_mesh(mesh).devices.flat[:4]))
    sync_devices(first, timeout_s=PATIENCE_S)
    assert not held.is_ready()


def test_a_mesh_of_jax_deleted_and_failed_arrays(mesh):
    def fail(x):
        raise ValueError("as asked")

    like = jax.ShapeDtypeStruct((), np.float32)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # now, or when it is asked for
        jax.jit(lambda x: jax.pure_callback(fail, like, x))(jnp.float32(1))
    gone = jnp.zeros(3)
    gone.delete()
    key = jax.random.key(0)
    sync_devices(jax_mesh(mesh), timeout_s=PATIENCE_S)
    assert jax.random.key_data(key).is_ready()


def test_entering_and_leaving_are_logged_with_the_name(mesh, caplog):
    caplog.set_level(logging.INFO, logger="shoal")
    sync_devices(mesh, name="before the timer")
    entered, left = [record.getMessage() for record in caplog.records]
    assert "enters sync_devices 'before the timer' (" in entered
    assert repr(Mesh.of(mesh)) in entered
    assert "leaves sync_devices 'before the timer'" in left


def test_a_sum_that_is_not_the_size_is_an_error(mesh, monkeypatch):
    monkeypatch.setattr(module, "_sum_and_finish", lambda devices, own: 7)
    with pytest.raises(DivergenceError, match=r"7 devices took part .* which has 8"):
        sync_devices(mesh)


def test_sync_devices_refuses_invalid_arguments(mesh):
    with pytest.raises(UsageTypeError, match="must be a "):
        sync_devices("x")
    with pytest.raises(UsageTypeError, match="name=3"):
        sync_devices(mesh, name=3)
    with pytest.raises(UsageError, match="name must not be empty"):
        sync_devices(mesh, name="")
    with pytest.raises(UsageError, match="timeout_s"):
        sync_devices(mesh, timeout_s=0)


def test_process_without_a_device_in_the_mesh_raises_usage_error(mesh):
    def go(client):
        try:
            sync_devices.on(client, mesh, timeout_s=PATIENCE_S)
        except UsageError as error:
            return error
        finally:  # only the first process had made the call
            barrier.on(client, "the next call", timeout_s=PATIENCE_S)
        return True

    done, refused = run_all(LocalJob(2), go)
    assert done is True
    assert isinstance(refused, UsageError)
    assert "process 1 has no device in Mesh(x=4, y=2" in str(refused)
    assert "processes [0] call it" in str(refused)
