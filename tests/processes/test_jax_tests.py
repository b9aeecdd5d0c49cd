"""JAX's own tests of `multihost_utils`, in jobs of shoal: `pytest --jax-tests PATH`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from meta.source import ROOT


@pytest.mark.timeout(600)
def test_jax_tests_pass_in_each_way_of_launching(request, child_env):
    checkout = request.config.getoption("--jax-tests")
    if checkout is None:
        pytest.skip("needs --jax-tests, a checkout of JAX")
    if importlib.util.find_spec("absl") is None:
        pytest.skip("JAX's helper needs absl-py")
    program = [sys.executable, "benchmarks/jax_multiprocess.py", "--jax-tests", checkout]
    done = subprocess.run(
        [*program, "multihost_utils_test"],
        cwd=ROOT,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) tests pass with JAX alone", done.stdout)
    assert count, done.stdout
    assert int(count[1]) > 20
