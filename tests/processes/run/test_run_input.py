"""Standard input of several processes: one of them has it."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

NO_INPUT = "  Process {0} has no standard input. To give it yours, pass --stdin {0}.\n"


def run(launch, *options: str, script: str, given: str):
    """Run it with this standard input."""
    launch.start(*options, script=script, stdin=subprocess.PIPE)
    launch.popen.stdin.write(given)
    launch.popen.stdin.close()
    launch.popen.stdin = None
    return launch.finish()


def test_one_process_of_several_reads_a_file(launch):
    script = "import sys; print(repr(sys.stdin.read()))"
    ended = run(launch, "-n", "3", "--stdin", "1", script=script, given="a file\n" * 2)
    assert ended.lines == ["p0| ''", "p1| 'a file\\na file\\n'", "p2| ''"]
    assert run(launch, "--stdin", "0", script=script, given="all").lines == ["p0| 'all'"]


BREAKS = """
    import shoal
    shoal.initialize(virtual_devices=1)
    answer = 6 * (7 + shoal.process_index())
    breakpoint()
    shoal.barrier("after it")
"""


@pytest.mark.parametrize("own", ["", "pdb.set_trace"])
def test_breakpoint_stops_in_the_process_with_input_alone(launch, own):
    launch.env |= {"PYTHONBREAKPOINT": own}
    ended = run(launch, "-n", "2", "--stdin", "1", script=BREAKS, given="p answer\nc\n")
    assert (ended.code, ended.err) == (0, "")
    assert "p1| (Pdb) 48" in ended.lines
    assert not any(line.startswith("p0| ") for line in ended.lines)


def test_breakpoint_on_a_terminal(launch):
    ours, theirs = pty.openpty()
    launch.env |= {"TERM": "xterm", "NO_COLOR": "1"}
    launch.start(
        "-n", "2", "--stdin", "0", script=BREAKS, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    for prompt, answer in ((b"(Pdb) ", b"p answer\n"), (b"42\r\np0| (Pdb) ", b"c\n")):
        while not shown.endswith(prompt):
            shown += os.read(ours, 1 << 16)
        os.write(ours, answer)
    assert launch.popen.wait(timeout=60) == 0
    os.close(ours)


@pytest.mark.parametrize(
    ("call", "error"),
    [("breakpoint()", "BdbQuit"), ("input('name?')", "EOFError")],
)
def test_a_process_that_wants_input_and_has_none_is_reported_with_the_option(launch, call, error):
    script = f"""
        import os
        if os.environ["RANK"] == "1":
            {call}
    """
    ended = launch.run("-n", "2", script=script)
    assert (ended.code, ended.verdict.endswith(f"process 1 of 2 raised {error}")) == (1, True)
    assert NO_INPUT.format(1) in ended.err
    ended = launch.run("-n", "1", script="raise EOFError('of a file')")
    assert "standard input" not in ended.err


def test_the_debugger_of_jax_without_input_is_reported_with_the_option(launch):
    script = """
        import jax
        import numpy as np
        import shoal
        from shoal import Layout
        shoal.initialize(virtual_devices=1)
        x = shoal.put(np.ones(2, "float32"), Layout(shoal.make_mesh({"data": -1}), "data"))
        @jax.jit
        def total(x):
            jax.debug.breakpoint()
            return x.sum()
        print(total(x))
    """
    ended = launch.run("-n", "2", script=script)
    assert ended.code == 1
    assert NO_INPUT.format(0) in ended.err
    ended = run(launch, "-n", "2", "--stdin", "0", script=script, given="c\n")
    assert (ended.code, ended.lines[-1]) == (0, "p1| 2.0"), ended
