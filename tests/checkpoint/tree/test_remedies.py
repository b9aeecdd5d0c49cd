"""What cannot be saved is refused with what to write instead, and that is true."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
import sys
from types import ModuleType

import jax
import numpy as np
import pytest

import shoal


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    width: int = 3


@dataclasses.dataclass
class State:
    w: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Known:
    w: object


class Names(str):
    pass


CASES = {
    "enum": (Color.RED, "is Color.RED, of the enum Color; save its .name or .value"),
    "int enum": (Level.LOW, "of the enum Level; save its .name or .value"),
    "dataclass": (
        Config(),
        "is a dataclass Config that JAX does not know; decorate it with "
        "@jax.tree_util.register_dataclass, or save dataclasses.asdict(…) of it",
    ),
    "class": (Config, "is the class Config; save its name, or leave it out"),
    "set": ({1}, "is a set; save a sorted list of it"),
    "path": (pathlib.Path("a"), "Path; save str(…) of it"),
    "time": (datetime.date(2020, 1, 2), r"is a date; save its .isoformat()"),
    "delta": (datetime.timedelta(1), "is a timedelta; save its .total_seconds()"),
    "counter": (collections.Counter("a"), "is a Counter; save dict(…) of it"),
    "text": (Names("a"), "is a Names; save str(…) of it"),
    "function": (len, "functions cannot be saved; leave it out"),
    "other": (object(), "is an object; pass arrays, numbers, str"),
}


@pytest.mark.parametrize("case", CASES)
def test_error_of_a_save_suggests_a_remedy(case, tmp_path):
    value, told = CASES[case]
    with pytest.raises(shoal.errors.UsageTypeError) as caught:
        shoal.save(tmp_path / "one", {"a": {"b": value}, "w": np.ones(2)})
    assert f"a/b: {told}" in str(caught.value) or (
        told in str(caught.value) and "a/b: is " in str(caught.value)
    )
    assert not (tmp_path / "one").exists()


def test_the_value_of_a_process_knows_no_registered_classes(tmp_path):
    with pytest.raises(shoal.errors.UsageTypeError) as caught:
        shoal.save(tmp_path / "one", {"own": shoal.PerProcess({"c": Config(), "e": Color.RED})})
    assert "c: is a dataclass Config; save dataclasses.asdict(…) of it" in str(caught.value)
    assert "e: is Color.RED, of the enum Color" in str(caught.value)


def test_a_key_that_is_an_enum(tmp_path):
    with pytest.raises(
        shoal.errors.UsageTypeError, match=r"of type Color, an enum; take its \.name or"
    ):
        shoal.save(tmp_path / "one", {Color.RED: 1})


def test_remedy_names_eqx_partition_if_equinox_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", ModuleType("equinox"))
    with (
        shoal.Checkpoints(tmp_path / "run") as history,
        pytest.raises(
            shoal.errors.UsageTypeError, match=r"act: .*; save eqx\.partition\(tree, eqx\.is_a"
        ),
    ):
        history.resume(np.ones(2), {"w": np.ones(2), "act": len})


def test_a_target_of_a_class_that_jax_does_not_know(tmp_path):
    """It is one leaf to JAX: what it holds is not looked for."""
    shoal.save(tmp_path / "one", {"w": np.ones(2)})
    remedy = "decorate it with @jax.tree_util.register_dataclass"
    with pytest.raises(shoal.errors.RestoreMismatchError, match=f"is a dataclass State .*{remedy}"):
        shoal.restore(tmp_path / "one", State(np.ones(2)))
    with pytest.raises(
        shoal.errors.RestoreMismatchError, match=r"is Color\.RED, of the enum Color"
    ):
        shoal.restore(tmp_path / "one", {"w": np.ones(2), "color": Color.RED})


def test_each_remedy_works(tmp_path):
    values = {
        "registered": Known(np.ones(2)),
        "dict": dataclasses.asdict(Config()),
        "name": Color.RED.name,
        "value": Level.LOW.value,
        "list": sorted({2, 1}),
        "path": str(pathlib.PurePosixPath("a")),
    }
    shoal.save(tmp_path / "one", values)
    back = shoal.restore(tmp_path / "one", values)
    assert isinstance(back["registered"], Known)
    assert {name: back[name] for name in values if name != "registered"} == {
        name: value for name, value in values.items() if name != "registered"
    }
