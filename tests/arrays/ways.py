"""Every public function that takes a mesh or a layout, given in every way that it can be given.

`play` runs in a process of any job with 8 devices; all of its processes run it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P

import shoal
from shoal import compat
from shoal.compat import multihost_utils

KINDS = {"auto": "auto", "explicit": "explicit", "mixed": {"data": "explicit", "model": "auto"}}
# A layout of axis names, as each way writes it; the second has the whole layout, the mesh alone.
WRITTEN = {
    "Layout": lambda planned, mesh, *dims: shoal.Layout(planned, *dims),
    "Layout on JAX's mesh": lambda planned, mesh, *dims: shoal.Layout(mesh, *dims),
    "Layout of a spec": lambda planned, mesh, *dims: shoal.Layout(mesh, P(*dims)),
    "NamedSharding": lambda planned, mesh, *dims: NamedSharding(mesh, P(*dims)),
    "abstract": lambda planned, mesh, *dims: NamedSharding(mesh.abstract_mesh, P(*dims)),
    "spec": lambda planned, mesh, *dims: P(*dims),
    "a short spec": lambda planned, mesh, *dims: P(*dims[: max(_last(dims), 0)]),
}
MESH_ALONE = {
    "JAX's mesh": lambda planned, mesh, *dims: mesh,
    "a planned mesh": lambda planned, mesh, *dims: planned,
}
ROWS, COLUMNS, WHOLE = ("data", None), (None, "model"), (None, None)
NOT_WHOLE = "every device every row"  # a mesh for rows


def _last(dims):
    return max((number + 1 for number, dim in enumerate(dims) if dim is not None), default=0)


def value():
    return np.arange(32, dtype=np.float32).reshape(8, 4)


def own_rows(layout):
    return np.concatenate([value()[rows] for rows in shoal.local_rows(layout, 8)])


def fed(layout):
    rows = own_rows(layout)
    return list(shoal.feed([rows, rows + 1], layout))


def resumed(layout, path):
    init = {"w": shoal.put(value(), shoal.Layout(_planned(), *WHOLE)), "n": 0}
    with shoal.Checkpoints(path / "run") as steps:
        steps.save(3, init)
    with shoal.Checkpoints(path / "run") as steps:
        state, step = steps.resume({"w": layout, "n": 0}, init)
    return state, step


def _planned():
    return shoal.Mesh.of(shoal.make_mesh({"data": 4, "model": 2}))


def in_manual(layout, out):
    program = shoal.manual(lambda x: x * 2, layout, out)
    return program(shoal.put(value(), layout))


def matched(layout):
    layouts = shoal.match_layouts({"**": layout}, {"w": value()}, mesh=_planned())
    return shoal.put({"w": value()}, layouts)


def in_linear(layout):
    return compat.linear(shoal.put(value(), layout), np.ones((6, 4), np.float32), layout=layout)


def pieces(layout):
    return compat.unpack(shoal.put(value(), layout))


def read(given, path):
    return shoal.restore(path / "saved", {"w": given})


# name → the dims of the layouts, and what is called with them and a folder
LAYOUTS = {
    "put": ([ROWS], lambda path, a: shoal.put(value(), a)),
    "create": ([ROWS], lambda path, a: shoal.create(lambda: jnp.ones((8, 4)), layouts=a)),
    "constrain": ([ROWS], lambda path, a: shoal.constrain(shoal.put(value(), a), a)),
    "constrain in jit": (
        [ROWS],
        lambda path, a: jax.jit(lambda x: shoal.constrain(x, a))(shoal.put(value(), a)),
    ),
    "describe": ([ROWS], lambda path, a: shoal.describe(shoal.put(value(), a))),
    "enter_manual": ([ROWS], lambda path, a: compat.enter_manual(shoal.put(value(), a), a)),
    "feed": ([ROWS], lambda path, a: fed(a)),
    "from_host_local": ([ROWS], lambda path, a: shoal.from_host_local(own_rows(a), a)),
    "to_host_local": ([ROWS], lambda path, a: shoal.to_host_local(shoal.put(value(), a), a)),
    "layout_of": ([ROWS], lambda path, a: shoal.layout_of(shoal.put(value(), a)).dims),
    "leave_manual": ([ROWS], lambda path, a: compat.leave_manual(pieces(a), a, (8, 4))),
    "linear": ([ROWS], lambda path, a: in_linear(a)),
    "local_rows": ([ROWS], lambda path, a: shoal.local_rows(a, 8)),
    "manual": ([ROWS, ROWS], lambda path, a, b: in_manual(a, b)),
    "match_layouts": (
        [ROWS],
        lambda path, a: matched(a),
    ),
    "pack": ([ROWS], lambda path, a: compat.pack(pieces(a), a)),
    "plan_relayout": (
        [ROWS, COLUMNS],
        lambda path, a, b: shoal.plan_relayout(shoal.put(value(), a), b).peak_bytes,
    ),
    "relayout": ([ROWS, COLUMNS], lambda path, a, b: shoal.relayout(shoal.put(value(), a), b)),
    "restore": ([COLUMNS], lambda path, a: read(a, path)),
    "resume": ([COLUMNS], lambda path, a: resumed(a, path)),
    "plan_restore": (
        [COLUMNS],
        lambda path, a: shoal.plan_restore(path / "saved", {"w": a}).read_bytes,
    ),
}
LAYOUTS["named_sharding"] = (
    [ROWS],
    lambda path, a: shoal.put(value(), shoal.named_sharding({"w": a})["w"]),
)
# what takes a mesh
MESHES = {
    "use_mesh": lambda mesh: _in_use(mesh),
    "host_local_array_to_global_array": lambda mesh: (
        multihost_utils.host_local_array_to_global_array(_rows_on(mesh), mesh, P("data"))
    ),
    "global_array_to_host_local_array": lambda mesh: (
        multihost_utils.global_array_to_host_local_array(
            shoal.put(value(), shoal.Layout(mesh, None, "model")), mesh, P("data")
        )
    ),
    "sync_devices": lambda mesh: shoal.sync_devices(mesh),
    "describe": lambda mesh: shoal.describe(mesh),
    "match_layouts": lambda mesh: (
        shoal.match_layouts({"**": P("data")}, {"w": value()}, mesh=mesh)["w"].dims
    ),
    "named_sharding": lambda mesh: shoal.put(value(), shoal.named_sharding(P("data"), mesh)),
    "Layout": lambda mesh: shoal.Layout(mesh, "data", None).dims,
    "jax_mesh": lambda mesh: shoal.jax_mesh(mesh).shape,
    "Mesh.of": lambda mesh: shoal.Mesh.of(mesh).text,
}


def _rows_on(mesh):
    return own_rows(shoal.Layout(mesh, "data", None))


def _in_use(mesh):
    with shoal.use_mesh(mesh):
        return shoal.put(value(), P("data"))


def known(result):
    """What can be compared of a result: plain values, and the shards of this process."""
    if isinstance(result, jax.Array):
        shards = sorted(result.addressable_shards, key=lambda shard: shard.device.id)
        return [(shard.device.id, np.asarray(shard.data).tolist()) for shard in shards]
    if isinstance(result, dict | list | tuple):
        return [known(leaf) for leaf in jax.tree.leaves(result)]
    return result


def contexts(mesh):
    """The ways to have a mesh in force."""
    yield "use_mesh", shoal.use_mesh(mesh)
    yield "set_mesh", jax.set_mesh(mesh)


def play(folder):
    """Return what differs: a line for each call whose result is not that with a Layout."""
    problems = []
    for kind, types in KINDS.items():
        mesh = shoal.make_mesh({"data": 4, "model": 2}, axis_types=types)
        planned = shoal.Mesh.of(mesh)
        path = folder / kind
        shoal.save(path / "saved", {"w": shoal.put(value(), mesh)})
        for name, (every, call) in LAYOUTS.items():
            for force, block in contexts(mesh):
                with block:
                    problems += _layouts(f"{kind} {force} {name}", call, every, planned, mesh, path)
        for name, call in MESHES.items():
            results = [known(call(given)) for given in (planned, mesh)]
            problems += [f"{kind} {name}: {results}"] if results[0] != results[1] else []
    return problems


def _layouts(name, call, every, planned, mesh, path):
    problems = []
    folders = iter(range(100))

    def go(write, each):
        fresh = path / name.replace(" ", "-") / str(next(folders))
        if shoal.process_index() == 0:
            fresh.mkdir(parents=True)
            (fresh / "saved").symlink_to(path / "saved")
        shoal.barrier("a folder of its own")
        return known(call(fresh, *[write(planned, mesh, *dims) for dims in each]))

    wanted = go(WRITTEN["Layout"], every)
    for way, write in WRITTEN.items():
        found = go(write, every)
        problems += [f"{name}, {way}: {found} is not {wanted}"] if found != wanted else []
    whole = [WHOLE] * len(every)
    wanted = go(WRITTEN["Layout"], whole)
    for way, write in MESH_ALONE.items():
        try:
            found = go(write, whole)
        except shoal.UsageError as error:
            found = wanted if NOT_WHOLE in str(error) and _of_rows(name) else str(error)
        problems += [f"{name}, {way}: {found} is not {wanted}"] if found != wanted else []
    return problems


def _of_rows(name):
    return name.split()[-1] in ("feed", "from_host_local", "local_rows")
