"""torch_xla's checkpoint manager: what it keeps, and what it must not lose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from compat.torch_xla_cases import of_kind
from shoal.errors import CorruptCheckpointError, StepAlreadyCommittedError, StorageError
from shoal.runtime import process
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.stopping import ReceivedNotice

STATE = {"w": np.arange(6.0, dtype=np.float32)}


def after(path, scenario):
    """Play what a case describes; return what it says of it."""
    if scenario == "save(1); save(1,force=True); save(10)":
        manager = xs.CheckpointManager(path, save_interval=10)
        returns = [
            manager.save(1, STATE),
            manager.save(1, STATE, force=True),
            manager.save(10, STATE),
        ]
        return {"returns": returns, "all_steps": manager.all_steps()}
    manager = xs.CheckpointManager(path, save_interval=10, max_to_keep=2)
    kept = []
    for step in (10, 20, 20, 20):
        try:
            manager.save(step, STATE)
        except StepAlreadyCommittedError:
            kept.append((step, "refused", manager.all_steps()))
        else:
            kept.append((step, "saved", manager.all_steps()))
    np.testing.assert_array_equal(manager.restore(20, STATE)["w"], STATE["w"])
    return kept


def test_a_way_out_that_the_manager_lacks_is_named_as_that_of_shoal(tmp_path):
    manager = xs.CheckpointManager(tmp_path, save_interval=1)
    manager.save(1, STATE)
    with pytest.raises(shoal.errors.RestoreMismatchError) as caught:
        manager.restore(1, {**STATE, "b": STATE["w"]})
    assert str(caught.value).startswith("torch_xla CheckpointManager.restore: ")
    assert "only='!b' keeps" in str(caught.value)
    assert str(caught.value).endswith("which reads the same checkpoints")


@of_kind("checkpoint_manager")
def test_checkpoint_manager(case, tmp_path, monkeypatch):
    expected, scenario = case["expected"], case["scenario"]
    if scenario == "construct":
        with pytest.raises(AssertionError, match=expected["error_message"]):
            xs.CheckpointManager(str(tmp_path), **case["args"])
    elif scenario.startswith("writer raises"):
        manager = xs.CheckpointManager(tmp_path / "run", save_interval=1)
        assert manager.save_async(1, STATE)
        manager.join()
        (tmp_path / "run").rename(tmp_path / "gone")
        (tmp_path / "run").write_text("a file where the directory was")
        with pytest.raises(StorageError):  # there it is never heard of
            _ = manager.save_async(2, STATE) and manager.join()
    elif "BUG" in case.get("note", ""):
        assert after(tmp_path, scenario) == [
            (10, "saved", [10]), (20, "saved", [10, 20]),
            (20, "refused", [10, 20]), (20, "refused", [10, 20]),
        ]  # fmt: skip
    else:
        found = after(tmp_path, scenario)
        assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_interval": 0}, "save_interval must be positive"),
        ({"save_interval": 1, "max_pending_async": 0}, "max_pending_async must be positive"),
        ({"save_interval": 1, "process_group": object()}, "leave process_group out"),
    ],
)
def test_managers_that_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        xs.CheckpointManager(tmp_path, **options)


def test_a_dict_is_restored_in_place_to_any_layout(tmp_path):
    manager = xs.CheckpointManager(tmp_path, 10, 2, chkpt_on_preemption=False)
    mesh = xs.get_1d_mesh("x")
    value = np.arange(16, dtype=np.float32)
    assert manager.save(10, {"w": xs.mark_sharding(value, mesh, ("x",)), "step": 10})
    state = {"w": xs.mark_sharding(np.zeros(16, np.float32), mesh, (None,)), "step": 0}
    restored = manager.restore(10, state)
    assert state["w"] is restored["w"]
    assert state["step"] == 10
    assert state["w"].sharding.is_fully_replicated
    np.testing.assert_array_equal(state["w"], value)
    with pytest.raises(
        AssertionError, match=r"untracked step 5. Valid steps are: \[10\]"
    ) as caught:
        manager.restore(5, state)
    assert isinstance(caught.value, shoal.errors.NotCommittedError)
    with pytest.raises(AssertionError, match="Preemption detection not enabled"):
        manager.reached_preemption(3)
    assert (manager.base_path, manager.save_interval, manager.max_to_keep) == (str(tmp_path), 10, 2)
    assert not manager.should_save(3)
    assert manager.should_save(20)
    assert manager._get_path(10).startswith(str(tmp_path))
    manager._wait_for_data()
    manager._release_oldest_checkpoints()
    assert manager._load_tracked_chkpts() == [10]
    manager._save(11, {"w": jnp.zeros(2)})
    manager._delete_chkpt_at_step(10)
    assert manager.all_steps() == [11]


def test_what_is_nested_and_views_are_restored_in_place(tmp_path):
    manager = xs.CheckpointManager(tmp_path, 10)
    grid = xs.Mesh(range(8), (4, 2), ("x", "y"))
    value = jnp.arange(16, dtype=jnp.bfloat16).reshape(8, 2)

    def state(value, spec):
        w = xs.mark_sharding(value, grid, spec)
        view = xs.wrap_as_sharded_tensor(w, partition_spec=spec)
        moments = {"mu": w, "nu": [view, {"deep": w}], "pair": (w, {"in": view}), "none": None}
        return {"params": {"view": view, "w": w}, "opt": moments, "count": 0}

    saved = state(value, (0, None))
    saved["count"] = 7
    assert manager.save(10, saved)
    target = state(jnp.zeros_like(value), (None, 1))
    params, view, opt, deep = (
        target["params"], target["params"]["view"], target["opt"], target["opt"]["nu"][1],
    )  # fmt: skip
    assert manager.restore(10, target) is target
    assert (target["params"], target["opt"], opt["nu"][1]) == (params, opt, deep)
    assert params["view"] is opt["nu"][0] is opt["pair"][1]["in"] is view
    assert (target["count"], view.partition_spec, opt["none"]) == (7, (None, 1), None)
    for array in (view.global_tensor, params["w"], opt["mu"], deep["deep"], opt["pair"][0]):
        assert isinstance(array, jax.Array)
        assert (array.dtype, xs.wrap_if_sharded(array).partition_spec) == (
            jnp.bfloat16,
            (None, "y"),
        )
        np.testing.assert_array_equal(array, value)
    alone = xs.wrap_if_sharded(xs.mark_sharding(value * 0, grid, ("x", "y")))
    manager.save(20, xs.wrap_if_sharded(saved["params"]["w"]))
    assert manager.restore(20, alone) is alone
    np.testing.assert_array_equal(alone, value)
    # views and arrays are saved alike
    arrays = {"params": {"view": params["w"] * 0, "w": params["w"] * 0}}
    manager.save(30, {"params": params})
    np.testing.assert_array_equal(manager.restore(30, arrays)["params"]["view"], value)


def test_one_flipped_byte_is_found(tmp_path):
    manager = xs.CheckpointManager(tmp_path, 1)
    manager.save(1, STATE)
    data = max(tmp_path.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    torn = bytearray(data.read_bytes())
    torn[torn.index(STATE["w"].tobytes()) + 9] ^= 1
    data.write_bytes(torn)
    with pytest.raises(CorruptCheckpointError):
        manager.restore(1, {"w": jax.ShapeDtypeStruct((6,), np.float32)})


def test_a_notice_is_a_reason_to_save_and_stops_only_who_asks(tmp_path, monkeypatch):
    """A manager that saves because of a notice has not ended the loop."""
    alone = LocalJob(1).clients[0]
    monkeypatch.setattr(process, "client", lambda: alone)
    monkeypatch.setattr(process, "is_watching", lambda: True)
    manager = xs.CheckpointManager(tmp_path, 10)
    assert not manager.save(13, STATE)
    alone.give_notice(ReceivedNotice("drained", "a test"))
    assert manager.save(14, STATE)
    assert alone.stop.exit_code == 0
    assert manager.reached_preemption(14)
    assert alone.stop.exit_code == 75
