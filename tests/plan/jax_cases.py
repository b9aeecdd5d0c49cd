"""The worked cases of JAX's `mesh_utils`, and what tests of device orders share."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest

from plan.described_devices import generated, row
from shoal.errors import UsageError

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "jax_mesh.jsonl").read_text().splitlines()
]


def has_sizes(case):
    """No mesh has other sizes: they are refused before an order is asked for."""
    sizes = case["mesh_shape"]
    return sizes is None or (isinstance(sizes, list) and all(isinstance(s, int) for s in sizes))


def of(*words):
    chosen = [c for c in CASES if c["function"].startswith(words) and has_sizes(c)]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def devices_of(case):
    given = case["devices"]
    if "list" in given:
        return [row(*one) for one in given["list"]]
    return generated(**given["generator"])


def check(case, make):
    expected = case["expected"]
    if "error" in expected:
        with pytest.raises(UsageError):
            make()
        return
    ids = make()
    assert ids.shape == tuple(expected["shape"])
    if "device_ids" in expected:
        assert ids.ravel().tolist() == expected["device_ids"]
    else:
        digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
        assert digest == expected["device_ids_sha256_int32le"]


def shapes_of(count):
    """All meshes of up to three axes."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [
        shape
        for rank in (1, 2, 3)
        for shape in itertools.product(divisors, repeat=rank)
        if math.prod(shape) == count
    ]
