"""Saving while the program goes on: values may change at once, errors surface once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint.saved_contents import CLEAN, files_of, in_job, kept, same_bits
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.saving.background import start_save
from shoal.checkpoint.saving.save import save_request
from shoal.errors import DeadlineError, SaveAbortedError, StepAlreadyCommittedError, StorageError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.process import client
from shoal.runtime.system import fault_points

DEADLINE_S = 30.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


@pytest.fixture
def held(monkeypatch):
    """Hold every save before its data is written; release them by setting the event."""
    goes_on = threading.Event()

    def reach(point, process=None):
        if point == "save.write":
            assert goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(fault_points, "reach", reach)
    yield goes_on
    goes_on.set()


def sharded(values):
    mesh = jax.make_mesh((8,), ("x",))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))


def test_later_changes_donations_and_deletions_do_not_affect_the_save(path, held):
    changed = np.arange(1 << 18, dtype=np.float32)
    turned = np.arange(64).reshape(8, 8).T
    gone, donated = sharded(np.arange(8.0)), sharded(np.arange(1 << 18, dtype=np.float32))
    key = jax.random.key(3)
    tree = {"changed": changed, "turned": turned, "gone": gone, "donated": donated, "key": key}
    expected = {name: np.array(value) for name, value in tree.items() if name != "key"}
    saving = start_save(client(), save_request(path), tree, arena=Arena())
    assert not saving.done
    changed[:] = -1
    turned[:] = -1
    gone.delete()
    key.delete()
    out = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated)
    if not donated.is_deleted():  # JAX 0.11 donates no array of which a view is held
        donated.delete()
    jax.block_until_ready(out)
    tree.clear()
    held.set()
    saving.wait(DEADLINE_S)
    found = kept(path)
    for name, values in expected.items():
        assert same_bits(found[name], values), name
    assert same_bits(found["key"], jax.random.key_data(jax.random.key(3)))


def test_arrays_are_let_go_when_they_are_copied(path, held):
    import weakref

    array = np.zeros(1000)
    alive = weakref.ref(array)
    saving = start_save(client(), save_request(path), [array], arena=Arena())
    del array
    assert alive() is None
    held.set()
    saving.wait(DEADLINE_S)


def test_memory_is_used_again(tmp_path):
    arena = Arena()
    for step in range(3):
        values = np.full(100_000, step)
        start_save(client(), save_request(tmp_path / str(step)), [values], arena=arena).wait()
        size = arena.num_bytes
        assert same_bits(kept(tmp_path / str(step))["0"], values)
    assert arena.num_bytes == size


def test_main_thread_can_synchronize_during_a_background_save(path, held):
    """The save waits in a lane of its own."""
    job = LocalJob(3)
    met = threading.Barrier(3)

    def work(job_client):
        saving = start_save(job_client, save_request(path), {"w": np.arange(9)}, arena=Arena())
        for turn in range(3):
            barrier.on(job_client, f"turn {turn}")
        met.wait(DEADLINE_S)
        held.set()
        saving.wait(DEADLINE_S)

    assert in_job(3, work, job) == [None] * 3
    assert same_bits(kept(path)["w"], np.arange(9))


def test_concurrent_background_saves_do_not_interfere(tmp_path, held):
    def work(job_client):
        first = start_save(
            job_client, save_request(tmp_path / "a"), [job_client.num_processes], arena=Arena()
        )
        second = start_save(job_client, save_request(tmp_path / "b"), [np.arange(4)], arena=Arena())
        held.set()
        # The order of waiting differs.
        for saving in (first, second)[:: 1 if job_client.process else -1]:
            saving.wait(DEADLINE_S)

    assert in_job(3, work) == [None] * 3
    assert kept(tmp_path / "a") == {"0": 3}
    assert same_bits(kept(tmp_path / "b")["0"], np.arange(4))


def test_an_error_surfaces_once_on_each(path, monkeypatch):
    def reach(point, process=None):
        if (point, process) == ("save.written", 1):
            raise StorageError("broken", path="x", errno=5)

    monkeypatch.setattr(fault_points, "reach", reach)

    def work(job_client):
        saving = start_save(job_client, save_request(path), [np.arange(4)], arena=Arena())
        with pytest.raises(StorageError, match="process 1 of 3"):
            saving.wait(DEADLINE_S)
        saving.wait(DEADLINE_S)
        return saving.done

    assert in_job(3, work) == [True] * 3
    assert files_of(path) == []


def test_failed_snapshot_is_raised_by_the_background_thread(path, monkeypatch):
    def reach(point, process=None):
        if (point, process) == ("save.snapshot", 1):
            raise MemoryError("no memory")

    monkeypatch.setattr(fault_points, "reach", reach)

    def work(job_client):
        saving = start_save(job_client, save_request(path), [np.arange(4)], arena=Arena())
        saving.wait(DEADLINE_S)

    errors = in_job(2, work)
    assert [type(error) for error in errors] == [SaveAbortedError, MemoryError]
    assert files_of(path) == []


def test_errors_before_the_snapshot_are_raised_at_once(path):
    start_save(client(), save_request(path), [1], arena=Arena()).wait()
    with pytest.raises(StepAlreadyCommittedError):
        start_save(client(), save_request(path), [1], arena=Arena())


def test_a_wait_has_an_end(path, held):
    saving = start_save(client(), save_request(path), [1], arena=Arena())
    with pytest.raises(DeadlineError, match=r"still runs after 0\.01 s"):
        saving.wait(0.01)
    assert not saving.done
    held.set()
    saving.wait(DEADLINE_S)
    assert saving.done
    assert files_of(path) == sorted({*CLEAN} - {"data"})


def test_on_done_is_called_with_the_commit_before_the_save_ends(path):
    seen = []
    job = LocalJob(2)

    def work(job_client):
        def done(commit):
            seen.append(
                (job_client.process, commit.step, commit.data_bytes > 0, (path / "COMMIT").exists())
            )

        start_save(
            job_client, save_request(path, step=5), [np.arange(4)], arena=Arena(), on_done=done
        ).wait(DEADLINE_S)

    assert in_job(2, work, job) == [None] * 2
    assert sorted(seen) == [(0, 5, True, True), (1, 5, True, True)]


def test_error_in_on_done_is_raised_and_keeps_the_commit(path):
    def done(commit):
        raise RuntimeError("afterwards")

    saving = start_save(client(), save_request(path), [1], arena=Arena(), on_done=done)
    with pytest.raises(RuntimeError, match="afterwards"):
        saving.wait(DEADLINE_S)
    assert kept(path) == {"0": 1}


ENDS = {
    "returns": "",
    "raises": "raise SystemExit(3)",
    "joined and returns": "",
}
PROGRAM = """
    import sys
    import numpy as np
    import jax, jax.numpy as jnp
    import shoal
    from shoal.checkpoint.saving.background import start_save
    from shoal.checkpoint.saving.save import save_request
    from shoal.checkpoint.blocks.memory import Arena
    from shoal.runtime.process import client
    if "joined" in sys.argv[2]:
        shoal.initialize(virtual_devices=2)
    tree = {"w": np.arange(1 << 22), "d": jnp.arange(5)}
    start_save(client(), save_request(sys.argv[1]), tree, arena=Arena())
"""


@pytest.mark.parametrize("way", ENDS)
def test_the_end_of_the_program_waits_for_it(path, child_env, way):
    """Also where new threads and pools are refused because the interpreter ends."""
    program = textwrap.dedent(PROGRAM) + ENDS[way]
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path), way],
        env=child_env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (3 if way == "raises" else 0, "")
    assert same_bits(kept(path)["w"], np.arange(1 << 22))


def run(program, path, child_env):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(path), "joined"],
        env=child_env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# A save that is held before its data is written until the main line waits for the thread.
HELD = """
    import threading
    from shoal.runtime.system import fault_points
    goes_on, joins = threading.Event(), threading.Thread.join
    def reach(point, process=None):
        if point == "save.write":
            goes_on.wait()
    def join(thread, timeout=None):
        if thread.name == "shoal-save":
            goes_on.set()
        joins(thread, timeout)
    fault_points.reach, threading.Thread.join = reach, join
"""


def test_leaving_the_job_waits_for_it(path, child_env):
    ended = run(HELD + PROGRAM + "    shoal.shutdown()\n    goes_on.set()", path, child_env)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert same_bits(kept(path)["w"], np.arange(1 << 22))


def test_leaving_the_job_waits_for_it_until_the_deadline(path, child_env):
    program = HELD.replace("goes_on.set()", "pass") + PROGRAM
    program += """
    try:
        shoal.shutdown(timeout_s=0.1)
    finally:
        goes_on.set()
    """
    ended = run(program, path, child_env)
    assert "DeadlineError: process 0 of 1" in ended.stderr
    assert "shutdown waited 0.1 s for a save that still runs" in ended.stderr


FORK = """
    import os, sys
    import numpy as np
    import shoal
    with shoal.Checkpoints(sys.argv[1]) as ckpts:
        ckpts.save(0, {"w": np.arange(1 << 22)})
        child = os.fork()
        if not child:
            sys.exit(0)
        goes_on.set()
        goes_on.set()
    print(os.waitpid(child, 0)[1], ckpts.all_steps())
"""


def test_a_fork_does_not_wait_for_the_thread_of_its_parent(path, child_env):
    ended = run(HELD + FORK, path, child_env)
    assert ended.stdout == "0 (0,)\n"
    assert "wait for it there" in ended.stderr  # a warning of the fork


def test_device_arrays_need_not_be_ready(path):
    """The computation that makes them may still run."""
    x = jnp.ones((512, 512))
    step = jax.jit(lambda x: x @ x / 512)
    for _ in range(20):
        x = step(x)
    saving = start_save(client(), save_request(path), [x], arena=Arena())
    expected = np.asarray(x)
    saving.wait(DEADLINE_S)
    assert same_bits(kept(path)["0"], expected)


def test_an_interrupt_while_one_waits_does_not_make_the_save_one_that_is_over():
    """In a process of its own: signals come to the main thread."""
    code = """
import os, signal, sys, threading
from shoal.checkpoint.saving.background import Saving
go_on, seen, done = threading.Event(), threading.Event(), []
def interrupt(*_):
    if not seen.is_set():
        seen.set()
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def poke():
    frames = [None]
    while not any(frame and frame.f_code is Saving.wait.__code__ for frame in frames):
        frames = [sys._current_frames()[threading.main_thread().ident]]
        while frames[-1]:
            frames.append(frames[-1].f_back)
    while not seen.wait(0.1):  # Python may see one only when its wait is over
        os.kill(os.getpid(), signal.SIGINT)
saving = Saving("save", lambda: (go_on.wait(60), done.append(1)))
try:
    threading.Thread(target=poke).start()
    saving.wait()
    print("not interrupted")
except KeyboardInterrupt:
    assert not saving.done
    go_on.set()
    saving.wait()
    print(done, saving.done)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "[1] True\n"
