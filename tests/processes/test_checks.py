"""`check_finite` and `check_replicas` in a job: values of devices that other processes own."""

from __future__ import annotations

import json

SCRIPT = """
import json
import numpy as np
import shoal
initialize(virtual_devices=3 if index else 2)
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = jax.devices()
line = Mesh(np.array(devices), "d")

def told(call):
    try:
        call()
    except (shoal.errors.NonFiniteError, DivergenceError) as error:
        facts = {name: value for name, value in vars(error).items() if name != "difference"}
        return [type(error).__name__, str(error).partition("): ")[2], facts]

def spread(spec, value, device=None, change=None, shape=(5, 4)):
    # Devices are counted over all processes; a change is to what one of them holds.
    where = NamedSharding(line, P(*spec))
    pieces = []
    for one, cut in where.addressable_devices_indices_map(shape).items():
        piece = np.array(np.full(shape, value, np.float32)[cut])
        if device is not None and one == devices[device]:
            change(piece)
        pieces.append(jax.device_put(piece, one))
    return jax.make_array_from_single_device_arrays(shape, where, pieces)

def flip(piece):
    piece.view(np.uint32)[2, 1] ^= 1 << 22

def spoil(piece):
    piece[0, 3] = np.nan

good = {"rows": spread(["d"], 1), "copies": spread([], 2), "n": 3}
results = [
    told(lambda: shoal.check_finite(good)),
    told(lambda: shoal.check_replicas(good)),
    told(lambda: shoal.check_finite(good | {"w": spread(["d"], 1, 3, spoil)})),
    told(lambda: shoal.check_finite({"w": spread([], 1, 4, spoil)})),
    told(lambda: shoal.check_finite({"w": np.float32(np.inf if index else 0)})),
    told(lambda: shoal.check_replicas(good | {"w": spread([], 1, 3, flip)})),
    told(lambda: shoal.check_replicas([spread([], index)])),
    told(lambda: shoal.check_replicas(good if index else [good])),
]
# A subset: the replicas of the other process do not count.
results.append(told(lambda: shoal.check_replicas([spread([], index)], processes=[index])))
shoal.check_finite("all are well", name="end")
say(json.dumps([results, [one.id for one in devices]]))
"""


def test_a_value_and_a_replica_are_named_wherever_they_are(job, said):
    ended = job.run(2, f"exec(compile({SCRIPT!r}, 'train.py', 'exec'))")
    for one in ended:
        assert one.code == 0, "\n".join(each.err for each in ended)
    found = [json.loads(said(one).splitlines()[-1]) for one in ended]
    assert found[0] == found[1]
    results, ids = found[0]
    fine, equal, rows, copies, host, bit, halves, trees, own = results
    assert [fine, equal, own] == [None] * 3
    kind, text, facts = rows
    assert kind == "NonFiniteError"
    assert text.startswith(f"check_finite: ['w'][3, 3] is nan on device {ids[3]} of process 1 (")
    assert (facts["index"], facts["process"], facts["device"]) == ([3, 3], 1, ids[3])
    assert copies[2]["device"] == ids[4]
    assert copies[1].endswith("['w']: float32[5,4]: 1 nan in 20 values; on 1 of 5 replicas")
    assert (host[2]["process"], host[2]["device"], host[2]["value"]) == (1, None, "inf")
    rest = f"4 devices (0-1, {ids[2]}, {ids[4]}) hold 1.0 (0x3f800000)"
    assert bit[0] == "DivergenceError"
    assert bit[2]["sides"] == {f"device {ids[3]} holds 1.5 (0x3fc00000)": [1], rest: [0, 1]}
    assert [*halves[2]["sides"].values()] == [[0], [1]]
    assert "processes gave check_replicas different trees" in trees[1]
