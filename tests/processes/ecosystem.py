"""The programs of examples/recipes, to be run in the processes of a cluster: see test_ecosystem."""

from __future__ import annotations

import runpy

import jax
import jax.numpy as jnp

from meta.source import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "examples/recipes").glob("*.py"))}


def train(name, folder, steps):
    """Train up to a step; return a number for each leaf of the state."""
    state = runpy.run_path(str(RECIPES[name]))["main"](folder, steps)
    return [number_of(leaf) for leaf in jax.tree.leaves(state)]


def resume_all(folder, steps):
    """Resume each program, and run it undisturbed."""
    return {
        name: [train(name, f"{folder}/{name}{end}", steps) for end in ("", " undisturbed")]
        for name in RECIPES
    }


def number_of(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return float(jnp.abs(leaf.astype(jnp.float32) * 0.37).sum())
