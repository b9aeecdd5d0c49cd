"""Children of a member inherit its launcher's variables, and are not members."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from few import few
from quiet_ports import quiet_row

# Runs a program that ends at once, and says how.
HELPER = """
import subprocess, sys, time
def child(code, *command):
    began = time.monotonic()
    command = command or (sys.executable, "-c", "import shoal; " + code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    took_s = time.monotonic() - began
    words = (done.stdout + done.stderr).strip().splitlines()
    return f"{done.returncode} {'late' if took_s > 20 else 'soon'} {words[-1] if words else ''}"
"""
ASKS = "print(shoal.process_index())"
JOINS = "shoal.initialize(virtual_devices=1)"
EXPLICIT = "shoal.initialize(coordinator_address={!r}, num_processes=2, process_id={})"
OWN = "shoal.initialize(num_processes=1, virtual_devices=1); print(shoal.process_count())"
ADVICE = (
    "put initialize() below `if __name__ == '__main__':`, or pass num_processes=1 for a job of its "
    "own, or start it with shoal run for one of several processes"
)
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def refused(index, pid):
    return f"this is a child of process {index} (pid {pid}) of a job: {ADVICE}"


def variables(kind, job, index):
    if kind == "Open MPI":
        return {**MPI, "OMPI_COMM_WORLD_RANK": str(index)}
    if kind == "torchrun":
        host, port = job.address.split(":")
        numbers = {"RANK": str(index), "WORLD_SIZE": "2"}
        return {**numbers, "MASTER_ADDR": host, "MASTER_PORT": port}
    named = {"SHOAL_NUM_PROCESSES": "2", "SHOAL_PROCESS_ID": str(index)}
    return {**named, "SHOAL_COORDINATOR": job.address}


KINDS = ("SHOAL_*", "Open MPI", "torchrun", "explicit", "attached")


@pytest.mark.parametrize("kind", few(KINDS, ["SHOAL_*", "explicit", "attached"]))
def test_a_child_is_refused_at_once_and_its_parents_go_on(job, said, kind):
    start = {
        "explicit": "initialize()",
        "attached": "import jax; jax.distributed.initialize(address, count, index);"
        " process.initialize(timeout_s=30)",
    }.get(kind, "process.initialize(virtual_devices=1, timeout_s=30)")
    joins = EXPLICIT if kind == "explicit" else JOINS
    script = f"""{HELPER}
{start}
say(os.getpid(), child({joins!r}.format(address, index)))
if {kind != "explicit"}:
    say(os.getpid(), child({ASKS!r}))
say(child({OWN!r}))
barrier("after")
    """
    for index in (0, 1):
        given = {} if kind == "explicit" else variables(kind, job, index)
        job.start(index, 2, script, **given)
    for index, one in enumerate(job.wait()):
        assert one.code == 0, one
        *lines, own = said(one).splitlines()
        for line in lines:
            pid, code, when, words = line.split(" ", 3)
            assert when == "soon"
            assert refused(index, pid) in words, one
            assert code == ("74" if line is lines[0] else "1")
        assert own == "0 soon 1"


@pytest.mark.parametrize("kind", few(["SHOAL_*", "Open MPI", "torchrun"], ["SHOAL_*"]))
def test_a_child_that_was_started_before_there_was_a_mark_is_refused_too(job, said, kind):
    """Without an address it would wait in the directory in which its parents no longer are."""
    joins = f"import sys, shoal; sys.stdin.read(); {JOINS}"
    script = f"""
import subprocess, sys
pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
child = subprocess.Popen([sys.executable, "-c", {joins!r}], text=True, **pipes)
process.initialize(virtual_devices=1, timeout_s=30)
barrier("begun")
words = child.communicate("", timeout=20)[1].replace(chr(10), " ")
say(os.getpid(), child.returncode, words)
barrier("after")
    """
    for index in (0, 1):
        job.start(index, 2, script, **variables(kind, job, index))
    for index, one in enumerate(job.wait()):
        assert one.code == 0, one
        pid, code, words = said(one).split(" ", 2)
        assert code == "74", one
        if kind == "Open MPI":
            assert f"process {index} of this job has joined it already (pid {pid})" in words, one
            assert ADVICE in words


def test_an_orphan_is_still_a_child(job):
    """The directory of Open MPI's processes is found by the ancestors, which an orphan lost."""
    script = f"""
import subprocess, sys
process.initialize(virtual_devices=1, timeout_s=30)
program = [sys.executable, "-c", "import shoal; {JOINS}"]
shell = 'exec 3>&1; ("$@" >&3 2>&3; echo "ended $?" >&3) & '  # which ends, and leaves it
child = subprocess.run(["sh", "-c", shell, "sh", *program], capture_output=True, text=True)
say(os.getpid(), child.stdout.replace("\\n", " "))
barrier("after")
    """
    for index in (0, 1):
        more = {"PMIX_NAMESPACE": "prterun-h-71@1", **variables("Open MPI", job, index)}
        job.start(index, 2, script, **more)
    for index, one in enumerate(job.wait()):
        assert one.code == 0, one
        pid = one.out.partition("> ")[2].split()[0]
        assert refused(index, pid) in one.out, one
        assert "ended 74" in one.out


def mpi_commands():
    beside = Path(sys.executable).parent
    hydra, prterun = beside / "mpiexec.hydra", beside / "prterun"
    torchrun = beside / "torchrun"
    options = ["--personality", "ompi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return {
        "shoal run": [sys.executable, "-m", "shoal", "run", "-n", "2"],
        "MPICH": [str(hydra), "-n", "2", sys.executable] if hydra.exists() else None,
        "Open MPI": [str(prterun), *options, sys.executable] if prterun.exists() else None,
        "torchrun": [str(torchrun), "--nproc-per-node", "2"] if torchrun.exists() else None,
    }


NESTED = """
import os, subprocess, sys, shoal
shoal.initialize(virtual_devices=1)
shoal.barrier("begun")
depth, index = os.environ.get("DEPTH", "outer"), shoal.process_index()
os.write(1, f"{depth} {index} of {shoal.process_count()}\\n".encode())
if depth == "outer":
    subprocess.run(sys.argv[1:] + ["script.py"], env={**os.environ, "DEPTH": f"in{index}"},
                   timeout=60, check=True)
shoal.barrier("after")
"""


def command_of(name):
    command = mpi_commands()[name]
    if command is None:
        pytest.skip(f"{name} is not installed (pip install shoal[test])")
    return command


LAUNCHERS = ["shoal run", "MPICH", "Open MPI", "torchrun"]
# With the suite, each is once the outer one and once the inner; each within each in test-faults.
NEXT = dict(zip(LAUNCHERS, [*LAUNCHERS[1:], LAUNCHERS[0]], strict=True))
PAIRS = [(outer, inner) for outer in LAUNCHERS for inner in LAUNCHERS]


@pytest.mark.parametrize(("outer", "inner"), few(PAIRS, NEXT.items()))
def test_a_member_may_start_a_job_of_its_own(child_env, tmp_path, outer, inner):
    (tmp_path / "script.py").write_text(NESTED)
    env = {**child_env, "SHOAL_INITIALIZE_TIMEOUT_S": "30"}
    done = subprocess.run(
        [*command_of(outer), "script.py", *command_of(inner)], env=env, cwd=tmp_path,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done
    for depth in ("outer", "in0", "in1"):
        for index in (0, 1):
            assert done.stdout.count(f"{depth} {index} of 2") == 1, done


EVALUATES = """
import subprocess, sys
subprocess.run([*sys.argv[1:], "evaluate.py"], check=True, timeout=60)
"""
EVALUATION = """
import os, shoal
shoal.initialize(virtual_devices=1)
shoal.barrier("begun")
os.write(1, f"{shoal.process_index()} of {shoal.process_count()}\\n".encode())
"""


@pytest.mark.parametrize("inner", few(LAUNCHERS, ["shoal run", "Open MPI"]))
@pytest.mark.parametrize("joins", [True, False])
def test_a_job_of_one_may_start_another_launcher(child_env, tmp_path, inner, joins):
    """Each process of the evaluation was "process 0 of 1", and did all of its work."""
    join = "import shoal; shoal.initialize(virtual_devices=1)\n" if joins else ""
    (tmp_path / "script.py").write_text(join + EVALUATES)
    (tmp_path / "evaluate.py").write_text(EVALUATION)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "--no-prefix", "script.py", *command_of(inner)],
        env=child_env, cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done
    for index in (0, 1):
        assert done.stdout.count(f"{index} of 2") == 1, done


def test_children_may_meet_elsewhere_and_after_their_parents_have_left(job, said):
    """In a second job of their own; and in one by the same variables, once the first is over."""
    script = f"""{HELPER}
process.initialize(virtual_devices=1, timeout_s=30)
barrier("begun")
other = sys.argv[4]
explicit = "shoal.initialize(coordinator_address=%r, timeout_s=20); " % other
say(child(explicit + {ASKS!r}))
process.shutdown()
say("SHOAL_MEMBER" in os.environ)
say(child({JOINS!r} + "; " + {ASKS!r}))
    """
    other = "{}:{}".format(*quiet_row(1))
    for index in (0, 1):
        job.start(index, 2, script, other, **variables("SHOAL_*", job, index))
    for index, one in enumerate(job.wait()):
        assert one.code == 0, one
        assert said(one).splitlines() == [f"0 soon {index}", "False", f"0 soon {index}"], one


def test_the_doctor_in_a_child(job, said):
    doctor = "'-P', '-m', 'shoal', 'doctor', '--json', '--timeout', '10'"
    script = f"""{HELPER}
process.initialize(virtual_devices=1, timeout_s=30)
done = subprocess.run([sys.executable, {doctor}], capture_output=True, text=True)
say(os.getpid(), done.stdout)
barrier("after")
    """
    for index in (0, 1):
        job.start(index, 2, script, **variables("SHOAL_*", job, index))
    for index, one in enumerate(job.wait()):
        pid, _, out = one.out.partition("> ")[2].partition(" ")
        found = json.loads("{" + said(one).partition("{")[2])["findings"]
        assert any(refused(index, pid) in finding["words"] for finding in found), (found, out)
