"""What strangers can and cannot do to a running job; SECURITY.md's table is made from `ROWS`.

The job runs on two hosts, namespaces, without a setting: its token is made from the file in the
home directory. A third host is the stranger's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from processes.clusters.pages import Started
from processes.run.launchers import on_host
from quiet_ports import quiet_row
from shoal.cli.observer import Observer, ServerAddress
from shoal.launch.order import NUM_PORTS
from shoal.runtime.rules.joining import OTHER_VERSION, WRONG_TOKEN
from shoal.runtime.startup import job_token
from shoal.runtime.startup.job_token import observed_tokens
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
from shoal.runtime.wire.frames import split_address
from shoal.runtime.wire.sockets import is_loopback
from shoal.testing.network import address_of, why_no_cuts
from shoal.testing.warden import MARK, marked
from shoal.testing.warding import Warden

PORT = 8476
TRIES = 200  # in each of two places: before all have joined, and while the job runs
SILENT = 600  # connections that say nothing, meanwhile
JOB = """
import os, shoal
shoal.initialize()
import jax
with open(os.environ["SAID"] + ".new", "w") as file:
    file.write(jax._src.distributed.global_state.coordinator_address)
os.rename(os.environ["SAID"] + ".new", os.environ["SAID"])
while not shoal.broadcast(os.path.exists("over")):
    pass
os.write(1, b"done\\n")
"""
ROOT = Path(__file__).parents[2]
needs_network = pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


class Row(NamedTuple):
    """What a kind of stranger tries, and what comes of it."""

    who: str
    tries: str
    result: str
    shown_by: str  # a test here, or `file::test`; or several, with spaces between


NETWORK = "a program that reaches the coordinator's port"
TAPPED = "a program that reads the packets"
NEIGHBOR = "another user of a host"
READER = "a reader of logs, reports and process lists"
SELF = "the same user, or root"

ROWS = (
    Row(NETWORK, "joins without a token, with a guess, or with that of the user's other ports",
        "refused; the job goes on", "test_a_stranger_does_not_join"),
    Row(NETWORK, "replays a recorded connection of this job, or of an earlier one at this address",
        "refused: random numbers are used once", "test_a_stranger_does_not_join"),
    Row(NETWORK, "keeps hundreds of connections open and says nothing",
        "closed after 30 s; the job goes on",
        "test_a_stranger_does_not_join "
        "runtime/wire/test_server_sockets.py::"
        "test_a_stranger_that_stays_silent_or_sends_half_a_frame_is_thrown_out_in_time"),
    Row(NETWORK, "listens at the address first, as if it were the coordinator",
        "processes do not join: it cannot prove that it has the token",
        "test_an_impostor_is_not_joined"),
    Row(NETWORK, "connects to JAX's service", "refused, as by the coordinator",
        "test_jax_s_service_lets_no_stranger_in"),
    Row(TAPPED, "looks for the token", "it is never sent", "test_a_stranger_does_not_join"),
    Row(TAPPED, "reads what processes send", "**it can**: nothing is encrypted",
        "test_what_is_sent_can_be_read"),
    Row(NEIGHBOR, "reads the token's file, or the environment of a process",
        "denied by the system", "test_another_user_reads_nothing"),
    Row(NEIGHBOR, "creates `/tmp/shoal-UID` first, or a link there",
        "jobs on this host do not start without SHOAL_TOKEN: it is not used",
        "runtime/startup/test_job_token.py::test_a_squatter_in_tmp_gets_nothing"),
    Row(NEIGHBOR, "connects to the coordinator's Unix socket",
        "refused, by its user id, unless the job is root's; then by the token",
        "test_another_user_does_not_call"),
    Row(NEIGHBOR, "connects to JAX's service of a job on this host alone",
        "refused, by its user id (Linux)", "test_jax_s_service_lets_no_other_user_in"),
    Row(NEIGHBOR, "connects to the TCP proxy through which processes reach JAX's service",
        "refused, by its user id (Linux)", "test_host_proxy_refuses_other_users"),
    Row(READER, "looks for the token in output, logs, reports and command lines",
        "it is not there, with two exceptions: `shoal coordinator` prints the token that it "
        "generates, and `--token` of `shoal watch`, `shoal stacks` and `shoal save` is on their "
        "command line: use `SHOAL_TOKEN`",
        "test_no_log_and_no_command_line_has_the_token"),
    Row(SELF, "reads the token", "**it can**: it is trusted", "test_the_same_user_can_join"),
)  # fmt: skip


def table() -> str:
    """Return the table of SECURITY.md."""
    lines = ["| who | tries | what happens |", "|---|---|---|"]
    before = ""
    for row in ROWS:
        who, before = "" if row.who == before else row.who, row.who
        lines.append(f"| {who} | {row.tries} | {row.result} |")
    return "\n".join(lines)


def test_the_page_has_this_table():
    assert table() in (ROOT / "SECURITY.md").read_text(encoding="utf-8"), f"paste it:\n{table()}"


def test_each_row_is_shown():
    for row in ROWS:
        for shown_by in row.shown_by.split():
            file, _, name = shown_by.rpartition("::")
            path = ROOT / "tests" / file if file else Path(__file__)
            assert f"\ndef {name}(" in path.read_text(encoding="utf-8"), row


# ---- A job on two hosts, and a third one.


class Scene:
    """Two hosts with a job, and the stranger's; all have this folder. Or this host for all."""

    def __init__(self, folder: Path, env: dict[str, str], warden: Warden) -> None:
        self.folder, self._warden, self._started = folder, warden, []
        quiet = quiet_row(NUM_PORTS)
        self.host, self.port = (address_of(0), PORT) if warden.namespaces else quiet
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "job.py").write_text(JOB)
        self._env = {**env, MARK: warden.mark, "HOME": str(self.home), "SHOAL_WARN_AFTER_S": "1"}
        del self._env["XDG_CONFIG_HOME"]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, host: int, *arguments: object, **env: str) -> Started:
        """Start Python on a host."""
        command = [*on_host(self._warden, host), sys.executable, *map(str, arguments)]
        self._started.append(Started(command, self.folder, {**self._env, **env}))
        return self._started[-1]

    def process(self, index: int, address: str = "") -> Started:
        """Start a process of the job, on its host."""
        return self.start(
            index, "job.py", SAID=str(self.folder / f"joined{index}"), SHOAL_NUM_PROCESSES="2",
            SHOAL_PROCESS_ID=str(index), SHOAL_COORDINATOR=address or self.address,
        )  # fmt: skip

    def torchrun(self, index: int, address: str = "") -> Started:
        """Start a process with the variables that torchrun sets for one process on each node."""
        own = {"SHOAL_COORDINATOR": address} if address else {}
        return self.start(
            index, "job.py", SAID=str(self.folder / f"joined{index}"), RANK=str(index),
            WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(index),
            MASTER_ADDR=self.host, MASTER_PORT=str(self.port), TORCHELASTIC_RUN_ID="job",
            **own,
        )  # fmt: skip

    def launcher(self, node: int, address: str = "") -> Started:
        """Start the launcher of a node."""
        nodes = ["--nnodes", "2", "--node-rank", node, "--coordinator", address or self.address]
        said = str(self.folder / f"joined{node}")
        return self.start(node, "-m", "shoal", "run", *nodes, "job.py", SAID=said)

    def stranger(self, *arguments: object) -> Started:
        """Start the stranger's program on its own host."""
        return self.start(2, Path(__file__).with_name("stranger.py"), *arguments)

    def member(self, way: str, index: int, address: str = "") -> Started:
        """Start a process of the job, or the launcher of a node, on its host."""
        if way == "torchrun":
            return self.torchrun(index, address)
        return (self.launcher if way == "shoal run" else self.process)(index, address)

    def gate(self, way: str) -> str:
        """Return the address at which the members of a job meet first."""
        master = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
        env = {**master, "RANK": "0", "WORLD_SIZE": "2"}
        return str(decide(Arguments(), env).address) if way == "torchrun" else self.address

    def secrets(self, address: str) -> list[str]:
        """Return the secret of the file, and the tokens that are derived from it."""
        host = Path(job_token.host_file()) if is_loopback(self.host) else None
        secret = (host or self.home / ".config/shoal/token").read_text().strip()
        port = split_address(address)[1]
        return [secret, *(job_token.derived(secret, f"{x} {port}") for x in ("job", "launchers"))]

    @contextlib.contextmanager
    def recorded(self, address: str, records: Path) -> Iterator[str]:
        """Yield the address of a relay on the second host, which records all that it passes on."""
        records.mkdir()
        host = address_of(1) if self._warden.namespaces else "127.0.0.9"
        via = f"{host}:{split_address(address)[1]}"
        program = Path(__file__).with_name("stranger.py")
        relay = self.start(1, program, "relay", via, address, records)
        relay.until("listens")
        yield via
        relay.end()

    def attacked(self, verb: str, address: str, records: Path) -> dict[str, int]:
        """Return the answers to all tries."""
        other = self.secrets(f"{self.host}:{PORT + 1}")[1]
        stranger = self.stranger(verb, address, TRIES, other, records)
        assert stranger.code() == 0, stranger.said
        answers = json.loads(stranger.said)
        assert sum(answers.values()) == TRIES
        return answers

    def await_file(self, name: str) -> None:
        """Wait until a process has written a file."""
        limit = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < limit, "it never came"
            time.sleep(0.01)

    def end(self) -> None:
        for started in self._started:
            started.end()


@pytest.fixture
def scene(tmp_path, child_env) -> Iterator[Scene]:
    warden = Warden(3)
    scene = Scene(tmp_path, child_env, warden)
    yield scene
    scene.end()
    warden.close()


KINDS = {"none", "guess", "empty", "another job's", "skipped", "replayed"}
REFUSALS = (WRONG_TOKEN, OTHER_VERSION, "the token is wrong")


@pytest.mark.parametrize("way", ["python", "torchrun", "shoal run"])
@pytest.mark.parametrize(
    "hosts", [pytest.param(3, marks=needs_network, id="two hosts"), pytest.param(0, id="loopback")]
)
def test_a_stranger_does_not_join(tmp_path, child_env, hosts, way):
    """While the job waits for a process, and while it runs; first it looks on at an earlier job."""
    warden = Warden(hosts)
    scene, records = Scene(tmp_path, child_env, warden), tmp_path / "records"
    try:
        gate = scene.gate(way)  # where the process of the other host comes first
        with scene.recorded(gate, records) as via:
            (tmp_path / "over").touch()
            earlier = [scene.member(way, 0), scene.member(way, 1, via)]
            assert [one.code() for one in earlier] == [0, 0], earlier[0].said + earlier[1].said
        wire = b"".join(path.read_bytes() for path in records.iterdir())
        assert wire.count(b'"proof"') >= 2, "of both ends"
        assert not any(secret.encode() in wire for secret in scene.secrets(gate))
        for name in ("over", "joined0", "joined1"):
            (tmp_path / name).unlink()

        waiting = scene.member(way, 0)  # at the same address, and so with the same token
        waiting.until("node 1 of 2 has not joined" if way == "shoal run" else "missing: process 1")
        scene.stranger("idle", gate, SILENT).until(f"{SILENT} are open")
        verb, refused = "try", "the token is wrong"
        if way == "shoal run":
            verb, refused = "node", "has another token than"
        answers = scene.attacked(verb, gate, records)
        assert {answer.partition(":")[0] for answer in answers} == KINDS
        assert all(refused in answer or OTHER_VERSION in answer for answer in answers), answers
        both = [waiting, scene.member(way, 1)]
        scene.await_file("joined0")
        scene.await_file("joined1")
        address = f"{scene.host}:{scene.port + 1}" if way == "shoal run" else gate
        answers = scene.attacked("try", address, records)
        assert {answer.partition(":")[0] for answer in answers} == KINDS
        assert all(answer.partition(": ")[2] in REFUSALS for answer in answers), answers
        (tmp_path / "over").touch()
        assert [one.code() for one in both] == [0, 0], both[0].said + both[1].said
        assert all("done\n" in one.said for one in both)
    finally:
        scene.end()
        warden.close()


@needs_network
def test_an_impostor_is_not_joined(scene):
    """It listens first, has no token, and answers a proof with the frames of a coordinator."""
    (scene.folder / "impostor.py").write_text(
        textwrap.dedent(f"""
        import socket
        from shoal.runtime.wire.connection import Channel
        from shoal.runtime.wire.frames import pack_frame
        server = socket.create_server(("{address_of(0)}", {PORT}))
        print("listens", flush=True)
        while True:
            channel = Channel(server.accept()[0], max_body_bytes=0)
            channel.receive(1e9)
            channel.send(pack_frame({{"is": "challenge", "nonce": "0" * 32}}), 1e9)
            channel.receive(1e9)
            channel.send(pack_frame({{"is": "proof", "proof": "0" * 64}}), 1e9)
            channel.send(pack_frame({{"is": "welcome"}}), 1e9)
        """)
    )
    impostor = scene.start(0, "impostor.py")
    impostor.until("listens")
    process = scene.process(1)
    assert process.code() == 74
    assert "it does not know the token of this job" in " ".join(process.said.split())


@needs_network
def test_jax_s_service_lets_no_stranger_in(scene):
    both = [scene.process(0), scene.process(1)]
    scene.await_file("joined0")
    scene.await_file("joined1")
    service = (scene.folder / "joined0").read_text()
    assert service.startswith(f"{address_of(0)}:")
    stranger = scene.stranger("jax", service, scene.secrets(f"{scene.host}:{PORT + 1}")[1])
    assert stranger.code() == 0, stranger.said
    answers = {"a guess": WRONG_TOKEN, "another job's token": WRONG_TOKEN}
    assert json.loads(stranger.said) == {"as JAX's own client": "closed", **answers}
    (scene.folder / "over").touch()
    assert [one.code() for one in both] == [0, 0], both[0].said + both[1].said


@needs_network
def test_what_is_sent_can_be_read(scene):
    records = scene.folder / "records"
    job = "import shoal\nshoal.initialize()\nshoal.broadcast({'words': 'for all to read'})\n"
    (scene.folder / "job.py").write_text(job)
    with scene.recorded(scene.address, records) as via:
        both = [scene.process(0), scene.process(1, via)]
        assert [one.code() for one in both] == [0, 0], both[0].said + both[1].said
    assert b"for all to read" in b"".join(path.read_bytes() for path in records.iterdir())


# ---- On one host: other users, logs, the same user.


# A process of another user. It imports all that it needs before: it may read no file of root's.
OTHERS = """
import codecs, os, selectors, socket, sys, tempfile, threading, time
from shoal.runtime.jax_service.jax_proxy import JaxGate, ProxiedConnections
from shoal.runtime.wire.sockets import listen_unix, may_call
codecs.lookup("ascii"), codecs.lookup("idna")
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))

def opened(path):
    try:
        return open(path, "rb").read().decode(errors="replace")
    except PermissionError:
        return "denied"

def gate(is_open):  # returns its listener, and that of what is behind it
    folder = tempfile.mkdtemp()
    behind = socket.socket(socket.AF_UNIX)
    behind.bind(f"{folder}/service")
    behind.listen()
    listener = socket.create_server(("127.0.0.1", 0))
    JaxGate(listener, f"{folder}/service", "a secret", is_open=is_open).open()
    return listener, behind

def answer(behind):
    kept = []
    while True:
        kept.append(behind.accept()[0])
        kept[-1].recv(100)
        kept[-1].sendall(b"!")

def call(port, family=socket.AF_INET, host="127.0.0.1"):
    with socket.socket(family) as sock:
        if family == socket.AF_INET6:  # as gRPC's, for both kinds of addresses
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.settimeout(30)
        sock.connect((host, port))
        try:
            sock.sendall(b"PRI * HTTP/2.0")
            return sock.recv(1).decode()
        except ConnectionError:
            return ""
"""
ONE, OTHER = 60001, 60002


def as_user(user: int, code: str) -> str:
    """Return what a program prints that runs as this user."""
    command = [sys.executable, "-c", OTHERS + textwrap.dedent(code), str(user)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextlib.contextmanager
def serving(code: str) -> Iterator[Callable[[], str]]:
    """Run a server as user ONE; yield a function that returns its next line."""
    command = [sys.executable, "-u", "-c", OTHERS + textwrap.dedent(code), str(ONE)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield lambda: server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@needs_root
def test_another_user_reads_nothing(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("HOME", folder)
        monkeypatch.delenv("XDG_CONFIG_HOME")
        source = Path(job_token.find_token("job", "10.0.0.1:1").source)
        for directory in (source.parent, source.parent.parent):
            directory.chmod(0o755)  # not even so
        pid = os.getpid()
        said = as_user(ONE, f"print(opened({str(source)!r}), opened('/proc/{pid}/environ'))")
        assert said == "denied denied\n"


@needs_root
def test_another_user_does_not_call():
    server = """
        listener = listen_unix()
        listener.setblocking(True)
        print(listener.getsockname()[1:].decode())
        while True:
            print(may_call(listener.accept()[0]))
    """
    with serving(server) as line:
        call = f"socket.socket(socket.AF_UNIX).connect('\\0{line()}')"
        for user, may in ((ONE, "True"), (OTHER, "False"), (0, "True")):
            as_user(user, call)
            assert line() == may


@needs_root
def test_jax_s_service_lets_no_other_user_in():
    server = """
        listener, behind = gate(is_open=True)
        print(listener.getsockname()[1])
        answer(behind)
    """
    with serving(server) as line:
        port = int(line())
        mapped = f"{port}, socket.AF_INET6, '::ffff:127.0.0.1'"
        both = f"print([call({port}), call({mapped})])"
        assert as_user(OTHER, both) == "['', '']\n"
        assert as_user(ONE, both) == "['!', '!']\n"


@needs_root
def test_a_connection_that_is_closed_early_is_of_no_user():
    server = """
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1])
        near = listener.accept()[0]
        near.recv(100)
        time.sleep(0.5)  # the kernel shows what is closed by then as root's
        print(may_call(near, root_serves_all=False))
    """
    with serving(server) as line:
        as_user(OTHER, f"socket.create_connection(('127.0.0.1', {line()})).sendall(b'PRI')")
        assert line() == "False"


@needs_root
def test_host_proxy_refuses_other_users():
    """It would prove the token for a process of that user."""
    server = """
        listener, behind = gate(is_open=False)
        selector = selectors.DefaultSelector()
        service = listener.getsockname()
        proxies = ProxiedConnections(selector, socket.AF_INET, service, secret="a secret")
        proxies.listen()
        threading.Thread(target=answer, args=[behind], daemon=True).start()
        print(listener.getsockname()[1], proxies.address.rpartition(":")[2])
        while True:
            for key, mask in selector.select():
                key.data(mask)
    """
    with serving(server) as line:
        own, proxy = map(int, line().split())
        assert as_user(OTHER, f"print([call({own}), call({proxy})])") == "['', '']\n"
        assert as_user(ONE, f"print([call({own}), call({proxy})])") == "['', '!']\n"


def test_no_log_and_no_command_line_has_the_token(tmp_path, child_env):
    (tmp_path / "script.py").write_text(
        "import os, shoal, time\nshoal.initialize()\n"
        "while not os.path.exists('over'): time.sleep(0.01)\n"
        "if shoal.process_index() == 1: raise ValueError('no data')\nshoal.barrier('never')\n"
    )
    warden = Warden(0)
    env = {**child_env, MARK: warden.mark, "SHOAL_FAILURE_GRACE_S": "0.3"}
    run = [sys.executable, "-m", "shoal", "run", "-n", "2", "--log-dir", "logs", "script.py"]
    started = Started(run, tmp_path, env)
    try:
        record = tmp_path / "logs/job.json"
        while not record.exists():
            time.sleep(0.01)
        token = json.loads(record.read_text())["token"]
        lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(warden.mark))
        assert lines.count(b"shoal") >= 3
        assert token.encode() not in lines
        (tmp_path / "over").touch()
        assert started.code() == 1
        logs = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
        assert len(logs) >= 4, "of both processes, both services, and the report"
        shown = started.said + "".join(path.read_text() for path in logs)
        assert "no data" in shown
        assert token not in shown
    finally:
        started.end()
        warden.close()


def test_the_same_user_can_join(tmp_path, child_env):
    (tmp_path / "script.py").write_text("import shoal\nshoal.initialize()")
    host, port = quiet_row(1)
    where = {"SHOAL_COORDINATOR": f"{host}:{port}", "SHOAL_NUM_PROCESSES": "2"}
    env = {**child_env, **where, "SHOAL_PROCESS_ID": "0", "SHOAL_WARN_AFTER_S": "0.1"}
    started = Started([sys.executable, "script.py"], tmp_path, env)
    try:
        started.until("missing: process 1")
        place = ServerAddress(f"{host}:{port}", observed_tokens(f"{host}:{port}"))
        with contextlib.closing(Observer("test", place)) as observer:
            assert [one.process for one in observer.roll().members] == [0, 1]
    finally:
        started.end()
