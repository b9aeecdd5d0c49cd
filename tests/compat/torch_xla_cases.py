"""torch_xla's worked cases, as its facade is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shoal.compat.torch_xla as xs

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "torch_xla.jsonl").read_text().splitlines()
]
# Answered elsewhere: the first by tests/plan, the other by what the page says of FSDP.
ELSEWHERE = {"dtensor_local_shape_offset"}


def of_kind(*kinds):
    """Parametrize a test by the cases of some kinds, which must be there."""
    chosen = [case for case in CASES if case["kind"] in kinds]
    assert {case["kind"] for case in chosen} == set(kinds)
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def one(case_id):
    """Return a case by the number at its end."""
    (found,) = [case for case in CASES if case["id"].endswith(f"-{case_id}")]
    return found


def mesh_of(case):
    return xs.Mesh(case["device_ids"], tuple(case["mesh_shape"]), case["axis_names"])


def spec_of(case):
    return tuple(tupled(entry) for entry in case["partition_spec"])


def tupled(entry):
    return tuple(map(tupled, entry)) if isinstance(entry, list) else entry
