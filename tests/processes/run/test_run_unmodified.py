"""Programs that know JAX, and programs that know shoal, find their job without arguments."""

from __future__ import annotations

import pytest

BODY = """
    import os, sys
    import jax
    if sys.argv[1] == "jax":
        jax.distributed.initialize()
    else:
        import shoal
        shoal.initialize()
    from jax.experimental import multihost_utils
    total = multihost_utils.process_allgather(jax.numpy.ones(1) + jax.process_index()).sum()
    index, count = jax.process_index(), jax.process_count()
    # Not to stdout: Gloo writes there, in pieces, at the same time.
    with open(f"result{index}", "w") as file:
        print(index, count, jax.local_device_count(), float(total), file=file)
"""


def results(launch):
    return [path.read_text() for path in sorted(launch.folder.glob("result*"))]


def test_jax_distributed_initialize_needs_no_arguments(launch):
    # Inside an allocation Slurm's variables would win, were ours not first.
    launch.env |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "nowhere", "SLURM_NTASKS": "1"}
    launch.env |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}
    finished = launch.run("-n", "2", "--devices", "2", script=BODY, arguments=("jax",))
    assert (finished.code, results(launch)) == (0, ["0 2 2 3.0\n", "1 2 2 3.0\n"])
    assert "joined the job" not in finished.err  # they did, though shoal saw nothing of it


def test_shoal_initialize_needs_no_arguments(launch):
    finished = launch.run("-n", "2", "--devices", "2", script=BODY, arguments=("shoal",))
    assert (finished.code, results(launch)) == (0, ["0 2 2 3.0\n", "1 2 2 3.0\n"])
    assert "joined the job" not in finished.err


SHUTS_DOWN_FIRST = """
    import pathlib, sys, time
    import jax, numpy as np
    if sys.argv[1] == "jax":
        jax.distributed.initialize()
    else:
        import shoal
        shoal.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows = jax.NamedSharding(mesh, jax.P("x"))
    ones = jax.make_array_from_callback((4, 8), rows, lambda where: np.ones((4, 8), "f4")[where])
    is_down, index = pathlib.Path("down"), jax.process_index()
    while index == 1 and not is_down.exists():
        time.sleep(0.01)
    total = jax.jit(lambda a: a.sum(0), out_shardings=jax.NamedSharding(mesh, jax.P()))(ones)
    jax.distributed.shutdown()
    is_down.touch()
    with open(f"result{index}", "w") as file:
        print(total.addressable_data(0)[0], file=file)
"""


@pytest.mark.parametrize("joins_by", ["jax", "shoal"])
def test_what_is_computed_after_jax_distributed_shutdown_is_computed_by_all(launch, joins_by):
    """The devices of the two processes connect only then."""
    finished = launch.run(
        "-n", "2", "--devices", "2", script=SHUTS_DOWN_FIRST, arguments=(joins_by,)
    )
    assert (finished.code, results(launch)) == (0, ["4.0\n", "4.0\n"]), finished


ALONE = """
import os, pathlib, sys, time
import jax
jax.distributed.initialize()
pid = pathlib.Path("pid")
"""


def test_a_script_that_is_done_stays_until_the_others_are_as_with_jax_alone(launch):
    script = ALONE + (
        "if jax.process_index() == 1:\n"
        "    pid.with_suffix('.part').write_text(str(os.getpid()))\n"
        "    pid.with_suffix('.part').rename(pid)\n"
        "else:\n"
        "    while not pid.exists(): time.sleep(0.01)\n"
        "    until = time.monotonic() + 2.0\n"
        "    while time.monotonic() < until and os.path.exists(f'/proc/{pid.read_text()}/fd/0'):\n"
        "        time.sleep(0.01)\n"
        "    print('it stayed:', time.monotonic() >= until)\n"
    )
    finished = launch.run("-n", "2", "--devices", "1", "--no-prefix", script=script)
    assert (finished.code, finished.out) == (0, "it stayed: True\n")


# The survivor saves steps for ever, as a loop that JAX has told of a preemption does.
SURVIVES = f"""{ALONE}
if jax.process_index() == 1 and os.environ["SHOAL_ATTEMPT"] == "0":
    while not pathlib.Path("saved").exists(): time.sleep(0.01)
    raise ValueError("no data")
while os.environ["SHOAL_ATTEMPT"] == "0":
    pathlib.Path("saved").touch()
    time.sleep(0.01)
"""


def test_a_survivor_that_joined_by_jax_alone_ends_without_the_grace_of_sigterm(launch):
    launch.env["SHOAL_GRACE_S"] = "600"
    finished = launch.run("-n", "2", "--devices", "1", script=SURVIVES)
    assert finished.code == 1, finished.err
    assert finished.verdict.endswith(": process 1 of 2 raised ValueError")
    assert (
        "  Process 0 was running, and was ended by shoal run with SIGKILL: it joined by JAX alone, "
        "which takes SIGTERM as a preemption notice.\n"
    ) in finished.err
    assert launch.leaves_nobody()


def test_a_restart_does_not_wait_for_a_survivor_that_joined_by_jax_alone(launch):
    del launch.env["SHOAL_FAILURE_GRACE_S"]
    launch.env["SHOAL_GRACE_S"] = "600"
    finished = launch.run("-n", "2", "--devices", "1", "--max-restarts", "1", script=SURVIVES)
    assert finished.code == 0, finished.err
    assert "shoal run: attempt 1 begins (1 of --max-restarts 1)" in finished.err


def test_a_survivor_that_joined_shoal_after_jax_gets_sigterm_as_others_do(launch):
    script = f"""{ALONE}
import shoal, signal
shoal.initialize()
if shoal.process_index() == 1: raise ValueError("no data")
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True: time.sleep(0.01)
"""
    launch.env["SHOAL_GRACE_S"] = "600"
    finished = launch.run("-n", "2", "--devices", "1", script=script)
    assert finished.code == 1, finished.err
    assert "Process 0 was running, and was ended by shoal run with SIGTERM.\n" in finished.err


def test_a_script_that_is_done_does_not_wait_for_one_that_fails(launch):
    launch.env |= {"SHOAL_FAILURE_GRACE_S": "0.5", "SHOAL_GRACE_S": "60"}
    script = ALONE + "sys.exit(3 * jax.process_index())\n"
    finished = launch.run("-n", "2", "--devices", "1", script=script)  # no SIGKILL after 60 s
    assert finished.code == 3
    assert "SIGKILL" not in finished.err
