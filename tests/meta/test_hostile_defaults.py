"""The suite runs under the hostile defaults that conftest.py sets, and its children do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import settings


def test_there_are_eight_virtual_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype promotion"):
        jnp.ones(2, "float32") + jnp.ones(2, "int32")


def test_mixed_ranks_are_refused():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_examples_are_the_same_in_every_run():
    assert settings.default.derandomize
    assert settings.default.deadline is None


def test_child_environment_has_only_the_platform_and_compile_flags(child_env, pytestconfig):
    expected = {"JAX_PLATFORMS"}
    if pytestconfig.getoption("--compile-quickly"):
        expected.add("XLA_FLAGS")
    told = {name for name in child_env if name.startswith(("JAX_", "XLA_", "SHOAL_", "SLURM_"))}
    assert told == expected
