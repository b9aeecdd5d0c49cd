"""What is wrong with a command line is said all at once, before anything starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meta.source import ROOT
from shoal import __version__, settings
from shoal.cli import run as command
from shoal.cli.main import build
from shoal.cli.run import NodesRequest, RunRequest, check
from shoal.errors import UsageError
from shoal.launch.environment import Addresses, HostShare, JobStart, variables
from shoal.runtime.system.local_devices import num_processes, overruled


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "python_train.py").write_text("")
    (tmp_path / "tool.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "tool").write_bytes(b"\x7fELF\2\1")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "launch").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "application").mkdir()
    (tmp_path / "application/__main__.py").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


def refusal(*program: str, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        check(RunRequest(program, **options))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_devices_that_contradict_the_environment_are_named_once(monkeypatch):
    flag = "--xla_force_host_platform_device_count"
    outer = {"XLA_FLAGS": f"{flag}=5 -x", "JAX_NUM_CPU_DEVICES": "3", "PJRT_NPROC": "6"}
    assert overruled("--devices 2", 2, outer) == (
        f"--devices 2 overrides JAX_NUM_CPU_DEVICES=3 and XLA_FLAGS={flag}=5: "
        "2 CPU devices per process"
    )
    monkeypatch.setattr("shoal.runtime.system.local_devices.num_cores", lambda: 4)
    addresses = Addresses("h:1", "h:2", "h:3")
    job = {"process": 0, "start": JobStart(HostShare(0, 0, 1), 1, addresses, "")}
    env = variables(outer, devices=8, **job)
    assert overruled("initialize(virtual_devices=8)", 8, env) == ""
    assert (env["XLA_FLAGS"], env["PJRT_NPROC"]) == ("-x", "16")
    assert variables(outer, devices=None, **job)["XLA_FLAGS"] == outer["XLA_FLAGS"]


def test_valid_requests_pass():
    assert check(RunRequest(("train.py",))) == (1, None, frozenset({0}), None, None, None, None, "")
    checked = check(RunRequest(("train.py", "--x"), False, "4", "2", "3, 0"))
    assert checked == (4, 2, frozenset({0, 3}), None, None, None, None, "")
    for program in ("launch", "application", "run.sh"):
        check(RunRequest((program,)))
    check(RunRequest(("ls", "-l"), no_python=True))
    check(RunRequest(("./run.sh",), no_python=True))
    check(RunRequest(("train",), module=True))
    check(RunRequest(("json.tool",), module=True))


def test_all_offenders_are_named_at_once():
    words = refusal("trian.py", processes="0", devices="-1", only="1,x", log_dir="train.py")
    assert words.startswith("run: 5 problems")
    for part in ("-n 0", "--devices -1", "'x'", "did you mean 'train.py'?", "--log-dir 'train.py'"):
        assert part in words


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ((), "no program"),
        (("python3.11", "train.py"), "leave it out"),
        (("ls",), "'ls' is a command, not a script: pass --no-python to start it"),
        (("tool",), "'tool' is neither a Python script nor executable: chmod +x tool"),
        (("tool.sh",), "'tool.sh' is neither a Python script nor executable: chmod +x tool.sh"),
        (("empty",), "holds no __main__.py"),
        (("nowhere/train.py",), "there is no directory 'nowhere'"),
        (("python_trian.py",), "there is no script 'python_trian.py'; did you mean"),
        (("2", "train.py"), "there is no script '2'; for that many processes, pass -n 2"),
        (("completely_different",), "there is no script 'completely_different'"),
    ],
)
def test_programs_that_cannot_be_run_are_refused(program, words):
    assert words in refusal(*program)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("nowhere_at_all", {}, "there is no command 'nowhere_at_all' on the PATH"),
        ("run.sh", {}, "no command 'run.sh' on the PATH; did you mean './run.sh'?"),
        ("./tool.sh", {}, "there is no command './tool.sh', or it is not executable"),
        ("ls", {"module": True}, "--no-python is for a command, -m for a module of Python"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(command, options, words):
    assert words in refusal(command, no_python=True, **options)


@pytest.mark.parametrize("no_python", [False, True])
@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("#! /nowhere/sh -e\n", "'./first.sh' is started by '/nowhere/sh', which is not there"),
        ("echo it\n", "the first line of './first.sh' must name what starts it, as #!/bin/sh"),
        ("#!/bin/sh\r\n", r"'./first.sh' is started by '/bin/sh\r', which is not there; its lines"),
    ],
)
def test_a_script_whose_first_line_names_no_program_is_refused(no_python, first, words):
    Path("first.sh").write_bytes(first.encode())
    Path("first.sh").chmod(0o755)
    assert words in refusal("./first.sh", no_python=no_python)


def test_a_module_that_is_not_there_is_refused():
    assert "there is no module 'trian'; did you mean 'train'?" in refusal("trian.x", module=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pkg.trian", "there is no module 'pkg.trian'; did you mean 'pkg.train'?"),
        ("pkg.deep.trian", "there is no module 'pkg.deep.trian'; did you mean 'pkg.deep.train'?"),
        ("pkg.train.py", "no module 'pkg.train.py': 'pkg.train' is not a package; leave out .py"),
        ("pkg.train.more", "there is no module 'pkg.train.more': 'pkg.train' is not a package"),
        ("pkg", "package 'pkg' holds no __main__.py: pass -m pkg.MODULE"),
        ("space.deep.trian", "there is no module 'space.deep.trian'; did you mean 'space.deep.tr"),
        ("space.deep", "package 'space.deep' holds no __main__.py: pass -m space.deep.MODULE"),
        ("json.toll", "there is no module 'json.toll'; did you mean 'json.tool'?"),
        ("pkg..train", "there is no module 'pkg.'"),
        (".train", "there is no module ''"),
    ],
)
def test_a_module_that_a_package_does_not_hold_is_refused(packages, name, words):
    assert words in refusal(name, module=True)


@pytest.mark.parametrize(
    "name", ["pkg.train", "pkg.deep.train", "space.deep.train", "runs", "sets_path.anything"]
)
def test_a_module_is_found_without_running_its_packages(packages, name):
    check(RunRequest((name,), module=True))


@pytest.fixture
def packages():
    """Write packages, regular ones whose code must not run, and namespaces."""
    for file in ("pkg/train.py", "pkg/deep/train.py", "space/deep/train.py", "runs/__main__.py"):
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for package in ("pkg", "pkg/deep", "runs"):
        Path(package, "__init__.py").write_text("raise SystemExit('ran')")
    Path("sets_path").mkdir()
    Path("sets_path/__init__.py").write_text("__path__ = find()")


@pytest.mark.parametrize("only", ["4", "0,4", "4,5"])
def test_only_refuses_ranks_outside_the_job(only):
    words = refusal("train.py", processes="4", only=only)
    assert "--only 4: the ranks of -n 4 are 0 to 3" in words
    assert ("--only 5" in words) == ("5" in only)


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        ("4", "--stdin 4: the ranks of -n 4 are 0 to 3"),
        ("0,1", "--stdin '0,1': one process only can read it"),
        ("-", "--stdin '-': '-' is not a rank"),
    ],
)
def test_one_process_at_most_reads_standard_input(stdin, words):
    assert words in refusal("train.py", processes="4", stdin=stdin)


@pytest.mark.parametrize("count", ["two", "1.5", "", "²"])
def test_counts_are_whole_numbers(count):
    assert "must be a whole number, at least 1" in refusal("train.py", processes=count)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a place that takes no files")
def test_a_log_dir_that_takes_no_files_is_refused():
    with pytest.raises(UsageError, match="--log-dir '/proc/self': "):
        command.run(["train.py"], log_dir="/proc/self")


def test_without_a_place_for_temporary_logs_a_log_dir_is_asked_for(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "nowhere")
    with pytest.raises(UsageError, match=r"no temporary directory for the logs .*--log-dir"):
        command.run(["train.py"])


def test_windows_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(command.sys, "platform", "win32")
    with pytest.raises(UsageError, match="requires Linux or macOS; on Windows use WSL"):
        command.run(["train.py"])


def test_by_default_a_job_ends_within_15_s_of_its_first_failure():
    failure_grace, grace = (
        float(settings.SETTINGS[name].default)
        for name in ("SHOAL_FAILURE_GRACE_S", "SHOAL_GRACE_S")
    )
    assert failure_grace + grace <= 13  # and up to a second each for leftovers and last words


def shoal(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_the_command_line_refuses_with_code_2(child_env):
    ended = shoal("run", "-n", "0", "--only", "x", "train.py", env=child_env)
    assert ended.returncode == 2
    assert ended.stderr.startswith("shoal: run: 2 problems")
    assert shoal("run", "--no-such-option", "train.py", env=child_env).returncode == 2
    ended = shoal("run", "train.py", env=child_env | {"SHOAL_GRACE_S": "soon"})
    assert ended.returncode == 2
    assert "SHOAL_GRACE_S='soon'" in ended.stderr


def test_help_helps(child_env):
    ended = shoal("run", "--help", env=child_env)
    assert ended.returncode == 0
    for words in ("shoal run -n 4 --devices 2 train.py", "--only", "SHOAL_GRACE_S", "Exit code"):
        assert words in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 82


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_as_good_as_no_reader(closed, tmp_path):
    (tmp_path / "main.py").write_text("print('said'); open('done', 'w').close()")
    line = f"{shlex.quote(sys.executable)} -m shoal run main.py {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "done").exists()
    assert done.stdout == ("" if ">&-" in closed.split() else "p0| said\n")


def test_the_version():
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"shoal {__version__}\n"


@pytest.mark.parametrize(
    ("options", "restarts"),
    [
        ({}, None),
        ({"max_restarts": "0"}, (0, False)),
        ({"max_restarts": "3", "restart_preempted": True}, (3, True)),
        ({"restart_preempted": True}, (0, True)),
    ],
)
def test_restart_options_determine_the_restarts(options, restarts):
    assert check(RunRequest(("train.py",), **options)).restarts == restarts


@pytest.mark.parametrize("number", ["-1", "1" * 5000])
def test_a_wrong_number_of_restarts_is_refused(number):
    assert f"--max-restarts {number} must be a whole number, at least 0" in refusal(
        "train.py", max_restarts=number
    )


HERE = {"node": "1", "coordinator": "a:8476"}


def nodes(**options: str) -> object:
    return check(RunRequest(("train.py",), nodes=NodesRequest(**options))).nodes


def test_a_job_on_one_host_needs_no_address():
    assert nodes() is nodes(nodes="1") is nodes(nodes="1", node="0", coordinator="a:1") is None


def test_the_place_of_a_host_is_taken_in_either_spelling(monkeypatch):
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    order = nodes(nodes="2", **HERE)
    assert order == (2, 1, "a", 8476, ("secret", "SHOAL_TOKEN", ""), 300.0, 10.0, 10.0, False)
    assert nodes(nodes="2", node="1", master_host="a", master_port="8476") == order
    assert nodes(nodes="2", node="1", master_host="a").port == 29500
    assert nodes(nodes="2", master_host="a", master_port="8476", **HERE) == order
    assert nodes(nodes="2", node="0", coordinator="[::1]:1").host == "::1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HERE, "--node-rank and --coordinator require --nnodes N"),
        ({"master_port": "1"}, "--master-port requires --nnodes N"),
        ({"nodes": "2", "node": "1"}, "--nnodes requires --coordinator HOST:PORT"),
        ({"nodes": "2", "node": "1", "master_port": "1"}, "--master-port 1 requires --master-addr"),
        ({"nodes": "2", "coordinator": "a:1"}, "--nnodes 2 requires --node-rank"),
        ({**HERE, "nodes": "1:2"}, "the number of hosts is fixed; pass --nnodes 2"),
        ({**HERE, "nodes": "0"}, "--nnodes 0 must be a whole number, at least 1"),
        ({**HERE, "nodes": "1"}, "--node-rank 1: the ranks of --nnodes 1 are 0 to 0"),
        ({**HERE, "nodes": "2", "node": "-1"}, "--node-rank -1 must be a whole number, at least 0"),
        ({**HERE, "nodes": "2", "coordinator": "a"}, "--coordinator: 'a' is not an address"),
        ({**HERE, "nodes": "2", "coordinator": "a:0"}, "its port must be 1 to 65532"),
        ({**HERE, "nodes": "2", "coordinator": "a:65533"}, "its port must be 1 to 65532"),
        (
            {"nodes": "2", "node": "0", "master_host": "a", "master_port": "http"},
            "--master-port http must be a whole number, at least 1",
        ),
        (
            {**HERE, "nodes": "2", "master_host": "b"},
            "--coordinator a:8476 is not --master-addr and -port, b:29500",
        ),
    ],
)
def test_a_wrong_place_is_refused(options, words):
    assert words in refusal("train.py", nodes=NodesRequest(**options))


def test_options_of_torchrun_that_are_not_taken_say_what_to_write(child_env):
    for option, words in (
        ("--rdzv-backend=c10d", "the hosts join at --coordinator"),
        ("--standalone", "without --nnodes all processes run on this host"),
    ):
        ended = shoal("run", option, "train.py", env=child_env)
        assert ended.returncode == 2
        assert f"run: {option.partition('=')[0]} of torchrun is not an option here" in ended.stderr
        assert words in ended.stderr


@pytest.mark.parametrize(
    ("option", "whose", "words"),
    [
        (("--hostfile", "hosts"), "mpirun", "run the command on each host, with --nnodes N"),
        (("-hostfile", "hosts"), "mpirun", "run the command on each host, with --nnodes N"),
        (("--bind-to", "core"), "mpirun", "the system schedules the processes"),
        (("-x", "LANG"), "mpirun", "the processes get all variables"),
        (("--ntasks=4",), "srun", "pass -n N, the number of processes on this host"),
        (("-host", "a"), "mpirun", "run the command on each host, with --nnodes N"),
        (("-genv", "LANG", "C"), "mpirun", "the processes get all variables"),
        (("-t", "3"), "torchrun", "pass --log-dir DIR"),
        (("--timeout", "9"), "mpirun", "pass --stalled-after TIME"),
        (("--signals-to-handle=SIGUSR1",), "torchrun", "all signals are passed on"),
    ],
)
def test_options_of_other_launchers_say_what_to_write(option, whose, words, child_env):
    ended = shoal("run", *option, "train.py", env=child_env)
    name = "--" + option[0].partition("=")[0].lstrip("-")
    name = re.sub("^--(x|t|genv)$", r"-\1", name)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = f"shoal: run: {name} of {whose} is not an option here: "
    assert ended.stderr.startswith(said)
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_all_options_of_other_launchers_are_refused_at_once_but_not_those_of_the_script(child_env):
    given = ("--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv-id=7", "--standalone", "-x", "A=1")
    ended = shoal("run", *given, "train.py", "--tee", "3", env=child_env)
    first, *lines = ended.stderr.splitlines()
    assert (ended.returncode, first) == (2, "shoal: run: 4 problems")
    named = [line.split(" is not an option here: ")[0] for line in lines]
    wanted = ("--rdzv-backend", "--rdzv-id", "--standalone")
    assert named == [*(f"  - {one} of torchrun" for one in wanted), "  - -x of mpirun"]


@pytest.mark.parametrize("word", ["--hosts", "--nproc", "--standalon"])
def test_an_option_that_is_refused_is_not_proposed(word, child_env):
    ended = shoal("run", word, "2", "train.py", env=child_env)
    said = ended.stderr.partition(f"No such option: {word}")[2]
    assert set(re.findall(r"--?\w[\w-]*", said)) <= command._own_options(), ended.stderr
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("option", "proposed"),
    [
        ("--lr", ""),
        ("--batch-size=8", ""),
        ("--epochs", ""),
        ("-b", ""),
        ("--devcies", " (Possible options: --devices)"),
        ("--log-dri=x", " (Possible options: --log-dir)"),
    ],
)
def test_an_option_of_the_script_before_it_is_answered_by_its_place(option, proposed):
    ended = CliRunner().invoke(build(["run"]), ["run", "-n", "2", option, "1", "train.py"])
    name = option.partition("=")[0]
    words = f"No such option: {name}; options of the script come after the script{proposed}"
    assert (ended.exit_code, ended.output.splitlines()[-1]) == (2, f"Error: {words}")


@pytest.mark.parametrize(("count", "words"), [("gpu", "write -n auto"), ("cpu", "=cpu shoal run")])
def test_counts_of_torchrun_say_what_to_write(count, words):
    assert words in refusal("train.py", processes=count)


def test_the_page_on_other_launchers_has_all_of_their_options_and_only_ours():
    page = (ROOT / "docs/coming-from/torchrun-and-mpirun.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    theirs = {word for row in rows for word in re.findall(r"`(--?\w[\w-]*)", " ".join(row[:2]))}
    refused = {*command._INSTEAD, *command._INSTEAD_OF_FLAGS, *command._OF_OTHERS} - {"--ntasks"}
    assert refused - theirs == set()
    tables = [part.split("\n\n")[1] for part in page.split("\n## ")[1:4]]
    ours = [line.split(" | ")[-2] for table in tables for line in table.splitlines()[2:]]
    named = {word for cell in ours for word in re.findall(r"`(--?\w[\w-]*)", cell)}
    assert named - command._own_options() == set()


@pytest.mark.parametrize(
    ("env", "devices", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3,5"}, None, 3),
        ({"CUDA_VISIBLE_DEVICES": "2,3,5", "JAX_PLATFORMS": "cpu"}, None, 7),
        ({"CUDA_VISIBLE_DEVICES": "2,3,5"}, "2", 7),
        ({"CUDA_VISIBLE_DEVICES": ""}, None, 7),
    ],
)
def test_auto_means_one_process_for_each_gpu_or_core(env, devices, number, monkeypatch):
    monkeypatch.setattr("shoal.runtime.system.local_devices.num_cores", lambda: 7)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name.startswith("jax_cuda13"))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert check(RunRequest(("train.py",), processes="auto", devices=devices)).processes == number


def test_a_tpu_host_has_one_process(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "libtpu")
    assert num_processes({"TPU_VISIBLE_CHIPS": "0,1,2,3"}) == (1, "one for all TPU chips of a host")


def test_n_auto_prints_the_number_of_processes(child_env):
    number, why = num_processes({**child_env, "JAX_PLATFORMS": "cpu"})
    ended = shoal("run", "-n", "auto", "--devices", "1", "train.py", env=child_env)
    assert ended.returncode == 0
    assert ended.stdout.count("trained") == number
    assert re.match(rf"shoal run: -n auto: {number} process(es)?, {why}\n", ended.stderr)
