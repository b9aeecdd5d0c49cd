"""Whoever dies in a save, and when: survivors and storage agree, and nothing is half.

death of                 at                       survivors          next run
anybody                  preflight … written      SaveAbortedError        the step is not there
the lead                 open, opened             SaveAbortedError        the step is not there
anybody                  parted                   it is saved        it is there
the lead                 assemble … tidied        it is saved        it is there
anybody                  announced                it is saved        it is there
the only process         parted … tidied          –                  it is there

With overwrite=True, whoever dies before any call of the system, or before any request: the old
checkpoint is there, or the new one, and survivors say which.

All of it on a disk; a few in a bucket on moto, too, and with `make test-buckets` all.
"""

from __future__ import annotations

import random
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from checkpoint.bucket import servers
from collectives.thread_jobs import run_all
from few import few
from processes.forked import Forks, Outcome, save_step, tree_of
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.blocks.copying import copy_checkpoint
from shoal.checkpoint.blocks.reader import Want, read_boxes, verify_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format.blobs import decode_tree
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import NotCommittedError
from shoal.runtime.client.in_process import LocalJob

EARLY = ("preflight", "snapshot", "write", "written")
LEAD_EARLY = ("open", "opened")
LEAD_LATE = ("assemble", "indexed", "link", "committed", "tidied")
PROCESSES = 4
SEED = 100
ONE_PYTHON = pytest.mark.skipif(sys.version_info >= (3, 12), reason="on the other Python")


class Run:
    """A run on a disk or in a bucket, whose step 1 is committed."""

    def __init__(self, root: Path | str, options: Mapping[str, str] | None = None) -> None:
        self._root, self._options = str(root), options

    def path(self, step: int) -> str:
        """Return the path or address of a step, for another process."""
        return f"{self._root}/{step}"

    def store(self, step: int) -> Store:
        """Return the store of a step, for this process."""
        path = self.path(step)
        return store_at(Bucket(path, **self._options) if self._options else path, "")


@pytest.fixture(scope="module")
def server():
    with servers.moto() as address:
        servers.make_bucket(address, "deaths")
        yield address


@pytest.fixture(scope="module", params=["disk", pytest.param("bucket", marks=pytest.mark.buckets)])
def place(request):
    """Where the run lies: no server, or one."""
    return None if request.param == "disk" else request.getfixturevalue("server")


@pytest.fixture(scope="module")
def forks(tmp_path_factory, outside, place):
    env = {**outside, **servers.variables(place)} if place else outside
    forks = Forks(tmp_path_factory.mktemp("forks"), env)
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A step that is committed."""
    path = tmp_path_factory.mktemp("earlier") / "1"
    assert run_all(LocalJob(2), lambda one: save_step(one, str(path), 1, 1, 30.0)) == [None] * 2
    return LocalStore(path)


@pytest.fixture
def root(earlier, tmp_path, place):
    if place is None:
        shutil.copytree(earlier.path, tmp_path / "run" / "1")
        return Run(tmp_path / "run")
    run = Run(f"s3://deaths/{secrets.token_hex(6)}", servers.options(place))
    copy_checkpoint(earlier, run.store(1))
    return run


def holds(store: Store, seed: int, processes: int) -> None:
    """Assert that a checkpoint is whole and bit-equal to what was saved."""
    checkpoint = open_checkpoint(store)
    assert verify_files(checkpoint) == []
    wants = {}
    for number, leaf in enumerate(checkpoint.manifest.leaves):
        if leaf.kind == "array":
            wants[leaf.name] = Want(
                number, (0,) * len(leaf.shape), np.empty(leaf.shape, leaf.dtype)
            )
    read_boxes(checkpoint, list(wants.values()), most_bytes=1 << 26)
    expected = tree_of(seed)
    for name, want in wants.items():
        assert np.array_equal(want.out, expected[name]), name
    assert len(wants) == 6
    (own,) = (n for n, leaf in enumerate(checkpoint.manifest.leaves) if leaf.name == "own")
    for process, (origin, size) in checkpoint.values_of(own).items():
        out = np.empty(size, np.uint8)
        read_boxes(checkpoint, [Want(own, (origin,), out)], most_bytes=1 << 26)
        assert decode_tree(out.tobytes()) == {"process": process, "seed": seed}
    assert len(checkpoint.values_of(own)) == processes


def judge(outcomes: list[Outcome], victims: set[int], store: Store, *, saved: bool) -> None:
    """Assert that all survivors say the same, and that the storage agrees, without a next run."""
    assert {p for p, one in enumerate(outcomes) if one.is_dead} == victims
    errors = {one.error for one in outcomes} - {"dead"}
    assert errors <= ({None} if saved else {"SaveAbortedError"}), [o.said for o in outcomes]
    for one in outcomes:
        if one.error not in (None, "dead"):
            assert {*one.said["processes"]} <= victims  # the first that was missed
            assert one.said["processes"]
            assert one.said["exit_code"] == 71
    if errors:
        assert (store.committed() is not None) == saved
        left = sorted(name.split("-")[0] for name in store.names())
        if saved:
            assert set(left) == {"COMMIT", "data", "index", "manifest"}
        else:
            assert left == []


def next_run(forks: Forks, root: Run, *, saved: bool, processes: int) -> None:
    """Recover, look, save the step again; the earlier step stands all the while."""
    store = root.store(2)
    assert (store.recover() is not None) == saved
    store.collect_garbage(idle_s=0)
    if saved:
        holds(store, SEED, processes)
    else:
        assert store.names() == []
        with pytest.raises(NotCommittedError):
            open_checkpoint(store)
    (again,) = forks.run(1, "save_step", root.path(2), 2, SEED + 1, 30.0, name="next")
    assert again.error == ("StepAlreadyCommittedError" if saved else None)
    holds(store, SEED if saved else SEED + 1, processes if saved else 1)
    holds(root.store(1), 1, 2)


ROWS = [
    *((point, victim, False) for point in EARLY for victim in (0, 2)),
    *((point, 0, False) for point in LEAD_EARLY),
    *(("parted", victim, True) for victim in (0, 2)),
    *((point, 0, True) for point in LEAD_LATE),
    *(("announced", victim, True) for victim in (0, 2)),
]


BEHIND = [
    ("save_behind", *row)
    for row in [("snapshot", 0, False), ("written", 2, False), ("parted", 0, True),
                ("link", 0, True)]
]  # fmt: skip
TABLE = [
    *(("save_step", *row) for row in ROWS),
    *few([("save_behind", *row) for row in ROWS], BEHIND),
]


@pytest.mark.parametrize(("work", "point", "victim", "saved"), TABLE)
def test_a_death(forks, root, work, point, victim, saved):
    faults = f"save.{point}@{victim}:kill"
    outcomes = forks.run(PROCESSES, work, root.path(2), 2, SEED, 30.0, faults=faults)
    judge(outcomes, {victim}, root.store(2), saved=saved)
    next_run(forks, root, saved=saved, processes=PROCESSES)


@ONE_PYTHON
@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize(("work", "point", "victim", "saved"), BEHIND)
def test_a_death_in_a_bucket(forks, root, work, point, victim, saved):
    test_a_death(forks, root, work, point, victim, saved)


WHOLE_JOB = [
    *((point, False) for point in (*EARLY, *LEAD_EARLY)),
    *((point, True) for point in ("parted", *LEAD_LATE, "announced")),
]


@pytest.mark.parametrize(("point", "saved"), WHOLE_JOB)
def test_the_only_process_dies(forks, root, point, saved):
    (outcome,) = forks.run(1, "save_step", root.path(2), 2, SEED, 30.0, faults=f"save.{point}:kill")
    assert outcome.is_dead
    next_run(forks, root, saved=saved, processes=1)


def test_all_die_when_all_have_written(forks, root):
    outcomes = forks.run(
        PROCESSES, "save_step", root.path(2), 2, SEED, 30.0, faults="save.parted:kill"
    )
    assert all(one.is_dead for one in outcomes)
    next_run(forks, root, saved=True, processes=PROCESSES)


@pytest.mark.parametrize(("victims", "saved"), [((0, 2), False), ((1, 2, 3), False)])
def test_several_die(forks, root, victims, saved):
    faults = "; ".join(f"save.written@{victim}:kill" for victim in victims)
    outcomes = forks.run(PROCESSES, "save_step", root.path(2), 2, SEED, 30.0, faults=faults)
    judge(outcomes, set(victims), root.store(2), saved=saved)
    next_run(forks, root, saved=saved, processes=PROCESSES)


def test_a_process_fails_and_another_dies(forks, root):
    faults = "save.write@1:raise; save.written@3:kill"
    outcomes = forks.run(PROCESSES, "save_step", root.path(2), 2, SEED, 30.0, faults=faults)
    errors = {one.error for one in outcomes}
    assert errors <= {"SaveAbortedError", "InjectedError", "dead"}
    next_run(forks, root, saved=False, processes=PROCESSES)


RAISES = [("snapshot", 2), ("write", 0), ("written", 2), ("parted", 0)]
ALSO = [("snapshot", 0), ("write", 2), ("written", 0), ("parted", 2)]


@pytest.mark.parametrize(
    ("point", "victim"), [*RAISES, *(pytest.param(*row, marks=pytest.mark.faults) for row in ALSO)]
)
def test_a_process_raises(forks, root, point, victim):
    """All hear of it, whoever it is; nobody waits for a deadline."""
    outcomes = forks.run(
        PROCESSES, "save_step", root.path(2), 2, SEED, 30.0, faults=f"save.{point}@{victim}:raise"
    )
    for process, one in enumerate(outcomes):
        assert one.error == ("InjectedError" if process == victim else "SaveAbortedError")
        if process != victim:
            assert one.said["processes"] == [victim]
            assert one.said["exit_code"] == 72
    next_run(forks, root, saved=False, processes=PROCESSES)


FROZEN = [
    ("write", 0),
    ("written", 2),
    pytest.param("write", 2, marks=pytest.mark.faults),
    pytest.param("written", 0, marks=pytest.mark.faults),
]


@pytest.mark.parametrize(("point", "victim"), FROZEN)
def test_a_frozen_writer_wakes_when_others_have_collected_and_saved(forks, root, point, victim):
    children = forks.start(
        PROCESSES, "save_step", root.path(2), 2, SEED, 3.0, faults=f"save.{point}@{victim}:stop"
    )
    children[victim].until_stopped()
    others = [child.wait() for p, child in enumerate(children) if p != victim]
    assert {one.error for one in others} == {"SaveAbortedError"}
    assert {one.said["exit_code"] for one in others} <= {71, 73}
    root.store(2).collect_garbage(idle_s=0)
    (second,) = forks.run(1, "save_step", root.path(2), 2, SEED + 1, 30.0)
    assert second.error is None
    children[victim].send(signal.SIGCONT)
    assert children[victim].wait().error is not None
    holds(root.store(2), SEED + 1, 1)
    assert len(root.store(2).names()) == 4


@ONE_PYTHON
@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize(("point", "victim"), [("written", 2)])
def test_a_frozen_writer_of_a_bucket(forks, root, point, victim):
    test_a_frozen_writer_wakes_when_others_have_collected_and_saved(forks, root, point, victim)


@pytest.mark.parametrize("point", ["opened", "write", "written", "assemble", "indexed", "link"])
def test_a_frozen_lead_cannot_commit_what_was_ended(forks, root, point):
    store = root.store(2)
    (child,) = forks.start(1, "save_step", root.path(2), 2, SEED, 30.0, faults=f"save.{point}:stop")
    child.until_stopped()
    (attempt,) = store.state().attempts
    assert store.abandon(attempt.id) is None
    (second,) = forks.run(1, "save_step", root.path(2), 2, SEED + 1, 30.0, name="another")
    assert second.error is None
    child.send(signal.SIGCONT)
    assert child.wait().error in ("SaveAbortedError", "StepAlreadyCommittedError")
    holds(root.store(2), SEED + 1, 1)
    assert len(store.names()) == 4


@pytest.mark.parametrize("point", ["assemble", "indexed", "link", "committed", "tidied"])
def test_what_a_frozen_lead_has_not_committed_is_recovered(forks, root, point):
    (child,) = forks.start(1, "save_step", root.path(2), 2, SEED, 30.0, faults=f"save.{point}:stop")
    child.until_stopped()
    assert root.store(2).collect_garbage(idle_s=0) == []
    (second,) = forks.run(1, "save_step", root.path(2), 2, SEED + 1, 30.0, name="another")
    assert second.error == "StepAlreadyCommittedError"
    child.send(signal.SIGCONT)
    assert child.wait().error is None
    holds(root.store(2), SEED, 1)
    assert len(root.store(2).names()) == 4


def test_a_live_writer_is_spared(forks, root):
    """Garbage is what nobody has touched for long."""
    (child,) = forks.start(1, "save_step", root.path(2), 2, SEED, 30.0, faults="save.written:stop")
    child.until_stopped()
    assert root.store(2).collect_garbage(idle_s=600) == []
    child.send(signal.SIGCONT)
    assert child.wait().error is None
    holds(root.store(2), SEED, 1)


@pytest.mark.parametrize(
    "turn", [0, 1, *(pytest.param(n, marks=pytest.mark.faults) for n in range(2, 20))]
)
def test_two_jobs_save_one_step(forks, root, turn):
    one = forks.start(2, "save_step", root.path(2), 2, SEED, 30.0, name="one")
    other = forks.start(2, "save_step", root.path(2), 2, SEED + 1, 30.0, name="other")
    outcomes = [{child.wait().error for child in job} for job in (one, other)]
    assert sorted(outcomes, key=len) == outcomes
    assert outcomes in (
        [{None}, {"StepAlreadyCommittedError"}],
        [{"StepAlreadyCommittedError"}, {None}],
    )
    holds(root.store(2), SEED if outcomes[0] == {None} else SEED + 1, 2)
    assert len(root.store(2).names()) == 5


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in range(1, 11))]
)
def test_random_kills(forks, root, seed):
    """Kill one of two processes at a random point of a random step of a loop, again and again."""
    chance = random.Random(seed)
    first = 2
    for _ in range(5):
        victim = chance.randrange(2)
        points = [*EARLY, "parted", "announced", *((*LEAD_EARLY, *LEAD_LATE) if not victim else ())]
        fault = f"save.{chance.choice(points)}@{victim}#{chance.randrange(1, 4)}:kill"
        outcomes = forks.run(2, "save_many", root.path(0), first, first + 4, faults=fault)
        assert outcomes[victim].is_dead, fault
        assert not outcomes[1 - victim].is_dead
        steps = range(first - 1, first + 4)
        saved = [step for step in steps if root.store(step).committed() is not None]
        assert saved, fault
        assert saved == list(range(saved[0], saved[-1] + 1)), fault
        for step in saved:
            holds(root.store(step), step, 2)
        for step in saved[:-1]:  # a history that is not too long to verify each time
            assert root.store(step).delete_damaged()
        first = saved[-1] + 1


# ---- overwrite=True

OVERWRITERS = [  # each takes one call of so many, all together take all
    pytest.param(processes, victim, turn, every, marks=[pytest.mark.faults] if turn else [])
    for processes, victim, every in ((1, 0, 16), (2, 0, 16), (2, 1, 4))
    for turn in range(every)
]


def which(store: Store, old: tuple[int, int], new: tuple[int, int]) -> tuple[int, int]:
    """Return which of two saves (seed, processes) is there, whole."""
    commit = store.committed()
    assert commit is not None
    leaves = {leaf.name: leaf.value for leaf in open_checkpoint(store).manifest.leaves}
    there = new if int(leaves["seed"]) == new[0] else old
    holds(store, *there)
    return there


def overwrites(
    forks: Forks, store: Store, path: str, processes: int, victim: int, calls: range
) -> list[int]:
    """Overwrite a checkpoint again and again, killed ever later, until it is not killed any more.

    Returns how often it was killed with the old one left, and with the new one.
    """
    there, killed = (1, 2), [0, 0]
    for dies_at in calls:
        new = (there[0] + 1, processes)
        outcomes = forks.run(processes, "overwrite", path, new[0], 30.0, victim, dies_at)
        found = which(store, there, new)
        for process, one in enumerate(outcomes):
            assert one.is_dead <= (process == victim)
            if not one.is_dead:
                assert one.error == (None if found == new else "SaveAbortedError"), one.said
        there = found
        if not any(one.is_dead for one in outcomes):
            assert found == new
            break
        killed[found == new] += 1
        if not isinstance(store, LocalStore):  # which counts leases in whole seconds
            store.collect_garbage(idle_s=0)
    assert dies_at < calls[-1], "it is killed for ever"
    return killed


@pytest.mark.parametrize("place", ["disk"], indirect=True)
@pytest.mark.parametrize(("processes", "victim", "turn", "every"), OVERWRITERS)
def test_a_death_before_each_call_leaves_one_of_two(forks, root, processes, victim, turn, every):
    store, calls = root.store(1), range(1 + turn, 1000, every)
    assert sum(overwrites(forks, store, root.path(1), processes, victim, calls)) > 2
    assert len(store.names()) == 3 + processes, "the last one has cleaned up after all others"


@ONE_PYTHON
@pytest.mark.parametrize("place", ["bucket"], indirect=True)
@pytest.mark.parametrize(("processes", "victim", "every"), [(1, 0, 4), (2, 0, 4), (2, 1, 2)])
def test_a_death_before_requests(forks, root, processes, victim, every):
    store, calls = root.store(1), range(1, 1000, every)
    assert sum(overwrites(forks, store, root.path(1), processes, victim, calls)) > 2
    assert len(store.names()) == 3 + processes
