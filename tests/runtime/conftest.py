"""Jobs to test job clients with: threads of this process, or clients of a real coordinator."""

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


def vanish(client):
    """Do what the kernel does for a process that is killed: all sockets end, without a BYE."""
    client._calls.close_all(Closed(UsageError, "the test let it vanish"))
    client._watcher.stop()


class Job(KillableJob):
    """N job clients of ours, and the power to kill one."""

    def until_known(self, process, gone):
        """Return once `process` was told that `gone` are gone."""
        give_up = time.monotonic() + PATIENCE_S
        asker = self.clients[process]
        while not {loss.process for loss in asker.peer_losses.open()} >= set(gone):
            asker.members(timeout_s=PATIENCE_S)
            assert time.monotonic() < give_up, "it was never told"


class Coordinators:
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
        command = [sys.executable, "-m", "shoal.runtime.server.coordinator"]
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
def coordinators():
    places = Coordinators(dict(os.environ))
    yield places
    places.stop()


@pytest.fixture
def run_all():
    """Return the function that runs functions in threads and collects results and errors."""
    return run_together


@pytest.fixture
def fresh_coordinator(coordinators):
    """Return a function that starts a coordinator of its own; returns its address."""
    servers = []

    def start(processes, *more):
        server, address = coordinators.start(processes, "--until-stdin-closes", *more)
        servers.append(server)
        return address

    yield start
    for server in servers:
        end(server)


@pytest.fixture(params=["local", "tcp"])
def make_job(request, coordinators):
    """Return a function that makes a `Job` of N processes, of either kind."""
    made = []

    def make(processes, **options):
        if request.param == "local":
            local = LocalJob(processes, **options)
            job = Job(local.clients, lambda p: local.lose(p, "its connection closed"))
        else:
            clients = coordinators.join_all(processes, **options)
            job = Job(clients, lambda p: vanish(clients[p]))
        made.append(job)
        return job

    yield make
    for job in made:
        for client in job.clients:
            client.close()


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
