"""Under JAX's transfer guard a call of shoal may do what `jax.device_put` may, and no more."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

import shoal
from arrays.test_under_set_mesh import CASES
from shoal import Layout

MESH = shoal.Mesh({"data": 4, "model": 2})
ROWS, COLUMN, SCALAR = Layout(MESH, "data", None), Layout(MESH, None, "model"), Layout(MESH)


def host_array(num_bytes, offset):
    """Return an array whose address is `offset` past a multiple of 64: at 0 JAX may adopt it."""
    memory = np.zeros(num_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes].view(np.float32).reshape(8, -1)


VALUES = {
    f"{name}, {place}": host_array(num_bytes, offset)
    for name, num_bytes in (("small", 1 << 8), ("large", 1 << 20))
    for place, offset in (("aligned", 0), ("unaligned", 4))
}


def rows_of(value):
    return [*shoal.feed([{"x": value, "n": np.int32(3)}], {"x": ROWS, "n": SCALAR})]


def in_background(path):
    with shoal.Checkpoints(f"{path}-steps", keep=1) as steps:
        steps.save(1, {"w": VALUES["large, aligned"], "n": 3})
        return steps.save(2, {"w": VALUES["small, aligned"], "n": 3})


# Of these JAX makes copies: no two devices share memory, which other tests measure.
ON_DEVICES = jax.device_put(VALUES["small, unaligned"], shoal.named_sharding(ROWS))
UNCOMMITTED = jax.device_put(VALUES["small, unaligned"])
UPLOADS = {
    **{f"put, {name}": lambda v=value: shoal.put(v, ROWS) for name, value in VALUES.items()},
    **{f"join, {name}": lambda v=v: shoal.from_host_local(v, COLUMN) for name, v in VALUES.items()},
    **{f"pin, {name}": lambda v=value: shoal.constrain(v, ROWS) for name, value in VALUES.items()},
    "put, numbers": lambda: shoal.put({"a": 1.5, "b": np.int8(3), "c": True}, SCALAR),
    "put, narrowed": lambda: shoal.put(np.arange(8), Layout(MESH, "data")),
    "put, empty": lambda: shoal.put(np.zeros((0, 4), np.float32), ROWS),
    "join, number": lambda: shoal.from_host_local(1.5, SCALAR),
    "pin, number": lambda: shoal.constrain(1.5, SCALAR),
    "pin, anywhere": lambda: shoal.constrain(VALUES["small, aligned"], None),
    "pin, uncommitted": lambda: shoal.constrain(UNCOMMITTED, ROWS),
    "create": lambda: shoal.create(lambda x: x * x, VALUES["small, aligned"], layouts=ROWS),
    "manual": lambda: shoal.manual(lambda x: x * x, ROWS, ROWS)(VALUES["small, aligned"]),
}
FEEDS = {f"feed, {name}": lambda v=value: rows_of(v) for name, value in VALUES.items()}
OF_ITS_OWN = {  # transfers that no call of the user's names
    "relayout": lambda path: shoal.relayout(ON_DEVICES, COLUMN),
    "values": lambda path: [shoal.broadcast(UNCOMMITTED), shoal.allgather(ON_DEVICES)],
    "check_finite": lambda path: shoal.check_finite(
        {"x": ON_DEVICES, "y": VALUES["large, aligned"]}
    ),
    "check_replicas": lambda path: shoal.check_replicas({"x": ON_DEVICES}),
    "same": lambda path: shoal.assert_same({"x": ON_DEVICES, "y": VALUES["large, aligned"]}),
    "sync": lambda path: shoal.sync_devices(MESH),
    "save": lambda path: shoal.save(f"{path}-own", {"x": ON_DEVICES, "y": UNCOMMITTED}),
    "restore": lambda path: [shoal.restore(path), shoal.restore(path, {"w": COLUMN})],
    "steps": in_background,
}


@contextlib.contextmanager
def everywhere(level):
    """Set the guard for all threads."""
    jax.config.update("jax_transfer_guard", level)
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard", None)


GUARDS = {"thread": jax.transfer_guard, "process": everywhere}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("name", [*CASES, *UPLOADS, *FEEDS, *OF_ITS_OWN])
def test_a_call_passes_where_only_implicit_transfers_are_disallowed(name, guard, tmp_path):
    path = str(tmp_path / "saved")
    shoal.save(path, {"w": VALUES["small, aligned"]})
    with GUARDS[guard]("disallow"):
        if name in CASES:
            CASES[name](MESH, path)
        elif name in OF_ITS_OWN:
            OF_ITS_OWN[name](path)
        else:
            (UPLOADS | FEEDS)[name]()


@pytest.mark.parametrize(
    ("guard", "name"),
    [
        *[("thread", name) for name in UPLOADS],
        *[("process", name) for name in UPLOADS | FEEDS],  # a feed uploads in a thread of its own
    ],
)
def test_where_explicit_ones_are_too_what_places_host_values_is_refused(guard, name):
    with GUARDS[guard]("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            jax.device_put(VALUES["small, aligned"], ON_DEVICES.sharding)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"Disallowed \w+-to-device"):
            (UPLOADS | FEEDS)[name]()


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_internal_transfers_pass_the_transfer_guard(name, guard, tmp_path):
    path = str(tmp_path / "saved")
    shoal.save(path, {"w": VALUES["small, aligned"]})
    with GUARDS[guard]("disallow_explicit"):
        OF_ITS_OWN[name](path)


def test_the_users_function_stays_guarded():
    def with_implicit(x):
        with jax.ensure_compile_time_eval():
            return x + (UNCOMMITTED + VALUES["small, aligned"]).sum()

    with jax.transfer_guard("disallow"):
        for call in (
            lambda: shoal.manual(with_implicit, ROWS, ROWS)(ON_DEVICES),
            lambda: shoal.create(with_implicit, ON_DEVICES, layouts=ROWS),
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
                call()
