"""A restore gives back the target's own types: the same structure, built of the same classes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from checkpoint.kinds_of_nodes import KINDS, MyOrdered, classes_of, local_namedtuple, nested
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.tree.flatten import PerProcess, UnknownNode
from shoal.compat.torch_xla import CheckpointManager
from shoal.errors import RestoreMismatchError, UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.client.in_process import LocalJob

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def is_same(back, target, values):
    """The structure law, and the values."""
    assert jax.tree.structure(back) == jax.tree.structure(target)
    assert classes_of(back) == classes_of(target)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(values), strict=True):
        assert np.array_equal(one, other)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_a_target_gives_the_structure(tmp_path, kind):
    make = kind()
    saved, target = make(np.ones(2), 3), make(np.zeros(2), 0)
    save(tmp_path / "saved", {"state": saved})
    is_same(restore(tmp_path / "saved", {"state": target}), {"state": target}, saved)
    placed = make(Layout(MESH, None), Layout(MESH))
    arrays = make(np.ones(2, np.float32), np.ones((), np.float32))
    save(tmp_path / "arrays", {"state": arrays})
    is_same(restore(tmp_path / "arrays", {"state": placed}), {"state": placed}, arrays)


def test_a_class_that_was_defined_anew_is_the_targets(tmp_path, kind):
    """The saved class is gone; the target has the one of before, or the one of now."""
    first, second = kind(), kind()
    save(tmp_path / "saved", first(np.ones(2), 3))
    for make in (first, second):
        target = make(np.zeros(2), 0)
        is_same(restore(tmp_path / "saved", target), target, first(np.ones(2), 3))


def test_every_start_of_a_run_has_the_same_structure(tmp_path, alone, kind):
    make = kind()
    init, target = make(np.ones(2), 3), make(np.zeros(2), 0)
    with Checkpoints(tmp_path, client=alone) as ckpts:
        state, first = ckpts.resume(target, init)
        assert state is init
        ckpts.save(first, state)
        ckpts.wait()
        is_same(ckpts.restore(0, target), target, init)
        for _ in range(2):
            state, first = ckpts.resume(target, None)
            is_same(state, target, init)
            ckpts.save(first, state)
            ckpts.wait()


def test_without_a_target_a_run_begins_only_if_it_can_go_on(tmp_path, alone, kind):
    init = kind()(np.ones(2), 3)
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.save(0, init)
        ckpts.wait()
        can_go_on = classes_of(ckpts.restore(0)) == classes_of(init)
    with Checkpoints(tmp_path / "new", client=alone) as ckpts:
        if can_go_on:
            assert ckpts.resume(None, init)[1] == 0
            return
        with pytest.raises(RestoreMismatchError, match="what `init` made could not be") as caught:
            ckpts.resume(None, init)
        assert "pass a target that has the class" in str(caught.value)


def test_values_of_each_process(tmp_path, alone, kind):
    make = kind()
    saved, target = PerProcess(make(np.ones(2), 3)), PerProcess(make(np.zeros(2), 0))
    save(tmp_path / "saved", {"loader": saved})
    back = restore(tmp_path / "saved", {"loader": target})
    assert type(back["loader"]) is PerProcess
    is_same(back["loader"].value, target.value, saved.value)
    with Checkpoints(tmp_path / "run", client=alone) as ckpts:
        ckpts.resume({"loader": target}, {"loader": saved})
        ckpts.save(0, {"loader": saved})
        ckpts.wait()
        state, _ = ckpts.resume({"loader": target}, None)
        is_same(state["loader"].value, target.value, saved.value)


def test_the_facade_of_torch_xla(tmp_path, kind):
    make = kind()
    manager = CheckpointManager(tmp_path, save_interval=1)
    saved, target = make(np.ones(2), 3), make(np.zeros(2), 0)
    manager.save(0, saved)
    is_same(manager.restore(0, target), make(np.zeros(2), 0), saved)


# ---- without a target, and where the trees differ


def test_unknown_class_says_which_module_to_import(tmp_path):
    save(tmp_path / "saved", {"state": local_namedtuple()(1, 2), "n": 3})
    back = restore(tmp_path / "saved")["state"]
    assert type(back) is UnknownNode
    assert "pass a target that has the class" in repr(back)
    assert "State of checkpoint.kinds_of_nodes" in repr(back)
    with pytest.raises(AttributeError, match="no attribute 'x': import State of"):
        _ = back.x
    node = UnknownNode("not_loaded:Net", ("w",), (1,))
    assert repr(node) == (
        "UnknownNode(w=1; import Net of not_loaded before it is restored, or pass a target that "
        "has the class)"
    )
    assert "was defined in a function" in UnknownNode("m:f.<locals>.Net", (), ()).remedy
    assert "does not take what was saved" in UnknownNode(f"{__name__}:PerProcess", (), ()).remedy


def test_a_node_of_an_unknown_class_is_a_target_too(tmp_path):
    save(tmp_path / "saved", {"state": local_namedtuple()(1, 2)})
    back = restore(tmp_path / "saved")
    again = restore(
        tmp_path / "saved", {"state": UnknownNode(back["state"].type, ("x", "y"), (0, 0))}
    )
    assert again == back


def test_a_value_of_each_process_may_have_grown(tmp_path):
    Sample = local_namedtuple()
    save(
        tmp_path / "saved", {"own": PerProcess({"buffer": [Sample(1, 2), Sample(3, 4)], "row": 5})}
    )
    target = {"own": PerProcess({"buffer": [Sample(0, 0)], "row": 0})}
    with pytest.raises(
        UsageError, match="own has a value of a class that is not known: import State"
    ):
        restore(tmp_path / "saved", target)
    longer = {"own": PerProcess({"buffer": [Sample(0, 0)] * 3, "row": 0})}
    back = restore(tmp_path / "saved", longer)["own"].value
    assert back == {"buffer": [Sample(1, 2), Sample(3, 4)], "row": 5}
    assert all(type(one) is Sample for one in back["buffer"])


@pytest.mark.parametrize(
    ("saved", "target", "told"),
    [
        (1, None, "v: was saved as an int; pass an int in place of None"),
        (np.ones(2), None, "v: was saved as an array; pass an array in place of None, or P() to"),
        (None, 1, "v: was saved as None; pass None in place of it"),
        (None, np.ones(2), "v: was saved as none, which is not an array"),
        (1, PerProcess(1), "v: was saved as an int; pass an int in place of a PerProcess"),
        (PerProcess(1), None, "v: was saved as a PerProcess; pass a PerProcess in place of None"),
    ],
)
def test_none_and_values_of_each_process_stand_for_nothing_else(tmp_path, saved, target, told):
    save(tmp_path / "saved", {"v": saved, "n": 1})
    with pytest.raises(RestoreMismatchError) as caught:
        restore(tmp_path / "saved", {"v": target, "n": 0})
    assert told in str(caught.value)
    assert caught.value.wrong_dtype == ("v",)
    assert "only='!v' keeps what the target has there" in str(caught.value) or saved is None
    own = restore(tmp_path / "saved", {"v": target, "n": 0}, only="!v")
    assert own["v"] is target


def test_a_value_of_each_process_comes_back_in_place_of_any_other_value(tmp_path):
    save(tmp_path / "saved", {"v": PerProcess({"row": 3})})
    assert restore(tmp_path / "saved", {"v": 0}) == {"v": PerProcess({"row": 3})}


def test_a_layout_may_stand_for_none_and_for_whatever_is_below(tmp_path):
    save(tmp_path / "saved", {"v": None, "w": {"a": np.ones(2, np.float32), "n": None}})
    back = restore(tmp_path / "saved", {"v": MESH, "w": MESH})
    assert back["v"] is None
    assert back["w"]["n"] is None


def test_static_data_that_would_change_are_seen_when_the_run_begins(tmp_path, alone):
    from checkpoint.kinds_of_nodes import DataAtTheTop

    with Checkpoints(tmp_path, client=alone) as ckpts:
        init = DataAtTheTop(np.ones(2), 1, "relu")
        with pytest.raises(
            RestoreMismatchError, match=r"has static data .*'relu'.*, the target .*'gelu'"
        ):
            ckpts.resume(DataAtTheTop(np.zeros(2), 0, "gelu"), init)
        assert ckpts.resume(DataAtTheTop(np.zeros(2), 0, "relu"), init)[1] == 0


def test_classes_in_values_of_each_process_are_checked_when_the_run_begins(tmp_path, alone):
    make = local_namedtuple()
    init = {"loader": PerProcess({"at": [make(1, 2)]})}
    with Checkpoints(tmp_path, client=alone) as ckpts:
        for target in (None, {"loader": 0}):
            with pytest.raises(
                RestoreMismatchError, match=r"loader/at/0: is a .*: import State of"
            ):
                ckpts.resume(target, init)
        with pytest.raises(
            RestoreMismatchError, match="loader has a value of a class that is not known"
        ):
            ckpts.resume({"loader": PerProcess({"at": []})}, init)
        assert ckpts.resume(init, init)[1] == 0


def test_all_that_would_change_is_named(tmp_path, alone):
    make = nested(local_namedtuple)()
    with Checkpoints(tmp_path, client=alone) as ckpts:
        with pytest.raises(RestoreMismatchError) as caught:
            ckpts.resume(None, {"a": make(1, 2), "b": make(3, 4)})
        assert [line.split(":")[0] for line in caught.value.problems] == [
            "a/in/0",
            "a/t",
            "b/in/0",
            "b/t",
        ]


# ---- what strangers tried


class Strict:
    """Takes arrays of JAX, and what stands for one, alone."""

    def __init__(self, w):
        if not isinstance(w, jax.Array | jax.ShapeDtypeStruct | Layout):
            raise TypeError(f"got {type(w).__name__}")
        self.w = w


jax.tree_util.register_pytree_node(Strict, lambda s: ((s.w,), None), lambda _, c: Strict(*c))


def test_class_that_rejects_restored_leaves_is_refused_at_the_start_of_a_run(tmp_path, alone):
    init = Strict(jax.numpy.ones((8, 8)))
    on_host = Strict(jax.ShapeDtypeStruct((8, 8), np.float32))
    with Checkpoints(tmp_path, client=alone) as ckpts:
        with pytest.raises(RestoreMismatchError, match=r"Strict takes no TypeError: got ndarray"):
            ckpts.resume(on_host, init)
        assert ckpts.resume(Strict(Layout(MESH, None, None)), init)[1] == 0
        ckpts.save(0, init)
        ckpts.wait()
        with pytest.raises(UsageError, match=r"Strict takes no TypeError: got ndarray"):
            ckpts.restore(0, on_host)


def test_arrays_that_are_one_object_are_no_swap(tmp_path, alone):
    one = jax.numpy.ones(8)
    target = {"a": Layout(MESH, None), "b": Layout(MESH, None)}
    with Checkpoints(tmp_path, client=alone) as ckpts:
        assert ckpts.resume(target, {"a": one, "b": one})[1] == 0
        with pytest.raises(RestoreMismatchError, match="would be in the order y, x"):
            ckpts.resume(MyOrdered(y=one, x=one), MyOrdered(x=one, y=one))


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"max_host_bytes": 5}, {"merge": "first"}])
def test_options_are_checked_when_the_run_begins(tmp_path, alone, options):
    with (
        Checkpoints(tmp_path, client=alone) as ckpts,
        pytest.raises(UsageError, match=f"resume: {next(iter(options))}="),
    ):
        ckpts.resume({"a": 0}, {"a": 1}, **options)


def test_a_layout_may_stand_for_a_subtree_without_leaves(tmp_path, alone):
    init = {"params": np.ones(2, np.float32), "opt": ({}, [()])}
    target = {"params": MESH, "opt": MESH}
    with Checkpoints(tmp_path, client=alone) as ckpts:
        ckpts.resume(target, init)
        ckpts.save(0, init)
        ckpts.wait()
        state, _ = ckpts.resume(target, None)
        assert state["opt"] == ({}, [()])
        with pytest.raises(RestoreMismatchError, match="optt: is not in the checkpoint"):
            ckpts.restore(0, {"params": MESH, "optt": MESH})


def test_a_function_that_is_a_leaf_is_not_lost(tmp_path):
    """With two arguments it could say where an array shall be, but there is none."""
    save(tmp_path / "saved", {"w": np.ones(2, np.float32), "gate": None})
    with pytest.raises(
        RestoreMismatchError, match="gate: was saved as None; pass None in place of it"
    ):
        restore(tmp_path / "saved", {"w": MESH, "gate": lambda a, b: a * b})


class Tables:
    """Its static data are arrays, which cannot be compared."""

    def __init__(self, w, table):
        self.w, self.table = w, table


jax.tree_util.register_pytree_node(
    Tables, lambda t: ((t.w,), (t.table,)), lambda static, c: Tables(*c, *static)
)


def test_static_data_that_cannot_be_compared(tmp_path, alone):
    make = lambda value: {"v": Tables(np.full(2, value), np.arange(3))}  # noqa: E731
    manager = CheckpointManager(tmp_path / "xla", save_interval=1)
    manager.save(0, make(1.0))
    assert manager.restore(0, make(0.0))["v"].w.tolist() == [1, 1]
    with Checkpoints(tmp_path / "run", client=alone) as ckpts:
        assert ckpts.resume(make(0.0), make(1.0))[1] == 0
        with pytest.raises(RestoreMismatchError, match=r"static data of Tables .* were not saved"):
            ckpts.resume(None, make(1.0))
