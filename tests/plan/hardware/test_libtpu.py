"""Described TPU slices against those that libtpu describes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from plan.libtpu_topologies import GOLDEN
from plan.libtpu_topologies import __file__ as SCRIPT
from shoal.plan.topology import Slices, from_devices, parse

CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
OF_ALL = pytest.mark.parametrize(
    "case", CASES, ids=[f"{case['name']} {case['options']}" for case in CASES]
)


def devices_of(case):
    return [
        {"id": number, "process": process, "coords": at, "core": core, "slice": part,
         "kind": case["kind"], "platform": "tpu"}
        for number, process, *at, core, part in case["devices"]
    ]  # fmt: skip


def expected(case):
    """Return the slices that the name and the options describe."""
    torus = parse(case["name"])
    options = case["options"]
    changes = {}
    if case["name"].startswith("v4"):
        changes["cores"] = 1 if "chip_config_name" in options else 2
    if host := options.get("chips_per_host_bounds"):
        changes["host"] = tuple(host[: len(torus.shape)])
    torus = dataclasses.replace(torus, **changes)
    count = options.get("num_slices", 1)
    return Slices((torus,) * count) if count > 1 else torus


@OF_ALL
def test_the_name_describes_what_libtpu_describes(case):
    topology = expected(case)
    assert topology.num_devices == len(case["devices"])
    tori = list(topology.parts()) if isinstance(topology, Slices) else [topology]
    assert case["kind"] == tori[0].kind
    for number, process, *at, core, part in case["devices"]:
        torus = tori[part or 0]
        cell = (*at[: len(torus.shape)], core)
        # Slices count for themselves there.
        first = 0 if part is None else (part + 1) * 100_000
        hosts = [row[1] for row in case["devices"] if row[-1] == part]
        assert torus.device_ids[cell] - torus.device_ids.min() == number - first
        assert torus.processes[cell] - torus.processes.min() == process - min(hosts)


@OF_ALL
def test_its_devices_are_recognised_in_any_order(case):
    devices = devices_of(case)
    random.Random(0).shuffle(devices)
    topology = from_devices(devices)
    wanted = expected(case)
    assert topology.grid == wanted.grid
    for one, other in zip(
        topology.parts() if isinstance(topology, Slices) else [topology],
        wanted.parts() if isinstance(wanted, Slices) else [wanted],
        strict=True,
    ):
        assert (one.shape, one.generation, one.wrap, one.cores) == (
            other.shape, other.generation, other.wrap, other.cores,
        )  # fmt: skip
    at = {device["id"]: device for device in devices}
    for cell, number in np.ndenumerate(topology.device_ids):
        assert topology.processes[cell] == at[number]["process"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_libtpu_says_what_the_file_keeps():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    said = subprocess.run(
        [sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert [json.loads(line) for line in said.splitlines()] == CASES
