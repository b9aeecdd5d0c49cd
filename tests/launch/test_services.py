"""The services of a job under `shoal run`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shoal.launch.loop import Console
from shoal.launch.services import EarlyServices, ServiceProcesses


def test_services_that_are_closed_before_they_listen_just_end(tmp_path, child_env):
    """As a signal to the launcher closes them: what they print then is read to its end."""
    loop = Console().loop
    env = {**child_env, "SHOAL_TOKEN": "a token"}
    services = ServiceProcesses(1, env, os.fspath(tmp_path), loop, early=EarlyServices())
    services.close()
    while loop.has_input:
        loop.turn(float("inf"))
    assert [service.popen.wait() for service in services._all] == [0, 0]
    for service in services._all:
        service.errors._log.close()


@pytest.fixture
def start(tmp_path, child_env):
    """Return a function that starts services with a token, and those that wait."""
    loop, early, started = Console().loop, EarlyServices(), []

    def start(token):
        env = {**child_env, "SHOAL_TOKEN": token}
        started.append(ServiceProcesses(1, env, os.fspath(tmp_path), loop, early=early))
        return started[-1]

    start.loop, start.early = loop, early
    yield start
    early.close()
    for services in started:
        services.close()
    while loop.has_input:
        loop.turn(float("inf"))
    for service in [service for services in started for service in services._all]:
        service.popen.wait()
        service.popen.stdin.close()
        service.log.close()


def test_services_of_the_next_attempt_wait_and_listen_with_its_token(start):
    first = start("of the first")
    first.start_next(start.early)
    waiting = start.early.pids
    first.start_next(start.early)
    assert start.early.pids == waiting
    assert len(waiting | first.pids) == 4
    second = start("of the second")
    assert (second.pids, start.early.pids) == (waiting, set())
    while not second.addresses:
        start.loop.turn(float("inf"))
    for pid in waiting:
        assert b"of the first" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_service_that_ended_while_it_waited_is_started_anew(start):
    start("of the first").start_next(start.early)
    killed, other = sorted(start.early.pids)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)  # as the loop of the launcher reaps it
    second = start("of the second")
    assert other in second.pids
    assert killed not in second.pids
    while not second.addresses:
        start.loop.turn(float("inf"))
