"""What the processes do whose saves and restores are interrupted at random moments."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
import signal
import sys
import threading
import time

import numpy as np

import shoal
from shoal.errors import DeadlineError, ShoalError

LEAVES = 30


def in_step(folder: str, rounds: int, seed: int) -> dict[str, int]:
    """Save and restore; in each round one process is interrupted. All stay in step."""
    gc.set_threshold(20)  # its callbacks, of which JAX has one, run often
    base = f"{folder}/base"
    me, count = shoal.process_index(), shoal.process_count()
    mesh = shoal.make_mesh({"x": -1})
    layout, other = shoal.Layout(mesh, "x", None), shoal.Layout(mesh, None, "x")
    host = {f"w{n}": np.full((64, 64), n, np.float32) for n in range(LEAVES)}
    state = shoal.put(host, layout)
    target = dict.fromkeys(state, other)
    shoal.save(base, state)
    shoal.restore(base, target)
    chance, took_s = random.Random(seed), [0.05, 0.05]
    counts = {"sent": 0, "raised": 0, "told": 0, "late": 0, "done": 0}
    sys.unraisablehook = functools.partial(_note_lost, counts)
    for number in range(rounds):
        is_save, fraction = chance.random() < 0.5, chance.random()
        began = time.monotonic()
        with contextlib.ExitStack() as ends:
            try:
                if number % count == me:
                    counts["sent"] += 1
                    ends.enter_context(_interrupted(fraction * took_s[is_save]))
                if is_save:
                    shoal.save(f"{folder}/s{number}", state)
                else:
                    shoal.restore(base, target)
                took_s[is_save] = 0.9 * took_s[is_save] + 0.1 * (time.monotonic() - began)
                counts["done"] += 1
                ends.close()  # the interrupt may come now
            except KeyboardInterrupt:
                counts["raised"] += 1
            except ShoalError as error:
                counts["late" if isinstance(error, DeadlineError) else "told"] += 1
        _together()
        if me == 0:
            shutil.rmtree(f"{folder}/s{number}", ignore_errors=True)
    shoal.save(f"{folder}/last", state)
    assert (host["w7"] == shoal.restore(f"{folder}/last")["w7"]).all()
    return counts


def _note_lost(counts: dict[str, int], lost: sys.UnraisableHookArgs) -> None:
    """Count an interrupt as raised that hit a callback in this file's code, as in any program's.

    In a call of shoal the handler is another one.
    """
    is_outside = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_outside and lost.exc_type is KeyboardInterrupt:
        counts["raised"] += 1
    else:
        sys.__unraisablehook__(lost)


def _together() -> None:
    """Meet, also where an interrupt came before the call of its process had begun."""
    while True:
        try:
            shoal.live_processes()
        except ShoalError:
            continue
        return


@contextlib.contextmanager
def _interrupted(after_s: float):
    """Let SIGINT come after this time; at the end of the block it has come."""
    never = threading.Event()

    def send() -> None:
        never.wait(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
