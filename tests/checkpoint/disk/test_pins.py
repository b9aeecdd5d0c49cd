"""A pin and a deletion at once: the step stays, or the pin says that it does not."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.policies import Last
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.step_names import step_name
from shoal.errors import NotCommittedError
from shoal.runtime.client.in_process import LocalJob

CALLS = ("rename", "link", "sync", "remove", "names", "size", "read", "write_new")
MOST_CALLS = 200


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


@pytest.fixture
def root(tmp_path, alone):
    with Checkpoints(tmp_path, client=alone) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.full(4, float(step))})
    return LocalStore(tmp_path)


def at_call(monkeypatch, number, act):
    """Act before the operation of that number on the folder of step 1; return a counter."""
    count = [0]

    def wrapped(name):
        real = getattr(LocalFolder, name)

        def call(self, *arguments, **options):
            if self.path.endswith(step_name(1)):
                count[0] += 1
                if count[0] == number:
                    act()
            return real(self, *arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(LocalFolder, name, wrapped(name))
    return count


def retain(root):
    saved_steps.retain(root, Last(1), saved=2, idle_s=60.0, process=0)


def is_consistent(root, alone, is_pinned):
    """A step that is said to be pinned is there, and whole."""
    store = root.step(1)
    if is_pinned:
        assert store.committed() is not None
        back = restore.on(alone, store.path)
        assert back["w"].tolist() == [1.0] * 4
        retain(root)
        assert store.committed() is not None
        saved_steps.unpin(root, 1)
    retain(root)
    assert store.names() == []


@pytest.mark.parametrize("is_pin_first", [True, False])
def test_whenever_the_other_comes(tmp_path, root, alone, monkeypatch, is_pin_first):
    """One runs; at each of its operations on the folder the other runs as a whole."""
    outcomes = set()
    for number in range(1, MOST_CALLS):
        pins = []

        def pin(pins=pins):
            try:
                saved_steps.pin(root, 1)
            except NotCommittedError:
                pins.append(False)
            else:
                pins.append(True)

        def delete():
            retain(root)

        first, other = (pin, delete) if is_pin_first else (delete, pin)
        with monkeypatch.context() as patch:
            count = at_call(patch, number, other)
            first()
        if count[0] < number:
            break
        (is_pinned,) = pins
        outcomes.add(is_pinned)
        is_consistent(root, alone, is_pinned)
        with Checkpoints(tmp_path, client=alone) as ckpts:
            ckpts.save(1, {"w": np.full(4, 1.0)})
    assert outcomes == {True, False}
    assert number < MOST_CALLS - 1
