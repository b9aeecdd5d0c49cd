"""Progress bars of several processes on a terminal, written as tqdm does."""

from __future__ import annotations

import os
import subprocess

import pytest

from terminals import open_terminal, read_to_end, screen

BARS = """
    import os, sys, time
    for step in range(41):
        bar = "#" * (step // 4)
        sys.stderr.write(f"\\r{step * 100 // 40:3d}%|{bar:10s}| {step}/40 [00:00<00:00]")
        sys.stderr.flush()
        time.sleep(0.03)
        if step == 20 and os.environ["RANK"] == "0":
            print("half")
    sys.stderr.write("\\n")
"""


def on_terminal(launch, *options: str, **popen: object) -> bytes:
    """Return what a terminal of 24 lines gets."""
    ours, theirs = open_terminal()
    launch.env |= {"TERM": "xterm", "NO_COLOR": "1"}
    launch.start(*options, script=BARS, **{"stdout": theirs, "stderr": theirs} | popen)
    os.close(theirs)
    shown = read_to_end(ours)
    assert launch.popen.wait(timeout=60) == 0
    return shown


def rows_of(lines: list[str], process: int) -> list[str]:
    return [line for line in lines if line.startswith(f"p{process}|")]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_one_row_of_each_process_is_redrawn(launch, processes):
    shown = on_terminal(launch, "-n", str(processes))
    lines = screen(shown)
    for process in range(processes):
        assert rows_of(lines, process)[-1] == f"p{process}| 100%|##########| 40/40 [00:00<00:00]"
        assert len(rows_of(lines, process)) == (2 if process == 0 else 1)
    assert rows_of(lines, 0)[0] == "p0| half"
    for at in range(0, len(shown), 7):  # at any time
        then = screen(shown[:at].rpartition(b"\x1b[?7h")[0])
        bars = [line for line in then if "%|" in line]
        assert len(bars) == len({line[:3] for line in bars})
    assert shown.count(b"%|") > 5 * processes


def test_without_the_terminal_for_itself_one_row_is_redrawn(launch):
    """The output goes elsewhere, perhaps to tee, which writes to the terminal, too."""
    shown = on_terminal(launch, "-n", "3", stdout=subprocess.PIPE)
    assert launch.popen.stdout.read() == "p0| half\n"
    lines = [line for line in screen(shown) if "%|" in line]
    assert sorted(line[:9] for line in lines) == ["p0| 100%|", "p1| 100%|", "p2| 100%|"]
