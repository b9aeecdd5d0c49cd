"""Where the token of a job comes from, on two hosts: namespaces, each with a home directory."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.clusters.pages import Started
from processes.run.launchers import codes, on_host
from shoal.runtime.failures.joining_text import REMEDY
from shoal.testing.network import address_of, why_no_cuts
from shoal.testing.warden import MARK
from shoal.testing.warding import Warden

pytestmark = pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")

PORT = 8476
SCRIPT = """
import os, shoal
shoal.initialize()
shoal.barrier("met")
os.write(1, b"met\\n")
"""
WAYS = ["python", "shoal run"]
LATER = [*WAYS]  # torchrun hands the token on in one way, whatever it is: once with the suite
if importlib.util.find_spec("torch") is not None:
    WAYS.append("torchrun")
    LATER.append(pytest.param("torchrun", marks=pytest.mark.faults))


class Hosts:
    """Two hosts, on each of which a process of one job is started."""

    def __init__(self, folder: Path, env: dict[str, str], warden: Warden) -> None:
        self.folder, self._warden, self._started = folder, warden, []
        (folder / "script.py").write_text(SCRIPT)
        self._env = {**env, MARK: warden.mark, "COLUMNS": "200", "TMPDIR": str(folder)}
        self._env |= {"SHOAL_INITIALIZE_TIMEOUT_S": "8", "SHOAL_WARN_AFTER_S": "2"}
        del self._env["XDG_CONFIG_HOME"]

    def start(self, host: int, way: str, home: str, **env: str) -> Started:
        """Start the launcher, or the process, of a host whose home directory has this name."""
        where = f"{address_of(0)}:{PORT}"
        own = {
            "python": {"SHOAL_COORDINATOR": where, "SHOAL_NUM_PROCESSES": "2"},
            "shoal run": {"SHOAL_FAILURE_GRACE_S": "0.3"},
            "torchrun": {"OMP_NUM_THREADS": "1"},
        }[way]
        nodes = ["--nnodes", "2", "--node-rank", str(host)]
        master = ["--master-addr", address_of(0), "--master-port", "29500"]
        command = {
            "python": [],
            "shoal run": ["-m", "shoal", "run", *nodes, "--coordinator", where],
            "torchrun": ["-m", "torch.distributed.run", *nodes, *master],
        }[way]
        env = {**self._env, **own, "SHOAL_PROCESS_ID": str(host), **env}
        if way != "python":
            del env["SHOAL_PROCESS_ID"]
        env["HOME"] = str(self.folder / home)
        command = [*on_host(self._warden, host), sys.executable, *command, "script.py"]
        self._started.append(Started(command, self.folder, env))
        return self._started[-1]

    def both(self, way: str, homes: tuple[str, str], **env: str) -> list[Started]:
        """Start both; homes other than "nowhere" exist."""
        for name in homes:
            if name != "nowhere":
                (self.folder / name).mkdir(exist_ok=True)
        return [self.start(host, way, home, **env) for host, home in enumerate(homes)]

    def end(self) -> None:
        for started in self._started:
            started.end()


@pytest.fixture
def hosts(tmp_path, child_env) -> Iterator[Hosts]:
    warden = Warden(2)
    hosts = Hosts(tmp_path, child_env, warden)
    yield hosts
    hosts.end()
    warden.close()


@pytest.mark.parametrize("way", WAYS)
def test_hosts_with_one_home_need_no_setting(hosts, way):
    both = hosts.both(way, ("home", "home"))
    assert codes(both) == [0, 0], [started.said for started in both]
    assert sum(started.said.count("met\n") for started in both) == 2
    path = hosts.folder / "home/.config/shoal/token"
    secret = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(secret in started.said for started in both)
    assert not any("SHOAL_INSECURE" in started.said for started in both)


@pytest.mark.parametrize("way", LATER)
def test_without_any_home_all_refuse_and_say_what_to_set(hosts, way):
    both = hosts.both(way, ("nowhere", "nowhere"))
    for started in both:
        assert started.code() == (1 if way == "torchrun" else 74), started.said
        said = " ".join(started.said.split())
        assert "has no token, so anyone could join it: SHOAL_TOKEN is not set" in said
        assert "nowhere: No such file or directory" in said
        pasted = [line for line in REMEDY.splitlines() if line.startswith("  ")]
        assert len(pasted) == 5
        assert all(f"{line}\n" in started.said for line in pasted), started.said
    assert not (hosts.folder / "nowhere").exists()


HOMES = [("home", "other"), pytest.param(("home", "nowhere"), marks=pytest.mark.faults)]


@pytest.mark.parametrize("way", ["python", "shoal run"])
@pytest.mark.parametrize("homes", HOMES)
def test_hosts_whose_homes_differ_name_the_other(hosts, way, homes):
    first, second = hosts.both(way, homes)
    assert codes([first, second]) == [74, 74], first.said + second.said
    for started in (first, second):
        assert "export SHOAL_TOKEN=$(cat token)  " in started.said
    if way == "python":
        said = " ".join(first.said.split())
        refused = "refused because its token is wrong: process 1 from 1"
        warned = said.index(f"missing: process 1; {refused}")
        reported = said.index("Refused because its token is wrong: process 1 from 1")
        assert reported > said.index("process 1 of 2 did not join") > warned
        assert "has not called initialize" not in said
        assert "the token is wrong" in second.said
    else:
        assert first.said.count(") has another token than node 0 (") == 2, "at once, and at the end"
        assert ") has another token than node 0 (" in second.said


@pytest.mark.parametrize("way", LATER)
def test_an_insecure_job_says_so_once(hosts, way):
    both = hosts.both(way, ("nowhere", "nowhere"), SHOAL_INSECURE="1")
    assert codes(both) == [0, 0], [started.said for started in both]
    assert [started.said.count("SHOAL_INSECURE=1: any program") for started in both] == [1, 0]


def test_single_insecure_process_is_refused(hosts):
    (hosts.folder / "home").mkdir()
    first = hosts.start(0, "python", "home")
    second = hosts.start(1, "python", "nowhere", SHOAL_INSECURE="1")
    assert codes([first, second]) == [74, 74]
    assert "that of this process: none (SHOAL_INSECURE=1)" in second.said


def test_an_argument_is_the_token(hosts):
    script = SCRIPT.replace("initialize()", "initialize(token=os.environ['MY_SECRET'])")
    (hosts.folder / "script.py").write_text(script)
    homes = ("nowhere", "nowhere")
    both = hosts.both("python", homes, MY_SECRET="a secret", SHOAL_TOKEN="of another job")
    assert codes(both) == [0, 0], [started.said for started in both]


def test_a_job_that_jax_joined_says_where_its_token_is(hosts):
    """And it publishes none that the user has set."""
    script = f"""
import os, shoal, jax
jax.distributed.initialize("{address_of(0)}:9000", 2, int(os.environ["SHOAL_PROCESS_ID"]))
shoal.initialize()
from jax._src import distributed
shown = distributed.global_state.client.key_value_dir_get("shoal/coordinator")
os.write(1, (repr(shown) + "\\n").encode())
shoal.shutdown()
"""
    (hosts.folder / "script.py").write_text(script)
    for token in ("", "a secret of mine"):
        both = hosts.both("python", ("nowhere", "nowhere"), SHOAL_TOKEN=token)
        assert codes(both) == [0, 0], [started.said for started in both]
        warned = "the token of this job is in JAX's key-value store"
        assert [started.said.count(warned) for started in both] == [0 if token else 1, 0]
        assert not any("a secret of mine" in started.said for started in both)


def test_the_doctor_shows_where_the_token_is_from_and_not_the_token(hosts):
    (hosts.folder / "script.py").write_text(
        "import sys\nfrom shoal.cli.main import main\nsys.argv = ['shoal', 'doctor', '--json', "
        "'--timeout', '8']\nmain()"
    )
    both = hosts.both("python", ("home", "home"))
    assert codes(both) == [0, 0], [started.said for started in both]
    (path,) = hosts.folder.glob("home/.config/shoal/token")
    shown = json.loads(both[0].said[both[0].said.index("{") :])
    assert [one["facts"]["token"] for one in shown["processes"]] == [{"source": str(path)}] * 2
    assert path.read_text().strip() not in both[0].said
    both = hosts.both("python", ("home", "nowhere"))
    assert codes(both) == [1, 1]
    said = " ".join(both[1].said.split())
    assert "SHOAL_TOKEN to one secret for all processes" in said
    os.remove(path)


def test_programs_that_use_jax_alone_pass_the_gate_on_two_hosts(hosts):
    """A proxy of each process proves the token for it; and shoal may attach later."""
    (hosts.folder / "script.py").write_text(
        "import os, jax\njax.distributed.initialize()\n"
        "from jax.experimental import multihost_utils as m\n"
        "met = m.process_allgather(jax.numpy.ones(1)).tolist()\n"
        "import shoal\nshoal.initialize()\n"
        "os.write(1, f'met {met} {shoal.broadcast(5)}\\n'.encode())\n"
    )
    both = hosts.both("shoal run", ("home", "home"), JAX_NUM_CPU_DEVICES="1")
    assert codes(both) == [0, 0], [started.said for started in both]
    assert all("met [[1.0], [1.0]] 5\n" in started.said for started in both)
