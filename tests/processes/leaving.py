"""What the processes do whose leaving is tested."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import shoal
from shoal.errors import ProcessLostError
from shoal.runtime.clouds import gce
from shoal.runtime.process import client

NOTICED_AFTER = 3  # turns


def rounds(plan: Iterable[tuple[str, int, int]], url: str, folder: Path) -> list[list[object]]:
    """Leave again and again, each time by another notice; return where, and why.

    Args:
      plan: for each round: the source, the stride of the steps, who gets the notice.
      url: of a metadata server, with a folder for each round.
    """
    here, first, told = shoal.process_index(), 2**31 - 40, []
    shoal.preemption.watch()
    for number, (source, stride, noticed) in enumerate(plan):
        give = notice_by(source, url + f"{number}/", folder / str(number), here == noticed)
        step, turns = first, 0
        while not shoal.preempted(step):
            turns += 1
            if turns == NOTICED_AFTER and here == noticed:
                give()
            if turns % 4 == 0:  # nobody gets far ahead, and they are not in step either
                shoal.barrier(f"step {step}")
            step += stride
        notice = shoal.preemption.notice()
        told.append([step, notice.step, notice.process, notice.source, notice.reason])
        shoal.preemption.clear()
        first = step + stride
    return told


def notice_by(source, url, path, is_here):
    """Watch a source; return what lets it give a notice."""
    if source == "SIGTERM":
        return lambda: os.kill(os.getpid(), signal.SIGTERM)
    if source == "file":
        whole = path.with_suffix(".whole")
        if is_here:
            shoal.preemption.watch(signals=(), files=[path], every_s=0.01)
            whole.write_text("drained\n")
        return lambda: whole.rename(path) and None
    if is_here:
        shoal.preemption.watch(signals=(), poll=[gce(url)], every_s=0.01)
    request = urllib.request.Request(url + "be-preempted", method="PUT")
    return lambda: urllib.request.urlopen(request, timeout=30).close()


def long_phase(fifo: str) -> tuple[bool, bool]:
    """Process 1 computes while the others stop; it must stop where they did."""
    here = shoal.process_index()
    assert not shoal.preempted(10 * here)
    shoal.barrier("all have asked")
    if here == 1:
        Path(fifo).read_bytes()  # until the test resumes it
        assert shoal.preemption.notice() is not None
    elif here == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if here != 1:
        until_noticed()
    answers = shoal.preempted(20), shoal.preempted(21)
    print("has stopped", flush=True)
    return answers


def lose_one() -> list[object]:
    """Process 2 is frozen, then killed, while the others wait for the step to stop at."""
    here = shoal.process_index()
    assert not shoal.preempted(here)
    shoal.barrier("all watch")
    print("ready", flush=True)
    if here == 2:
        signal.pause()
    until_noticed()
    print("asks", flush=True)
    try:
        shoal.preempted(5)
    except ProcessLostError as error:
        lost = sorted(error.lost)
    alive = list(shoal.live_processes())
    return [lost, alive, shoal.preempted(1), shoal.preempted(2), shoal.preemption.notice().process]


def until_noticed() -> None:
    """Wait until this process knows of a notice."""
    stop = client().stop
    while True:
        changes = stop.changes
        if shoal.preemption.notice() is not None:
            return
        stop.wait(changes, 60.0)
