"""Saved by four processes, restored by four, two and one: bit for bit, and read once."""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

import shoal
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.restoring.restore import plan_restore
from shoal.testing.cluster import Cluster

LARGE, SMALL = (2048, 1024), (16, 24)
NAMES = ("a", "b", "c", "d")
DIMS = {
    "rows": (("data", "model"), None),
    "columns": (None, ("data", "model")),
    "both": ("model", "data"),
    "whole": (None, None),
}


@functools.cache
def values():
    rng = np.random.default_rng(0)
    large = {name: rng.standard_normal(LARGE, np.float32) for name in NAMES}
    return large | {"small": rng.integers(0, 99, SMALL).astype(np.int16), "odd": np.ones(7, "f2")}


def layout(dims):
    mesh = shoal.make_mesh({"data": 4, "model": 2})
    return shoal.Layout(mesh, *DIMS[dims])


def everywhere():
    return shoal.Layout(shoal.make_mesh({"data": 4, "model": 2}), None)


def target(dims):
    return {name: layout(dims) for name in (*NAMES, "small")} | {"odd": everywhere()}


def is_same(back):
    for name, wanted in values().items():
        for shard in back[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), name


def save_rows(path):
    tree = target("rows") | {"step": 7, "own": 0}
    placed = shoal.put(values(), target("rows"))
    own = shoal.PerProcess({"row": shoal.process_index()})
    shoal.save(path, tree | placed | {"own": own})


def counted():
    """Count the bytes that this process reads of data files."""
    amounts = []
    read_at = LocalFolder.read_at

    def counting(self, name, offset, into):
        got = read_at(self, name, offset, into)
        amounts.append(got)
        return got

    LocalFolder.read_at = counting
    return amounts


def four(path):
    """Save by rows; restore in each way; return what was planned and read for the columns."""
    save_rows(path)
    amounts = counted()
    found = {}
    ways = [(dims, "auto") for dims in DIMS] + [("whole", "direct")]
    for dims, mode in ways:
        del amounts[:]
        back = shoal.restore(path, target(dims) | {"step": 0, "own": 0}, mode=mode)
        is_same(back)
        assert back["step"] == 7
        assert back["own"].value == {"row": shoal.process_index()}
        read = int(sum(shoal.allgather(sum(amounts)).tolist()))
        plan = plan_restore(path, target(dims) | {"step": 0, "own": 0}, mode=mode)
        assert plan.read_bytes == read
        found[f"{dims} {mode}"] = (plan.mode, read)
    is_same(shoal.restore(path, "stored"))
    small_elements(f"{path}-small")
    one = np.array([each for each in jax.devices() if each.process_index == 1])
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(one, "x"), jax.P("x"))
    back = shoal.restore(path, {"a": place}, only="a")["a"]  # others have no part of it
    assert len(back.addressable_shards) == (2 if shoal.process_index() == 1 else 0)
    for shard in back.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values()["a"][shard.index].tobytes()
    return found


def small_elements(path):
    """All bits of small floats, those of NaNs among them, and elements that share a byte."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(2048, 32)
    tree = {name: bits.view(name) for name in (ml_dtypes.bfloat16.__name__, "float16")}
    tree |= {"fp8": bits.view(ml_dtypes.float8_e5m2), "int2": (bits % 2).astype(ml_dtypes.int2)}
    shoal.save(path, tree)
    for dims in DIMS:
        back = shoal.restore(path, layout(dims), mode="exchange")
        for name, wanted in tree.items():
            for shard in back[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), name


def fewer(path):
    """Restore what four processes saved."""
    for dims in ("columns", "rows", "whole"):
        asked = target(dims)
        back = shoal.restore(path, asked, only=list(asked))
        is_same(back)
    with pytest.raises(shoal.UsageError, match="own has a value of each of 4 processes"):
        shoal.restore(path)
    with pytest.raises(
        shoal.errors.RestoreMismatchError, match=r"a: was saved as .* which does not fit here"
    ):
        shoal.restore(path, "stored", only=["a", "b"])
    merged = shoal.restore(path, only=["own", "odd"], merge=lambda rows: [r["row"] for r in rows])
    assert merged["own"].value == [0, 1, 2, 3]
    assert type(merged["odd"]) is np.ndarray


def test_four_processes_save_and_others_restore(tmp_path):
    path = tmp_path / "saved"
    with Cluster(4, start_method="fork", devices=2) as cluster:
        found = cluster.run(four, path)
    assert len({str(one) for one in found}) == 1
    needed = sum(one.nbytes for one in values().values())
    mode, read = found[0]["columns auto"]
    assert mode == "exchange"
    assert read <= 1.1 * needed
    mode, read = found[0]["whole auto"]
    assert mode == "exchange"
    assert read <= 1.1 * needed
    assert found[0]["whole direct"][1] >= 4 * needed
    assert found[0]["rows auto"][0] == "direct"
    with Cluster(2, start_method="fork", devices=4) as cluster:
        cluster.run(fewer, path)
    assert len(jax.devices()) == 8
    fewer(path)


def run_in_parts(path):
    """Begin a run and resume it twice, with classes that only a function knows."""
    from checkpoint.kinds_of_nodes import classes_of, local_dataclass, local_namedtuple

    train_state, sample = local_dataclass(), local_namedtuple()
    rows = shoal.Layout(shoal.make_mesh({"data": -1}), "data")
    own = shoal.PerProcess([sample(shoal.process_index(), "row")])
    target = train_state(rows, {"own": shoal.PerProcess([sample(0, "")]), "step": 0})

    def init():
        return train_state(shoal.put(np.arange(8.0, dtype="f4"), rows), {"own": own, "step": 7})

    with shoal.Checkpoints(path) as ckpts:
        with pytest.raises(
            shoal.errors.RestoreMismatchError, match=r"is a .*, and would come back as a"
        ):
            ckpts.resume(None, init)
        odd = sample(1, 2) if shoal.process_index() == 1 else 1  # on one process alone
        with pytest.raises(
            shoal.errors.RestoreMismatchError, match="p has a value of a class that is not"
        ):
            ckpts.resume({"p": shoal.PerProcess(None)}, {"p": shoal.PerProcess(odd)})
        for number in range(3):
            state, first = ckpts.resume(target, init)
            assert first == number
            assert jax.tree.structure(state) == jax.tree.structure(target)
            assert classes_of(state) == classes_of(target)
            assert state.y == {"own": own, "step": 7}
            assert type(state.y["own"].value[0]) is sample
            ckpts.save(first, state)
            ckpts.wait()
        for only, told in (
            (["y/**", "xx"], "only='xx' takes no leaf"),
            (["y", "x"], "'y' is a directory of 2 leaves"),
        ):
            with pytest.raises(shoal.errors.RestoreMismatchError, match=told):
                ckpts.restore(1, target, only=only)
        shoal.barrier("in step")


def test_types_and_names_in_a_job_of_two(tmp_path):
    with Cluster(2, start_method="fork", devices=2) as cluster:
        cluster.run(run_in_parts, tmp_path / "run")


def other_models(path):
    """Resume with models of several widths, whose arrays both processes make together."""
    me, rows = shoal.process_index(), shoal.Layout(shoal.make_mesh({"data": -1}), "data")
    made = []

    def init(width, *, meets=False):
        def make(key):
            return jax.random.normal(key, (4, width))

        placed = shoal.put(np.ones((4, width), np.float32), rows)
        own = np.full((2, width), me, np.float32)  # of each process
        made.append(float(own.sum()))
        if meets:
            shoal.barrier("in init")
        return {
            "put": placed,
            "create": shoal.create(make, jax.random.key(0), layouts=rows),
            "own": shoal.from_host_local(own, rows),
            "moved": shoal.relayout(placed, shoal.Layout(rows.mesh)),
        }

    def refused(width, call):
        with pytest.raises(shoal.errors.RestoreMismatchError) as caught:
            call()
        assert {*caught.value.wrong_shape} == {"put", "create", "own", "moved"}
        assert f"own: is float32[4,2], and `init` makes float32[4,{width}]" in str(caught.value)

    with shoal.Checkpoints(path) as ckpts:
        state, first = ckpts.resume(rows, lambda: init(2))
        ckpts.save(first, state)
        for number in (1, 2):
            state, first = ckpts.resume(rows, lambda: init(2))
            assert first == number
            ckpts.save(first, state)
        refused(3, lambda: ckpts.resume(rows, lambda: init(3)))
        refused(3, lambda: ckpts.resume(rows, lambda: init(2 + me)))
        ckpts.resume(dict.fromkeys(state, rows), lambda: init(2))
        with pytest.raises(shoal.errors.RestoreMismatchError, match="v: is in the checkpoint, not"):
            ckpts.save(3, {**state, "v": np.ones(3)})
        assert ckpts.resume(rows, lambda: init(4), check_init=False)[1] == 3
        assert len(made) == 6
        # The trace ends where processes would meet: what such an `init` makes is not compared.
        refused(3, lambda: ckpts.resume(rows, lambda: init(3, meets=me == 0)))
        assert ckpts.resume(rows, lambda: init(3, meets=True))[1] == 3
        shoal.barrier("in step")
        shoal.put(np.ones(4, np.float32), rows)
        shoal.barrier("in step again")


def test_models_of_other_widths_in_a_job_of_two(tmp_path):
    with Cluster(2, start_method="fork", devices=2) as cluster:
        cluster.run(other_models, tmp_path / "run")
