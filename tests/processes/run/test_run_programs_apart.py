"""Programs over all devices that only some processes run: a warning if they return, else a report.

The shape of https://github.com/marin-community/marin/issues/5319: on a resume, the logger of
process 0 returned early, while the others did eager arithmetic on replicated global arrays.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("forks")  # its jobs begin as any do

HEAD = """
import logging
import numpy as np
import shoal
shoal.initialize(virtual_devices=1)
import jax
here = shoal.process_index()
mesh = shoal.make_mesh({"data": -1})
loss = shoal.put(np.float32(8.0), shoal.Layout(mesh))
shoal.barrier("start")
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("shoal").addHandler(handler)
"""
ALONE = """
if here == 0:
    print("loss", loss / 2)  # it is here
    jax.jit(lambda x: x * 3).lower(loss).compile().cost_analysis()
"""
LOGGER = """
def log(loss):
    if here == 0:  # a resumed run has logged this step already
        return
    print("loss", loss / 2, "and", loss * 3)  # it is here

log(loss)
"""
CONTINUES = """
while not np.sum(shoal.allgather(len(warned))):
    pass
for _ in range(9):
    shoal.barrier("more")
for words in warned:
    print(words)
if here == 0:
    print(len(shoal.job_status().programs), "in all")
"""
HANGS = """
rows = shoal.put(np.arange(6.0, dtype="float32"), shoal.Layout(mesh, "data"))

def log(rows):
    if here == 0:
        return
    print("mean", float(rows.mean()))  # it is here

log(rows)
shoal.barrier("end")
"""


def line_of(script):
    lines = script.splitlines()
    return f"script.py:{next(n for n, line in enumerate(lines, 1) if '# it is here' in line)}"


@pytest.mark.parametrize(
    ("processes", "program", "beginning", "end"),
    [
        (2, ALONE, "process 0 alone has", "; if it runs it, it may wait for the others"),
        (
            3, LOGGER, "processes 1-2 have",
            ", and process 0 has not; if they run it, they may wait for the others",
        ),
    ],
    ids=["a cost and a print", "a logger that returns early"],
)  # fmt: skip
def test_what_some_processes_compute_alone_is_one_warning(
    processes, program, beginning, end, launch
):
    launch.env["SHOAL_HEARTBEAT_S"] = "0.2"
    script = HEAD + program + CONTINUES
    finished = launch.run("-n", str(processes), script=script)
    assert finished.code == 0, finished.err
    text = "\n".join(finished.lines)
    (words,) = [line for line in finished.lines if "compiled" in line]
    assert text.count("loss 4.0") == (processes - 1)
    assert "p0| 2 in all" in text
    # How many more there are depends on which heartbeat is first: see test_coordinator_wire.
    assert words.partition(": ")[2].removesuffix(" (1 more difference: shoal.job_status())") == (
        f"{beginning} compiled jit(true_divide) for {processes} devices of processes "
        f"0-{processes - 1} at {line_of(script)}{end}"
    )


def test_a_hang_names_the_program_and_its_processes_first(launch):
    launch.env["SHOAL_HEARTBEAT_S"] = "0.2"
    script = HEAD + HANGS
    finished = launch.run("-n", "3", "--stalled-after", "3s", script=script)
    assert finished.code == 77, finished.err
    report = finished.err[finished.err.index("shoal run: failed") :].splitlines()
    assert report[1].startswith(
        "  Processes 1-2 have compiled jit(_mean) for 3 devices of processes 0-2 at "
        f"{line_of(script)}, and process 0 has not; if they run it, they may wait"
    )
