"""With `--no-prefix` the bytes of the processes arrive as they were written."""

from __future__ import annotations

import json
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

BYTES = [20 << 20, pytest.param(100 << 20, marks=pytest.mark.faults)]  # of all processes
PIPE_BYTES = 64 << 10
WAITING_BYTES = 1 << 20  # the launcher's, of what no reader has taken

PIECES = """
    import json, os, random, sys

    def pieces(process, kind, size):
        chance, num = random.Random(process), 0
        while size > 0:
            if kind == "random":
                piece = chance.randbytes(min(size, chance.randrange(1, 300_000)))
            elif kind == "one line":
                piece = str(process).encode() * min(size, 300_000)
            else:
                text = "\\u20ac\\\\\\r" * chance.choice([1, 10, 100, 7_000, 100_000])
                piece = json.dumps([process, num, text], ensure_ascii=False).encode() + b"\\n"
            yield piece
            size, num = size - len(piece), num + 1

    if __name__ == "__main__":
        for piece in pieces(int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])):
            sys.stdout.buffer.write(piece)
"""


def written(kind: str, processes: int, size: int) -> list[bytes]:
    """Return what each process of `PIECES` writes, so many bytes together."""
    names: dict[str, object] = {"__name__": "pieces"}
    exec(textwrap.dedent(PIECES), names)
    size //= processes
    return [b"".join(names["pieces"](process, kind, size)) for process in range(processes)]


def start(launch, *options: str, script: str, arguments: Iterable[str] = (), **popen: object):
    """Start it with binary streams."""
    return launch.start(
        *options, script=script, arguments=tuple(arguments), text=False, errors=None, **popen
    )


def peaks_of(launch, popen) -> int:
    """Return the largest resident size of the launcher's two processes, bytes, at its end."""
    peak = 0
    while popen.poll() is None:
        for pid in launch.pids(" run "):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            rows = [line.split() for line in status.splitlines() if line.startswith("VmHWM")]
            peak = max([peak, *(int(row[1]) << 10 for row in rows)])
        time.sleep(0.05)
    return peak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it reads sizes in /proc")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", BYTES)
@pytest.mark.parametrize("kind", ["random", "json", "one line"])
@pytest.mark.parametrize("processes", [1, 4])
def test_all_bytes_arrive_and_the_launcher_stays_small(launch, kind, processes, size):
    popen = start(
        launch, "-n", str(processes), "--no-prefix",
        script=PIECES, arguments=(kind, str(size // processes)),
    )  # fmt: skip
    peaks: list[int] = []
    watcher = threading.Thread(target=lambda: peaks.append(peaks_of(launch, popen)))
    watcher.start()
    came, _ = popen.communicate(timeout=200)
    watcher.join()
    assert popen.returncode == 0
    wanted = written(kind, processes, size)
    if processes == 1:
        assert came == wanted[0]
    else:  # whole lines, in any order
        lines = [line for data in wanted for line in data.split(b"\n")]
        assert sorted(filter(None, came.split(b"\n"))) == sorted(filter(None, lines))
        assert 0 <= len(came) - sum(map(len, wanted)) < processes  # ends of unfinished last lines
    if kind == "json":
        assert all(len(json.loads(line)) == 3 for line in came.splitlines())
    assert 0 < peaks[0] < 60 << 20, peaks


def test_carriage_returns_nulls_and_a_missing_end_of_line_stay(launch):
    data = b"10%\r20%\r\nend of line\r\n\0\xff\x1e[shoal\n\x1b[31mred, unfinished"
    script = f"import sys; sys.stdout.buffer.write({data!r})"
    assert start(launch, "--no-prefix", script=script).communicate(timeout=60)[0] == data
    came, _ = start(launch, "-n", "2", "--no-prefix", script=script).communicate(timeout=60)
    lines, _, rest = data.rpartition(b"\n")
    assert sorted(came.split(b"\n")) == sorted([*lines.split(b"\n"), rest] * 2)


def test_a_process_that_pauses_within_a_long_line_does_not_hold_up_the_others(launch):
    """Process 0 waits, within its line, for what process 1 does after its own output."""
    script = """
        import os, pathlib, sys, time
        if os.environ["RANK"] == "0":
            sys.stdout.write("0" * 500_000)
            sys.stdout.flush()
            pathlib.Path("begun").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
            print("0" * 500_000)
        else:
            while not pathlib.Path("begun").exists():
                time.sleep(0.01)
            for _ in range(500):
                print("1" * 1_000)
            pathlib.Path("go").touch()
    """
    came, _ = start(launch, "-n", "2", "--no-prefix", script=script).communicate(timeout=60)
    assert launch.popen.returncode == 0
    lines = came.splitlines()
    assert lines.count(b"1" * 1_000) == 500
    assert b"".join(line for line in lines if line.startswith(b"0")) == b"0" * 1_000_000


def test_the_last_bytes_wait_for_a_slow_reader(launch):
    size = WAITING_BYTES + 2 * PIPE_BYTES + 1
    script = f"import sys; sys.stdout.buffer.write(bytes({size}))"
    popen = start(launch, "--no-prefix", script=script)
    deadline_s = time.monotonic() + 60
    while not launch.pids("script.py") or launch.pids("child.py"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(1.5)  # longer than the launcher waits for a pipe that another process holds open
    assert len(popen.communicate(timeout=60)[0]) == size


def test_the_streams_stay_apart_and_those_of_one_pipe_do_not_cut_lines(launch):
    script = """
        import sys, threading
        def write(stream, letter):
            for _ in range(500):
                print(letter * 9_000, file=stream)
        threads = [
            threading.Thread(target=write, args=one)
            for one in ((sys.stdout, "o"), (sys.stderr, "e"))
        ]
        for thread in threads:
            thread.start()
    """
    out, err = start(launch, "-n", "2", "--no-prefix", script=script).communicate(timeout=60)
    assert set(out.splitlines()) == {b"o" * 9_000}
    assert set(err.splitlines()[:-1]) == {b"e" * 9_000}
    both, _ = start(
        launch, "-n", "2", "--no-prefix", script=script, stderr=subprocess.STDOUT
    ).communicate(timeout=60)
    lines = both.splitlines()
    assert len(lines) == 2001  # one of the launcher
    assert {b"o" * 9_000, b"e" * 9_000} < set(lines)
    assert len(set(lines)) == 3
