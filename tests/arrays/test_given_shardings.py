"""An array has the sharding that was given, and the mesh in force is found in JAX's ways."""

from __future__ import annotations

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P
from jax.sharding import AxisType

import shoal

VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
SPECS = [P("data"), P("data", None), P(), P(None, "model"), P(("data", "model"))]


@pytest.fixture
def mesh():
    return shoal.make_mesh({"data": 4, "model": 2})


def by(verb, given, path):
    rows = shoal.put(VALUE, shoal.Layout(given.mesh, "data", "model"))
    if verb == "restore":
        shoal.save(path / "saved", {"w": rows})
    return {
        "put": lambda: shoal.put(VALUE, given),
        "put what is there": lambda: shoal.put(rows, given),
        "create": lambda: shoal.create(lambda: jnp.ones((8, 4)), layouts=given),
        "constrain": lambda: shoal.constrain(rows, given),
        "feed": lambda: next(iter(shoal.feed([VALUE], given))),
        "from_host_local": lambda: shoal.from_host_local(VALUE, given),
        "relayout": lambda: shoal.relayout(rows, given),
        "restore": lambda: shoal.restore(path / "saved", {"w": given})["w"],
    }[verb]()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("verb", ["put", "put what is there", "create", "constrain", "feed",
                                  "from_host_local", "relayout", "restore"])  # fmt: skip
def test_an_array_has_the_sharding_that_was_given(verb, spec, mesh, tmp_path):
    given = NamedSharding(mesh, spec)
    assert by(verb, given, tmp_path).sharding == given


@pytest.mark.parametrize("verb", ["put", "create", "from_host_local", "relayout", "feed"])
def test_an_array_has_the_spec_that_was_given(verb, mesh):
    rows = shoal.put(VALUE, mesh)
    with shoal.use_mesh(mesh):
        made = {
            "put": lambda: shoal.put(VALUE, P("data")),
            "create": lambda: shoal.create(lambda: jnp.ones((8, 4)), layouts=P("data")),
            "from_host_local": lambda: shoal.from_host_local(VALUE, P("data")),
            "relayout": lambda: shoal.relayout(rows, P("data")),
            "feed": lambda: next(iter(shoal.feed([VALUE], P("data")))),
        }[verb]()
    assert made.sharding == NamedSharding(mesh, P("data"))


@pytest.mark.parametrize("verb", ["put", "put what is there", "create", "constrain", "feed",
                                  "from_host_local", "relayout", "restore"])  # fmt: skip
def test_an_array_has_the_dims_of_the_layout_that_was_given(verb, mesh, tmp_path):
    for spec in SPECS:
        made = by(verb, shoal.Layout(mesh, spec), tmp_path / str(spec))
        assert made.sharding == NamedSharding(mesh, spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_array_of_matched_rules_has_the_spec_of_its_rule(spec, mesh):
    layouts = shoal.match_layouts({"**": spec}, {"w": VALUE}, mesh=mesh)
    given = NamedSharding(mesh, spec)
    assert shoal.named_sharding(layouts) == {"w": given}
    assert shoal.put({"w": VALUE}, layouts)["w"].sharding == given
    pieces = shoal.compat.unpack(shoal.put(VALUE, given))
    for packed in (
        shoal.compat.pack(pieces, given),
        shoal.compat.pack(pieces, layouts["w"]),
        shoal.compat.leave_manual(pieces, given, VALUE.shape),
    ):
        assert packed.sharding == given


def test_a_spec_with_pending_sums_is_understood():
    mesh = shoal.make_mesh({"data": 4, "model": 2}, axis_types="explicit")
    spec = P("data", None, unreduced={"model"})
    assert shoal.Layout(mesh, spec) == shoal.Layout(mesh, "data", None, partial={"model": "sum"})
    x, w = (shoal.put(VALUE, NamedSharding(mesh, P(None, "model"))) for _ in range(2))
    with jax.set_mesh(mesh):
        made = jax.jit(lambda x, w: shoal.compat.linear(x, w, layout=spec))(x, w)
    assert jax.typeof(made).sharding.spec == spec


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_loop_compiles_once(kind):
    mesh = shoal.make_mesh({"data": 4, "model": 2}, axis_types=kind)
    traced = []

    @jax.jit
    def step(x):
        traced.append(x)
        return x + 1

    given = NamedSharding(mesh, P("data"))
    with jax.log_compiles(False), jax.set_mesh(mesh):
        for _ in range(3):
            for x in (shoal.put(VALUE, given), jax.device_put(VALUE, given)):
                step(x)
    assert len(traced) == 1
    assert step._cache_size() == 1


@pytest.mark.filterwarnings("ignore:.with mesh.:DeprecationWarning")
def test_the_mesh_in_force_is_that_of_use_mesh_then_set_mesh_then_with(mesh):
    other = shoal.make_mesh({"data": 8})
    third = jax.make_mesh((2, 4), ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    with third:
        assert shoal.put(VALUE, P("data")).sharding.mesh == third
        with jax.set_mesh(other):
            assert shoal.put(VALUE, P("data")).sharding.mesh == other
            with shoal.use_mesh(mesh):
                assert shoal.put(VALUE, P("data")).sharding.mesh == mesh


def test_a_thread_has_no_mesh_in_force_of_another(mesh):
    messages = []

    def look():
        try:
            shoal.put(VALUE, P("data"))
        except shoal.UsageError as error:
            messages.append(str(error))

    with shoal.use_mesh(mesh), jax.set_mesh(mesh):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert "shoal.named_sharding(tree, mesh)" in messages[0]


def test_a_planned_mesh_says_what_jax_takes():
    planned = shoal.Mesh({"data": 8})
    with pytest.raises(AttributeError, match=r"write shoal.named_sharding\(layout\)"):
        NamedSharding(planned, P("data"))
    with pytest.raises(AttributeError, match=r"or shoal.jax_mesh\(mesh\)"):
        _ = planned.devices


CLEARED = """
import jax, numpy as np, shoal
shoal.initialize(virtual_devices=4)
for _ in range(2):
    mesh = shoal.make_mesh({"x": 4})
    layout = shoal.Layout(mesh, "x")
    x = shoal.put(np.arange(8.0, dtype="float32"), layout)
    assert float(jax.jit(lambda x: x.sum())(x)) == 28
    assert shoal.jax_mesh(shoal.Mesh.of(mesh)).devices.tolist() == jax.devices()
    jax.clear_caches()
    jax.extend.backend.clear_backends()
print("done")
"""


def test_after_clear_backends_meshes_have_the_new_devices(child_env):
    command = [sys.executable, "-c", "import jax.extend.backend\n" + CLEARED]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr
