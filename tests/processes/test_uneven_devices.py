"""Processes with different numbers of devices: what the error of `from_host_local` names, works."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import numpy as np
import shoal

index = int(os.environ["SHOAL_PROCESS_ID"])
shoal.initialize(virtual_devices=1 + 2 * index)
rows = shoal.Layout(shoal.make_mesh({"x": -1}), "x", None)
own = np.full((2 + 4 * index, 2), index, np.float32)
for call in (shoal.from_host_local, shoal.to_host_local):
    given = own if call is shoal.from_host_local else shoal.put(np.ones((8, 2), np.float32), rows)
    try:
        call({"a": given}, rows)
    except shoal.UsageError as error:
        words = "since processes own different numbers of them: feed takes the rows"
        assert words in str(error), error
        assert "order the mesh" not in str(error), error
    else:
        raise AssertionError("it was taken")
(batch,) = shoal.feed(iter([own]), rows)
assert batch.shape == (8, 2)
assert {shard.data.sum().item() for shard in batch.addressable_shards} == {4.0 * index}
pieces = [own[2 * n : 2 * n + 2] for n in range(1 + 2 * index)]
packed = shoal.compat.pack(pieces, rows)
for array in (batch, packed):
    whole = shoal.allgather(array, tiled=True)
    assert whole[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1], whole
print("whole")
"""


def test_feed_and_pack_take_unequal_parts(tmp_path, child_env):
    script = tmp_path / "uneven.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(script)]
    done = subprocess.run(
        command, env=child_env, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("whole") == 2
