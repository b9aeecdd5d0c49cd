"""Whether the devices of this process are done."""

from __future__ import annotations

import jax
import pytest

from shoal.runtime.jax_service import device_work


class Array:
    """What `device_work` looks at of an array."""

    def __init__(self, state="computing"):
        self.state = state

    def is_deleted(self):
        return self.state == "deleted"

    def is_ready(self):
        if self.state == "donated meanwhile":
            raise RuntimeError("Array has been deleted")
        return self.state == "computed"


@pytest.fixture
def arrays(monkeypatch):
    """Return the living arrays, while devices exist."""
    jax.devices()
    living = []
    monkeypatch.setattr(jax, "live_arrays", lambda: living)
    return living


def test_what_is_started_later_is_not_waited_for(arrays):
    first = Array()
    arrays.append(first)
    is_done = device_work.issued_work()
    arrays.append(Array())  # a thread goes on computing
    assert not is_done()
    first.state = "computed"
    while not is_done():  # the last program is on its way
        pass
    assert not device_work.is_idle()


def test_the_last_program_is_started_when_the_arrays_are_computed(arrays, monkeypatch):
    """Starting it blocks while the queue of a device is full."""
    started = []
    monkeypatch.setattr(device_work, "_mark", lambda devices: started.append(devices))
    arrays.append(Array())
    is_done = device_work.issued_work()
    assert not is_done()
    assert started == []
    arrays[0].state = "computed"
    assert is_done()
    assert is_done()
    assert started == [jax.local_devices()]


@pytest.mark.parametrize("state", ["deleted", "computed", "donated meanwhile"])
def test_an_array_that_no_device_computes(arrays, state):
    arrays.append(Array(state))
    assert device_work.is_idle()
