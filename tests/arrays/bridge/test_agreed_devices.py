"""Processes agree on the devices of a mesh, or are shown what differs first. They are threads."""

from __future__ import annotations

import pytest

from collectives.thread_jobs import run_all
from plan.described_devices import as_jax, generated
from shoal.arrays.bridge.agreed_devices import View, agree_on_devices
from shoal.arrays.make_mesh import OrderRequest, ordered
from shoal.errors import DivergenceError
from shoal.runtime.client.in_process import LocalJob

ROWS = generated(4, 4, 1, "TPU v5 lite")  # four processes of four chips
PAIRS = [("data", 4), ("model", 4)]


def agreed(change=None, *, only=None, group=None, rows=None, **more):
    """Let each process make a mesh of what it sees; `change(process, rows)` says what that is."""
    count = 4
    job = LocalJob(count)

    def run(client):
        me = client.process
        if group is not None and me not in group:
            return None
        view = {"rows": [dict(row) for row in rows or ROWS], "pairs": PAIRS, "number": me,
                "options": [], "site": "train.py:3 (main)", "own": None, "name": ""}  # fmt: skip
        if change is not None and (only is None or me == only):
            change(view)
        devices = as_jax(view["rows"])
        order = ordered(
            view["pairs"], devices, OrderRequest(), given=False, kind="tpu", label=view["name"]
        )
        own = [device for device in devices if device.process_index == view["number"]]
        if view["own"] is not None:
            own = as_jax(view["own"])
        with client.call("make_mesh", "main", group):
            agree_on_devices(
                client,
                order.mesh,
                View(view["number"], devices, own),
                options=view["options"],
                site=view["site"],
                group=group,
                lane="main",
                timeout_s=30.0,
            )
        return order.mesh

    return run_all(job, run)


def differences(change, *, only, **named):
    """Return what the process is told that differs: the others may come when that is known."""
    errors = agreed(change, only=only, **named)
    assert all(type(error) is DivergenceError for error in errors), errors
    return str(errors[only]), errors[only].sides


def apart(sides, process):
    """Is the process alone on one side, and are others on the other?"""
    one, other = sorted(sides.values(), key=lambda held: held != (process,))
    return one == (process,) and other and process not in other


def test_equal_calls_agree():
    meshes = agreed()
    assert len({*meshes}) == 1
    assert meshes[0].shape == (4, 4)


def test_the_order_of_jaxs_list_counts_and_an_order_of_its_processes_does_not():
    def renumber(view):  # JAX counts them in another order than the job
        view["number"] = 3 - view["number"]

    assert len({*agreed(renumber)}) == 1
    told, _ = differences(lambda view: view["rows"].reverse(), only=2)
    assert "device 15: tpu" in told


def swap_coords(view):
    rows = view["rows"]
    rows[5]["coords"], rows[6]["coords"] = rows[6]["coords"], rows[5]["coords"]


def test_the_first_device_that_differs_is_shown_with_its_coordinates():
    told, sides = differences(swap_coords, only=3)
    here, there = ROWS[5]["coords"], ROWS[6]["coords"]
    assert f"device {ROWS[5]['id']}: tpu, TPU v5 lite, process 1, at {here}" in told
    assert f"at {there}" in told
    assert apart(sides, 3)
    assert "train.py:3 (main)" in told


@pytest.mark.parametrize(
    ("change", "one", "other"),
    [
        (lambda view: view["rows"].__setitem__(9, view["rows"][9] | {"process": 0}),
         "process 2", "process 0"),
        (lambda view: view["rows"].__setitem__(9, view["rows"][9] | {"id": 99}),
         "device 99", "device 9"),
        (lambda view: view.update(pairs=[("data", 2), ("model", 8)]),
         "axes data=4 model=4", "axes data=2 model=8"),
        (lambda view: view.update(pairs=[("model", 4), ("data", 4)]),
         "axes data=4 model=4", "axes model=4 data=4"),
        (lambda view: view.update(options=["across={'data': 2}"]),
         "options none", "across={'data': 2}"),
        (lambda view: view.update(rows=view["rows"][:12], pairs=[("data", 4), ("model", 3)]),
         "data=4 model=4", "data=4 model=3"),
        (lambda view: view.update(name="pod"), "make_mesh at train", "'pod'"),
    ],
)  # fmt: skip
def test_first_difference_of_the_device_lists_is_shown(change, one, other):
    told, sides = differences(change, only=1)
    assert one in told, told
    assert other in told, told
    assert apart(sides, 1)


def test_equal_calls_at_different_places_agree():
    assert len({*agreed(lambda view: view.update(site=f"train.py:{view['number']} (main)"))}) == 1


def test_two_processes_with_one_number_in_jax():
    told, sides = differences(lambda view: view.update(number=0), only=2)
    assert "initialize both together" in told
    assert sides["is process 0 in JAX"] == (0, 2)
    assert len(sides) == 3


def test_devices_that_differ_from_the_shared_list_are_reported():
    moved = [dict(row) for row in ROWS if row["process"] == 3]
    moved[1]["coords"] = (9, 9, 0)
    told, sides = differences(lambda view: view.update(own=moved), only=3)
    assert f"has device {moved[1]['id']}: tpu" in told
    assert "at (9, 9, 0), core 0, slice 0; the list has device" in told
    assert "hardware fault" in told
    assert [*sides.values()] == [(3,)]
    told, _ = differences(lambda view: view.update(own=moved[2:]), only=3)
    assert "lacks a device of the list: device" in told


def test_process_without_its_listed_devices_is_the_differing_side():
    _, sides = differences(lambda view: view.update(own=[]), only=0)
    assert [*sides.values()] == [(0,)]


def test_group_of_processes_agrees_without_the_others():
    rows = [row for row in ROWS if row["process"] in (1, 2)]

    def part(view):
        view.update(pairs=[("data", 8)])

    first, *members, last = agreed(part, group=(1, 2), rows=rows)
    assert first is last is None
    assert members[0] == members[1]
    assert members[0].process_indices == (1, 2)
