"""Workers of a data loader import the program that started them."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from processes.test_children import refused

SPAWNS = """
import multiprocessing, os, sys
import shoal
{before}
shoal.initialize(virtual_devices=1)
def work():
    return
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    worker = context.Process(target=work)
    try:
        worker.start()
        worker.join()
        print("worker", os.getpid(), worker.exitcode, flush=True)
    except (EOFError, OSError):  # the fork server has imported this module, and ended
        print("worker", os.getpid(), 1, flush=True)
    shoal.barrier("after")
    print("after", flush=True)
"""
EARLIER = """
def work():
    return
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start()
    worker.join()
    print("worker", os.getpid(), worker.exitcode, flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_import_the_program(launch, method):
    with tempfile.TemporaryDirectory() as short:  # the socket of a fork server has its path there
        launch.env["TMPDIR"] = short
        workers_are_refused(launch, method)


def workers_are_refused(launch, method):
    finished = launch.run("-n", "2", script=SPAWNS.format(before=""), arguments=(method,))
    assert finished.code == 0, finished
    workers = [line.split() for line in finished.lines if "worker" in line]
    code = "74" if method == "spawn" else "1"  # of the exception, or since the fork server ended
    assert [(rank, ended) for rank, _, _, ended in workers] == [("p0|", code), ("p1|", code)]
    for index, (_, _, pid, _) in enumerate(workers):
        assert refused(index, pid) in finished.err


def test_workers_that_import_the_program_before_it_joins(launch):
    finished = launch.run("-n", "2", script=SPAWNS.format(before=EARLIER), arguments=("spawn",))
    assert finished.code == 0, finished
    for index in (0, 1):
        assert f"this is a child of process {index} (pid " in finished.err
    assert finished.out.count("after") == 2


STARTS_THEM = """
import multiprocessing, os, shoal
if "SHOAL_PROCESS_ID" in os.environ:  # set by the parent, which is no member
    shoal.initialize(virtual_devices=1)
def work():
    os.write(1, f"process {shoal.process_index()} of {shoal.process_count()}\\n".encode())
if __name__ == "__main__":
    workers = []
    for index in range(2):
        os.environ.update(SHOAL_PROCESS_ID=str(index), SHOAL_NUM_PROCESSES="2")
        workers.append(multiprocessing.get_context("spawn").Process(target=work))
        workers[-1].start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
"""


def test_workers_to_which_a_parent_gives_their_numbers(child_env, tmp_path):
    (tmp_path / "script.py").write_text(STARTS_THEM)
    env = {**child_env, "SHOAL_RENDEZVOUS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "script.py"], env=env, cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done
    said = [line for line in done.stdout.splitlines() if line.startswith("process")]
    assert sorted(said) == ["process 0 of 2", "process 1 of 2"]
