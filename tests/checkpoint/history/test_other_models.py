"""A run is not resumed with the state of another model, and saves none that it could not resume."""

from __future__ import annotations

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

import shoal
from collectives.thread_jobs import run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.errors import RestoreMismatchError, UsageError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system.shapes_only import shapes_only

MESH = shoal.make_mesh({"x": 4, "y": 2})
ROWS = NamedSharding(MESH, P("x"))
COLUMNS = NamedSharding(MESH, P(None, "y"))


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


@pytest.fixture
def ckpts(tmp_path, alone):
    with Checkpoints(tmp_path / "run", client=alone) as history:
        yield history


def saved(ckpts, state, step=0):
    ckpts.save(step, state)
    ckpts.wait()


def ones(width):
    return np.ones((8, width), np.float32)


def normal(key, width):
    return jax.random.normal(key, (8, width))


# name → what makes w of a width, on devices or hosts
MAKERS = {
    "a host array": ones,
    "put": lambda width: shoal.put(ones(width), ROWS),
    "put of a number each": lambda width: jnp.stack([shoal.put(1.0, MESH)] * 8 * width).reshape(
        8, width
    ),
    "put of what is traced": lambda width: shoal.put(jnp.ones((8, width)), ROWS),
    "create": lambda width: shoal.create(lambda: jnp.ones((8, width)), layouts=ROWS),
    "create of a key": lambda width: shoal.create(
        lambda key: normal(key, width), jax.random.key(0), layouts=ROWS
    ),
    "create of host values": lambda width: shoal.create(
        lambda w: {"w": w * 2}, ones(width), layouts=ROWS
    )["w"],
    "from_host_local": lambda width: shoal.from_host_local(ones(width), ROWS),
    "from_host_local that passes": lambda width: shoal.from_host_local(PLACED[width], ROWS),
    "relayout": lambda width: shoal.relayout(shoal.put(ones(width), ROWS), COLUMNS),
    "relayout of one that is": lambda width: shoal.relayout(PLACED[width], COLUMNS),
    "jit": lambda width: jax.jit(lambda: jnp.ones((8, width)), out_shardings=ROWS)(),
    "device_put": lambda width: jax.device_put(ones(width), ROWS),
    "jnp": lambda width: jnp.ones((8, width)),
    "like another": lambda width: jax.tree.map(jnp.zeros_like, shoal.put(ones(width), ROWS)),
    "manual": lambda width: shoal.manual(lambda a: a * 2, ROWS, ROWS)(shoal.put(ones(width), ROWS)),
    "on hosts of several": lambda width: jax.make_array_from_callback(
        (8, width), ROWS, lambda index: ones(width)[index]
    ),
}
PLACED = {width: shoal.put(ones(width), ROWS) for width in (2, 4)}


@pytest.mark.parametrize("target", [ROWS, None, {"w": ROWS, "step": 0}], ids=["one", "no", "tree"])
@pytest.mark.parametrize("name", MAKERS)
def test_another_width_is_refused_whatever_makes_it(ckpts, name, target, caplog):
    make = MAKERS[name]
    state, first = ckpts.resume(target, lambda: {"w": make(2), "step": 0})
    saved(ckpts, state)
    with caplog.at_level(logging.DEBUG, "shoal"):
        state, first = ckpts.resume(target, lambda: {"w": make(2), "step": 0})
        assert (first, state["w"].shape) == (1, (8, 2))
        for init in (lambda: {"w": make(4), "step": 0}, {"w": make(4), "step": 0}):
            with pytest.raises(RestoreMismatchError) as caught:
                ckpts.resume(target, init)
            assert caught.value.wrong_shape == ("w",)
            assert "step 0 of " in str(caught.value)
            assert "w: is float32[8,2], and `init` makes float32[8,4]" in str(caught.value)
            assert "use a directory of its own" in str(caught.value)
            assert ckpts.resume(target, init, check_init=False)[0]["w"].shape == (8, 2)
    assert "not compared" not in caplog.text
    assert not shapes_only()
    assert shoal.put(ones(2), ROWS).addressable_data(0).shape == (2, 2)


@pytest.mark.parametrize(
    ("init", "attribute", "words"),
    [
        ({"w": ones(2), "k": "key"}, "unexpected", "b: is float32[3], and `init` makes no such"),
        ({"w": ones(2), "b": "(3,)", "k": "key", "c": "(3,)"}, "missing", "c: is not there, and"),
        ({"w": ones(2), "b": "bf16", "k": "key"}, "wrong_dtype", "and `init` makes bfloat16[3]"),
        ({"w": ones(2), "b": "(3,)", "k": "rbg"}, "wrong_dtype", "is key<fry>[], and `init` makes"),
        ({"w": ones(2), "b": "(3,)", "k": "(3,)"}, "wrong_shape", "is key<fry>[], and `init` mak"),
        ({"w": 0, "b": "(3,)", "k": "key"}, "wrong_shape", "float32[8,2], and `init` makes int"),
    ],
)
@pytest.mark.parametrize("how", ["value", "function"])
def test_differences_from_the_saved_model_are_named(ckpts, how, init, attribute, words):
    def made(given):
        values = {
            "key": lambda: jax.random.key(0),
            "rbg": lambda: jax.random.key(0, impl="rbg"),
            "(3,)": lambda: jnp.ones(3),
            "bf16": lambda: jnp.ones(3, jnp.bfloat16),
        }
        return {name: values[x]() if isinstance(x, str) else x for name, x in given.items()}

    saved(ckpts, made({"w": ones(2), "b": "(3,)", "k": "key"}))
    with pytest.raises(RestoreMismatchError) as caught:
        ckpts.resume(None, made(init) if how == "value" else lambda: made(init))
    assert len(getattr(caught.value, attribute)) == 1
    told = str(caught.value).replace("key<threefry2x32>", "key<fry>")
    assert words in told
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("saves", "init"),
    [
        ({"w": 1.0, "step": np.int32(3)}, {"w": jnp.zeros(()), "step": 0}),
        ({"w": np.ones(3, np.float32)}, {"w": np.ones(3)}),  # once `jit` has run
        ({"w": jnp.ones(3), "best": 0.5, "n": None}, {"w": np.ones(3), "best": None, "n": 1}),
        ({"w": jnp.ones(3), "mean": {"w": jnp.ones(3)}}, {"w": np.ones(3), "mean": None}),
        ({"w": jnp.ones(3), "losses": [0.1, 0.2]}, {"w": np.ones(3), "losses": []}),
        (
            {"w": jnp.ones(3), "names": np.array(["abc"])},
            {"w": np.ones(3), "names": np.array([""])},
        ),
        (
            {"w": jnp.ones(3), "own": shoal.PerProcess({"a": np.ones(3)})},
            {"w": np.ones(3), "own": shoal.PerProcess({"b": np.ones(9)})},
        ),
        ({"w": jnp.ones(3)}, {}),
        ({"w": jnp.ones(3)}, None),
    ],
)
def test_changes_that_a_run_may_make_are_accepted_by_resume(ckpts, saves, init):
    first, begins = ckpts.resume(None, lambda: init)
    assert (begins, first is init) == (0, True)
    saved(ckpts, saves)
    for made in (init, lambda: init):
        state, begins = ckpts.resume(None, made)
        assert (begins, state.keys()) == (1, saves.keys())


def test_leaves_omitted_by_only_are_not_compared(ckpts):
    target = {"w": ROWS, "batch": np.zeros(5)}
    init = {"w": MAKERS["put"](2), "batch": np.zeros(5)}
    state, _ = ckpts.resume(target, init, only="!batch")
    saved(ckpts, {**state, "batch": np.zeros(9)})
    assert ckpts.resume(target, lambda: init, only="!batch")[1] == 1
    with pytest.raises(RestoreMismatchError, match="w: is float32"):
        ckpts.resume(target, lambda: {**init, "w": MAKERS["put"](4)}, only="!batch")


@pytest.mark.parametrize("why", ["reads", "restores", "raises"])
def test_an_init_that_cannot_be_traced_is_not_compared(ckpts, tmp_path, caplog, why):
    shoal.save(tmp_path / "weights", {"w": ones(4)})
    made = []

    def init():
        w = shoal.put(ones(4), ROWS)
        made.append(shapes_only())
        if why == "reads" and float(w.sum()) < 0:
            return {}
        if why == "restores":
            return shoal.restore(tmp_path / "weights", ROWS)
        if why == "raises" and len(made) > 1:
            raise OSError("no such file")
        return {"w": w}

    assert ckpts.resume(ROWS, init)[0]["w"].shape == (8, 4)
    ckpts.resume(ROWS, lambda: {"w": ones(2)})
    saved(ckpts, {"w": shoal.put(ones(2), ROWS)})
    with caplog.at_level(logging.DEBUG, "shoal"):
        assert ckpts.resume(ROWS, init)[0]["w"].shape == (8, 2)
    assert made == [False, True]
    told = {
        "reads": "Concretization",
        "restores": "UsageError: restore: ",
        "raises": "OSError: no ",
    }
    assert f"`init` is not compared with the checkpoint: {told[why]}" in caplog.text
    assert shoal.put(ones(4), ROWS).is_fully_addressable


# ---- saves


OTHER = {
    "a leaf more": (lambda state: {**state, "b": np.ones(3)}, "b: is in the checkpoint, not in"),
    "a leaf less": (lambda state: {"w": state["w"]}, "step: is not in the checkpoint"),
    "another root": (lambda state: {"state": state}, "is not in the checkpoint"),
    "a dtype": (lambda state: {**state, "w": jnp.ones((8, 2), jnp.bfloat16)}, "is bfloat16 as"),
    "a shape": (lambda state: {**state, "w": jnp.ones((8, 4))}, "w: has shape (8, 4) as saved"),
}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("change", OTHER)
def test_a_tree_that_the_target_would_not_restore_is_not_saved(tmp_path, change, asynchronous):
    other, words = OTHER[change]

    def run(client):
        state = {"w": ones(2), "step": 0}
        one = Checkpoints(tmp_path, asynchronous=asynchronous, client=client)
        one.resume(state, lambda: state)
        one.save(0, state)
        for _ in range(2):
            with pytest.raises(RestoreMismatchError) as caught:
                one.save(1, other(state))
            assert words in str(caught.value)
            assert "save(1): `resume` would refuse this state" in str(caught.value)
            assert "nothing was saved; save other trees by shoal.save" in str(caught.value)
            assert caught.value.problems
        one.save(2, state)
        one.close()
        assert one.resume(state, state)[1] == 3
        return one.all_steps()

    count = 2 if asynchronous else 1
    assert run_all(LocalJob(count), run) == [(0, 2)] * count


@pytest.mark.parametrize("target", [None, MESH, lambda name, x: ROWS if x.ndim else None])
def test_a_state_that_init_would_not_make_is_not_saved(ckpts, target):
    """Without shapes in the target, only `init` says which model it is."""
    init = {"w": shoal.put(ones(2), ROWS), "step": 0}
    state, _ = ckpts.resume(target, lambda: init)
    with pytest.raises(RestoreMismatchError) as caught:
        ckpts.save(0, {**state, "w": shoal.put(ones(4), ROWS)})
    assert caught.value.wrong_shape == ("w",)
    assert "w: is float32[8,4], and `init` makes float32[8,2]" in str(caught.value)
    assert "pass check_init=False to `resume`" in str(caught.value)
    ckpts.resume(target, lambda: init, check_init=False)
    saved(ckpts, {**state, "w": shoal.put(ones(4), ROWS)})
    assert ckpts.resume(target, lambda: init, check_init=False)[1] == 1
    with pytest.raises(RestoreMismatchError):
        ckpts.resume(target, lambda: init)


def test_resume_compares_cast_leaves_by_their_restored_dtype(ckpts):
    target = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "step": np.zeros((), np.int32)}
    init = {"w": jnp.ones(3, jnp.bfloat16), "step": np.int32(0)}
    ckpts.resume(target, lambda: init, dtype="any")
    saved(ckpts, {"w": jnp.ones(3), "step": 0})
    state, first = ckpts.resume(target, lambda: init, dtype="any")
    assert (first, state["w"].dtype) == (1, jnp.bfloat16)


def test_a_save_is_compared_only_where_its_leaves_have_changed(ckpts):
    asked = []

    def choose(name, x):
        asked.append(name)
        return MESH

    ckpts.resume(choose, {"w": jnp.ones(3), "step": 0})
    asked.clear()
    counts = []
    for step, state in enumerate(
        [
            {"w": jnp.ones(3), "step": 0},
            {"w": jnp.zeros(3), "step": 1},
            {"w": jnp.zeros(3), "step": jnp.int32(2)},  # `jit` has made it an array
            {"w": jnp.zeros(3), "step": jnp.int32(3)},
        ]
    ):
        ckpts.save(step, state)
        counts.append(len(asked))
    assert counts == [1, 1, 3, 3]


def test_arrays_of_the_target_are_released(ckpts):
    target = {"w": shoal.put(ones(2), ROWS), "v": np.ones(3)}
    state = {"w": shoal.put(ones(2), ROWS), "v": np.ones(3)}
    alive = [weakref.ref(value) for tree in (target, state) for value in tree.values()]
    ckpts.resume(target, state)
    ckpts.wait()
    ckpts._saver._await_memory()
    del target, state
    gc.collect()
    assert [one() for one in alive] == [None] * 4


def test_with_a_notice_the_state_comes_first(ckpts, alone, caplog):
    state = {"w": ones(2)}
    ckpts.resume(state, state)
    alone.give_notice(ReceivedNotice("drained", "a test", 60.0))
    ckpts.save(0, {"v": ones(2)}, force=True)
    (warning,) = (text for text in caplog.messages if "refuse" in text)
    assert "save(0): the job is preempted, so it saves a state that `resume` would" in warning
    assert list(ckpts.restore()) == ["v"]


def test_without_a_resume_any_tree_is_saved(ckpts):
    for step, state in enumerate([{"w": ones(2)}, [ones(4), 3], {}]):
        saved(ckpts, state, step)
    with pytest.raises(UsageError):
        ckpts.resume({"v": ROWS}, None)  # what fails asks for nothing
    saved(ckpts, {"x": 1}, 3)
    assert ckpts.all_steps() == (0, 1, 2, 3)
