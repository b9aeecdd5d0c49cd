"""JAX's device orders, bit by bit: its worked cases, and JAX itself."""

import itertools

import numpy as np
import pytest

from plan.described_devices import as_jax, generated
from plan.jax_cases import check, devices_of, of, shapes_of
from shoal.errors import UsageError
from shoal.plan.orders import jax_order
from shoal.plan.topology import from_devices


@of("create_device_mesh")
def test_one_slice(case):
    sizes = case["mesh_shape"]
    topology = from_devices(devices_of(case))
    check(case, lambda: jax_order.order(topology, tuple(sizes), **case["kwargs"]))


@of("create_hybrid")
def test_slices(case):
    topology = from_devices(devices_of(case))
    inner, outer = case["mesh_shape"], case["dcn_mesh_shape"]
    if len(inner) != len(outer):  # JAX aligns them at the end, in silence
        assert case["shoal_should"] == "raise ValueError"
        with pytest.raises(UsageError, match="as many axes"):
            jax_order.hybrid_order(topology, inner, outer)
        return
    check(case, lambda: jax_order.hybrid_order(topology, inner, outer))


@of("nd_torus")
def test_the_search_over_whole_and_split_dims(case):
    ids = from_devices(devices_of(case)).device_ids[..., 0].reshape(case["physical_shape"])
    search = jax_order._split_order if "splitting" in case["function"] else None
    split = bool(case["kwargs"].get("allow_split_physical_axes"))

    def make():
        sizes = case["mesh_shape"]
        assignment = (
            search(ids, sizes) if search else jax_order.torus_order(ids, sizes, allow_split=split)
        )
        assert assignment[1].tolist() == case["expected"]["assignment_physical_by_logical"]
        return assignment[0]

    check(case, make)


@of("_get_prime_factors")
def test_prime_factors(case):
    assert jax_order._factors(case["n"]) == case["expected"]["factors"]


@of("_enumerate")
def test_shares(case):
    shares = jax_order._shares(
        case["physical_shape"], np.array(case["assigned"]), case["logical_axis_size"]
    )
    assert shares == {tuple(row) for row in case["expected"]["assignments_in_order"]}


def mesh_utils_of_that_version():
    jax = pytest.importorskip("jax")
    if jax.__version_info__[:2] != (0, 10):
        pytest.skip(f"the order is that of JAX 0.10.2, and this is {jax.__version__}")
    return pytest.importorskip("jax._src.mesh_utils")


KINDS = {
    "TPU v2": [(2, 2, 1), (4, 4, 1)],
    "TPU v3": [(2, 2, 1), (4, 2, 1)],
    "TPU v4": [(2, 2, 1), (2, 2, 4), (4, 4, 4), (4, 4, 8), (2, 6, 7)],
    "TPU v4 lite": [(2, 2, 1), (2, 4, 1)],
    "TPU v5": [(2, 2, 2), (4, 4, 4)],
    "TPU v5p": [(2, 2, 2), (2, 2, 4), (4, 4, 4)],
    "TPU v5 lite": [(2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (4, 4, 1), (8, 8, 1), (1, 8, 1)],
    "TPU v6 lite": [(4, 4, 1), (4, 8, 1)],
    "TPU7x": [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 4, 4)],
    "TPU8i": [(2, 1, 1), (2, 2, 2)],
    "TPU v99": [(3, 3, 3), (2, 4, 6)],
}
CORES = ("TPU v2", "TPU v3", "TPU7x", "TPU8i")


@pytest.mark.parametrize("kind", KINDS)
def test_jax_itself_gives_the_same(kind):
    mesh_utils = mesh_utils_of_that_version()
    for at, (x, y, z) in enumerate(KINDS[kind]):
        rows = generated(x, y, z, kind, one_device_per_chip=kind not in CORES)
        rows = rows[::-1] if at == 1 else rows
        topology, devices = from_devices(rows), as_jax(rows)
        ways = itertools.product(shapes_of(len(rows)), (False, True), (False, True))
        for shape, split, contiguous in ways:
            options = {"allow_split_physical_axes": split, "contiguous_submeshes": contiguous}
            try:
                wanted = mesh_utils.create_device_mesh(shape, devices, **options)
            except (AssertionError, NotImplementedError, TypeError, ValueError):
                with pytest.raises(UsageError):
                    jax_order.order(topology, shape, **options)
                continue
            ids = [device.id for device in wanted.ravel()]
            ordered = jax_order.order(topology, shape, **options)
            assert ordered.ravel().tolist() == ids, (kind, (x, y, z), shape, options)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "cpu"])
def test_jax_itself_gives_the_same_across_slices(kind):
    mesh_utils = mesh_utils_of_that_version()
    rows = generated(2, 4, 1, kind, num_slices=4)
    if kind == "cpu":
        rows = [
            row | {"coords": None, "core": None, "slice": None, "platform": "cpu"} for row in rows
        ]
    topology, devices = from_devices(rows), as_jax(rows)
    count = 8 if kind == "cpu" else 4  # processes are the granules
    for inner, outer in itertools.product(shapes_of(32 // count), shapes_of(count)):
        if len(inner) != len(outer):
            continue
        try:
            wanted = mesh_utils.create_hybrid_device_mesh(
                inner, outer, devices, process_is_granule=kind == "cpu"
            )
        except (NotImplementedError, ValueError):
            with pytest.raises(UsageError):
                jax_order.hybrid_order(topology, inner, outer)
            continue
        ordered = jax_order.hybrid_order(topology, inner, outer)
        assert ordered.tolist() == np.vectorize(lambda device: device.id)(wanted).tolist(), (
            inner,
            outer,
        )
