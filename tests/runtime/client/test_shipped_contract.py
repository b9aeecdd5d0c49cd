"""Both of our job clients keep the contract that is shipped to those who write their own."""

import pytest

from runtime.coordinator_contract import CoordinatorContract, KillableJob


class TestOurs(CoordinatorContract):
    @pytest.fixture
    def stage(self, make_job):
        def make(processes):
            job = make_job(processes)
            return KillableJob(job.clients, job.kill)

        return make


def test_a_coordinator_that_breaks_its_word_is_found():
    class Broken:
        process, num_processes = 0, 1

        def arrive(self, point, payload=b"", *, timeout_s):
            return {0: b"something else"}

    with pytest.raises(AssertionError):
        CoordinatorContract().test_every_process_gets_all_payloads(
            lambda n: KillableJob([Broken()], None), 1
        )
