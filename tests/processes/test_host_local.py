"""Per-process parts ⇄ one global array, where processes really have parts of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import shoal
from shoal import Layout
from shoal.errors import DivergenceError, UsageError
from shoal.plan.shards import region
from shoal.testing.cluster import Cluster

BIT_PATTERNS = {"bfloat16": "u2", "float8_e4m3fn": "u1", "int4": "u1", "bool": "?", "complex64": ""}


def meshes():
    """Return meshes of four processes with two devices each, in several orders."""
    devices = jax.devices()
    rows = shoal.make_mesh({"data": 4, "model": 2})
    assert shoal.Mesh.of(rows).processes.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    return {
        "rows": rows,
        "explicit": shoal.make_mesh({"data": 4, "model": 2}, axis_types="explicit"),
        "grid": shoal.make_mesh({"a": 2, "b": 2, "c": 2}, devices=devices),
        # each process: one device of each column, in another row
        "crossed": shoal.make_mesh({"x": 2, "y": 4}, devices=[devices[n] for n in (0, 3, 4, 7,
                                                                                 2, 1, 6, 5)]),
    }  # fmt: skip


def layouts_of(mesh):
    """Return layouts whose dims processes cut in every way: 0, 1, both, none."""
    rows, explicit, grid, crossed = (mesh[name] for name in ("rows", "explicit", "grid", "crossed"))
    return [
        Layout(rows, "data", None),
        Layout(rows, None, "data"),
        Layout(rows, "model", None),
        Layout(rows, None, None),
        Layout(rows, ("data", "model"), None),
        Layout(rows, "model", "data"),
        Layout(explicit, "data", "model"),
        Layout(explicit, None, "data"),
        Layout(grid, "a", "b"),
        Layout(grid, ("a", "c"), "b"),
        Layout(grid, "a", None),
        Layout(grid, "c", ("a", "b")),
        Layout(crossed, None, None),
        Layout(crossed, None, "x"),
        Layout(crossed, "y", None),
    ]


def own_part(value, layout):
    """Return the part of a whole value that this process's devices hold, by brute force."""
    ids = layout.mesh.local(shoal.process_index()).tolist()
    regions = [region(layout, value.shape, i) for i in ids]
    spans = [
        slice(min(r[dim].start for r in regions), max(r[dim].stop for r in regions))
        for dim in range(value.ndim)
    ]
    return value[tuple(spans)]


def pointers(array):
    shards = array.addressable_shards
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in shards}


def same_bits(one, other):
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def holds(array, value, layout):
    assert (array.shape, shoal.layout_of(array)) == (value.shape, layout)
    for shard in array.addressable_shards:
        same_bits(shard.data, value[shard.index])


def convert_there_and_back(layout):
    shape = layout.global_shape((2, 1))
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mine = own_part(value, layout)
    whole = shoal.from_host_local({"w": mine, "n": [2.5]}, {"w": layout, "n": Layout(layout.mesh)})
    holds(whole["w"], value, layout)
    assert (whole["n"][0].shape, whole["n"][0].dtype) == ((), np.float32)
    back = shoal.to_host_local(whole["w"], layout)
    assert back.is_fully_addressable
    same_bits(back, mine)
    assert pointers(back) == pointers(whole["w"])  # nothing is copied, there
    again = shoal.from_host_local(back, layout)
    assert pointers(again) == pointers(back)  # and back
    holds(again, value, layout)
    types = {axis: layout.mesh.axis_types[axis] for axis in layout.mesh.axis_names}
    local = shoal.layout_of(back).mesh
    assert set(local.axis_types.values()) <= set(types.values())
    holds(shoal.from_host_local(jnp.asarray(mine), layout), value, layout)
    assert shoal.from_host_local(whole["w"], layout) is whole["w"]  # global already
    assert shoal.to_host_local(back, layout) is back  # local already


def every_dtype(layout):
    for dtype, view in BIT_PATTERNS.items():
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        bits = np.arange(64, dtype=np.uint8).reshape(4, 16)
        mine = (bits % 8).view(kind) if view in ("u1", "?") and dtype != "bool" else None
        mine = np.full((4, 16), np.nan, kind) if dtype == "bfloat16" else mine
        mine = (bits % 2).astype(kind) if mine is None else mine
        same_bits(shoal.to_host_local(shoal.from_host_local(mine, layout), layout), mine)
    keys = jax.random.split(jax.random.key(shoal.process_index(), impl="rbg"), (2, 4))
    back = shoal.to_host_local(shoal.from_host_local(keys, layout), layout)
    same_bits(jax.random.key_data(back), jax.random.key_data(keys))


def reference(value):
    """A function of the whole array that mixes all its elements, as a loss."""
    mixed = jnp.sin(value) @ value.T
    return (mixed * mixed).sum()


def slopes_are_right(layout):
    """The loss is one of the whole array; each process asks for the slope by its own part."""
    shape = layout.global_shape((1, 1))
    value = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    mine = jnp.asarray(own_part(value, layout))
    wanted = own_part(np.asarray(jax.grad(reference)(jnp.asarray(value))), layout)

    def loss(part):
        total = jax.jit(reference)(shoal.from_host_local(part, layout))
        return shoal.to_host_local(total, Layout(layout.mesh))

    result, slope = jax.value_and_grad(loss)(mine)
    assert result.is_fully_addressable
    np.testing.assert_allclose(result, reference(jnp.asarray(value)), rtol=1e-4)
    assert slope.shape == mine.shape
    np.testing.assert_allclose(slope, wanted, rtol=1e-3, atol=1e-3)
    # a loss of each process's part of a mixture, summed over the parts
    mixture = jax.jit(lambda g: jnp.sin(g) * g.sum(), out_shardings=shoal.named_sharding(layout))

    def own_loss(part):
        return (
            shoal.to_host_local(mixture(shoal.from_host_local(part, layout)), layout) ** 2
        ).sum()

    slope = jax.grad(own_loss)(mine)
    wanted = jax.grad(lambda g: ((jnp.sin(g) * g.sum()) ** 2).sum())(jnp.asarray(value))
    np.testing.assert_allclose(slope, own_part(np.asarray(wanted), layout), rtol=1e-3, atol=1e-3)
    pushed = jax.jvp(lambda x: shoal.from_host_local(x, layout), (mine,), (mine * 2,))[1]
    holds(pushed, value * 2, layout)
    back = jax.vjp(lambda x: shoal.from_host_local(x, layout), mine)[1]
    turned = shoal.relayout(shoal.put(value, layout), Layout(layout.mesh, None, "c"))
    for cotangent in (value, turned):  # wherever autodiff made it
        same_bits(back(cotangent)[0], own_part(value, layout))
    back = jax.vjp(lambda x: shoal.to_host_local(x, layout), pushed)[1](mine)[0]
    holds(back, value, layout)


def batches_are_right(mesh):
    layout, index = Layout(mesh["rows"], "data"), shoal.process_index()
    batch = np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * index  # three rows of two
    value = np.concatenate([batch + 10 * (n - index) for n in range(4)], axis=1)
    whole = jax.vmap(lambda x: shoal.from_host_local(x, layout))(batch)
    holds(whole, value, Layout(mesh["rows"], None, "data"))
    back = jax.vmap(lambda x: shoal.to_host_local(x, layout))(whole)
    same_bits(back, batch)
    across = jax.vmap(lambda x: shoal.from_host_local(x, layout), in_axes=1, out_axes=1)
    holds(across(batch.T), value.T, Layout(mesh["rows"], "data", None))
    split = jax.vmap(lambda x: shoal.from_host_local(x, layout), spmd_axis_name="model")
    two = split(batch[:2])
    holds(two, value[:2], Layout(mesh["rows"], "model", "data"))
    same_bits(
        jax.vmap(lambda x: shoal.to_host_local(x, layout), spmd_axis_name="model")(two), batch[:2]
    )
    column = Layout(mesh["rows"], "model")
    between = jax.vmap(lambda x: shoal.from_host_local(x, column), spmd_axis_name="data")
    assert "it splits the batch between processes, so that its size, 3, would change" in refused(
        lambda: between(batch)
    )
    slope = jax.vmap(jax.grad(lambda x: (shoal.from_host_local(x, layout) ** 2).sum()))(
        jnp.asarray(batch)
    )
    np.testing.assert_allclose(slope, 2 * batch)
    rows = jax.jacrev(lambda x: shoal.to_host_local(shoal.from_host_local(x, layout), layout))(
        jnp.asarray(batch[0])
    )
    np.testing.assert_array_equal(rows, np.eye(2))
    gradient_of_all = jax.grad(
        lambda x: (jax.vmap(lambda y: shoal.from_host_local(y, layout))(x) ** 2).sum()
    )(jnp.asarray(batch))
    np.testing.assert_allclose(gradient_of_all, 2 * batch)


def refused(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    raise AssertionError("not refused")


def refusals(mesh):
    """Return what is refused alike on all processes, in words."""
    value = np.ones((8, 8), np.float32)
    rows, columns = Layout(mesh["rows"], "data", None), Layout(mesh["rows"], None, "data")
    whole = shoal.put(value, rows)
    dealt = shoal.make_mesh({"x": 8}, devices=[*jax.devices()[::2], *jax.devices()[1::2]])
    three = shoal.make_mesh({"x": 3}, devices=jax.devices()[1:4])
    shoal.from_host_local(value, Layout(three, None, None))  # as replicas they may be uneven
    return {
        "order": refused(lambda: shoal.from_host_local(value, Layout(mesh["crossed"], "x", "y"))),
        "gap": refused(lambda: shoal.to_host_local(value, Layout(dealt, None, "x"))),
        "uneven": refused(lambda: shoal.from_host_local(value, Layout(three, "x", None))),
        "there": refused(lambda: shoal.from_host_local({"w": whole}, columns)),
        "back": refused(lambda: shoal.to_host_local({"w": whole}, columns)),
        "jit": refused(lambda: jax.jit(lambda x: shoal.from_host_local(x, rows))(value)),
        "vmap": refused(lambda: jax.vmap(lambda x: shoal.from_host_local(x, rows))(
            shoal.put(value[None], Layout(mesh["rows"], None, "data", None)))),
        "spread": refused(lambda: shoal.put(whole, columns)),
    }  # fmt: skip


def parts_elsewhere():
    """On a mesh of two processes, the others give and get parts without values."""
    here = shoal.process_index() < 2
    pair = shoal.make_mesh({"x": 4}, devices=jax.devices()[:4])
    layout = Layout(pair, "x", None)
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    mine = own_part(value, layout) if here else jax.ShapeDtypeStruct((2, 3), np.float32)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    tree = {"w": mine, "same": value[:2], "keys": keys}
    whole = shoal.from_host_local(tree, layout)
    assert {name: array.shape for name, array in whole.items()} == dict.fromkeys(tree, (4, 3))
    assert len(whole["w"].addressable_shards) == (2 if here else 0)
    holds(whole["w"], value, layout)
    assert whole["keys"].dtype == keys.dtype
    back = shoal.to_host_local(whole, layout)
    if here:
        same_bits(back["w"], mine)
        assert "has no values" in refused(
            lambda: shoal.from_host_local(jax.ShapeDtypeStruct((2, 3), np.float32), layout)
        )
    else:
        assert back["w"] == mine
        assert back["keys"].dtype == keys.dtype
        assert "owns no device" in refused(
            lambda: jax.grad(lambda x: shoal.to_host_local(x, layout).sum())(whole["w"])
        )
    assert shoal.from_host_local(back, layout)["w"].shape == (4, 3)


def meet(told, name):
    """Meet, and note what this process is told."""
    try:
        shoal.barrier("go")
    except DivergenceError as error:
        told[name] = [str(error), {side: [*who] for side, who in error.sides.items()}]
    else:
        told[name] = "equal"
    shoal.barrier("again")


def differ_in_every_way(mesh):
    """Process 1 does something else than the others."""
    told = {}
    odd = int(shoal.process_index() == 1)
    rows, both = Layout(mesh["rows"], "data", None), Layout(mesh["rows"], "model", None)
    value = np.ones((4, 4), np.float32)
    shoal.from_host_local({"w": value + odd, "r": value}, {"w": rows, "r": both})
    meet(told, "own rows")
    shoal.from_host_local(value[: 4 - 2 * odd], rows)
    meet(told, "shape")
    shoal.from_host_local(value.astype(np.int32) if odd else value, rows)
    meet(told, "dtype")
    shoal.from_host_local({"a": value, "b": value} if odd else {"a": value}, rows)
    meet(told, "tree")
    shoal.from_host_local({"w": value, "r": value + odd}, {"w": rows, "r": both})
    meet(told, "replicas")
    shoal.from_host_local(value + odd, both, check_values=False)
    meet(told, "not compared")
    if odd:
        part = "dim 0 of the part (3, 4) of process 1 has size 3, which its 2 of the 8 shards over "
        assert part + "data x model do not divide; 2 or 4 would fit" in refused(
            lambda: shoal.from_host_local(value[:3], Layout(mesh["rows"], ("data", "model"), None))
        )
    else:
        shoal.from_host_local(value, Layout(mesh["rows"], ("data", "model"), None))
    meet(told, "does not divide")
    whole = shoal.from_host_local(value, both)
    jax.grad(lambda x: (shoal.to_host_local(x, both) * (1 + odd)).sum())(whole)
    meet(told, "loss")
    shared = Layout(mesh["grid"], "a", None)  # 0 and 1 hold the same rows, 2 and 3 the others
    mine = value + shoal.process_index() // 2
    shoal.from_host_local({"w": mine, "r": value}, {"w": shared, "r": Layout(mesh["grid"], *"cb")})
    meet(told, "as it should be")
    shoal.from_host_local({"w": mine + odd}, shared)
    meet(told, "some replicas")
    return told


def everything():
    """Run in each of four processes with two devices each."""
    mesh = meshes()
    for layout in layouts_of(mesh):
        convert_there_and_back(layout)
    every_dtype(Layout(mesh["rows"], "data", None))
    for dims in (("a", "b"), (None, "b")):
        layout = Layout(mesh["grid"], *dims)
        slopes_are_right(layout)
    explicit_slopes_are_right(mesh)
    batches_are_right(mesh)
    parts_elsewhere()
    shoal.barrier("all was well")
    return refusals(mesh), differ_in_every_way(mesh)


def explicit_slopes_are_right(mesh):
    layout = Layout(mesh["explicit"], "data", None)
    mine = jnp.arange(6.0, dtype="float32").reshape(2, 3)
    whole, back = jax.vjp(lambda x: shoal.from_host_local(x, layout), mine)
    assert jax.typeof(whole).sharding.spec == P("data", None)
    (slope,) = back(whole)
    np.testing.assert_array_equal(slope, mine)
    part, back = jax.vjp(lambda x: shoal.to_host_local(x, layout), whole)
    assert jax.typeof(part).sharding.spec == P("data", None)
    assert jax.typeof(back(part)[0]).sharding.spec == P("data", None)


def test_parts_of_four_processes():
    with Cluster(4, start_method="fork", devices=2) as cluster:
        results = cluster.run(everything)
    refusals_, told = results[0]
    assert [one[0] for one in results] == [refusals_] * 4
    refused_words(refusals_)
    names = [*told]
    assert [[*one[1]] for one in results] == [names] * 4
    for name in names:
        said = [one[1][name] for one in results]
        if name in ("own rows", "not compared", "as it should be"):
            assert said == ["equal"] * 4
            continue
        told = said  # also those that came later than the first that differ
        assert [sides for _, sides in told] == [told[0][1]] * len(told), name
        (others, _), (one, first) = sorted(told[0][1].items(), key=lambda side: side[1] == [1])
        assert first == [1], name
        told_words(name, others, one, told[0][0])


def refused_words(words):
    assert "process 0 holds 2 of the 4 shards between its first and last" in words["order"]
    assert "its devices are at (x, y) = (0, 0), (1, 1)" in words["order"]
    assert "order the mesh so that each process's devices form one block of it" in words["order"]
    assert "process 0 holds shards 0,4 of dim 1, which x=8 cuts into 8" in words["gap"]
    assert "or pass a piece for each device to pack" in words["gap"]
    assert "of the 3 shards of dim 0 (x=3) process 0 holds 1 and process 1 2" in words["uneven"]
    for name in ("there", "back"):
        assert "['w']: is in Layout(data, - @" in words[name]
        assert "relayout moves it to Layout(-, data @" in words[name]
    assert (
        "inside jit (or scan, cond, checkpoint, eval_shape) every array is global" in words["jit"]
    )
    assert "is global already; under vmap it cannot pass unchanged" in words["vmap"]


def told_words(name, others, one, message):
    here = "from_host_local at tests/processes/test_host_local.py:"
    if name == "does not divide":
        assert others.startswith(here)
        assert one.startswith("(no call: it reached 'go' ")
    elif name == "loss":
        assert "gradient of to_host_local at tests/processes/test_host_local.py" in message
        assert ": values " in one
        assert "each process must compute the same loss of it" in message
    else:
        assert here in message
        assert (": values " in one) == (name in ("replicas", "some replicas"))
    if name in ("replicas", "some replicas"):
        assert "broadcast them first" in message
