"""However a program ends, the others hear its own words, whoever has hooked the interpreter.

Real processes at a real coordinator, with the guard of this process and without JAX.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from shoal.errors import PeerFailedError
from shoal.launch import child
from shoal.runtime.barrier import barrier
from shoal.runtime.client.over_tcp import join
from shoal.runtime.system.foreign_text import headline_of

PATIENCE_S = 60.0  # a deadline of the test itself: reached only when something is broken

HEAD = """
import atexit, os, sys, threading
from shoal.runtime.client.over_tcp import join
from shoal.runtime.exit.guard import ExitGuard

job = join(sys.argv[1], process=int(sys.argv[2]), num_processes=int(sys.argv[3]), timeout_s=60)
guard = ExitGuard()
guard.hook()
guard.watch(job, is_idle=lambda: True, issued_work=lambda: lambda: True, leave=job.close,
            compare=bool, parts_together=False)

class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def main(error=ValueError("no data\\nfor row 7")):
    raise error

"""
RAISED = "raised ValueError: no data (train.py:N (main))"
# What the program does then: its exit code, what the others are told, what it prints last.
ENDS = {
    "raises": ("main()", 1, RAISED, "for row 7"),
    "rich": ("import rich.traceback; rich.traceback.install(); main()", 1, RAISED, "for row 7"),
    "a hook that calls nobody": (
        "sys.excepthook = lambda kind, error, trace: print('mine', file=sys.stderr)\nmain()",
        1, RAISED, "mine",
    ),
    "a hook of the last moment": (
        "try:\n main()\nexcept ValueError:\n sys.excepthook = lambda *what: None\n raise",
        1, RAISED, "",
    ),
    "a hook that raises": ("sys.excepthook = lambda *what: 1 / 0\nmain()", 1, RAISED, "for row 7"),
    "a hook that raises, before ours": (
        "guard._excepthook = lambda *what: 1 / 0\nmain()", 1, RAISED, "for row 7",
    ),
    "a hook that waits": (
        "from threading import Event\n"
        "sys.excepthook = lambda *what: Event().wait(60) if job.members(timeout_s=60) else 0\n"
        "main()", None, RAISED, "",
    ),
    "a thread that never ends": (
        "threading.Thread(target=threading.Event().wait).start()\n"
        "sys.excepthook = lambda *what: None\nmain()", 1, RAISED, "ending it now",
    ),
    "an error of shoal, and a hook": (
        "from shoal.errors import DivergenceError; sys.excepthook = lambda *what: None\n"
        "main(DivergenceError('two sides'))",
        70, "raised shoal.errors.DivergenceError: two sides (train.py:N (main))", "",
    ),
    "no words": (
        "main(Unsayable())",
        1, "raised Unsayable: <exception str() failed> (train.py:N (main))",
        "Unsayable: <exception str() failed>",
    ),
    "only shown": (
        "try:\n main()\nexcept ValueError:\n sys.excepthook(*sys.exc_info())\nsys.exit(4)",
        4, "exited with code 4 (train.py:N (<module>))", "for row 7",
    ),
    "sys.exit of text": (
        "def check():\n sys.exit('no such file: x\\nlook')\ncheck()",
        1, "exited: no such file: x (train.py:N (check))", "look",
    ),
    "sys.exit while handling": (
        "try:\n main()\nexcept ValueError:\n sys.exit(3)", 3,
        "exited with code 3 (train.py:N (<module>)) while handling ValueError: no data "
        "(train.py:N (main))", "",
    ),
    "argparse": (
        "import argparse; argparse.ArgumentParser('train').parse_args(['-x'])", 2,
        "exited with code 2 (train.py:N (<module>))",
        "train: error: unrecognized arguments: -x",
    ),
    "sys.exit(0)": ("sys.exit(0)", 0, "left the job", ""),
    "sys.exit()": ("sys.exit()", 0, "left the job", ""),
    "a caught sys.exit": ("try:\n sys.exit(3)\nexcept SystemExit:\n pass", 0, "left the job", ""),
    "returns": ("", 0, "left the job", ""),
    "raise SystemExit": (
        "raise SystemExit('words')", 1,
        "left the job by SystemExit (exit code unknown), at train.py:N (<module>)", "words",
    ),
    "raise SystemExit under a launcher": (
        "def check():\n raise SystemExit('words')\ncheck()", 1,
        "exited: words (train.py:N (check))", "words",
    ),
    "raise SystemExit(3) under a launcher": (
        "raise SystemExit(3)", 3, "exited with code 3 (train.py:N (<module>))", "",
    ),
    "raise SystemExit(None) under a launcher": ("raise SystemExit", 0, "left the job", ""),
    "a hook under a launcher": ("sys.excepthook = lambda *what: None\nmain()", 1, RAISED, ""),
}  # fmt: skip

LEFT_OPEN = """
import functools, sys
from shoal.runtime.client.over_tcp import join
from shoal.runtime.exit.guard import ExitGuard

job = join(sys.argv[1], process=0, num_processes=1, timeout_s=60)
guard = ExitGuard()
guard.hook()
yes = "yes".isalpha  # a lambda would hold the program's names
guard.watch(job, is_idle=yes, issued_work=functools.partial(getattr, "yes", "isalpha"),
            leave=job.close, compare=bool, parts_together=False)
log = open("log.txt", "w")
log.write("epoch 0")
"""
# The end of a program that has left it open: its exit code.
LEAVES = {
    "": 0,
    "raise ValueError('no data')": 1,
    "import signal; from shoal.runtime.notices import Sources\n"
    "signal.signal(signal.SIGTERM, lambda *_: None)\n"
    "Sources(bool, bool).watch([signal.SIGTERM], (), (), 1.0, None)": 0,
}


@pytest.fixture
def ended(tmp_path, child_env):
    """Run all of them as one job with this process: {end: (what it is told, code, stderr)}."""
    count = len(ENDS) + 1
    place = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", str(count)]
    server = subprocess.Popen([*place, "--until-empty"], stdout=subprocess.PIPE, env=child_env)
    address = json.loads(server.stdout.readline())["address"]
    env = {**child_env, "SHOAL_HANG_TIMEOUT_S": "0.5"}
    programs = []
    for process, (end, (script, *_)) in enumerate(ENDS.items(), 1):
        path = tmp_path / str(process) / "train.py"
        path.parent.mkdir()
        path.write_text(HEAD + script + "\n")
        runner = [child.__file__] if "launcher" in end else []
        command = [sys.executable, *runner, str(path), address, str(process), str(count)]
        programs.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        yield from _told(address, count, programs)
        server.wait(PATIENCE_S)
    finally:
        for one in [*programs, server]:
            one.kill()
            one.communicate()


@pytest.mark.parametrize("end", LEAVES, ids=["returns", "raises", "watches signals"])
def test_files_that_a_program_leaves_open_are_written(end, tmp_path, child_env):
    """As at the end of any Python program, though threads of shoal may outlive its names."""
    place = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--processes", "1"]
    command = [*place, "--until-empty"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_env) as server:
        address = json.loads(server.stdout.readline())["address"]
        script = tmp_path / "train.py"
        script.write_text(LEFT_OPEN + end)
        program = [sys.executable, str(script), address, "0", "1"]
        done = subprocess.run(
            program, env=child_env, cwd=tmp_path, timeout=PATIENCE_S, stderr=subprocess.PIPE
        )
    assert done.returncode == LEAVES[end], done.stderr
    assert (tmp_path / "log.txt").read_text() == "epoch 0"


def _told(address, count, programs):
    me = join(address, process=0, num_processes=count, timeout_s=PATIENCE_S)
    told = {}
    for process, (end, program) in enumerate(zip(ENDS, programs, strict=True), 1):
        with pytest.raises(PeerFailedError) as caught:
            barrier.on(me, "after", processes=[0, process], timeout_s=PATIENCE_S)
        if ENDS[end][1] is None:
            program.kill()
        _, err = program.communicate(timeout=PATIENCE_S)
        told[end] = (caught.value, program.returncode, err)
    yield told
    me.close()


def test_peers_get_the_end_of_a_program_in_its_own_words(ended):
    found = {}
    for process, (end, (error, code, err)) in enumerate(ended.items(), 1):
        first, more = str(error), error.details.splitlines()
        fate = re.sub(r"\.py:[0-9]+ ", ".py:N ", first.partition(f"process {process} (")[2])
        fate = fate.partition(") ")[2]
        last = (err.splitlines() or [""])[-1].strip()
        expected = ENDS[end][1:]
        if expected[2] and expected[2] in last:
            last = expected[2]
        found[end] = (None if expected[0] is None else code, fate, last)
        assert all(line.startswith("  | ") for line in more)
        assert ("Traceback" in error.details) == ("raised" in fate or "while handling" in fate)
        assert headline_of(error.failed[process]) in first
    assert found == {end: tuple(expected) for end, (_, *expected) in ENDS.items()}
