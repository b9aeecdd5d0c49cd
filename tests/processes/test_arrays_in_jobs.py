"""Device arrays over real processes: the same calls, results and errors as in one."""

from __future__ import annotations

import json

import pytest

JOIN = """
import sys, json
import numpy as np
import shoal

def join(devices):
    address, index, count, *more = sys.argv[1:]
    shoal.initialize(
        coordinator_address=address, num_processes=int(count), process_id=int(index),
        virtual_devices=devices, timeout_s=50,
    )
    return int(index), int(count)
"""

PLACE = """
index, count = join(4)
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from shoal import Layout

mesh = shoal.make_mesh({"data": 4, "model": 2})
ids = [device.id for device in jax.devices()]
mixed = shoal.make_mesh({"rows": -1}, devices=[ids[n] for n in (5, 0, 7, 2, 4, 1, 6, 3)])
flat = shoal.make_mesh({"fsdp": -1})
first = shoal.make_mesh({"x": 4}, devices=jax.devices()[:4])  # all of process 0
second = shoal.make_mesh({"x": 4}, devices=jax.devices()[4:])
explicit = shoal.make_mesh({"a": 4, "b": 2}, axis_types="explicit")
planned = shoal.Mesh.of(mesh)
assert planned.processes.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
assert (planned.process_indices, shoal.Mesh.of(first).process_indices) == ((0, 1), (0,))
value = np.arange(128, dtype=np.float32).reshape(16, 8)
rows, whole = Layout(mesh, "data", None), Layout(mesh, None, None)

def holds(array, wanted, layout):
    assert shoal.layout_of(array) == layout, (array.sharding, layout)
    assert array.shape == wanted.shape
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
    return len(array.addressable_shards)

def refused(call):
    try:
        call()
    except shoal.UsageError as error:
        return str(error)
    raise SystemExit("not refused")

# put sends nothing: process 1 puts only after process 0 has what it put
if index == 1:
    shoal.barrier("process 0 has put", lane="beside the main line")
layouts = [rows, whole, Layout(mesh, ("model", "data"), None), Layout(mixed, "rows", None)]
for layout in layouts:
    assert holds(shoal.put(value, layout), value, layout) == 4
    assert holds(shoal.put(jnp.asarray(value), layout), value, layout) == 4
    assert holds(shoal.put(jax.device_put(value, jax.local_devices()[3]), layout), value, layout)
keys = jax.random.split(jax.random.key(3), 16)
placed = shoal.put(keys, Layout(mesh, "data"))
assert shoal.layout_of(placed) == Layout(mesh, "data")
holds(jax.random.key_data(placed), np.asarray(jax.random.key_data(keys)), rows)
assert holds(shoal.put(value, Layout(first, "x", None)), value, Layout(first, "x", None)) == (
    4 if index == 0 else 0)
if index == 0:
    shoal.barrier("process 0 has put", lane="beside the main line")

# what only part of a process's data says: its own rows are right, the others are never read
mine = np.full_like(value, np.nan)
mine[8 * index : 8 * index + 8] = value[8 * index : 8 * index + 8]
holds(shoal.put(mine, rows, check_values=False), value, rows)

array = shoal.put(value, rows)
assert shoal.put(array, rows) is array
same = shoal.put(array, Layout(explicit, "a", None))
assert [s.data.unsafe_buffer_pointer() for s in same.addressable_shards] == [
    s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
absent = shoal.Mesh({"x": 4}, device_ids=[0, 1, 2048, 7])
errors = [
    refused(lambda: shoal.put(array, whole)),
    refused(lambda: shoal.put({"w": value[:7]}, rows)),
    refused(lambda: shoal.relayout({"w": array}, Layout(mesh, "data", None, None))),
    refused(lambda: shoal.named_sharding(Layout(absent, "x"))),
]

# relayout: other axes, other order of the devices, trees, back again
columns = Layout(mesh, None, "data")
for layout in [whole, columns, Layout(mixed, None, "rows"), Layout(mixed, "rows", None)]:
    moved = shoal.relayout({"a": array, "b": [array]}, layout)
    assert holds(moved["a"], value, layout) == holds(moved["b"][0], value, layout) == 4
    holds(shoal.relayout(moved["a"], rows, donate=True), value, rows)
for source, target in (
    (Layout(mesh, None, "model"), Layout(flat, None, "fsdp")),  # one process sends for both
    (Layout(mesh, "data", "model"), Layout(flat, None, "fsdp")),
    (Layout(mesh, "model", "data"), Layout(mixed, "rows", None)),
):
    assert shoal.plan_relayout(shoal.put(value, source), target).way == "collectives"
    holds(shoal.relayout(shoal.put(value, source), target), value, target)
turned = shoal.relayout(placed, Layout(mixed, "rows"))  # keys, to another order of the devices
assert shoal.layout_of(turned) == Layout(mixed, "rows")
holds(jax.random.key_data(turned), np.asarray(jax.random.key_data(keys)),
      Layout(mixed, "rows", None))
# bits that arithmetic would lose: NaNs of narrow floats, elements narrower than a byte
narrow = {"bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float4_e2m1fn": 4, "int4": 4}
narrow["int2"] = 2
for dtype, bits in narrow.items():
    patterns = np.arange(1 << 16).reshape(256, 256) % (1 << bits)
    some = patterns.astype("u2" if bits == 16 else "u1").view(dtype)
    sides = [Layout(mesh, ("data", "model"), None), Layout(mesh, None, ("model", "data"))]
    for side in [sides[1], Layout(mixed, "rows", None), Layout(mixed, None, "rows")]:
        across = shoal.relayout(shoal.put(some, sides[0]), side)
        assert (shoal.layout_of(across), across.dtype) == (side, dtype)
        for shard in across.addressable_shards:
            assert np.asarray(shard.data).tobytes() == some[shard.index].tobytes(), dtype
slope = jax.grad(lambda x: (shoal.relayout(x, columns) ** 2).sum())(array)
holds(slope, 2 * value, rows)
for target in (columns, whole, rows, Layout(mesh, "model", "data")):
    slope = jax.grad(lambda x: (shoal.relayout(x, target) * 2).sum())(array)
    holds(slope, 0 * value + 2, rows)
    slope = jax.grad(lambda x: (shoal.relayout(x, target) ** 2).sum() + (x * 3).sum())(array)
    holds(slope, 2 * value + 3, rows)
# between different devices of one process; the other holds nothing before and after
there = shoal.relayout(shoal.put(value, Layout(first, "x", None)), Layout(first, None, "x"))
assert holds(there, value, Layout(first, None, "x")) == (4 if index == 0 else 0)

# create: equal values everywhere, and the same as on one device
def init(key):
    return {"w": jax.random.bits(key, (16, 8)), "n": jnp.zeros((8,))}

def choose(path, leaf):
    return rows if path == "w" else Layout(mesh, "model")

made = shoal.create(init, jax.random.key(1), layouts=choose)
holds(made["w"], np.asarray(jax.random.bits(jax.random.key(1), (16, 8))), rows)
holds(made["n"], np.zeros(8, np.float32), Layout(mesh, "model"))

# pack and unpack
for layout in layouts[2:]:
    pieces = shoal.compat.unpack(shoal.put(value, layout))
    order = [ids.index(i) for i in layout.mesh.local(index)]
    assert [next(iter(p.devices())) for p in pieces] == [jax.devices()[n] for n in order]
    packed = shoal.compat.pack(pieces, layout)
    holds(packed, value, layout)
    assert [p.unsafe_buffer_pointer() for p in shoal.compat.unpack(packed)] == [
        p.unsafe_buffer_pointer() for p in pieces]
    holds(shoal.compat.pack([np.asarray(p) for p in pieces], layout), value, layout)
like = jax.ShapeDtypeStruct((4, 8), np.float32)
mine = shoal.compat.unpack(shoal.put(value, Layout(first, "x", None)))
assert len(mine) == (4 if index == 0 else 0)
holds(shoal.compat.pack(mine, Layout(first, "x", None), like=like), value, Layout(first, "x", None))
errors.append(refused(lambda: shoal.compat.pack([value[:2]] * 3, rows)))
nothing = refused(lambda: shoal.compat.pack([], Layout(first, "x", None)))
assert ("for the 4 devices" if index == 0 else "owns no device here") in nothing, nothing

# what only one process could see is the same on both: weak types, memory, other orders
weak = jnp.asarray(2.0)
assert weak.weak_type and not shoal.put(weak, Layout(mesh)).weak_type
half = shoal.create(lambda by: jnp.ones(8, jnp.bfloat16) * by, weak, layouts=Layout(mesh, "data"))
assert half.dtype == np.float32
pinned = jax.sharding.NamedSharding(shoal.named_sharding(Layout(first)).mesh, P("x"),
                                    memory_kind="pinned_host")
errors.append(refused(lambda: shoal.put(value, pinned)))
backwards = shoal.put(value, Layout(mixed, "rows", None))
errors.append(refused(lambda: shoal.create(lambda x: x, {"x": backwards}, layouts=rows)))
gone = shoal.put(value, rows)
gone.delete()
errors.append(refused(lambda: shoal.put({"w": gone}, rows)))
source = shoal.put(value, Layout(first, None, None))
if index == 1:  # process 0 holds it alone: there it is a host value
    assert "is only on devices of process 0; put needs" in refused(lambda: shoal.put(source, rows))
    foreign = "piece 3 is on a device of process 0; pass one of your own"
    far = shoal.put(value[:4], Layout(shoal.Mesh({}, device_ids=[ids[0]], processes=0), None, None))
    assert foreign in refused(lambda: shoal.compat.pack([far] * 4, rows))
else:
    shoal.put(value[:4], Layout(shoal.Mesh({}, device_ids=[ids[0]], processes=0), None, None))

# constrain, with a default mesh
with shoal.use_mesh(mesh):
    doubled = jax.jit(lambda x: shoal.constrain(x * 2, (None, "data")))(array)
holds(doubled, value * 2, Layout(mesh, None, "data"))
print("RESULT", json.dumps([errors, planned.text, repr(planned)]))
"""

MEASURE = """
index, count = join(2)
import jax
from shoal import Layout

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

mesh = shoal.make_mesh({"x": -1})
added = {}
for name, dims in (("replicated", (None,)), ("sharded", ("x",))):
    layout = Layout(mesh, *dims)
    shoal.put(np.zeros(64, np.float32), layout)  # whatever the first call loads
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak begins anew: proc(5)
    source = np.arange(1 << 24, dtype=np.float32)
    array = shoal.put(source, layout)
    added[name] = (status("VmHWM") - before) / 2**20
    held = sum(shard.data.nbytes for shard in array.addressable_shards) / 2**20
    added[name + " bound"] = 64 + 1.2 * held
    del source, array
print("RESULT", json.dumps(added))
"""

INSIDE = """
index, count = join(4)
import jax
import jax.numpy as jnp
from shoal import Layout

mesh = shoal.make_mesh({"data": 4, "model": 2})
rows, columns = Layout(mesh, "data", None), Layout(mesh, None, "model")
value = np.arange(64, dtype=np.float32).reshape(8, 8)
x = shoal.put(value, rows)
total = shoal.manual(lambda x: jax.lax.psum((x**2).sum(), "data"), rows, Layout(mesh))
sums = [float(total(x)), float(total(value))]  # of a global array, of equal host values
slope = jax.grad(total)(x)
same = all(np.array_equal(s.data, 2 * value[s.index]) for s in slope.addressable_shards)

shards = shoal.compat.enter_manual(x, columns)
back = shoal.compat.leave_manual([2 * shard for shard in shards], columns, (8, 8))
same &= all(np.array_equal(s.data, 2 * value[s.index]) for s in back.addressable_shards)
if index:  # other calls before must not make another program of it
    jax.jit(shoal.shard_alike).lower(1.0, 2.0)
twins = jax.jit(lambda x: shoal.shard_alike(x * 1, jnp.ones((8, 8))))
program = twins.lower(x).as_text()
y = jax.jit(lambda x: shoal.compat.linear(x, jnp.ones((4, 8))))(twins(x)[1])
try:
    shoal.constrain(x, None)
    refused = ""
except shoal.UsageError as error:
    refused = str(error)
print("RESULT", json.dumps([sums, same, len(shards), shoal.layout_of(y).text, program, refused]))
"""


def results(job, count, script):
    path = job.folder / "program.py"  # one file for all, as in a real job: call sites are compared
    path.write_text(JOIN + script)
    ended = job.run(count, f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))")
    for one in ended:
        assert one.code == 0, "\n".join(each.err for each in ended)
    marked = [line for one in ended for line in one.out.splitlines() if line.startswith("RESULT ")]
    assert len(marked) == count
    return [json.loads(line.removeprefix("RESULT ")) for line in marked]


def test_two_processes_place_move_and_refuse_alike(job):
    (errors, text, shown), other = results(job, 2, PLACE)
    assert other == [errors, text, shown]
    assert shown == (
        "Mesh(data=4, model=2; 8 cpu devices, 2 processes, ids 0..3,2048..2051, auto axes)"
    )
    spread, uneven, rank, absent, count, memory, order, gone = errors
    assert spread == (
        "put: the array: is spread over processes in another layout; relayout moves it"
    )
    assert "['w']: dim 0 of (7, 8) has size 7, which 4 shards (data=4) do not divide" in uneven
    assert "4 or 8 would fit; if these are the rows of this process alone, from_host_loc" in uneven
    assert "['w']: shape (16, 8) has rank 2, but Layout(data, -, - @" in rank
    assert "no cpu device has the id 7" in absent
    assert "2048 (process 1)" in absent
    assert "3 pieces for the 4 devices that this process owns in Mesh(data=4" in count
    assert "memory kind 'pinned_host'" in memory
    assert "args[0]['x']: is on other devices than the layouts, or on them in another" in order
    assert "['w']: was deleted" in gone


SUMS = """
join(2)
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from shoal import Layout

mesh = shoal.make_mesh({"process": 2, "device": 2}, axis_types="explicit")
grid = shoal.named_sharding(Layout(mesh, None)).mesh
columns = np.arange(8192, dtype="float32") % 64

def wrong(axis, mib):
    "Count the wrong elements of each device, of a sum of two arrays of so many MiB."
    rows = np.arange(32 * mib, dtype="float32")[:, None] % 64
    def product(a, b):
        pending = P(None, None, unreduced={axis})
        return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), out_sharding=pending)
    with jax.set_mesh(grid):
        a = jax.device_put(rows.repeat(2, 1), NamedSharding(grid, P(None, axis)))
        b = jax.device_put(np.stack([columns, 2 * columns]), NamedSharding(grid, P(axis, None)))
        terms = jax.jit(product)(a, b)
    summed = shoal.relayout(terms, Layout(mesh, axis, None)).addressable_shards
    return [int((one.data != 3 * rows[one.index[0]] * columns).sum()) for one in summed]

sizes = [("process", 1), ("process", 32), ("device", 8), ("device", 32)]
print("RESULT " + json.dumps({f"{axis} {mib}": wrong(axis, mib) for axis, mib in sizes}))
"""


def test_sums_that_are_scattered_are_right_at_every_size(job):
    """Those of JAX's psum_scatter are not, between CPU devices: jax-ml/jax#40830."""
    for wrong in results(job, 2, SUMS):
        assert len(wrong) == 4
        assert not any(map(any, wrong.values())), wrong


def test_what_works_inside_jit_works_over_processes(job):
    one, other = results(job, 2, INSIDE)
    assert one == other
    sums, same, shards, text, program, refused = one
    assert sums == [85344, 85344]
    assert (same, shards) == (True, 4)
    assert text.startswith("data, - @ data=4 model=2")
    assert program.count("sdy.sharding_group") == 2
    assert "this one is on processes 0, 1: allgather(x, tiled=True)" in refused


@pytest.mark.parametrize("count", [2, 4])
def test_put_holds_no_more_than_the_source_and_its_devices(job, count):
    for added in results(job, count, MEASURE):
        assert added["replicated"] > 64 + 2 * 64 - 8, "the measure does not measure"
        assert added["replicated"] <= added["replicated bound"], added
        assert added["sharded"] <= added["sharded bound"], added


GUARDED = """
index, count = join(2)
import jax
from shoal import Layout
from shoal.compat import multihost_utils

jax.config.update("jax_transfer_guard", "disallow")  # in all threads
mesh = shoal.make_mesh({"data": 2, "model": 2})
rows, columns = Layout(mesh, "data", None), Layout(mesh, None, "model")
refused = []
for value in (np.ones((8, 8), np.float32), np.ones((8, 1 << 17), np.float32)):
    x = shoal.put(value, rows)
    shoal.constrain(value, columns)
    shoal.create(lambda x: x * x, value, layouts=rows)
    own = shoal.from_host_local(value + index, rows)
    [batch] = shoal.feed([value + index], rows)
    for array in (x, own, batch):
        shoal.relayout(array, columns)
        shoal.relayout(array, columns, staged=True)
        shoal.to_host_local(array, rows)
        shoal.allgather(array, tiled=True)
        shoal.assert_same({"x": array, "y": value})
    multihost_utils.broadcast_one_to_all(value + index)
    multihost_utils.process_allgather(value)
    path = f"FOLDER/{value.size}"
    with shoal.Checkpoints(path) as steps:
        steps.save(1, {"x": x, "own": own})
        steps.wait()
        steps.restore(1, {"x": columns, "own": columns})
    shoal.sync_devices(mesh)
    with jax.transfer_guard("disallow_explicit"):
        for place in (shoal.put, shoal.from_host_local, shoal.constrain):
            try:
                place(value, rows)
            except jax.errors.JaxRuntimeError as error:
                refused.append("Disallowed host-to-device" in str(error))
print("RESULT", json.dumps(refused))
"""


def test_the_transfer_guard_refuses_what_it_refuses_of_device_put(job):
    assert results(job, 2, GUARDED.replace("FOLDER", str(job.folder))) == [[True] * 6] * 2
