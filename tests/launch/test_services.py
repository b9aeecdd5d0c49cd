"""The services of a job under `shoal run`."""

from __future__ import annotations

import os

from shoal.launch.loop import Console
from shoal.launch.services import ServiceProcesses


def test_services_that_are_closed_before_they_listen_just_end(tmp_path, child_env):
    """As a signal to the launcher closes them: what they print then is read to its end."""
    loop = Console().loop
    services = ServiceProcesses(1, child_env, os.fspath(tmp_path), loop)
    services.close()
    while loop.has_input:
        loop.turn(float("inf"))
    assert [service.popen.wait() for service in services._all] == [0, 0]
    for service in services._all:
        service.errors._log.close()
