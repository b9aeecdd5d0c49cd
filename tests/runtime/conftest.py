"""Jobs to test coordinators with: threads of this process, or clients of a real meeting place."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from runtime.coordinator_contract import PATIENCE_S, KillableJob, run_together
from shoal.errors import UsageError
from shoal.runtime.client.call_sockets import Closed
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.over_tcp import join


def vanish(coordinator):
    """Do what the kernel does for a process that is killed: all sockets end, without a BYE."""
    coordinator._calls.close_all(Closed(UsageError, "the test let it vanish"))
    coordinator._watcher.stop()


class Job(KillableJob):
    """N coordinators of ours, and the power to kill one."""

    def until_known(self, process, gone):
        """Return once `process` was told that `gone` are gone."""
        give_up = time.monotonic() + PATIENCE_S
        asker = self.coordinators[process]
        while not {trouble.process for trouble in asker.troubles.open()} >= set(gone):
            asker.members(timeout_s=PATIENCE_S)
            assert time.monotonic() < give_up, "it was never told"


class MeetingPlaces:
    """One real server for each number of processes; each serves one job after the other."""

    token = "the secret of the tests"

    def __init__(self, env):
        self._env = {**env, "SHOAL_TOKEN": self.token}
        self._running = {}

    def address(self, processes):
        if processes not in self._running:
            self._running[processes] = self.start(processes, "--until-stdin-closes")
        return self._running[processes][1]

    def start(self, processes, *more):
        """Start a server; return it and its address."""
        command = [sys.executable, "-m", "shoal.runtime.server.meeting_place"]
        server = subprocess.Popen(
            [*command, "--processes", str(processes), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
        )
        return server, json.loads(server.stdout.readline())["address"]

    def join_all(self, processes, **options):
        """Let N clients, in threads, join; return their results or errors."""
        address = self.address(processes)
        options = {"num_processes": processes, "token": self.token, "timeout_s": 10.0, **options}
        joins = (lambda p=p: join(address, process=p, **options) for p in range(processes))
        return run_together(*joins)

    def stop(self):
        for server, _ in self._running.values():
            end(server)


def end(server):
    """Close the leash of a server; it must end by itself."""
    server.stdin.close()
    assert server.wait(PATIENCE_S) == 0
    server.stdout.close()


@pytest.fixture(scope="package")
def meeting_places():
    places = MeetingPlaces(dict(os.environ))
    yield places
    places.stop()


@pytest.fixture
def run_all():
    """Return the function that runs functions in threads and collects results and errors."""
    return run_together


@pytest.fixture
def fresh_place(meeting_places):
    """Return a function that starts a meeting place of its own; returns its address."""
    servers = []

    def start(processes, *more):
        server, address = meeting_places.start(processes, "--until-stdin-closes", *more)
        servers.append(server)
        return address

    yield start
    for server in servers:
        end(server)


@pytest.fixture(params=["local", "tcp"])
def make_job(request, meeting_places):
    """Return a function that makes a `Job` of N processes, of either kind."""
    made = []

    def make(processes, **options):
        if request.param == "local":
            local = LocalJob(processes, **options)
            job = Job(local.coordinators, lambda p: local.lose(p, "its connection closed"))
        else:
            coordinators = meeting_places.join_all(processes, **options)
            job = Job(coordinators, lambda p: vanish(coordinators[p]))
        made.append(job)
        return job

    yield make
    for job in made:
        for coordinator in job.coordinators:
            coordinator.close()


class Watcher(logging.Handler):
    """Collects log records, and wakes who waits for one."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.has_line = threading.Event()

    def forget(self):
        self.lines.clear()
        self.has_line.clear()

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))
        self.has_line.set()


@pytest.fixture
def shoal_log():
    watcher = Watcher()
    logging.getLogger("shoal").addHandler(watcher)
    yield watcher
    logging.getLogger("shoal").removeHandler(watcher)
