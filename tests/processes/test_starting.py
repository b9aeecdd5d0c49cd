"""The same script, started in several ways, with the real launchers where they are installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from forked_scripts import ForkedScript
from processes.clusters.slurm_here import SRUN
from processes.run.launchers import Launchers, codes, said
from shoal.testing.network import why_no_cuts
from shoal.testing.warding import Warden

SCRIPT = """
import os
import jax, numpy as np, shoal

shoal.initialize()
mesh = shoal.make_mesh({"data": -1})
rows = shoal.put(np.arange(6.0, dtype="float32"), shoal.Layout(mesh, "data"))
total = float(jax.jit(lambda x: x.sum())(rows))
met = shoal.allgather(np.int32(shoal.process_index())).tolist()
line = f"process {shoal.process_index()} of {shoal.process_count()}: {total} {met}"
with open(os.path.join(os.environ["SAID"], f"{shoal.process_index()}"), "x") as file:
    file.write(line)
"""
WAIT_S = 90


@pytest.fixture
def start(tmp_path, child_env):
    """Return a function that starts the script by a command, and returns what was said."""
    (tmp_path / "script.py").write_text(SCRIPT)
    source = str(Path(shoal.__file__).parents[1])
    paths = [source, *(path for path in sys.path if path.endswith("site-packages"))]

    def run(command):
        said = tmp_path / "said"
        said.mkdir()
        env = {
            **child_env, "SAID": str(said), "SHOAL_INITIALIZE_TIMEOUT_S": "60",
            "PYTHONPATH": ":".join([child_env["PYTHONPATH"], *paths]),
        }  # fmt: skip
        me = [sys.executable, "script.py"]
        process = subprocess.Popen(
            command(me) if callable(command) else [*command, *me],
            env=env, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=WAIT_S)[0]
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output
        return [path.read_text() for path in sorted(said.rglob("*")) if path.is_file()]

    return run


def expected(count):
    met = list(range(count))
    return [f"process {index} of {count}: 15.0 {met}" for index in met]


def program(name):
    """Return a program that lies beside this Python or on the path; None: it does not."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@functools.cache
def open_mpi():
    """Return the command of Open MPI, which a wheel of MPICH may lie on top of."""
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    mpirun = program("mpirun")
    if mpirun is not None:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
        if "Open MPI" in version.stdout:
            return [mpirun, *options]
    prterun = program("prterun")
    return prterun and [prterun, "--personality", "ompi", *options]


def needs(command, package):
    if command is None:
        pytest.skip(f"{package} is not installed (pip install shoal[test])")
    return command


def test_plain_python(start):
    assert start([]) == expected(1)


def test_shoal_run(start):
    run = [sys.executable, "-m", "shoal", "run", "-n", "2"]
    assert start(lambda me: [*run, me[1]]) == expected(2)


def test_open_mpi(start):
    assert start(needs(open_mpi(), "openmpi")) == expected(2)


def test_mpich(start):
    hydra = needs(program("mpiexec.hydra"), "mpich")
    assert start([hydra, "-n", "2"]) == expected(2)


def test_mpich_through_a_script_of_the_users(start, tmp_path):
    hydra = needs(program("mpiexec.hydra"), "mpich")
    (tmp_path / "wrap.sh").write_text('"$@"; exit $?\n')
    assert start([hydra, "-n", "2", "sh", "wrap.sh"]) == expected(2)


def test_torchrun(start):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (pip install torch)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # torchrun wants a script, not a Python
    assert start(lambda me: [*torchrun, "--nproc-per-node", "2", me[1]]) == expected(2)


def test_slurm_recorded(start, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    assert start([sys.executable, str(srun)]) == expected(2)


@pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")
def test_shoal_run_on_two_hosts(child_env, tmp_path):
    warden = Warden(2)
    launchers = Launchers(tmp_path, child_env, warden)
    (tmp_path / "said").mkdir()
    try:
        both = launchers.both(script=SCRIPT, SAID=str(tmp_path / "said"))
        assert codes(both) == [0, 0], said(both)
    finally:
        launchers.close()
        warden.close()
    assert [path.read_text() for path in sorted((tmp_path / "said").iterdir())] == expected(2)


def test_a_shared_directory_is_enough(child_env, tmp_path):
    """As on several hosts, in a directory in which an earlier job of the same name was killed."""
    left = tmp_path / "shared" / "shoal-shoal-e4a6a0577479b2b4"
    left.mkdir(parents=True)
    (left / "address").write_text('{"address": "127.0.0.1:9", "token": "", "to": ["0"]}')
    (left / f"process-1-{'0' * 16}").touch()
    (tmp_path / "said").mkdir()
    env = {
        **child_env, "SAID": str(tmp_path / "said"), "SHOAL_NUM_PROCESSES": "3",
        "SHOAL_RENDEZVOUS": str(tmp_path / "shared"), "SHOAL_INITIALIZE_TIMEOUT_S": "60",
    }  # fmt: skip
    scripts = [
        ForkedScript(SCRIPT, {**env, "SHOAL_PROCESS_ID": index}, tmp_path) for index in "210"
    ]
    ended = [script.wait(WAIT_S) for script in scripts]
    assert [one.returncode for one in ended] == [0] * 3, ended
    assert [path.read_text() for path in sorted((tmp_path / "said").iterdir())] == expected(3)
    assert os.listdir(tmp_path / "shared") == []


def test_two_jobs_of_one_host_at_once_meet_apart(start):
    hydra = needs(program("mpiexec.hydra"), "mpich")
    job = shlex.join([hydra, "-n", "2", sys.executable, "script.py"])
    job = f"SAID=$SAID/$name {job} || exit 1"
    both = f"for name in a b; do mkdir $SAID/$name; ({job}) & done; wait"
    assert start(lambda me: ["sh", "-c", both]) == expected(2) * 2
