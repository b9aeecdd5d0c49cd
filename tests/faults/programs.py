"""What the processes of the fault matrix do while a fault comes, and what they say of it."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable

import shoal
from shoal.runtime.fault_points import reach

VICTIM_BY_ITSELF = ("raise", "exit")


def run(where: str, fault: str, victim: int | None) -> None:
    """Stand somewhere until a fault ends it; say when and how this process learns of it."""
    stand = _stands()[where]()
    shoal.barrier("ready")
    say("ready", time.time())
    reach("ready")
    if shoal.process_index() == victim and fault in VICTIM_BY_ITSELF:
        reach("mine")
        say("fault", time.time())
        if fault == "exit":
            sys.exit(3)
        raise ValueError("no more data")
    try:
        stand()
    except BaseException as error:
        say("learned", time.time(), type(error).__name__)
        raise


def say(*words: object) -> None:
    """One write on a line of its own: gloo's threads print to the same stdout."""
    os.write(1, ("\n" + " ".join(map(str, words)) + "\n").encode())


def _stands() -> dict[str, Callable[[], Callable[[], None]]]:
    return {"barrier": _in_barrier, "collective": _in_collective, "step": _in_steps}


def _in_barrier() -> Callable[[], None]:
    def stand() -> None:
        reach("before_barrier")  # one is held here, so that the others wait in it
        shoal.barrier("never")

    return stand


def _in_collective() -> Callable[[], None]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    rows = np.ones((len(devices), 4096), np.float32)
    array = jax.make_array_from_callback(rows.shape, sharding, lambda where: rows[where])
    total = jax.jit(lambda a: a.sum(0))
    total(array).block_until_ready()

    def stand() -> None:
        while True:
            total(array).block_until_ready()

    return stand


def _in_steps() -> Callable[[], None]:
    def stand() -> None:
        for number in itertools.count():
            with shoal.step(number):
                time.sleep(0.02)

    return stand
