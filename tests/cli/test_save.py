"""`shoal save`: what it prints or raises, by what the processes of the job answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.bare_sockets import TOKEN, BareCoordinator
from shoal.cli.save import save
from shoal.errors import CheckpointError, DeadlineError, ProcessLostError, UsageError
from shoal.runtime.rules.requested_saves import BY_STEPS, EACH_CALL, NO_CHECKPOINTS


@pytest.fixture
def coordinator():
    coordinator = BareCoordinator(2)
    yield coordinator
    coordinator.end()


class Requested:
    """A job of two processes, whose save is requested in a thread."""

    def __init__(self, coordinator, pool, **options):
        self.job = coordinator.job()
        self._result = pool.submit(save, coordinator.address, TOKEN, **options)

    def answer(self, *paces):
        """Answer for each process that has a pace; process P has passed step 10 + P."""
        for p, pace in enumerate(paces):
            assert self.job[p].told() == {"is": "save", "number": 1, "withdrawn": False, "body": ""}
            self.say(p, "answered", 10 + p, pace)

    def say(self, p, state, step, pace=NO_CHECKPOINTS):
        self.job[p].say("save", number=1, state=state, step=step, pace=pace)

    def result(self):
        return self._result.result(30)


@pytest.fixture
def requested(coordinator):
    """Return a function that makes a job and requests its save."""
    with ThreadPoolExecutor() as pool:
        yield lambda **options: Requested(coordinator, pool, **options)


@pytest.mark.parametrize(
    ("paces", "words"),
    [
        ((BY_STEPS, BY_STEPS), "the job saves step 12, or the first one after it"),
        ((EACH_CALL, EACH_CALL), "the job asks again at its next save"),
        ((BY_STEPS, NO_CHECKPOINTS), "the job saves step 12, or the first one after it"),
    ],
)
def test_the_answer_says_which_job_and_which_step_is_saved(
    requested, coordinator, capsys, paces, words
):
    job = requested()
    job.answer(*paces)
    job.result()
    said = capsys.readouterr()
    assert said.out == f"requested: {words}\n"
    assert said.err == f"shoal save: the job at {coordinator.address}\n"
    for process in job.job:
        agreed = {"is": "save", "number": 1, "withdrawn": False, "step": 12, "body": ""}
        assert process.told() == agreed


def test_wait_prints_the_committed_step_alone(requested, capsys):
    job = requested(wait=True)
    job.answer(BY_STEPS, BY_STEPS)
    job.say(1, "committed", 14)
    job.result()
    assert capsys.readouterr().out == "14\n"


def test_without_checkpoints_it_is_refused_and_withdrawn(requested):
    job = requested()
    job.answer(NO_CHECKPOINTS, NO_CHECKPOINTS)
    with pytest.raises(UsageError, match=r"no process has opened shoal\.Checkpoints"):
        job.result()
    assert job.job[0].told()["withdrawn"] is True


def test_a_failed_save_is_an_error(requested):
    job = requested(wait=True)
    job.answer(BY_STEPS, BY_STEPS)
    job.say(0, "failed", 12)
    with pytest.raises(CheckpointError, match="the save of step 12 failed"):
        job.result()


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_end_of_the_job_is_an_error(requested, is_answered):
    job = requested(wait=is_answered)
    if is_answered:
        job.answer(BY_STEPS, BY_STEPS)
    for process in job.job:
        process.say("bye", place="")
    with pytest.raises(ProcessLostError, match="the job ended before it saved"):
        job.result()


def test_a_job_that_has_not_begun(coordinator):
    coordinator.process(0)
    with pytest.raises(UsageError, match="not all processes have joined the job"):
        save(coordinator.address, TOKEN)


def test_then_stop_is_a_notice_which_overtakes_the_request(requested, capsys):
    job = requested(then_stop=True, wait=True)
    for process in job.job:
        assert process.told()["is"] == "save"
        notice = process.told()
        assert (notice["is"], notice["source"]) == ("notice", "shoal save")
    job.say(0, "committed", 13)
    job.result()
    assert capsys.readouterr().out == "13\n"


def test_a_process_that_does_not_answer_is_named(requested, monkeypatch):
    monkeypatch.setattr("shoal.cli.observer.Observer.__init__.__kwdefaults__", {"answer_s": 0.5})
    job = requested()
    job.answer(BY_STEPS)
    with pytest.raises(DeadlineError, match=r"no answer within 0\.5 s from process 1 of the job"):
        job.result()
