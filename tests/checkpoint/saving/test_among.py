"""Checkpoints of some of the processes of a job: of the survivors of a loss, or of any group."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoint.saved_contents import CLEAN, files_of, in_job, kept, same_bits
from collectives.thread_jobs import PATIENCE_S
from shoal.checkpoint.coordination.lease import LeaseKeeper
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.who_writes import ShardMap, own_boxes
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.saving.state import among, held_of, own_of, read_state
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.collectives.live_processes import live_processes
from shoal.errors import (
    DivergenceError,
    NotCommittedError,
    ProcessLostError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    UsageError,
    UsageTypeError,
)
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.preemption import preempted
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points

WORDS = np.arange(1 << 20, dtype=np.float32)  # large enough to be shared


def tree_of(process):
    return {"w": WORDS, "n": 7, "own": PerProcess({"of": process})}


def works_among(client, path, group):
    """Save and restore among a group; return who wrote, and what came back of one's own."""
    options = {"processes": group, "timeout_s": PATIENCE_S}
    save.on(client, path, tree_of(client.process), **options)
    with pytest.raises(StepAlreadyCommittedError):
        save.on(client, path, tree_of(client.process), **options)
    back = restore.on(client, path, **options)
    assert same_bits(back["w"], WORDS)
    return back["n"], back["own"].value["of"]


def is_whole(path, members):
    """Is it what these processes saved, for whoever reads it?"""
    found = kept(path)
    assert same_bits(found["w"], WORDS)
    assert [own["of"] for own in found["own"]] == list(members)
    checkpoint = open_checkpoint(LocalStore(path))
    assert checkpoint.manifest.num_processes == len(members)
    assert files_of(path) == sorted([*CLEAN, *["data"] * (len(members) - 1)])
    one, other = in_job(2, lambda c: restore.on(c, path, only=("w", "n"), timeout_s=PATIENCE_S))
    return same_bits(one["w"], WORDS) and other["n"] == 7


def test_groups_save_and_restore_at_the_same_time(tmp_path):
    groups = {0: [2, 0], 2: (0, 2), 1: [4, 1, 3], 3: [1, 3, 4], 4: {1, 3, 4}}

    def go(client):
        group = groups[client.process]
        return works_among(client, tmp_path / str(min(group)), group)

    assert in_job(5, go) == [(7, process) for process in range(5)]
    assert is_whole(tmp_path / "0", [0, 2])
    assert is_whole(tmp_path / "1", [1, 3, 4])


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_save_and_go_on_with_their_history(tmp_path, victim):
    job = LocalJob(3)

    def go(client):
        me = client.process
        with Checkpoints(tmp_path / "run", keep=1, client=client) as ckpts:
            ckpts.save(1, tree_of(me))
            ckpts.wait()
            if me == victim:
                return job.lose(victim)
            with pytest.raises((ProcessLostError, SaveAbortedError)):
                ckpts.save(2, tree_of(me))
        alive = live_processes.on(client, timeout_s=PATIENCE_S)
        found = works_among(client, tmp_path / "one", alive)
        with Checkpoints(tmp_path / "run", keep=1, client=client, processes=alive) as ckpts:
            state, first = ckpts.resume(None, None, only=("w", "n"))
            assert (first, state["n"]) == (2, 7)
            for step in (2, 3):
                assert ckpts.save(step, tree_of(me), force=True)
            ckpts.wait()
            assert ckpts.all_steps() == (3,)
            assert ckpts.restore()["own"].value == {"of": me}
            ckpts.delete(3)
            with pytest.raises(NotCommittedError):
                ckpts.restore()
            assert ckpts.save(4, tree_of(me))
        return found

    alive = [p for p in range(3) if p != victim]
    assert in_job(3, go, job) == [None if p == victim else (7, p) for p in range(3)]
    assert is_whole(tmp_path / "one", alive)
    assert is_whole(tmp_path / "run" / "step_000000000004", alive)


def test_preempted_survivors_save_and_request_a_restart(tmp_path):
    job = LocalJob(3)
    job.lose(0)

    def go(client):
        if client.process == 0:
            return None
        alive = live_processes.on(client, timeout_s=PATIENCE_S)
        if client.process == 2:
            client.give_notice(ReceivedNotice("maintenance", "a test", deadline_s=500.0))
        with Checkpoints(tmp_path, client=client, processes=alive) as ckpts:
            step = 0
            while not preempted.on(client, step):
                step += 1
            ckpts.save(step, tree_of(client.process))
            return ckpts.latest() == step, client.stop.exit_code

    assert in_job(3, go, job) == [None, (True, 75), (True, 75)]


def test_process_lost_in_a_save_of_a_group_aborts_it_and_is_named(tmp_path, monkeypatch):
    """Process 3 is the second of the group. Taken for process 1, it would be waited for."""
    job = LocalJob(4)
    reach = fault_points.reach

    def dying(point, process=None):
        if point == "save.write" and process == 3:
            job.lose(3)
            raise KeyError("it is dead")
        reach(point, process)

    monkeypatch.setattr(fault_points, "reach", dying)

    def go(client):
        if client.process in (1, 3):
            save.on(client, tmp_path / "x", tree_of(0), processes=[1, 3], timeout_s=600)

    _, error, _, _ = in_job(4, go, job)
    assert isinstance(error, SaveAbortedError), error
    assert error.processes == (3,)
    assert files_of(tmp_path / "x") == []


def test_save_completes_if_a_process_is_lost_after_writing_its_part(tmp_path, monkeypatch):
    job = LocalJob(4)
    reach = fault_points.reach

    def dying(point, process=None):
        if point == "save.parted" and process == 3:
            job.lose(3)
            raise KeyError("it is dead")
        reach(point, process)

    monkeypatch.setattr(fault_points, "reach", dying)

    def go(client):
        if client.process in (0, 2):
            return None
        options = {"processes": [1, 3], "timeout_s": 600}
        return save.on(client, tmp_path / "x", tree_of(client.process), **options)

    assert in_job(4, go, job)[1] is None
    monkeypatch.setattr(fault_points, "reach", reach)
    assert is_whole(tmp_path / "x", [1, 3])


@pytest.mark.parametrize("group", [None, (1, 2)])
def test_the_first_of_the_group_keeps_the_lease(tmp_path, group):
    """Process 0 has nothing to do with a save of others, or is dead and known to be."""
    job = LocalJob(3)
    folder = LocalFolder(tmp_path / "x")
    folder.make()
    pending = tmp_path / "x" / "PENDING-abcabcabcabc"
    pending.write_text("")
    os.utime(pending, (0, 0))
    second, third = job.clients[1:]
    LeaseKeeper(third, LocalStore(folder), "abcabcabcabc", 1, members=group).keep()
    assert pending.stat().st_mtime == 0
    LeaseKeeper(second, LocalStore(folder), "abcabcabcabc", 1, members=group).keep()
    assert (pending.stat().st_mtime > 0) == (group is not None)


CALLS = {
    "save": lambda c, path, **more: save.on(c, path, {"n": 1}, **more),
    "restore": lambda c, path, **more: restore.on(c, path, **more),
    "Checkpoints": lambda c, path, **more: Checkpoints(path, client=c, **more),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_groups_are_a_divergence_and_no_group_is_refused(tmp_path, call):
    def go(client):
        group = [[0, 1], [1, 2], [2, 0]][client.process]
        return call(client, tmp_path / "x", processes=group, timeout_s=PATIENCE_S)

    assert [type(error) for error in in_job(3, go)] == [DivergenceError] * 3
    first = LocalJob(3).clients[0]
    with pytest.raises(UsageError, match=r"\(this one\) is not among the processes \[1, 2\]"):
        call(first, tmp_path / "x", processes=[2, 1])
    with pytest.raises(UsageError, match="named more than once"):
        call(first, tmp_path / "x", processes=[0, 0])
    with pytest.raises(UsageTypeError, match="must be a list of process indices"):
        call(first, tmp_path / "x", processes=1)
    assert not (tmp_path / "x").exists()


def spread_state(shape, *holders):
    """Return a state of one array, cut into rows that these processes (JAX's numbers) hold."""
    rows = shape[0] // len(holders)
    array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(
        Mesh(np.array(jax.devices()[: len(holders)]), "x"), P("x")))  # fmt: skip
    state = read_state({"w": array, "n": np.arange(3)}, 1)
    leaf = next(leaf for leaf in state.leaves if leaf.record.name == "w")
    origin = np.array([[rows * n, 0] for n in range(len(holders))], np.int64)
    extent = np.full((len(holders), 2), [rows, shape[1]], np.int64)
    leaves = tuple(
        one._replace(shards=ShardMap(origin, extent, holders)) if one is leaf
        else one._replace(shards=None)
        for one in state.leaves
    )  # fmt: skip
    return state._replace(leaves=leaves)


def test_survivors_write_the_data_that_they_hold_once():
    state, lost = among(spread_state((12, 4), (0, 1), (1, 2), (4,)), numbers=[4, 2, 1])
    assert lost == []
    written = [own_of(state, place, place, 3) for place in range(3)]
    boxes = [
        (place, one.box) for place in range(3) for one in written[place] if one.record.name == "w"
    ]
    assert [(place, box.origin, box.extent) for place, box in boxes] == [
        (0, (8, 0), (4, 4)), (1, (4, 0), (4, 4)), (2, (0, 0), (4, 4)),
    ]  # fmt: skip
    assert sum(one.record.name == "n" for own in written for one in own) == 1
    assert own_boxes(held_of(state, 3), 0) == written[0]


def test_data_held_only_outside_the_group_are_named():
    _, lost = among(spread_state((12, 4), (0, 1), (1, 2), (4,)), numbers=[0, 2])
    assert lost == ["w: 16 of its 48 values are held only by other processes"]


def test_arrays_without_values_can_always_be_saved():
    state, lost = among(spread_state((0, 4), (1,), (2,)), numbers=[0, 3])
    assert lost == []
    written = [[one.record.name for one in own_of(state, place, place, 2)] for place in (0, 1)]
    assert sorted(name for names in written for name in names) == ["n", "w"]
