"""A run is not resumed with the state of another model, and saves none that it could not resume."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

import shoal
from shoal.arrays.host.shapes_only import shapes_only
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.errors import RestoreMismatchError
from shoal.runtime.client.in_process import LocalJob

MESH = shoal.make_mesh({"x": 4, "y": 2})
ROWS = NamedSharding(MESH, P("x"))
COLUMNS = NamedSharding(MESH, P(None, "y"))


@pytest.fixture
def alone():
    return LocalJob(1).coordinators[0]


@pytest.fixture
def ckpts(tmp_path, alone):
    with Checkpoints(tmp_path / "run", coordinator=alone) as history:
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
def test_what_differs_is_named(ckpts, how, init, attribute, words):
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
def test_what_may_change_while_a_run_trains(ckpts, saves, init):
    first, begins = ckpts.resume(None, lambda: init)
    assert (begins, first is init) == (0, True)
    saved(ckpts, saves)
    for made in (init, lambda: init):
        state, begins = ckpts.resume(None, made)
        assert (begins, state.keys()) == (1, saves.keys())


def test_what_only_leaves_out_is_not_compared(ckpts):
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
