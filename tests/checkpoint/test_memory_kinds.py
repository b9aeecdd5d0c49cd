"""Arrays in other memory of the devices than their own, such as what is offloaded to the host."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.arrays.bridge.sharding import sharding_of
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format.records import in_memory, layout_and_memory
from shoal.checkpoint.restoring import placing
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import RestoreMismatchError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.testing.strategies import layouts

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
KINDS = ("device", "pinned_host", "unpinned_host")


def state():
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    place = sharding_of(Layout(MESH, "x", None))
    tree = {kind: jax.device_put(w, place.with_memory_kind(kind)) for kind in KINDS}
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding_of(Layout(MESH, "x")))
    return {**tree, "one": jax.device_put(w, one), "keys": keys}


def test_memory_kind_is_restored(tmp_path):
    saved = state()
    shoal.save(tmp_path / "one", saved)
    for target in ("stored", saved):
        back = shoal.restore(tmp_path / "one", target)
        for name, array in saved.items():
            found = back[name]
            assert found.sharding.memory_kind == array.sharding.memory_kind, name
            assert found.sharding.is_equivalent_to(array.sharding, array.ndim), name
            if name in KINDS:
                assert np.array_equal(np.asarray(found), np.asarray(array))
    onto = shoal.restore(tmp_path / "one", MESH, only="pinned_host")
    assert onto["pinned_host"].sharding.memory_kind == "device", "a layout says its own"


def test_the_default_memory_is_not_written_down(tmp_path):
    """What is there by default is another kind on each backend."""
    saved = state()
    shoal.save(tmp_path / "one", saved)
    texts = {
        leaf.name: leaf.layout
        for leaf in open_checkpoint(LocalStore(tmp_path / "one")).manifest.leaves
    }
    assert texts["device"] == Layout(MESH, "x", None).text
    assert texts["pinned_host"] == Layout(MESH, "x", None).text + " in pinned_host"


def test_unavailable_memory_kind_raises_unless_a_target_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.saving.state.memory_of", lambda given: "far")
    place = Layout(Mesh({"never": 8}, kind="cpu"), "never", None)  # texts of layouts are kept
    shoal.save(tmp_path / "one", {"w": shoal.put(np.ones((8, 4), np.float32), place)})
    told = "w: was saved in far memory, which .*device.*; pass a target of layouts"
    with pytest.raises(RestoreMismatchError, match=told):
        shoal.restore(tmp_path / "one", "stored")
    assert shoal.restore(tmp_path / "one", MESH)["w"].shape == (8, 4)


def test_the_devices_exchange_nothing_that_lies_elsewhere():
    place = sharding_of(Layout(MESH, "x", None))
    assert placing.intermediates(place, (8, 8))
    assert not placing.intermediates(place.with_memory_kind("pinned_host"), (8, 8))


@given(layouts(), st.sampled_from(["", "pinned_host", "unpinned_host", "device", "far2"]))
def test_no_layout_ends_like_a_memory(layout, memory):
    text = in_memory(layout.text, memory)
    assert layout_and_memory(text) == (layout.text, memory)
    assert Layout.parse(layout_and_memory(text)[0]) == layout
