"""The default mesh: that of `use_mesh`, else that of `jax.set_mesh`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shoal
from shoal import Layout, Mesh, use_mesh
from shoal.arrays.bridge.devices import jax_mesh
from shoal.errors import UsageError


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_mesh_of_jax_set_mesh_is_the_default_outside_use_mesh(kind, tmp_path):
    mesh, other = Mesh({"x": 4, "y": 2}, axis_types=kind), Mesh({"x": 8})
    value, rows = np.arange(16, dtype=np.float32).reshape(8, 2), Layout(mesh, "x", None)
    with jax.set_mesh(jax_mesh(mesh)):
        placed = shoal.put(value, P("x"))
        assert shoal.layout_of(placed) == rows
        made = shoal.create(lambda: jnp.asarray(value), layouts=P("x"))
        moved = shoal.relayout(placed, (None, "y"))
        inside = jax.jit(lambda x: shoal.constrain(x * 1, P(None, "y")))(placed)
        doubled = jax.jit(shoal.manual(lambda x: 2 * x, P("x"), P("x")))(placed)
        shoal.save(tmp_path / "c", {"w": placed})
        back = shoal.restore(tmp_path / "c", {"w": P("x")})["w"]
        assert shoal.match_layouts({"**": ("x", None)}, {"w": value})["w"] == rows
        with use_mesh(other):
            assert shoal.layout_of(shoal.put(value, P("x"))).mesh == other
    assert [shoal.layout_of(array) for array in (made, back)] == [rows, rows]
    assert [shoal.layout_of(array).dims for array in (moved, inside)] == [(None, "y")] * 2
    for array, wanted in ((made, 1), (back, 1), (moved, 1), (inside, 1), (doubled, 2)):
        np.testing.assert_array_equal(array, wanted * value)
    with pytest.raises(UsageError, match="needs a mesh"):
        shoal.put(value, P("x"))


def test_a_target_of_eval_shape_is_on_the_current_mesh(tmp_path):
    mesh = Mesh({"x": 4, "y": 2}, axis_types="explicit")

    def init():
        return {"w": jax.reshard(jnp.ones((8, 4)), P("x", "y")), "n": jnp.zeros(3)}

    with jax.set_mesh(jax_mesh(mesh)):
        target = jax.eval_shape(init)
        for steps in (0, 1, 2):
            with shoal.Checkpoints(tmp_path / "run", keep=2) as history:
                state, first = history.resume(target, init())
                assert first == steps
                assert shoal.layout_of(state["w"]) == Layout(mesh, "x", "y")
                history.save(first, state)
        shoal.save(tmp_path / "c", state)
    with use_mesh(mesh):
        assert shoal.restore(tmp_path / "c", target)["w"].shape == (8, 4)
    for current in (None, Mesh({"x": 8})):
        with (
            jax.set_mesh(None if current is None else jax_mesh(current)),
            pytest.raises(UsageError, match="on an abstract mesh of axes x=4, y=2"),
        ):
            shoal.restore(tmp_path / "c", target)
