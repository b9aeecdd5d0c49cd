"""Per-device pieces ⇄ one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from arrays.device_grids import placements
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.placing.pack import pack, unpack
from shoal.arrays.placing.put import put
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region

MESH = Mesh({"x": 2, "y": 2}, device_ids=[5, 0, 3, 6])


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


@given(placements())
def test_pack_and_unpack_undo_each_other(placement):
    layout, shape = placement
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    pieces = [whole[region(layout, shape, int(device))] for device in layout.mesh.device_ids.flat]
    array = pack(pieces, layout)
    np.testing.assert_array_equal(np.asarray(array), whole)
    assert array.sharding == sharding_of(layout)
    for piece, back, device in zip(pieces, unpack(array), layout.mesh.device_ids.flat, strict=True):
        np.testing.assert_array_equal(np.asarray(back), piece)
        assert back.devices() == {jax.devices()[device]}
    again = pack(unpack(array), layout)
    assert pointers(unpack(again)) == pointers(unpack(array))  # nothing was copied


def test_pieces_on_other_devices_move():
    pieces = [jax.device_put(np.full(2, n, np.float32), jax.devices()[7]) for n in range(4)]
    array = pack(pieces, Layout(MESH, ("x", "y")))
    assert np.asarray(array).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [next(iter(piece.devices())).id for piece in unpack(array)] == [5, 0, 3, 6]


def test_a_later_change_of_a_piece_changes_nothing():
    raw = np.zeros(4096 + 64, np.uint8)
    piece = raw[-raw.ctypes.data % 64 :][:4096].view(np.float32)  # aligned: JAX would share it
    array = pack([piece] * 4, Layout(MESH, None))
    piece[:] = 7
    assert not np.asarray(array).any()


def test_trees():
    pieces = [{"w": np.full((1, 2), n, np.float32), "k": jax.random.key(7)} for n in range(4)]
    layouts = {"w": Layout(MESH, ("x", "y"), None), "k": Layout(MESH)}
    packed = pack(pieces, layouts)
    assert packed["w"].shape == (4, 2)
    assert packed["k"].dtype == jax.random.key(7).dtype
    back = unpack(packed)
    assert len(back) == 4
    assert back[3]["w"].tolist() == [[3, 3]]


def test_the_terms_of_a_sum():
    mesh = Mesh({"x": 2, "y": 2}, axis_types="explicit")
    terms = pack([np.full(2, n, np.float32) for n in range(4)],
                 Layout(mesh, "x", partial={"y": "sum"}))  # fmt: skip
    assert [piece.tolist() for piece in unpack(terms)] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    with jax.set_mesh(jax_mesh(mesh)):
        assert jax.reshard(terms, jax.P("x")).tolist() == [1, 1, 5, 5]


def test_replicas_must_be_equal_bit_by_bit():
    nan = np.float32("nan")
    layout = Layout(MESH, "x")
    pieces = [np.array([nan, 0], np.float32) for _ in range(4)]
    assert pack(pieces, layout).shape == (4,)
    pieces[3][1] = -0.0
    with pytest.raises(UsageError, match="the array: pieces 2 and 3 are replicas in Layout"):
        pack(pieces, layout)
    assert pack(pieces, Layout(MESH, ("x", "y"))).shape == (8,)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([np.zeros(2, np.float32)] * 3, "3 pieces for the 4 devices that this process owns"),
        ([np.zeros(2, np.float32)] * 5, "5 pieces for the 4 devices"),
        ([], "no pieces for the 4 devices that this process owns"),
        ([np.float32(2)] * 4, r"shape \(\) has rank 0, but .* has rank 1"),
        ([np.zeros(n, np.float32) for n in (2, 2, 3, 4)],
         r"2 problems\n.*piece 2 is float32\[3\], piece 0 is float32\[2\]\n.*piece 3"),
        ([np.zeros(2, t) for t in ("f4", "i4", "f4", "f2")],
         r"2 problems\n.*piece 1 is int32\[2\], piece 0 is float32\[2\]\n.*piece 3 is float16"),
        ([np.full(2, 1 << 40)] * 4, "4 problems\n.*piece 0: holds 1099511627776, which"),
        (["text"] * 4, "piece 3: is a str"),
        ([{"a": np.zeros(2, np.float32)}] * 3 + [{"b": np.zeros(2, np.float32)}],
         r"piece 3 is the tree PyTreeDef\(\{'b': \*\}\), piece 0 is"),
    ],
)  # fmt: skip
def test_pack_refuses_invalid_pieces(pieces, message):
    with pytest.raises(UsageError, match=message):
        pack(pieces, Layout(MESH, ("x", "y")))


def test_pieces_are_a_list_of_arrays_on_one_device():
    with pytest.raises(UsageTypeError, match="must be a list, not an ndarray"):
        pack(np.zeros((4, 2), np.float32), Layout(MESH, "x"))
    spread = put(np.zeros(2, np.float32), Layout(MESH, "x"))
    with pytest.raises(UsageError, match="piece 3 is spread over several devices"):
        pack([spread] * 4, Layout(MESH, ("x", "y")))


def test_only_arrays_have_pieces():
    with pytest.raises(UsageTypeError, match=r"2 problems\n  - \['a'\]: an ndarray .*\n.*\['b'\]"):
        unpack({"a": np.zeros(3), "b": 4, "c": jnp.zeros(3)})
    with pytest.raises(UsageError, match=r"\['a'\] on 1, \['b'\] on 4"):
        unpack({"a": jnp.zeros(3), "b": put(np.zeros(2, np.float32), Layout(MESH, "x"))})
    with pytest.raises(UsageError, match="has no pieces"):
        jax.jit(lambda x: unpack(x))(jnp.zeros(3))


def test_an_array_on_one_device_has_one_piece():
    array = jax.device_put(np.arange(3, dtype=np.float32), jax.devices()[2])
    (piece,) = unpack(array)
    assert piece.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


def test_deleted_arrays_and_pieces_are_named():
    gone = put(np.zeros(8, np.float32), Layout(MESH, "x"))
    pieces = unpack(gone)
    gone.delete()
    with pytest.raises(UsageError, match=r"unpack: \['a'\]: was deleted"):
        unpack({"a": gone})
    assert pieces[2].is_deleted()  # one buffer, under two names
    pieces[1] = np.zeros(4, np.float32)
    with pytest.raises(UsageError, match=r"pack: 3 problems\n.*piece 0: was deleted.*\n.*piece 2"):
        pack(pieces, Layout(MESH, "x"))


def test_pieces_in_other_memory_are_refused():
    device = jax.devices()[MESH.device_ids.ravel()[1]]
    pinned = jax.device_put(
        np.zeros(2, np.float32),
        jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"),
    )
    pieces = [np.zeros(2, np.float32)] * 4
    pieces[1] = pinned
    with pytest.raises(UsageError, match="piece 1 is in pinned_host memory"):
        pack(pieces, Layout(MESH, ("x", "y")))


def test_pieces_are_packed_outside_jit():
    with pytest.raises(UsageError, match="inside jit no value is on a device yet"):
        jax.jit(lambda x: x + pack([np.zeros(2, np.float32)] * 4, Layout(MESH, None)))(jnp.ones(2))
