"""What a launch shows, logs, and tells its processes."""

from __future__ import annotations

import json
import os
import pty
import queue
import re
import subprocess
import threading

import pytest

from terminals import read_to_end

APART = (
    "shoal run: no process has joined the job, by shoal.initialize() or "
    "jax.distributed.initialize(): unless they joined by other means, these are 2 separate programs"
)
SPEAK = """
    import os, sys
    me = os.environ["RANK"]
    print("out", me, *sys.argv[1:])
    print("err", me, file=sys.stderr)
    sys.stdout.buffer.write(bytes([0, 255, 13, 10]) + b"no end of line " + me.encode())
"""


def test_lines_are_led_by_their_process_and_all_are_logged(launch):
    finished = launch.run(
        "-n", "3", "--only", "0,2", "--log-dir", "logs", script=SPEAK, arguments=("-n", "--only")
    )
    assert finished.code == 0
    assert sorted(finished.err.splitlines()[:-1]) == ["p0| err 0", "p2| err 2"]
    assert finished.lines == sorted(
        line
        for me in (0, 2)
        for line in (
            f"p{me}| out {me} -n --only",
            f"p{me}| \0\udcff",
            f"p{me}| no end of line {me}",
        )
    )
    for me in range(3):
        logged = (launch.folder / f"logs/p{me:04d}.log").read_bytes()
        lines = [b"out %d -n --only" % me, b"err %d" % me, b"\0\xff\r", b"no end of line %d" % me]
        assert sorted(line for line in logged.split(b"\n") if line) == sorted(lines)
    assert launch.leaves_nobody()


def test_lines_stand_alone_on_request(launch):
    finished = launch.run("-n", "2", "--no-prefix", script="print('well')")
    assert finished.lines == ["well", "well"]
    assert finished.err == f"{APART}\n"
    assert launch.run(script="print('alone')").err == ""


def test_missing_joins_are_printed_while_the_processes_run(launch):
    script = """
        import pathlib, time
        import jax.numpy as jnp
        jnp.ones(3).sum()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    """
    launch.start("-n", "2", "--devices", "1", script=script)
    assert launch.popen.stderr.readline() == f"{APART}\n"
    (launch.folder / "go").touch()
    assert launch.finish() == (0, "", "")  # not once more


def test_the_launcher_learns_when_the_devices_of_a_program_of_jax_alone_exist(launch):
    script = """
        import os
        import jax
        from shoal.runtime.system.progress_file import has_devices
        path = os.environ["SHOAL_PROGRESS_FILE"]
        jax.eval_shape(jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((3,), "float32"))
        print(has_devices(path))
        jax.numpy.ones(3)
        print(has_devices(path))
    """
    finished = launch.run("--no-prefix", "--devices", "1", script=script)
    assert finished.out.split() == ["False", "True"], finished.err


def test_two_jobs_do_not_write_into_one_folder(launch):
    """Both begin at the same moment; the one that is second does not begin."""
    script = """
        import pathlib, time
        print("runs", flush=True)
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    """
    both = [launch.start("-n", "2", "--log-dir", "logs", script=script) for _ in range(2)]
    ended = queue.SimpleQueue()
    for popen in both:
        threading.Thread(target=lambda p=popen: ended.put((p, *p.communicate(timeout=60)))).start()
    second, out, err = ended.get(timeout=60)
    (launch.folder / "go").touch()
    first, out_of_first, _ = ended.get(timeout=60)
    assert (first.returncode, second.returncode, out) == (0, 2, "")
    assert out_of_first.count("runs") == 2
    assert "shoal: run: --log-dir 'logs' holds the logs of `shoal run -n 2 --log-dir logs " in err
    assert f"` (pid {first.pid}), running since 20" in err
    assert launch.run("-n", "2", "--log-dir", "logs", script=script).code == 0


def test_temporary_logs_go_when_all_is_well_and_stay_when_it_is_not(launch):
    assert launch.run("-n", "2", script="print('well')").code == 0
    assert list(launch.temporary.iterdir()) == []
    assert launch.run("-n", "2", script="raise SystemExit(3)").code == 3
    (kept,) = launch.temporary.iterdir()
    assert {path.name for path in kept.iterdir()} >= {"p0000.log", "p0001.log"}


def test_processes_get_the_variables_of_shoal_jax_and_torchrun(launch):
    stale = {"JAX_COORDINATOR_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launch.env |= stale | {"RANK": "7", "MINE": "kept"}
    finished = launch.run(
        *("-np", "2", "--devices", "3"),
        script="import json, os; print(json.dumps(dict(os.environ)))",
    )
    envs = [json.loads(line.partition("| ")[2]) for line in finished.lines]
    for index, env in enumerate(envs):
        expected = {
            "SHOAL_NUM_PROCESSES": "2", "SHOAL_PROCESS_ID": str(index),
            "SHOAL_VIRTUAL_DEVICES": "3", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3",
            "JAX_COORDINATOR_ADDRESS": env["SHOAL_JAX_SERVICE"],
            "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index),
            "RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "PYTHONUNBUFFERED": "1", "MINE": "kept",
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == expected
        assert not stale.keys() & env.keys()
    shared = [(env["SHOAL_COORDINATOR"], env["SHOAL_TOKEN"], env["MASTER_PORT"]) for env in envs]
    assert shared[0] == shared[1]
    assert len(shared[0][1]) >= 16
    addresses = [envs[0]["SHOAL_COORDINATOR"], envs[0]["SHOAL_JAX_SERVICE"]]
    ports = {address.rpartition(":")[2] for address in addresses} | {envs[0]["MASTER_PORT"]}
    assert len(ports) == 3


def test_one_process_reads_our_input_and_several_read_none(launch):
    script = "import sys; print(repr(sys.stdin.read()))"
    launch.start(script=script, stdin=subprocess.PIPE)
    launch.popen.stdin.write("to one")
    assert launch.finish().out == "p0| 'to one'\n"
    launch.start("-n", "2", script=script, stdin=subprocess.PIPE)
    launch.popen.stdin.write("to nobody")
    assert launch.finish().lines == ["p0| ''", "p1| ''"]


def test_job_ends_when_its_output_has_no_reader(launch):
    launch.start("-n", "2", script="while True: print('x' * 70)")
    launch.popen.stdout.readline()
    launch.popen.stdout.close()
    launch.popen.stdout = None
    _, err = launch.popen.communicate(timeout=60)
    assert launch.popen.returncode == 128 + 13
    assert "the output has no reader" in err
    assert launch.leaves_nobody()


def show_on_terminal(launch, script="print('\\033[31mred')", **env):
    """Return what a terminal gets from a launch of two processes, and the exit code."""
    launch.env |= env
    ours, theirs = pty.openpty()
    launch.start("-n", "2", script=script, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = read_to_end(ours)
    return sorted(shown.decode().split("\r\n")), launch.popen.wait(timeout=60)


def test_a_terminal_gets_colours(launch):
    shown, code = show_on_terminal(launch, TERM="xterm")
    assert (shown, code) == (
        [
            "",
            "\x1b[33mp1|\x1b[0m \x1b[31mred\x1b[0m",
            "\x1b[36mp0|\x1b[0m \x1b[31mred\x1b[0m",
            APART,
        ],
        0,
    )


def test_a_terminal_without_colours_gets_none_of_ours(launch):
    shown, code = show_on_terminal(launch, TERM="xterm", NO_COLOR="1")
    assert (shown, code) == (["", "p0| \x1b[31mred\x1b[0m", "p1| \x1b[31mred\x1b[0m", APART], 0)


def shown_to_a_person(launch, *options, **script):
    """Return the lines that a terminal gets from a good run of one process."""
    ours, theirs = pty.openpty()
    launch.start("--no-prefix", *options, **script, stdout=theirs, stderr=theirs)
    os.close(theirs)
    lines = read_to_end(ours).decode().splitlines()
    assert launch.popen.wait(timeout=60) == 0
    return lines


def test_a_good_run_says_so_on_a_terminal(launch):
    trained, last = shown_to_a_person(launch, script="print('trained')")
    assert trained == "trained"
    assert re.fullmatch(r"shoal run: finished after \d+\.\d s: 1 process", last)
    assert shown_to_a_person(launch, "--quiet", script="print('trained')") == ["trained"]


def test_a_good_run_prints_nothing_of_its_own_in_a_pipe(launch):
    assert launch.run("--no-prefix", script="print('trained')") == (0, "trained\n", "")


MISPLACED = "shoal run: {} after script.py goes to it; options of shoal run precede the script"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("import jax; jax.devices", ("--devices", "2"), "--devices"),
        (
            "x_n = 1",
            ("-n", "4", "--log-dirs=x", "--log_dir=x", "--log-dir=x"),
            "-n, --log_dir, --log-dir",
        ),
        ("def main(devices: int): ...", ("--devices", "2"), ""),
        ("parser = ['--devices', '-n']", ("--devices", "2", "-n", "3"), ""),
        ("flags = [('log_dir', '')]", ("--log-dir=x", "--help", "-m"), ""),
    ],
)
def test_options_after_the_script_are_the_scripts(launch, script, arguments, words):
    *notes, last = shown_to_a_person(launch, script=script, arguments=arguments)
    assert notes == ([MISPLACED.format(words)] if words else [])
    assert "finished" in last
    if words:
        assert shown_to_a_person(launch, "--quiet", script=script, arguments=arguments) == []


def test_job_json_is_next_to_the_logs_while_the_job_runs(launch):
    finished = launch.run(
        *("-n", "2", "--log-dir", "logs"),
        script="""
            import json, os, pathlib, stat, time
            path = pathlib.Path("logs/job.json")
            while not path.exists():
                time.sleep(0.01)
            told = json.loads(path.read_text())
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert told["coordinator"] == os.environ["SHOAL_COORDINATOR"]
            assert told["jax_service"] == os.environ["SHOAL_JAX_SERVICE"]
            assert told["token"] == os.environ["SHOAL_TOKEN"]
            assert told["processes"][int(os.environ["RANK"])] == os.getpid()
            assert set(told["services"]) == {"coordinator", "JAX service"}
            os.kill(told["launcher"], 0)
        """,
    )
    assert finished.code == 0, finished
    assert not (launch.folder / "logs/job.json").exists()
    assert (launch.folder / "logs/p0001.log").exists()


LOGS = """
    import os, sys, threading
    import shoal
    shoal.log("before")
    print("torn?", end="", file=sys.stderr, flush=True)
    shoal.initialize(virtual_devices=1)
    me = shoal.process_index()
    threads = [
        threading.Thread(target=lambda n=n: [shoal.log(str(n) * 300) for _ in range(50)])
        for n in range(4)
    ]
    with shoal.step(3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shoal.barrier("all have said")
    shoal.shutdown()
    shoal.log("after")
"""


def test_lines_of_log_are_whole_and_of_process_0_in_a_pipe_and_on_a_terminal(launch):
    said = ["before", "after", *(f"step 3: {str(n) * 300}" for n in range(4) for _ in [0] * 50)]
    wanted = sorted(f"p0| {line}" for line in said)
    finished = launch.run("-n", "2", script=LOGS)
    assert finished.code == 0, finished
    assert sorted(finished.lines) == wanted
    shown, code = show_on_terminal(launch, LOGS, TERM="xterm", NO_COLOR="1")
    assert code == 0
    assert (
        sorted(line for line in shown if line.startswith(("p0| step", "p0| a", "p0| b"))) == wanted
    )
    assert not any(line.startswith("p1| step") for line in shown)


def test_a_later_job_with_fewer_processes_leaves_no_logs_of_an_earlier_one(launch):
    fails = "import sys; print('Error', flush=True); sys.exit(3)"
    logs = launch.folder / "logs"
    before = launch.run("-n", "3", "--max-restarts", "1", "--log-dir", "logs", script=fails)
    assert before.code == 3
    (logs / "attempt0" / "notes.txt").write_text("mine")
    launch.run("-n", "3", "--log-dir", "logs", script=fails)
    assert (logs / "p0002.log").exists()
    after = launch.run("--log-dir", "logs", script="print('fine')")
    assert after.code == 0
    found = {str(path.relative_to(logs)) for path in logs.rglob("*") if path.is_file()}
    assert found == {"attempt0/notes.txt", "coordinator.log", "jax_service.log", "p0000.log"}
    assert (logs / "p0000.log").read_text() == "fine\n"
