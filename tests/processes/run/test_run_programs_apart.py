"""A program over all devices that one process alone runs: a warning if it returns, else a report.

The shape of https://github.com/marin-community/marin/issues/5319: on a resume, the logger of
process 0 returned early, while the others did eager arithmetic on replicated global arrays.
"""

from __future__ import annotations

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
"""
RETURNS = """
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("shoal").addHandler(handler)
if here == 0:
    print("loss", loss / 2)  # alone
    jax.jit(lambda x: x * 3).lower(loss).compile().cost_analysis()
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
rows = shoal.put(np.arange(8.0, dtype="float32"), shoal.Layout(mesh, "data"))
evaluate = jax.jit(lambda x: x.sum())
if here == 0:
    print(float(evaluate(rows)))  # alone
shoal.barrier("end")
"""


def line_of(script):
    lines = script.splitlines()
    return f"script.py:{next(n for n, line in enumerate(lines, 1) if '# alone' in line)}"


def test_what_one_process_alone_computes_is_one_warning(launch):
    launch.env["SHOAL_HEARTBEAT_S"] = "0.2"
    script = HEAD + RETURNS
    finished = launch.run("-n", "2", script=script)
    assert finished.code == 0, finished.err
    text, (words,) = "\n".join(finished.lines), [w for w in finished.lines if "alone" in w]
    assert "p0| loss 4.0" in text
    assert "p0| 2 in all" in text
    # How many more there are depends on which heartbeat is first: see test_place_wire.
    assert words.partition(": ")[2].removesuffix(" (1 more difference: shoal.job_status())") == (
        "process 0 alone has compiled jit(true_divide) for 2 devices of processes 0-1 at "
        f"{line_of(script)}; if it runs it, it may wait for the others"
    )


def test_a_hang_names_the_program_and_its_process_first(launch):
    launch.env["SHOAL_HEARTBEAT_S"] = "0.2"
    script = HEAD + HANGS
    finished = launch.run("-n", "2", "--stalled-after", "3s", script=script)
    assert finished.code == 77, finished.err
    report = finished.err[finished.err.index("shoal run: failed") :].splitlines()
    assert report[1].startswith(
        "  Process 0 alone has compiled jit(_lambda) for 2 devices of processes 0-1 at "
        f"{line_of(script)}; if it runs it"
    )
