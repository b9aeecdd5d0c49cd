"""A small job takes no detour: it loads nothing of gatherers, and connects as without them."""

import json
import subprocess
import sys

import pytest

from runtime.coordinator_contract import PATIENCE_S

PROGRAM = """
import json, os, socket, sys
from shoal.runtime.rules.deadline import ends_at
from shoal.runtime.rules.point import Point
from shoal.runtime.startup.launchers import JobPlace
from shoal.runtime.startup.meeting_address import join_place

address, token = sys.argv[1:]
cluster = JobPlace(
    process=0, num_processes=1, address=address, bind_host=None, jax_service="none", token=token,
    virtual_devices=None, local_device_ids=None, reason="", passed_over=(),
)
coordinator, _ = join_place(cluster, ends_at(20.0))
coordinator.arrive(Point("x"), timeout_s=20.0)
connections = []
for file in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(file))) as sock:
            connections.append(sock.family.name)
    except OSError:
        pass  # it is no socket, or the listing's own
with open(f"/proc/self/task/{os.getpid()}/children") as file:
    children = len(file.read().split())
loaded = [name for name in sys.modules if name.startswith("shoal.runtime.gatherer")]
coordinator.close()
print(json.dumps([sorted(connections), children, bool(loaded)]))
"""


@pytest.mark.parametrize(
    ("gather_from", "connections", "is_gathered"),
    [
        (None, ["AF_INET", "AF_UNIX"], False),  # for its life, and for calls on the server's host
        ("2", ["AF_INET", "AF_UNIX"], False),
        ("1", ["AF_UNIX", "AF_UNIX"], True),
    ],
)
def test_only_a_job_of_so_many_processes_has_gatherers(
    fresh_place, meeting_places, child_env, gather_from, connections, is_gathered
):
    if gather_from is not None:
        child_env["SHOAL_GATHER_FROM"] = gather_from
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, fresh_place(1), meeting_places.token],
        env=child_env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.stderr == ""
    assert json.loads(ended.stdout) == [connections, int(is_gathered), is_gathered]
