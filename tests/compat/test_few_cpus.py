"""A process with its one CPU device, and a mesh of more: the error says how to get them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, shoal
from shoal.compat import dtensor
if sys.argv[2:]:
    shoal.initialize(virtual_devices=int(sys.argv[2]))
else:
    dtensor.initialize_accelerator_system("CPU")
mesh = {
    "mesh": lambda: shoal.make_mesh({"x": 2}),
    "grid": lambda: shoal.make_mesh({"x": 2, "y": 1}),
    "free": lambda: shoal.make_mesh({"x": 2, "y": -1}),
    "create": lambda: dtensor.create_mesh({"x": 2}),
    "named": lambda: dtensor.create_mesh({"x": 2}, devices=["CPU:0", "CPU:1"]),
    "distributed": lambda: dtensor.create_distributed_mesh({"x": 2}),
}[sys.argv[1]]
try:
    print(mesh())
except shoal.UsageError as error:
    print(error)
"""
CALLS = ["mesh", "grid", "free", "create", "named", "distributed"]
WORDS = "for 2 CPU devices in a process, call shoal.initialize(virtual_devices=2) at the start"


def printed(child_env, *arguments):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {name: value for name, value in child_env.items() if name != "SHOAL_VIRTUAL_DEVICES"}
    env |= {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": ""}
    env = {name: value for name, value in env.items() if value}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_the_error_says_how_to_get_them(child_env, call):
    assert WORDS in printed(child_env, call)


def test_advice_for_too_few_cpu_devices_works(child_env):
    for call in ("create", "named", "distributed", "mesh"):
        found = printed(child_env, call, "2")
        assert (
            "2 cpu devices" in found or "2 devices" in found or "x=2" in found or "'x': 2" in found
        ), found
