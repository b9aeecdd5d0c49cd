"""Meshes over the devices there are, and the default mesh of a block."""

from __future__ import annotations

import asyncio
import logging
import math
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.use_mesh import default_mesh, use_mesh
from shoal.arrays.make_mesh import make_mesh
from shoal.arrays.placing.put import put
from shoal.errors import InitializeError, NoDevicesError, UsageError, UsageTypeError
from shoal.plan.mesh import Mesh
from shoal.runtime import process


def test_all_devices_in_jaxs_order():
    mesh = make_mesh({"data": 4, "model": 2})
    assert isinstance(mesh, jax.sharding.Mesh)
    assert mesh is jax_mesh(Mesh({"data": 4, "model": 2}))
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_one_size_may_be_left_open():
    axes = {"data": -1, "model": 2}
    assert dict(make_mesh(axes).shape) == {"data": 4, "model": 2}
    assert axes == {"data": -1, "model": 2}  # the caller's dict is the caller's
    assert dict(make_mesh([("data", np.int64(8)), ("model", -1)]).shape) == {"data": 8, "model": 1}


MIXED = (AxisType.Explicit, AxisType.Auto)


@pytest.mark.parametrize(
    "given", [{"data": "explicit"}, {"data": AxisType.Explicit}, MIXED, ("explicit", "auto")]
)
def test_axis_types(given):
    assert make_mesh({"data": -1, "model": 2}, axis_types=given).axis_types == MIXED


def test_the_form_of_jaxs_own():
    here = jax.make_mesh((4, 2), ("data", "model"), MIXED)
    assert make_mesh((4, 2), ("data", "model"), MIXED) == here
    assert make_mesh((-1, 2), ("data", "model"), axis_types=MIXED, devices=jax.devices()) == here
    whole = (AxisType.Explicit,) * 2
    assert make_mesh((4, 2), ("a", "b"), AxisType.Explicit).axis_types == whole
    with pytest.raises(UsageTypeError, match=r"must be as many sizes as names"):
        make_mesh((4, 2), ("a",))
    with pytest.raises(UsageError, match=r"must be one for each axis: a, b"):
        make_mesh((4, 2), ("a", "b"), (AxisType.Auto,))
    with pytest.raises(UsageTypeError, match="or sizes and then names"):
        make_mesh((4, 2))


def test_fewer_devices_are_named():
    by_id = make_mesh({"x": -1}, devices=[6, 1, np.int64(3)])
    assert Mesh.of(by_id).device_ids.tolist() == [6, 1, 3]
    assert by_id == make_mesh({"x": 3}, devices=[jax.devices()[n] for n in (6, 1, 3)])
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    assert make_mesh({"x": 2, "y": 2}, devices=grid).devices.tolist() == grid.tolist()


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"x": 3, "y": 2},
            r"multiply to 6, .* devices, 8; {'x': 4, 'y': 2} would fit, or .*\[:6\]",
        ),
        ({"x": 16}, r"multiply to 16, which is not .* 8; {'x': 8} would fit$"),
        ({"x": -1, "y": 3}, r"multiply to 3, which does not divide .* 8; {'x': 2, 'y': 4} would"),
        ({}, r"multiply to 1, .* 8; name axes, or name fewer: devices=jax.devices\(\)\[:1\]"),
        ({"x": -1, "y": -1}, "'x', 'y' are all -1"),
        ({"x": 0}, "axis 'x': size 0 must be at least 1, or -1"),
        ({"x": -2, "y": 0}, "2 problems"),
        ({"x": 2.0}, "axis 'x': size 2.0 must be an integer"),
        ({"x": True}, "must be an integer"),
        ("data", "must be a dict"),
        ({"": 8}, "an axis name is empty"),
    ],
)
def test_invalid_axes_raise_with_the_reason(axes, message):
    with pytest.raises(UsageError, match=message):
        make_mesh(axes)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans())
def test_axes_that_do_not_fit_raise_with_sizes_that_fit(sizes, free):
    axes = {f"a{number}": size for number, size in enumerate(sizes)}
    if free:
        axes["a0"] = -1
    try:
        assert make_mesh(axes).size == 8
    except UsageError as error:
        offer = str(error).partition("devices, 8; {")[2].partition("}")[0]
        would = {name: int(size) for name, size in (pair.split(": ") for pair in offer.split(", "))}
        assert math.prod(would.values()) == 8
        assert [name.strip("'") for name in would] == list(axes)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([0, 8, 99], "2 problems\n.*no device has the id 8; there are 0, 1"),
        ([0, "cpu:1"], "'cpu:1' must be a device or the id of one"),
        ([0, 0], "repeated: 0"),
        (3, "must be a list"),
    ],
)
def test_invalid_devices_raise_with_the_reason(devices, message):
    with pytest.raises(UsageError, match=message):
        make_mesh({"x": -1}, devices=devices)


def test_blocks_nest_and_restore_even_when_they_raise():
    outer, inner = Mesh({"x": 8}), Mesh({"y": 4})
    assert default_mesh() is None
    with use_mesh(outer) as given:
        assert given is default_mesh() is outer
        with pytest.raises(KeyError, match=r"y=4"), use_mesh(inner):
            raise KeyError(default_mesh())
        assert default_mesh() is outer
    assert default_mesh() is None


def test_jaxs_mesh_is_a_mesh():
    with use_mesh(jax_mesh(Mesh({"x": 8}))):
        assert default_mesh() == Mesh({"x": 8})


def test_threads_and_coroutines_do_not_see_each_other():
    meshes = {name: Mesh({name: 8}) for name in "abc"}
    meet = threading.Barrier(len(meshes), timeout=30)
    seen = {}

    def run(name):
        before = default_mesh()
        with use_mesh(meshes[name]):
            meet.wait()
            seen[name] = (before, default_mesh())
            meet.wait()

    with use_mesh(Mesh({"main": 8})):
        threads = [threading.Thread(target=run, args=[name]) for name in meshes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {name: pair[1] for name, pair in seen.items()} == meshes

    async def enter(name, mine, other):
        with use_mesh(meshes[name]):
            mine.set()
            await other.wait()
            return default_mesh()

    async def both():
        one, other = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(enter("a", one, other), enter("b", other, one))

    assert asyncio.run(both()) == [meshes["a"], meshes["b"]]
    assert default_mesh() is None


def test_the_default_mesh_is_no_mesh_of_jaxs():
    with use_mesh(Mesh({"x": 8})):
        assert len(jax.numpy.ones(3).sharding.device_set) == 1
        assert jax.sharding.get_abstract_mesh().empty


def test_not_a_mesh():
    with pytest.raises(UsageTypeError, match="must be a "), use_mesh("data"):
        pytest.fail("entered")


def test_without_a_default_mesh_the_error_says_how_to_get_one():
    with pytest.raises(UsageError, match=r"'x' needs a mesh: pass .* use_mesh\(mesh\)"):
        put(np.ones(8, np.float32), "x")


def test_a_platform_names_all_of_its_devices():
    mesh = make_mesh({"x": -1}, devices="cpu")
    assert mesh is make_mesh({"x": 8})
    with pytest.raises(NoDevicesError, match=r"no TPU device was found: .*\nthe program requests"):
        make_mesh({"x": -1}, devices="tpu")
    with pytest.raises(
        UsageError, match="devices='cpus' is neither a list nor one of 'tpu', 'gpu'"
    ):
        make_mesh({"x": -1}, devices="cpus")


def test_order_and_devices_options_decide_the_device_order():
    reversed_ids = list(range(8))[::-1]
    given = make_mesh({"x": 8}, devices=reversed_ids)
    assert given.device_ids.tolist() == reversed_ids
    assert make_mesh({"x": 8}, devices=reversed_ids, order="given") is given
    assert make_mesh({"x": 8}, devices=reversed_ids, order="wires") is make_mesh({"x": 8})
    assert make_mesh({"x": 8}, across={"x": 1}) is make_mesh({"x": 8}, compatible_with="jax")
    with pytest.raises(UsageError, match=r"^make_mesh: across: x=2 makes 2, .* has 1 hosts"):
        make_mesh({"x": 8}, across={"x": 2})
    with pytest.raises(UsageError, match="needs a list of devices="):
        make_mesh({"x": 8}, order="given")
    with pytest.raises(UsageError, match="lane"):
        make_mesh({"x": 8}, lane=None)


def test_chosen_device_order_is_logged_once_at_debug_level(caplog):
    with caplog.at_level(logging.DEBUG, logger="shoal"):
        make_mesh({"x": 4, "y": 2})
    (line,) = caplog.messages
    assert "make_mesh (" in line
    assert "test_make_mesh.py" in line
    assert line.endswith(
        "cpu:1 hosts x 8, 1 process: process after process, for no links are known"
    )
    with caplog.at_level(logging.INFO, logger="shoal"):
        make_mesh({"x": 4, "y": 2})
    assert len(caplog.messages) == 1


def test_meshes_are_registered_once_from_all_threads():
    meet = threading.Barrier(8, timeout=30)
    made = []

    def make(number):
        meet.wait()
        made.append(make_mesh({f"axis {number % 2}": 8}))

    threads = [threading.Thread(target=make, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(mesh) for mesh in made}) == 2


def test_a_process_of_a_job_that_it_has_not_joined_makes_no_mesh(monkeypatch):
    """Not of listed ids either: they are not yet those of the job's devices."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    for name in ("alone", "left"):  # whatever ran before here
        monkeypatch.setattr(process._RECORD, name, None)
    for devices in (None, "cpu", [0, 1], jax.devices()[:2]):
        with pytest.raises(InitializeError, match=r"one of 4 .* call shoal.initialize\(\) first"):
            make_mesh({"x": 2}, devices=devices)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, 10**400])
def test_a_deadline_that_is_none_is_refused_before_anything_starts(timeout_s):
    with pytest.raises(UsageError, match=r"make_mesh: timeout_s=.* must be a .* number of sec"):
        make_mesh({"x": -1}, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("axes", "options", "words"),
    [
        ({"x": 1}, {"devices": []}, "names no device"),
        ({"x": 1}, {"devices": b"cpu"}, "names no device"),
        ({"x": 10**400}, {}, "would fit"),
        ({"x": -1}, {"across": {"x": -1}}, "across: axis 'x': size -1 must be at least 1"),
        ({"x": -1}, {"order": np.array([1, 2])}, "must be 'wires' or 'given'"),
        ({"x": -1}, {"allow_split_physical_axes": "no"}, "must be True or False"),
        (dict.fromkeys("abcdefgh", 3), {}, "would fit"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(axes, options, words):
    with pytest.raises(UsageError, match=words):
        make_mesh(axes, **options)
