"""`check_replicas`: equal replicas pass, and one bit that differs is found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.device_trees import (
    SHAPE,
    SPECS,
    Shared,
    bits,
    device_dtypes,
    on_devices,
    placed,
    replicas,
    sharding,
)
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives import check_replicas as module
from shoal.collectives.check_replicas import check_replicas
from shoal.errors import DivergenceError, UsageError
from shoal.runtime.client.in_process import LocalJob

DTYPES = device_dtypes()
# Those that more than one device holds, and how many.
REPLICATED = {(): 8, ("a",): 2, (None, "b"): 4}


@pytest.fixture(params=["host", "devices"])
def where(request, monkeypatch):
    if request.param == "devices":
        on_devices(monkeypatch)
    return request.param


def flipped(place, bit):
    """Return a function that flips a bit of an item of a piece."""

    def change(piece):
        raw = piece.reshape(-1).view(np.uint8)
        raw[place * piece.itemsize + bit // 8] ^= 1 << bit % 8

    return change


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_pass_and_any_flipped_bit_is_found_in_every_dtype(dtype, where):
    width = 1 if dtype.kind == "b" else jax.dtypes.itemsize_bits(dtype)

    @settings(max_examples=3)
    @given(bits(dtype), st.data())
    def try_it(value, data):
        spec = data.draw(st.sampled_from(SPECS))
        device, bit = data.draw(st.integers(0, 7)), data.draw(st.integers(0, width - 1))
        shard = sharding(spec).shard_shape(SHAPE)
        item = data.draw(st.integers(0, int(np.prod(shard)) - 1))
        with jax.enable_x64(True):
            good = replicas(value, spec)
            bad = replicas(value, spec, (device, flipped(item, bit)))
            check_replicas({"good": good, "host": value, "n": 3})
            if spec not in REPLICATED:
                check_replicas(bad)
                return
            with pytest.raises(DivergenceError) as caught:
                check_replicas({"a": good, "w": bad})
        index = sharding(spec).devices_indices_map(SHAPE)[jax.devices()[device]]
        local = np.unravel_index(item, shard)
        place = [(cut.start or 0) + int(at) for cut, at in zip(index, local, strict=True)]
        error = caught.value
        assert error.difference.path == f"['w']{place}"
        assert error.difference.what == "replica"
        assert any(side.startswith(f"device {device} holds ") for side in error.sides)

    try_it()


def test_a_flipped_bit_is_found_200_times_of_200(where, monkeypatch):
    chance = np.random.default_rng(3)
    shared = Shared(monkeypatch, [0] * 8)
    jobs, specs = (LocalJob(1), LocalJob(2)), [*REPLICATED]
    good = [placed(chance.standard_normal(SHAPE, np.float32), spec) for spec in specs]
    for number in range({"host": 200, "devices": 50}[where]):
        is_shared = number % 4 == 0
        shared.owners = [0, 0, 0, 1, 1, 1, 1, 1] if is_shared else [0] * 8
        leaf, device, bit = (int(chance.integers(size)) for size in (3, 8, 32))
        spec = specs[leaf]
        item = int(chance.integers(np.prod(sharding(spec).shard_shape(SHAPE))))
        bad = replicas(np.asarray(good[leaf]), spec, (device, flipped(item, bit)))
        tree = [*good[:leaf], bad, *good[leaf + 1 :]]

        def go(client, tree=tree):
            shared.own(client.process)
            check_replicas.on(client, tree, timeout_s=PATIENCE_S)

        errors = run_all(jobs[is_shared], go)
        for error in errors:
            assert isinstance(error, DivergenceError), error
            assert error.sides == errors[0].sides
            odd = next(s for s in error.sides if s.startswith(f"device {device} holds "))
            assert error.sides[odd] == (shared.owners[device],)
            (rest,) = {*error.sides} - {odd}
            count = REPLICATED[spec] - 1
            assert rest.startswith(f"{count} devices (" if count > 1 else "device ")
            assert error.difference.path.startswith(f"[{leaf}][")


def test_no_false_alarm_in_2000_clean_arrays(where):
    chance = np.random.default_rng(5)
    for _ in range({"host": 20, "devices": 2}[where]):
        values = chance.integers(1 << 32, size=(100, *SHAPE), dtype=np.uint32).view(np.float32)
        which = chance.integers(len(SPECS), size=100)
        tree = [placed(value, SPECS[n]) for value, n in zip(values, which, strict=True)]
        check_replicas(tree)


@pytest.mark.parametrize(
    ("spec", "device", "shown"),
    [
        (
            (), 5,
            ["process 0: device 5 holds 7.0 (0x40e00000)",
             "process 0: 7 devices (0-4, 6-7) hold 0.0 (0x00000000)"],
        ),
        (
            ("a",), 3,
            ["process 0: device 2 holds 0.0 (0x00000000)",
             "process 0: device 3 holds 7.0 (0x40e00000)"],
        ),
    ],
)  # fmt: skip
def test_the_odd_device_is_named_by_majority_or_both_sides(spec, device, shown):
    def change(piece):
        piece[-1, -1] = 7

    bad = replicas(np.zeros(SHAPE, np.float32), spec, (device, change))
    with pytest.raises(DivergenceError) as caught:
        check_replicas({"ok": jnp.ones(3), "w": bad}, name="state")
    first, call, intro, *rows, advice, more = str(caught.value).splitlines()
    assert first.endswith("): check_replicas 'state' found different replicas")
    assert "test_check_replicas.py:" in call
    at = "[7, 3]" if spec == () else "[3, 3]"
    assert intro == f"  first difference, at ['w']{at}, in ['w']: float32[8,4]:"
    assert [row.strip() for row in rows] == shown
    assert advice == "If a single device differs, suspect its hardware."
    assert "check_vma=False" in more


def test_three_versions_of_replicas_are_reported():
    value = np.zeros(SHAPE, np.float32)
    pieces = [replicas(value, (), (n, lambda piece, n=n: piece.fill(n % 3))) for n in range(8)]
    own = [array.addressable_shards[n].data for n, array in enumerate(pieces)]
    bad = jax.make_array_from_single_device_arrays(SHAPE, sharding(()), own)
    with pytest.raises(DivergenceError) as caught:
        check_replicas(bad)
    assert [*caught.value.sides] == [
        "2 devices (2, 5) hold 2.0 (0x40000000)",
        "3 devices (0, 3, 6) hold 0.0 (0x00000000)",
        "3 devices (1, 4, 7) hold 1.0 (0x3f800000)",
    ]


def test_many_versions_are_not_all_shown(monkeypatch):
    monkeypatch.setattr(module, "MAX_GROUPS_SHOWN", 3)
    own = [replicas(np.full(SHAPE, n, "f4"), ()).addressable_shards[n].data for n in range(8)]
    bad = jax.make_array_from_single_device_arrays(SHAPE, sharding(()), own)
    with pytest.raises(DivergenceError) as caught:
        check_replicas(bad)
    assert [*caught.value.sides] == [
        "device 0 holds 0.0 (0x00000000)",
        "device 1 holds 1.0 (0x3f800000)",
        "device 7 holds 7.0 (0x40e00000)",
        "5 devices hold other values",
    ]


def test_swapped_values_and_moved_rows_differ(where):
    value = np.arange(32, dtype=np.float32).reshape(SHAPE)
    for change in (
        lambda piece: piece.__setitem__(slice(None), piece[::-1].copy()),
        lambda piece: piece.__setitem__(slice(None), np.roll(piece, 1, axis=1)),
        lambda piece: np.negative(piece, out=piece),
        lambda piece: piece.fill(0),
    ):
        with pytest.raises(DivergenceError):
            check_replicas(replicas(value, (), (4, change)))


def test_keys_scalars_and_empty_arrays(where):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding(("a",)))
    scalar = jax.device_put(np.float32(3), sharding(()))
    check_replicas([keys, scalar, jax.device_put(np.zeros((0, 4), "f4"), sharding(())), None, "x"])
    with pytest.raises(DivergenceError, match=r"at \[0\], in \[0\]: float32\[\]:"):
        check_replicas([replicas(np.float32(3), (), (6, lambda piece: piece.fill(4)))])
    words = np.asarray(jax.random.key_data(keys))
    others = replicas(words, ("a",), (6, flipped(1, 4)))
    data = [jax.random.wrap_key_data(shard.data) for shard in others.addressable_shards]
    bad = jax.make_array_from_single_device_arrays((8,), sharding(("a",)), data)
    with pytest.raises(
        DivergenceError, match=r"at \[6, 1\], in the value: key<threefry2x32>\[8\]:"
    ):
        check_replicas(bad)


def test_each_process_compares_a_local_array_with_itself():
    def go(client):
        value = np.full(SHAPE, client.process, np.float32)
        change = (5, flipped(0, 3)) if client.process == 1 else None
        check_replicas.on(client, {"w": replicas(value, (), change)}, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(3), go):
        assert {*error.sides.values()} == {(1,)}
        assert any(side.startswith("device 5 holds ") for side in error.sides)


def test_devices_of_other_processes_are_not_compared(monkeypatch):
    """Of processes 0 and 2 alone, replicas are equal; process 1 holds the odd one."""
    shared = Shared(monkeypatch, [0, 0, 1, 1, 1, 2, 2, 2])
    processes = dict(enumerate([0, 0, 1, 1, 1, 2, 2, 2]))
    real = module.shards_here

    def numbered(leaf, array):
        return [
            shard._replace(
                holders=tuple(h._replace(process=processes[h.device]) for h in shard.holders)
            )
            for shard in real(leaf, array)
        ]

    monkeypatch.setattr(module, "shards_here", numbered)
    bad = replicas(np.zeros(SHAPE, np.float32), (), (3, flipped(0, 3)))

    def go(client):
        shared.own(client.process)
        monkeypatch.setattr(jax, "process_index", lambda: shared._here.process)
        if client.process != 1:
            check_replicas.on(client, bad, processes=[0, 2], timeout_s=PATIENCE_S)
            check_replicas.on(client, [bad], processes=[0, 2], timeout_s=PATIENCE_S)

    assert run_all(LocalJob(3), go) == [None] * 3


def test_a_process_sends_16_bytes(monkeypatch):
    sent = []
    real = module.meet_callers

    def meet(*given, payload, **more):
        sent.append(payload)
        return real(*given, payload=payload, **more)

    monkeypatch.setattr(module, "meet_callers", meet)
    check_replicas({f"{n}": replicas(np.ones(SHAPE, "f4"), ()) for n in range(40)})
    assert [len(payload) for payload in sent] == [16]


def test_a_shape_has_no_values():
    with pytest.raises(UsageError, match=r"\['w'\]: stands for an array, but its value is needed"):
        check_replicas({"w": jax.ShapeDtypeStruct((2,), "f4")})
