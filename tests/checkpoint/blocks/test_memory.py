"""What a restore does with memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest

from checkpoint import hand_written
from shoal.checkpoint.blocks.memory import extra_bytes, uncollected
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring.filling import Restorer, fill, on_host
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.store.opening import open_checkpoint


def _fail_inside(inside):
    with uncollected():
        inside.append(gc.isenabled())
        raise ZeroDivisionError


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collector_state_is_restored_after_an_error(before):
    was_enabled = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        inside = []
        with pytest.raises(ZeroDivisionError):
            _fail_inside(inside)
        assert inside == [False]
        assert gc.isenabled() == before
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_memory_bound_is_the_callers_or_part_of_the_free_memory():
    assert extra_bytes(12345) == 12345
    assert 1 << 20 < extra_bytes(None) <= 2 << 30


def test_memory_that_is_not_kept_is_given_up_before_more_is_read(tmp_path):
    tree = {name: name.encode() * 800_000 for name in "abcd"}
    hand_written.write(tmp_path / "saved", tree)
    checkpoint = open_checkpoint(LocalStore(tmp_path / "saved"))
    requests = [LeafRequest(number, None, None) for number in range(4)]
    fillings = [on_host(checkpoint, request, Restorer(0, 1)) for request in requests]
    held = [weakref.ref(one.wants[0].out) for one in fillings]
    alive = []

    def counted(filling):
        def finish():
            alive.append(sum(one() is not None for one in held))
            return filling.finish()

        return filling._replace(finish=finish)

    values, read_bytes = fill(checkpoint, list(map(counted, fillings)), max_host_bytes=1 << 21)
    assert alive == [4, 3, 2, 1]  # 800,000 bytes each, and a buffer
    assert read_bytes > 4 * 800_000
    assert values == list(tree.values())
    assert all(one() is None for one in held)


FORKED = """
    import os, sys
    import numpy as np
    import shoal
    from shoal.checkpoint.blocks.memory import Arena, pages
    from shoal.checkpoint.blocks.image import FileImage

    def in_fork(work):
        if (pid := os.fork()) == 0:
            work()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def image(letter):
        return [FileImage("x", letter * 8, 8, ())]

    shoal.save(sys.argv[1], {"w": np.ones(1 << 20)})
    w = shoal.restore(sys.argv[1])["w"]
    in_fork(lambda: w.fill(-1))
    arena = Arena()
    arena.take(image(b"a"))
    in_fork(lambda: arena.take(image(b"b")))
    print(w.min(), bytes(arena.image("x")[:8]))
    kept = pages(1 << 22)
    kept[:] = 7
    print(in_fork(lambda: os._exit(int(kept.max()))), kept.min())
"""


def test_memory_changes_of_a_forked_process_are_not_visible(tmp_path, child_env):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED), str(tmp_path / "saved")],
        env=child_env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("1.0 b'aaaaaaaa'\n0 7\n", "")
