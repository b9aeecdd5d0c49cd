"""`shoal doctor` on broken set-ups, with real processes, sockets, folders and launchers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import shoal
from few import few
from forked_scripts import ForkedScript
from shoal.testing.network import address_of, why_no_cuts
from shoal.testing.warding import Warden

WAIT_S = 100
DOCTOR = [sys.executable, "-P", "-m", "shoal", "doctor"]
# A process whose clock is off: Python runs this file before anything else.
AHEAD = "import time\n_now = time.time\ntime.time = lambda: _now() + 300\n"
HELD = """
import os
if "SHOAL_PROCESS_ID" in os.environ:
    open("held").read()  # until the other end is opened, and closed
"""
HANGING = "import time\ndef initialize(): time.sleep(1000)\n"


class Patient:
    """A process of `shoal doctor`."""

    def __init__(self, env, folder, *options, command=()):
        self.popen = subprocess.Popen(
            [*command, *DOCTOR, *options], env=env, cwd=folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def ended(self):
        """Return its code and its output, on one line as if the screen were wide."""
        try:
            out, err = self.popen.communicate(timeout=WAIT_S)
        finally:
            self.popen.kill()
        assert "Traceback" not in err, err
        return self.popen.returncode, " ".join(out.split())


@pytest.fixture
def see(child_env, tmp_path):
    """Return a function that starts a process of `shoal doctor`."""

    def start(*options, command=(), folder=tmp_path, **variables):
        return Patient({**child_env, **variables}, folder, *options, command=command)

    return start


# The doctor, and the probe of the devices that it starts, in forks that have imported JAX.
FORKED = """
import io, os, signal, sys
from shoal.cli.main import main
from shoal.runtime.doctor import device_probe

class Forked:
    def __init__(self, module, *arguments, env):
        assert module == device_probe.__name__
        reads, writes = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.dup2(writes, 1)
            os.environ.update(env)
            os._exit(device_probe.main(arguments))
        os.close(writes)
        self.stdin, self.stdout = io.BytesIO(), open(reads, "rb")

    def kill(self):
        os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout_s):
        os.waitpid(self._pid, 0)

    def detach(self):
        self.stdout.close()

device_probe.Spawned = Forked
os.chdir({folder!r})
os.environ.update({variables!r})
sys.argv[:] = ["shoal", "doctor", *{options!r}]
main()
"""


class ForkedPatient:
    """The same in a fork."""

    def __init__(self, env, folder, *options, variables, namespaces=()):
        script = FORKED.format(folder=str(folder), options=options, variables=variables)
        names = (f"doctor{number}.py" for number in itertools.count())
        name = next(name for name in names if not (folder / name).exists())
        self._script = ForkedScript(script, env, folder, name=name, namespaces=namespaces)

    def ended(self):
        """Return its code and its output, as of a `Patient`."""
        done = self._script.wait(WAIT_S)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, " ".join(done.stdout.split())


@pytest.fixture
def see_fork(child_env, tmp_path):
    """Return a function that starts a fork that does what `shoal doctor` does."""

    def start(*options, namespaces=(), **variables):
        more = {"variables": variables, "namespaces": namespaces}
        return ForkedPatient(child_env, tmp_path, *options, **more)

    return start


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def member(process, count, address):
    """Return the variables of one process of a job."""
    return {
        "SHOAL_PROCESS_ID": str(process), "SHOAL_NUM_PROCESSES": str(count),
        "SHOAL_COORDINATOR": address,
    }  # fmt: skip


def installed(folder, **versions):
    """Make a folder for PYTHONPATH in which packages have other versions."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def paths(folder):
    """Return a PYTHONPATH with a folder before all others."""
    source = str(Path(shoal.__file__).parents[1])
    return os.pathsep.join([str(folder), source, sysconfig.get_path("purelib")])


def test_doctor_of_a_healthy_job_has_no_findings(see, tmp_path):
    both = see("-n", "2", "--devices", "2", "--shared", str(tmp_path), "--json")
    code, out = both.ended()
    said = json.loads(out)
    assert (code, said["findings"], said["is_complete"]) == (0, [], True)
    assert [report["process"] for report in said["processes"]] == [0, 1]
    facts = said["processes"][1]["facts"]
    assert facts["devices"] == {"platform": "cpu", "kind": "cpu", "count": 2, "cpu_devices": 2}
    assert facts["hidden"] == {str(tmp_path): []}
    assert facts["address"]["connecting_to_jax_service"] == "open"
    rules = {rule["launcher"]: rule for rule in facts["launcher"]["rules"]}
    assert (rules["SHOAL_*"]["is_used"], rules["torchrun"]["is_used"]) == (True, False)
    assert rules["torchrun"]["why"] == "RANK=1, WORLD_SIZE=2: SHOAL_* is further inside"
    assert os.listdir(tmp_path) == []


def test_doctor_reports_differing_versions_clocks_and_directories(see, address, tmp_path):
    """Versions and the clock; and a folder that is another one in each process."""
    other = tmp_path / "other"
    installed(other, jax="9.9.9", shoal="0.0.1")
    (other / "sitecustomize.py").write_text(AHEAD)
    rooms = [tmp_path / "room0", tmp_path / "room1"]
    for room in rooms:
        (room / "data").mkdir(parents=True)
    options = ("--shared", "data")
    first = see(*options, folder=rooms[0], **member(0, 2, address))
    more = {"PYTHONPATH": paths(other)}
    second = see(*options, folder=rooms[1], **member(1, 2, address), **more)
    code, out = first.ended()
    assert code == 1
    assert "jax differs: " in out
    assert "9.9.9 on process 1" in out
    assert "0.0.1 on process 1" in out
    assert "that of process 1 (" in out
    assert "is 5.0 min ahead" in out
    assert "data is not shared: process 0 (" in out
    assert "5 problems" in out  # the folder's clock differs from that of process 1, too
    assert second.ended() == (1, "")  # only process 0 prints, and all end with its code


@pytest.mark.faults
def test_a_name_that_does_not_resolve(see_fork):
    code, out = see_fork(**member(1, 2, "no-such-host.invalid:8476")).ended()
    assert code == 1
    assert "the name 'no-such-host.invalid' of the coordinator" in out
    assert "does not resolve on this host" in out
    assert "which resolves to nothing" in out


def test_a_taken_port(see_fork):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out = see_fork(
            **member(0, 2, f"127.0.0.1:{port}"), SHOAL_INITIALIZE_TIMEOUT_S="5"
        ).ended()
    assert code == 1
    assert f"port {port} of this host is taken by pid {os.getpid()} (" in out


def test_the_port_of_a_job_that_runs(see_fork, child_env):
    """As `kubectl exec POD -- shoal doctor --alone` on process 0."""
    place = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*place, "--until-stdin-closes"], env=child_env, **pipes) as popen:
        address = json.loads(popen.stdout.readline())["address"]
        code, out = see_fork("--alone", **member(0, 2, address)).ended()
        popen.stdin.close()
    assert code == 0
    assert f"a shoal job uses port {address.rpartition(':')[2]} of this host: pid " in out


def test_the_address_of_another_host(see_fork):
    code, out = see_fork("--timeout", "2", **member(0, 2, "192.0.2.1:8476")).ended()
    assert code == 1
    assert "process 0 is here, and 192.0.2.1 (192.0.2.1) is not an address of this host" in out


def test_two_processes_with_one_index(see_fork, address):
    both = [see_fork("--timeout", "30", **member(index, 3, address)) for index in (0, 1, 1)]
    for patient in both:
        code, out = patient.ended()
        assert code == 1
        assert "two processes have the index 1: process 1 (" in out


def test_a_process_that_is_not_there(see_fork, address):
    code, out = see_fork("--timeout", "2", **member(0, 2, address)).ended()
    assert code == 1
    assert "process 1 of 2 did not join within 2 s" in out


def test_process_0_is_not_there(see_fork, address):
    patients = [
        see_fork("--timeout", "2", **member(1, 2, address)),
        see_fork("--alone", **member(1, 2, address)),
    ]
    for patient in patients:
        code, out = patient.ended()
        assert (code, f"nothing listens at {address}, though its host answers" in out) == (1, True)


@pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")
def test_a_host_that_cannot_be_reached(see_fork):
    warden = Warden(2)
    try:
        warden.order("cut", 0)
        address = f"{address_of(0)}:7171"
        processes = [
            see_fork("--timeout", "4", namespaces=place, **member(index, 2, address))
            for index, place in enumerate(warden.namespaces)
        ]
        (_, first), (code, out) = (patient.ended() for patient in processes)
    finally:
        warden.close()
    assert code == 1
    assert f"the host of {address} cannot be reached: " in out
    assert "process 1 of 2 did not join within 4 s" in first


def test_a_proxy_in_the_way(see_fork, address):
    proxy = "http://127.0.0.1:9"

    def both(**more):
        ranks = (member(index, 2, address) for index in range(2))
        patients = [see_fork(**rank, http_proxy=proxy, **more) for rank in ranks]
        return [patient.ended() for patient in patients]

    (code, out), _ = both()
    assert code == 1
    assert f"http_proxy={proxy} is in the way" in out
    assert [code for code, _ in both(no_proxy="127.0.0.1")] == [0, 0]


def test_a_driver_that_hangs(see, tmp_path):
    plugin = tmp_path / "plugin" / "jax_plugins" / "hanging"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(HANGING)
    code, out = see("--timeout", "8", PYTHONPATH=paths(tmp_path / "plugin")).ended()
    assert code == 1
    assert "the devices did not start within 8 s: the driver hangs" in out


def test_devices_that_are_not_there(see):
    code, out = see(JAX_PLATFORMS="rocket").ended()
    assert code == 1
    assert "the devices do not start: RuntimeError: Unable to initialize backend 'rocket'" in out


def test_half_of_the_variables(see_fork):
    code, out = see_fork(RANK="1").ended()
    assert code == 1
    assert "torchrun (RANK=1) without WORLD_SIZE: set both or neither" in out


def test_a_shared_folder_that_each_host_has_for_itself(see_fork, tmp_path):
    """A rendezvous in one directory whose content differs: each process names it."""
    rooms = [tmp_path / "room0", tmp_path / "room1"]
    patients = []
    for index, room in enumerate(rooms):
        room.mkdir()
        more = member(index, 2, "") | {"SHOAL_RENDEZVOUS": str(room)}
        patients.append(see_fork("--timeout", "3", **more))
    for patient in patients:
        code, out = patient.ended()
        assert code == 1
        assert "SHOAL_RENDEZVOUS must be one directory that all hosts share" in out


def test_under_mpich(see):
    hydra = Path(sys.executable).with_name("mpiexec.hydra")
    hydra = str(hydra) if hydra.exists() else shutil.which("mpiexec.hydra")
    if hydra is None:
        pytest.skip("mpich is not installed (pip install shoal[test])")
    code, out = see("--json", command=[hydra, "-n", "2"]).ended()
    said = json.loads(out)  # one object: that of process 0
    assert (code, said["findings"]) == (0, [])
    assert [report["process"] for report in said["processes"]] == [0, 1]
    used = [
        [rule["launcher"] for rule in report["facts"]["launcher"]["rules"] if rule["is_used"]]
        for report in said["processes"]
    ]
    assert used == [["MPICH"], ["MPICH"]]


def test_a_variable_that_does_not_exist(see, see_fork, address):
    words = "shoal has no variable SHOAL_NPROCS; did you mean 'SHOAL_NUM_PROCESSES'?"
    code, out = see_fork(SHOAL_NPROCS="2").ended()
    assert (code, f"note launcher: {words}" in out) == (0, True), out
    both = see("-n", "2", "--devices", "1", SHOAL_NPROCS="2")
    out, err = both.popen.communicate(timeout=WAIT_S)
    assert " ".join(out.split()).count(words) == 1, out
    assert "SHOAL_NPROCS" not in err
    pair = [see_fork(**member(index, 2, address), SHOAL_NPROCS="2") for index in (0, 1)]
    said = [patient.ended()[1].count(words) for patient in pair]
    assert said == [1, 0]


OWN_NAMES = [((), "note"), (("-n", "2"), "problem")]


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make namespaces, with util-linux's unshare",
)
@pytest.mark.parametrize(("options", "level"), few(OWN_NAMES, OWN_NAMES[:1]))
def test_a_host_whose_own_name_does_not_resolve(see, options, level):
    """CPU devices of several processes connect by it; others need it not."""
    nameless = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host-xyz; exec "$@"', "sh"]
    code, out = see("--json", *options, command=nameless).ended()
    (found,) = json.loads(out)["findings"]
    assert (code, found["level"], found["check"]) == (int(level == "problem"), level, "host")
    assert "this host's own name 'no-such-host-xyz' does not resolve: " in found["words"]
    assert "add it to /etc/hosts" in found["advice"]


def test_at_ctrl_c_only_the_doctor_speaks(child_env, tmp_path):
    os.mkfifo(tmp_path / "held")
    (tmp_path / "sitecustomize.py").write_text(HELD)
    env = {**child_env, "PYTHONPATH": paths(tmp_path)}
    with subprocess.Popen(
        [*DOCTOR, "-n", "2"],
        env=env, cwd=tmp_path, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as popen:  # fmt: skip
        opened = os.open(tmp_path / "held", os.O_WRONLY)  # one of them has come to it
        os.killpg(popen.pid, signal.SIGINT)
        out, err = popen.communicate(timeout=WAIT_S)
        os.close(opened)
    assert (popen.returncode, out, err) == (130, "", "shoal doctor: ended by Ctrl-C\n")
