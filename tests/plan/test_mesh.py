"""Meshes: a value with one validator, an exact text form, and positions apart from ids."""

import copy
import enum
import pickle
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.testing.strategies import meshes


@given(meshes())
@example(Mesh({"\n": 1, "x": 1}, axis_types={"\n": "explicit"}))
def test_text_pickle_and_hash_round_trip(mesh):
    for again in (Mesh.parse(mesh.text), pickle.loads(pickle.dumps(mesh))):
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert repr(again) == repr(mesh)
    assert "\n" not in repr(mesh)


@given(meshes())
def test_position_coords_and_ids_agree_with_numpy(mesh):
    ids = mesh.device_ids
    assert ids.shape == mesh.shape == tuple(mesh.axes.values())
    assert ids.size == mesh.size
    for index in np.ndindex(mesh.shape):
        assert mesh.coords(int(ids[index])) == index
        assert (
            mesh.position(int(ids[index])) == np.ravel_multi_index(index, mesh.shape or (1,))
            if mesh.shape
            else mesh.position(int(ids[index])) == 0
        )


@given(meshes())
def test_every_device_is_local_to_its_process(mesh):
    assert mesh.processes.shape == mesh.shape
    owned = [mesh.local(process) for process in mesh.process_indices]
    assert sorted(np.concatenate(owned)) == sorted(mesh.device_ids.ravel())
    for process, ids in zip(mesh.process_indices, owned, strict=True):
        expected = [
            int(mesh.device_ids[index])
            for index in np.ndindex(mesh.shape)
            if mesh.processes[index] == process
        ]
        assert ids.tolist() == expected
    assert mesh.local(99).tolist() == []


@given(meshes())
def test_host_mesh_is_one_to_one(mesh):
    host = mesh.host_mesh()
    assert host.kind == "cpu"
    assert (host.device_ids == mesh.device_ids).all()
    assert (host.processes == mesh.processes).all()
    assert host.axes == mesh.axes


@given(meshes())
def test_host_mesh_per_process_has_the_first_device_of_each(mesh):
    host = mesh.host_mesh(per="process")
    owners = mesh.processes.ravel()
    firsts = {p: mesh.device_ids.ravel()[owners == p].min() for p in np.unique(owners)}
    assert host.axes == {"process": len(firsts)}
    assert host.kind == "cpu"
    assert dict(zip(host.processes.tolist(), host.device_ids.tolist(), strict=True)) == firsts
    assert host.processes.tolist() == sorted(firsts)


def test_host_mesh_of_what():
    with pytest.raises(UsageError, match="per='host' is not one of 'device', 'process'"):
        Mesh({"x": 2}).host_mesh(per="host")


def test_submesh_drops_or_keeps_an_axis_like_numpy():
    mesh = Mesh({"x": 4, "y": 2}, device_ids=np.arange(8)[::-1], processes=[0, 0, 0, 0, 1, 1, 2, 2])
    grid = mesh.device_ids
    picked = mesh.submesh(x=1)
    assert picked.axis_names == ("y",)
    assert (picked.device_ids == grid[1]).all()
    assert (mesh.submesh(x=slice(1, None, 2)).device_ids == grid[1::2]).all()
    assert (mesh.submesh(x=-1, y=slice(1)).device_ids == grid[-1, :1]).all()
    assert mesh.submesh(x=0, y=0) == Mesh({}, device_ids=7)
    assert mesh.submesh(x=0, y=0).device_ids.shape == ()
    assert mesh.submesh(x=np.array(1)) == mesh.submesh(x=np.int8(1)) == picked
    assert Mesh({"self": 2, "x": 2}).submesh(self=1) == Mesh({"x": 2}, device_ids=[2, 3])
    assert mesh.submesh(x=slice(2, 4)).processes.tolist() == [[1, 1], [2, 2]]
    assert mesh.submesh() == mesh
    iota = Mesh({"x": 4, "y": 2})
    assert iota.submesh(x=slice(0, 2)).is_iota
    assert not iota.submesh(x=slice(2, 4)).is_iota


def test_values_that_say_the_same_are_equal():
    plain = Mesh({"x": 2, "y": 2})
    assert Mesh([("x", 2), ("y", 2)], device_ids=[[0, 1], [2, 3]], processes=[0, 0, 0, 0]) == plain
    assert Mesh({"x": np.int32(2), "y": 2}, processes=0) == plain
    assert plain != Mesh({"y": 2, "x": 2})
    assert plain != Mesh({"x": 2, "y": 2}, kind="gpu")
    assert plain != Mesh({"x": 2, "y": 2}, label="a")
    assert plain != Mesh({"x": 2, "y": 2}, processes=1)
    assert plain != Mesh({"x": 2, "y": 2}, axis_types="explicit")
    assert plain != Mesh({"x": 2, "y": 2}, device_ids=[3, 2, 1, 0])
    assert (plain == 3) is False


@pytest.mark.parametrize(("device_ids", "processes"), [([3, 1, 0, 2], [0, 1, 0, 1])])
def test_nothing_that_a_mesh_hands_out_can_be_made_writable(device_ids, processes):
    mesh = Mesh({"x": 4}, device_ids=device_ids, processes=processes)
    for again in (mesh, pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh)):
        for view in (again.device_ids, again.processes):
            while isinstance(view, np.ndarray):
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view.flags.writeable = True
                view = view.base
    source = np.array([[3, 9], [1, 9], [0, 9], [2, 9]])[:, 0]  # strided, and owned by another array
    aliased = Mesh({"x": 4}, device_ids=source)
    source[:] = 7
    assert aliased.device_ids.tolist() == [3, 1, 0, 2]


def test_a_mesh_cannot_be_changed():
    ids = np.array([3, 1, 0, 2])
    mesh = Mesh({"x": 4}, device_ids=ids, processes=[0, 1, 0, 1])
    before = mesh.text
    ids[0] = 7
    assert mesh.text == before
    for view in (mesh.device_ids, mesh.processes, Mesh({"x": 4}).device_ids):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 5
    with pytest.raises(AttributeError, match="immutable"):
        mesh.kind = "gpu"
    with pytest.raises(AttributeError, match="immutable"):
        del mesh._ids
    with pytest.raises(TypeError):
        mesh.axes["x"] = 5
    view = pickle.loads(pickle.dumps(mesh)).device_ids
    assert not view.flags.writeable


def test_ids_from_zero_store_nothing_per_device():
    large = Mesh({"x": 1 << 20, "y": 1 << 20})
    stored = sum(
        sys.getsizeof(getattr(large, slot)) for slot in Mesh.__slots__ if hasattr(large, slot)
    )
    assert stored < 2000
    assert Mesh({"x": 1 << 10}, device_ids=np.arange(1 << 10))._ids is None
    assert large.position((1 << 39) + 1) == (1 << 39) + 1
    assert large.processes.strides == (0, 0)


def test_repr_says_what_matters():
    assert repr(Mesh({"data": 4, "model": 2})) == (
        "Mesh(data=4, model=2; 8 cpu devices, 1 process, auto axes)"
    )
    assert repr(
        Mesh(
            {"x": 2},
            device_ids=[1, 0],
            processes=[0, 1],
            kind="gpu",
            label="a",
            axis_types="explicit",
        )
    ) == ("Mesh('a': x=2; 2 gpu devices, 2 processes, ids 1..0, explicit axes)")
    mixed = Mesh({"x": 1, "y": 1}, axis_types={"y": "explicit"})
    assert repr(mixed) == "Mesh(x=1, y=1; 1 cpu device, 1 process, explicit axes: y)"
    assert repr(Mesh({})) == "Mesh(no axes; 1 cpu device, 1 process, auto axes)"
    assert len(repr(Mesh({"x": 4096}, device_ids=np.random.RandomState(0).permutation(4096)))) < 120


BAD = [
    (lambda: Mesh({"": 2}), ["an axis name is empty"]),
    (lambda: Mesh([("x", 2), ("x", 2)]), ["axis 'x' is repeated"]),
    (lambda: Mesh({"x": 3}, device_ids=[0, 1]), ["2 device ids for 3 = 3 positions"]),
    (
        lambda: Mesh({"x": 2, "y": 2}, device_ids=[[0, 1, 2, 3]]),
        ["1x4 device ids for 2x2 = 4 positions"],
    ),
    (lambda: Mesh({"x": 4}, device_ids=[1, 1, 2, 2]), ["repeated: 1, 2"]),
    (lambda: Mesh({"x": 3}, device_ids=[0, -1, -5]), ["negative: -1, -5"]),
    (lambda: Mesh({"x": 2}, device_ids=[0.0, 1.0]), ["sequence of integers"]),
    (lambda: Mesh({"x": 2}, device_ids=[True, False]), ["sequence of integers"]),
    (lambda: Mesh({"x": 2.0}), ["size 2.0 must be an integer"]),
    (lambda: Mesh({"x": True}), ["size True must be an integer"]),
    (lambda: Mesh({"x": 0, "y": -3}), ["size 0", "size -3"]),
    (lambda: Mesh({"x": 2}, processes=[0]), ["1 processes for 2 = 2"]),
    (lambda: Mesh({"x": 2}, processes=[0, -1]), ["negative: -1"]),
    (lambda: Mesh({"x": 2}, processes=[[0], [1, 2]]), ["sequence of integers"]),
    (lambda: Mesh({"x": 2}, axis_types="manual"), ["'manual' is neither"]),
    (lambda: Mesh({}, axis_types="manual"), ["'manual' is neither"]),
    (lambda: Mesh({"x": 2}, axis_types=np.array(["auto"] * 2)), ["is neither"]),
    (lambda: Mesh({"x": 2}, axis_types={0: "explicit", "": "auto"}), ["axis 0", "axis ''"]),
    (lambda: Mesh({"x": 1, "y": 1}, axis_types={"x": 1, "y": "a"}), ["['x']=1", "['y']='a'"]),
    (lambda: Mesh([([1], 2)]), ["axis name [1] must be a string"]),
    (lambda: Mesh({"x": 2}, device_ids=np.array([1, 0], "m8[s]")), ["sequence of integers"]),
    (lambda: Mesh({"x": 2}, device_ids=[2**63, 0]), ["integers"]),
    (lambda: Mesh({f"a{i}": 1 for i in range(65)}), ["65 axes", "64"]),
    (lambda: Mesh({"x": 2**32, "y": 2**32}), ["4294967296x4294967296", "64 bits"]),
    (lambda: Mesh({"a\ud800": 2}), ["surrogate"]),
    (lambda: Mesh({"data": 2}, axis_types={"dat": "auto"}), ["did you mean 'data'"]),
    (lambda: Mesh({"x": 2}, kind=""), ["a kind is empty"]),
    (lambda: Mesh(7), ["axes=7 must be a dict"]),
    (
        lambda: Mesh({3: 2, "": 1.5}, kind=4),
        ["3 must be a string", "empty", "1.5", "kind 4 must be"],
    ),
    (
        lambda: Mesh({"x": 2}, device_ids=[-1, -1], processes=[1, 2, 3]),
        ["negative: -1", "repeated: -1", "3 processes for 2"],
    ),
]


@pytest.mark.parametrize(("make", "parts"), BAD)
def test_mesh_error_names_every_problem(make, parts):
    with pytest.raises(UsageError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def test_wrong_values_are_no_type_errors():
    for make in (
        lambda: Mesh({"x": 0}),
        lambda: Mesh([("must be a", 1)] * 2),
        lambda: Mesh({"": 1}),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert not isinstance(caught.value, TypeError)


def test_wrong_types_are_type_errors_too():
    with pytest.raises(UsageTypeError):
        Mesh({"x": 2.0})
    with pytest.raises(TypeError):
        Mesh({"x": 2}, device_ids=[0.5, 1.5])


@pytest.mark.parametrize(
    ("picks", "part"),
    [
        ({"dat": 0}, "no axis 'dat' (axes: data, model); did you mean 'data'?"),
        ({"model": 2}, "model=2 is not below its size 2"),
        ({"model": -3}, "model=-3 is below -2, its first index"),
        ({"model": slice(1, 1)}, "leaves nothing of its 2 positions"),
        ({"model": 1.0}, "must be an int or a slice"),
        ({"model": True}, "model=True must be an int or a slice"),
        ({"model": slice("a", None)}, "slice"),
    ],
)
def test_submesh_refuses(picks, part):
    with pytest.raises(UsageError) as caught:
        Mesh({"data": 4, "model": 2}).submesh(**picks)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "x=", "x=a", "=3", "x=2 | ids 0", "x=2 | ids 0..99999999999999", "x=2 | color 3",
        "x=2 | ids 0,1 | ids 0,1", "x=2 y=2;", "x=2 |", "x=2 trailing", 'x=2 | name "a', "() ()",
        "x=2 | processes 0x9", "x=9" * 3000, "x=" + "9" * 5000, "x=2 | ids 0," + "9" * 20,
        "x=2 | processes 0x" + "9" * 5000, "x=\u0663", "x=1000000000 | ids 999999999..0",
        "x=1000000000 | processes 0x1,1x999999999", 'x=2 | name "\\ud800"', " ".join(["x=2"] * 65),
        "x=2 x=2", "x=-2", "x=2 | explicit y", "x=2.5",
    ],
)  # fmt: skip
def test_parse_refuses(text):
    with pytest.raises(UsageError):
        Mesh.parse(text)


@given(st.text(alphabet='xy=+-|@ 0123456789.,"\\()\n\u0663', max_size=40) | st.text(max_size=20))
@pytest.mark.parametrize("parse", [Mesh.parse, Layout.parse])
def test_any_text_is_read_or_refused(parse, text):
    for candidate in (text, f"x=2 | {text}", f"x @ x=2 | ids {text}", f"- | {text} @ x=2"):
        try:
            value = parse(candidate)
        except UsageError:
            continue
        assert parse(value.text) == value


def test_long_texts_are_read_in_linear_time():
    ids = np.random.RandomState(0).permutation(200_000)
    mesh = Mesh({"x": 200_000}, device_ids=ids, processes=ids)
    assert Mesh.parse(mesh.text) == mesh  # minutes, if each word copied what is left


@pytest.mark.parametrize("kind", [str, np.str_, type("Text", (str,), {"__str__": lambda s: "no"})])
def test_names_of_str_subclasses_become_plain_strings(kind):
    mesh = Mesh(
        {kind("data"): 2}, kind=kind("gpu"), label=kind("a"), axis_types={kind("data"): "auto"}
    )
    assert {type(mesh.axis_names[0]), type(mesh.kind), type(mesh.label)} == {str}
    assert mesh.text == "data=2 | kind gpu | name a"


def test_axes_may_be_members_of_an_enum():
    axis = enum.Enum("axis", {"DATA": "data"}, type=str)  # whose str() is "axis.DATA"
    layout = Layout(Mesh({axis.DATA: 2}), axis.DATA)
    assert layout.text == "data @ data=2"
    assert {type(name) for name in layout.axes_of_dims[0]} == {str}


def test_large_meshes_cost_nothing_per_device():
    mesh = Mesh({"x": 1 << 20, "y": 1 << 20}, processes=3)
    assert mesh.submesh(x=5, y=slice(2, 4)).device_ids.tolist() == [(5 << 20) + 2, (5 << 20) + 3]
    assert mesh.text == "x=1048576 y=1048576 | processes 3x1099511627776"
    assert Mesh.parse(mesh.text) == mesh
    with pytest.raises(UsageError, match=r"its ids: 0\.\.1099511627775"):
        mesh.position(-1)


def test_a_repr_stays_on_one_line():
    assert "\n" not in repr(Mesh({"a\nb": 1}, kind="c\nd", label="e\nf"))


def test_unknown_devices_are_refused():
    with pytest.raises(UsageError, match=r"device 8 is not in .* ids: 0..7"):
        Mesh({"x": 8}).coords(8)
    with pytest.raises(UsageError, match="device 0 is not in"):
        Mesh({"x": 2}, device_ids=[5, 6]).position(0)
    with pytest.raises(UsageError, match=r"device_id=1.0 must be a whole number"):
        Mesh({"x": 2}).coords(1.0)
