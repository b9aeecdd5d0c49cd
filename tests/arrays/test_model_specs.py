"""Trees of specs as models of flax and equinox carry them; see the program."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("model_specs.py")


def test_each_leaf_has_the_sharding_that_its_library_gives(child_env):
    for name in ("flax", "equinox"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=child_env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tried = ["of_nnx", "of_linen_with_logical_rules", "of_flax_gemma", "of_flax_lm1b"]
    assert done.stdout.split() == [*tried, "of_flax_nlp_seq", "of_equinox"]
