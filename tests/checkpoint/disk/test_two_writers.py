"""Several writers of one step, deletions and collectors at the same time: exactly one commits."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from pathlib import Path

import pytest

from shoal.checkpoint.disk import committing, step_folder, sweep
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.records import Commit
from shoal.errors import SaveAbortedError, StepAlreadyCommittedError
from shoal.runtime.system import fault_points
from shoal.runtime.system.fault_points import POINTS, InjectedError
from shoal.testing.store_contract import Save, names_of, value_of

PATIENCE_S = 60
TRIES = 20
FIRST, SECOND, THIRD = (Save(f"00000000000{n}", value=n) for n in (1, 2, 3))
DELETING = ("delete.marked", "delete.half")
COMMITTING = ("save.assemble", "save.indexed", "save.link", "save.committed", "save.tidied")


SHM = Path("/dev/shm")


@pytest.fixture
def tmp_path():
    """Memory where there is some: fsync takes no time there, so that more happens at once."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(tmp_path / "step")


def _outcome(folder: LocalFolder, save: Save, start: threading.Barrier) -> object:
    """Save as soon as all others are ready to."""
    start.wait(PATIENCE_S)
    try:
        return save.save(folder).attempt
    except StepAlreadyCommittedError as error:
        return error
    except SaveAbortedError as error:
        return error


def _is_one_winner(folder: LocalFolder, outcomes: dict[str, object]) -> None:
    winners = [attempt for attempt, outcome in outcomes.items() if outcome == attempt]
    assert len(winners) == 1
    (winner,) = winners
    for attempt, outcome in outcomes.items():
        if attempt != winner:
            assert isinstance(outcome, StepAlreadyCommittedError)
            assert outcome.attempt == winner
    commit = step_folder.committed(folder)
    assert commit.attempt == winner
    assert value_of(folder, commit) == int(winner, 16)
    sweep.collect_garbage(folder, idle_s=0)
    assert folder.names() == names_of(folder, commit)


def test_exactly_one_of_two_threads_commits(tmp_path):
    for turn in range(TRIES):
        folder = LocalFolder(tmp_path / str(turn))
        start = threading.Barrier(2)
        outcomes: dict[str, object] = {}

        def run(save: Save, folder=folder, start=start, outcomes=outcomes) -> None:
            outcomes[save.attempt] = _outcome(folder, save, start)

        threads = [threading.Thread(target=run, args=(save,)) for save in (FIRST, SECOND)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        _is_one_winner(folder, outcomes)


def _run_all(path: Path, save: Save, start, results) -> None:
    for turn in range(TRIES):
        outcome = _outcome(LocalFolder(path / str(turn)), save, start)
        results.put((turn, save.attempt, outcome))


def test_exactly_one_of_two_processes_commits(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("disk")
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_run_all, args=(tmp_path, save, start, results))
        for save in (FIRST, SECOND)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, dict[str, object]] = {turn: {} for turn in range(TRIES)}
    for _ in range(2 * TRIES):
        turn, attempt, outcome = results.get(timeout=PATIENCE_S)
        outcomes[turn][attempt] = outcome
    for process in processes:
        process.join(PATIENCE_S)
    for turn, ends in outcomes.items():
        _is_one_winner(LocalFolder(tmp_path / str(turn)), ends)


def test_all_processes_of_a_job_may_commit_at_once(tmp_path):
    for turn in range(TRIES):
        folder = LocalFolder(tmp_path / str(turn))
        FIRST.prepare(folder)
        start = threading.Barrier(4)
        commits: list[Commit] = []

        def run(number: int, folder=folder, start=start, commits=commits) -> None:
            start.wait(PATIENCE_S)
            done = (
                sweep.recover_step(folder) if number else committing.commit(folder, FIRST.attempt)
            )
            commits.append(done)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert commits == [step_folder.committed(folder)] * 4
        assert folder.names() == names_of(folder, commits[0])


@pytest.mark.parametrize("written", ["begun", "data", "part", "all"])
def test_a_writer_that_was_collected_while_it_was_frozen_cannot_commit(folder, written):
    FIRST.begin(folder)
    if written in ("part", "all"):
        FIRST.write(folder, 0)
    committing.abandon(folder, FIRST.attempt)
    assert folder.names() == []
    SECOND.save(folder)
    if written == "all":
        FIRST.write(folder, 1)  # it wakes, and goes on
    with pytest.raises((SaveAbortedError, StepAlreadyCommittedError)):
        committing.commit(folder, FIRST.attempt)
    commit = step_folder.committed(folder)
    assert value_of(folder, commit) == 2
    sweep.collect_garbage(folder, idle_s=0)
    assert folder.names() == names_of(folder, commit)


def test_a_writer_that_was_collected_leaves_nothing(folder):
    FIRST.prepare(folder)
    committing.abandon(folder, FIRST.attempt)
    folder.make()
    FIRST.write(folder, 0)
    FIRST.write(folder, 1)
    with pytest.raises(SaveAbortedError, match="PENDING is gone"):
        committing.commit(folder, FIRST.attempt)
    assert folder.names() == []


def _frozen_at(monkeypatch, point: str, meanwhile) -> None:
    """Let something happen when a point is reached for the first time."""
    real = fault_points.reach
    seen: list[str] = []

    def reach(name: str, process: int | None = None) -> None:
        if name == point and not seen:
            seen.append(name)
            meanwhile()
        real(name, process)

    monkeypatch.setattr("shoal.runtime.system.fault_points.reach", reach)


@pytest.mark.parametrize("point", ["save.assemble", "save.indexed", "save.link"])
def test_a_committer_that_is_collected_at_a_point_cannot_commit(folder, point, monkeypatch):
    FIRST.prepare(folder)
    _frozen_at(monkeypatch, point, lambda: committing.abandon(folder, FIRST.attempt))
    with pytest.raises(SaveAbortedError):
        committing.commit(folder, FIRST.attempt)
    assert step_folder.committed(folder) is None
    assert folder.names() == []


@pytest.mark.parametrize("point", ["save.assemble", "save.indexed", "save.link"])
def test_a_committer_that_is_overtaken_at_a_point_gives_way(folder, point, monkeypatch):
    FIRST.prepare(folder)
    _frozen_at(monkeypatch, point, lambda: SECOND.save(folder))
    with pytest.raises(StepAlreadyCommittedError) as caught:
        committing.commit(folder, FIRST.attempt)
    assert caught.value.attempt == SECOND.attempt
    assert value_of(folder, step_folder.committed(folder)) == 2


@pytest.mark.parametrize("point", COMMITTING)
def test_a_committer_that_is_helped_at_a_point_has_committed(folder, point, monkeypatch):
    FIRST.prepare(folder)
    _frozen_at(monkeypatch, point, lambda: sweep.recover_step(folder))
    commit = committing.commit(folder, FIRST.attempt)
    assert commit == step_folder.committed(folder)
    assert folder.names() == names_of(folder, commit)


@pytest.mark.parametrize("point", COMMITTING)
def test_commit_interrupted_at_any_point_can_be_recovered(folder, point, monkeypatch):
    FIRST.prepare(folder)
    monkeypatch.setenv("SHOAL_FAULTS", f"{point}:raise")
    with pytest.raises(InjectedError):
        committing.commit(folder, FIRST.attempt)
    is_linked = point in ("save.committed", "save.tidied")
    assert (step_folder.committed(folder) is not None) == is_linked
    commit = sweep.recover_step(folder)
    assert value_of(folder, commit) == 1
    assert folder.names() == names_of(folder, commit)


@pytest.mark.parametrize("point", DELETING)
def test_a_step_saved_again_outlives_the_deletion_that_died(folder, point, monkeypatch):
    FIRST.save(folder)
    monkeypatch.setenv("SHOAL_FAULTS", f"{point}:raise")
    with pytest.raises(InjectedError):
        sweep.delete_committed(folder, FIRST.attempt)
    assert step_folder.committed(folder) is None
    assert step_folder.folder_state(folder).deleting == (FIRST.attempt,)
    SECOND.save(folder)
    sweep.delete_committed(folder, FIRST.attempt)  # it goes on
    commit = step_folder.committed(folder)
    assert value_of(folder, commit) == 2
    assert folder.names() == names_of(folder, commit)


@pytest.mark.parametrize("point", DELETING)
def test_a_step_saved_again_outlives_the_deletion_that_was_frozen(folder, point, monkeypatch):
    FIRST.save(folder)
    _frozen_at(monkeypatch, point, lambda: SECOND.save(folder))
    sweep.delete_committed(folder, FIRST.attempt)
    commit = step_folder.committed(folder)
    assert value_of(folder, commit) == 2
    assert folder.names() == names_of(folder, commit)


def _delete_frozen_before_its_rename(folder: LocalFolder) -> None:
    """Delete the first save; meanwhile others delete it, and save the second."""

    class Slow(LocalFolder):
        def rename(self, old: str, new: str) -> None:
            if old == "COMMIT":
                sweep.delete_committed(folder, FIRST.attempt)
                SECOND.save(folder)
            super().rename(old, new)
            if old == "COMMIT":
                raise InjectedError("it dies right after")

    with pytest.raises(InjectedError):
        sweep.delete_committed(Slow(folder.path), FIRST.attempt)
    assert "COMMIT" not in folder.names()


def test_a_deletion_that_renamed_anothers_commit_took_nothing(folder):
    FIRST.save(folder)
    _delete_frozen_before_its_rename(folder)
    assert step_folder.committed(folder).attempt == SECOND.attempt
    assert step_folder.folder_state(folder).commit.attempt == SECOND.attempt
    with pytest.raises(StepAlreadyCommittedError):
        THIRD.begin(folder)
    sweep.collect_garbage(folder, idle_s=0)
    commit = step_folder.committed(folder)
    assert value_of(folder, commit) == 2
    assert folder.names() == names_of(folder, commit)


def test_a_commit_that_is_renamed_while_a_deletion_is_finished_is_not_taken(folder):
    FIRST.save(folder)
    _delete_frozen_before_its_rename(folder)
    sweep._finish_deletion(folder, FIRST.attempt)
    assert value_of(folder, step_folder.committed(folder)) == 2


def test_commit_fails_and_restores_a_commit_renamed_by_mistake(folder):
    FIRST.save(folder)
    _delete_frozen_before_its_rename(folder)
    third = THIRD.attempt
    folder.write_new(f"PENDING-{third}", b"{}")
    folder.write_new(f"manifest-{third}.json", b"")
    with pytest.raises(StepAlreadyCommittedError):
        committing.commit(folder, third)
    assert "COMMIT" in folder.names()


def test_deletion_aborts_a_second_commit_of_the_same_attempt(folder):
    """What a crash left untidy could be committed again as soon as COMMIT is renamed."""
    FIRST.prepare(folder)
    committing._link(folder, FIRST.attempt)
    commit = step_folder.committed(folder)

    class Slow(LocalFolder):
        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            with pytest.raises(SaveAbortedError):
                committing.commit(folder, commit.attempt)

    sweep.delete_committed(Slow(folder.path), FIRST.attempt)
    assert step_folder.committed(folder) is None
    assert folder.names() == []


# ---- a commit in place of another


def _replaced(folder: LocalFolder) -> Commit:
    """Let the second save replace the first one, which is committed."""
    return committing.commit(folder, SECOND.attempt, FIRST.attempt)


@pytest.fixture
def replacing(folder):
    """A folder where the second save is complete, and is to replace the first one."""
    FIRST.save(folder)
    SECOND.prepare(folder, FIRST.attempt)
    return folder


@pytest.mark.parametrize("point", ["save.assemble", "save.indexed", "save.link"])
def test_a_replacement_that_is_collected_at_a_point_leaves_the_old_one(
    replacing, point, monkeypatch
):
    _frozen_at(monkeypatch, point, lambda: committing.abandon(replacing, SECOND.attempt))
    with pytest.raises(SaveAbortedError):
        _replaced(replacing)
    commit = step_folder.committed(replacing)
    assert value_of(replacing, commit) == 1
    assert replacing.names() == names_of(replacing, commit)


@pytest.mark.parametrize("point", COMMITTING)
def test_a_replacement_that_is_helped_at_a_point_has_committed(replacing, point, monkeypatch):
    _frozen_at(monkeypatch, point, lambda: _replaced(replacing))
    commit = _replaced(replacing)
    assert value_of(replacing, commit) == 2
    assert commit == step_folder.committed(replacing)
    assert replacing.names() == names_of(replacing, commit)


@pytest.mark.parametrize("point", ["save.assemble", "save.indexed", "save.link"])
def test_replacement_succeeds_if_the_old_commit_is_deleted_meanwhile(replacing, point, monkeypatch):
    delete = lambda: sweep.delete_committed(replacing, FIRST.attempt)  # noqa: E731
    _frozen_at(monkeypatch, point, delete)
    commit = _replaced(replacing)
    assert value_of(replacing, commit) == 2
    assert replacing.names() == names_of(replacing, commit)


@pytest.mark.parametrize("point", COMMITTING)
def test_interrupted_replacement_leaves_one_of_the_two_commits(replacing, point, monkeypatch):
    monkeypatch.setenv("SHOAL_FAULTS", f"{point}:raise")
    with pytest.raises(InjectedError):
        _replaced(replacing)
    before = step_folder.committed(replacing)
    assert value_of(replacing, before) == (2 if point in COMMITTING[3:] else 1)
    sweep.collect_garbage(replacing, idle_s=0)
    commit = step_folder.committed(replacing)
    # What it replaces is not known any more once COMMIT's text is written over it.
    assert value_of(replacing, commit) == (1 if point == "save.link" else 2)
    assert replacing.names() == names_of(replacing, commit)


def test_all_processes_of_a_job_may_replace_at_once(tmp_path):
    for turn in range(TRIES):
        folder = LocalFolder(tmp_path / str(turn))
        FIRST.save(folder)
        SECOND.prepare(folder, FIRST.attempt)
        start, commits = threading.Barrier(4), []

        def run(folder=folder, start=start, commits=commits) -> None:
            start.wait(PATIENCE_S)
            commits.append(_replaced(folder))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert commits == [step_folder.committed(folder)] * 4
        assert value_of(folder, commits[0]) == 2
        assert folder.names() == names_of(folder, commits[0])


def test_a_commit_exists_at_every_moment_of_concurrent_replacements(folder):
    """Of replacements of one attempt at once, one or more are committed, one after the other."""
    FIRST.save(folder)
    is_over = threading.Event()
    absent: list[object] = []

    def look() -> None:
        while not is_over.is_set():
            if step_folder.read_commit(folder, "COMMIT") is None:
                absent.append("COMMIT is missing")

    looker = threading.Thread(target=look)
    looker.start()
    last = FIRST
    try:
        for turn in range(TRIES):
            saves = [Save(f"{16 + 2 * turn + n:012x}", value=turn) for n in range(2)]
            for save in saves:
                save.prepare(folder, last.attempt)
            outcomes: list[object] = []

            def run(save: Save, outcomes=outcomes, last=last) -> None:
                try:
                    outcomes.append(committing.commit(folder, save.attempt, last.attempt))
                except StepAlreadyCommittedError as error:
                    outcomes.append(error)

            threads = [threading.Thread(target=run, args=(save,)) for save in saves]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            commit = step_folder.committed(folder)
            assert commit in outcomes
            (last,) = (save for save in saves if save.attempt == commit.attempt)
            assert value_of(folder, commit) == turn
            sweep.collect_garbage(folder, idle_s=0)
            assert folder.names() == names_of(folder, commit)
    finally:
        is_over.set()
        looker.join(PATIENCE_S)
    assert absent == []


def test_two_deletions_at_once_and_a_save(tmp_path):
    for turn in range(TRIES):
        folder = LocalFolder(tmp_path / str(turn))
        FIRST.save(folder)
        start = threading.Barrier(3)
        outcomes: list[object] = []

        def delete(folder=folder, start=start) -> None:
            start.wait(PATIENCE_S)
            sweep.delete_committed(folder, FIRST.attempt)

        def save(folder=folder, start=start, outcomes=outcomes) -> None:
            outcomes.append(_outcome(folder, SECOND, start))

        threads = [threading.Thread(target=each) for each in (delete, delete, save)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        commit = sweep.recover_step(folder)
        if commit:
            assert outcomes == [SECOND.attempt]
            assert value_of(folder, commit) == 2
        else:
            assert isinstance(outcomes[0], StepAlreadyCommittedError)
        sweep.collect_garbage(folder, idle_s=0)
        assert folder.names() == (names_of(folder, commit) if commit else [])


def test_a_save_beside_many_collectors(tmp_path):
    """Whoever collects spares what is alive, and removes the folder only while it is empty."""
    folder = LocalFolder(tmp_path / "step")
    is_over = threading.Event()
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            while not is_over.is_set():
                sweep.collect_garbage(folder, idle_s=3600)
        except BaseException as error:
            errors.append(error)
            raise

    collectors = [threading.Thread(target=collect) for _ in range(2)]
    for thread in collectors:
        thread.start()
    try:
        for number in range(TRIES):
            save = Save(f"{number + 16:012x}", value=number)
            commit = save.save(folder)
            assert value_of(folder, commit) == number
            sweep.delete_committed(folder, save.attempt)
    finally:
        is_over.set()
        for thread in collectors:
            thread.join(PATIENCE_S)
    assert errors == []


def test_the_points_here_are_all_there_are():
    ours = {name for name in POINTS if name.startswith("delete.")} | set(COMMITTING)
    assert set(DELETING) | set(COMMITTING) == ours
    assert os.environ.get("SHOAL_FAULTS") is None
