"""What the processes of the fault matrix do while a fault comes, and what they say of it.

Times are those of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import shoal
from shoal.runtime.system.fault_points import reach

ENOUGH = 3  # turns of a loop, until it is clear that it runs
MANY_BYTES = 20 << 20
FAIL = signal.SIGUSR2  # has the main line fail in the midst of a call, as a handler of SIGTERM may

Place = Callable[[bool, bool], Callable[[], object]]  # is it apart, is it the victim: what it does


def stand(where: str, fault: str, apart: int, is_victim: bool) -> None:
    """Stand somewhere until a fault ends it; say when and how this process learns of it.

    Args:
      where: a name of PLACES.
      fault: what the process apart does by itself, if anything.
      apart: the process that keeps the others from getting any further.
      is_victim: whether it happens to that process, and not to a service.
    """
    here = shoal.process_index()
    place = PLACES[where](here == apart, is_victim)
    fails = here == apart and is_victim and fault in BY_ITSELF
    if fails:
        signal.signal(FAIL, lambda *_: BY_ITSELF[fault](here))
    shoal.barrier("all are here")
    with said_when_learned():
        if fails and where not in IN_THE_MIDST:
            reach("before")
            BY_ITSELF[fault](here)
        place()
    raise AssertionError("it went on as if nothing had happened")


@contextlib.contextmanager
def said_when_learned() -> Iterator[None]:
    """Say when an exception comes out of the block, which, and whom it names."""
    try:
        yield
    except BaseException as error:
        at = time.monotonic()
        named = {name: sorted(getattr(error, name, ())) for name in ("lost", "failed")}
        kind, words = type(error).__name__, str(error)
        say("learned", json.dumps({"at": at, "kind": kind, "words": words, **named}))
        raise


def say(word: str, more: object = "") -> None:
    """One write on a line of its own: gloo's threads print to the same stdout."""
    os.write(1, f"\n{word} {shoal.process_index()} {more}\n".encode())


def _raise(here: int) -> None:
    say("fault", time.monotonic())
    raise ValueError(f"process {here} has no more data")


def _exit(_here: int) -> None:
    say("fault", time.monotonic())
    sys.exit(3)


BY_ITSELF: dict[str, Callable[[int], None]] = {"raise": _raise, "exit": _exit}


def in_agreement(call: Callable[[], object]) -> Place:
    """All wait in a call, and nobody can go on."""

    def of(is_apart: bool, is_victim: bool) -> Callable[[], None]:
        def place() -> None:
            if is_apart and is_victim:
                reach("before")
            else:
                threading.Thread(target=say_when_it_waits, daemon=True).start()
            if is_apart and not is_victim:  # it waits too: for one who waits in another lane
                shoal.barrier("never", processes=[0, shoal.process_index()], lane="apart")
            call()

        return place

    return of


def say_when_it_waits() -> None:
    """Say that this process is inside, once the coordinator knows that it waits."""
    here = shoal.process_index()
    with contextlib.suppress(shoal.errors.ShoalError):
        while not shoal.job_status().members[here].is_waiting:
            time.sleep(0.02)
        say("inside")


def small(operation: str) -> Callable[[], object]:
    """Return a call that brings a few bytes."""
    return lambda: getattr(shoal, operation)(b"few", name="never")


def large(operation: str) -> Callable[[], object]:
    """Return a call that brings some more than is under way at a time."""
    return lambda: getattr(shoal, operation)(bytes(MANY_BYTES), name="never")


def in_collective(is_apart: bool, _is_victim: bool) -> Callable[[], None]:
    """In a collective of XLA, for which one does not come."""
    total, array = _collective()

    def place() -> None:
        if is_apart:
            reach("before")
        result = total(array)
        assert is_apart or not result.is_ready()
        say("inside")
        result.block_until_ready()

    return place


def in_stream(_is_apart: bool, _is_victim: bool) -> Callable[[], None]:
    """In one collective of XLA after the other."""
    total, array = _collective()

    def place() -> None:
        for turn in itertools.count():
            total(array).block_until_ready()
            if turn == ENOUGH:
                say("inside")

    return place


def in_steps(_is_apart: bool, _is_victim: bool) -> Callable[[], None]:
    """In Python, with no call of shoal but the label of each step."""

    def place() -> None:
        for number in itertools.count():
            with shoal.step(number):
                time.sleep(0.01)  # a program that computes
            if number == ENOUGH:
                say("inside")

    return place


def _collective() -> tuple[Any, Any]:
    """Return a jitted sum over all devices, compiled, and what it sums."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    rows = np.ones((len(devices), 4096), np.float32)
    array = jax.make_array_from_callback(rows.shape, sharding, lambda where: rows[where])
    total = jax.jit(lambda a: a.sum(0))
    total(array).block_until_ready()
    return total, array


# All have agreed, and one does not go on: the bench holds it at a point of shoal's own.
IN_THE_MIDST = {
    "chunks of broadcast": large("broadcast"),
    "chunks of allgather": large("allgather"),
    "pieces of broadcast": large("broadcast"),
    "difference": lambda: shoal.assert_same(shoal.process_index(), name="never"),
}
PLACES: dict[str, Place] = {
    "barrier": in_agreement(lambda: shoal.barrier("never")),
    "broadcast": in_agreement(small("broadcast")),
    "allgather": in_agreement(small("allgather")),
    "assert_same": in_agreement(small("assert_same")),
    "collective": in_collective,
    "stream": in_stream,
    "step": in_steps,
    **{where: lambda *_, call=call: call for where, call in IN_THE_MIDST.items()},
}


def come_late(timeout_s: float) -> None:
    """Meet in a step, to which one comes late."""
    with shoal.step(7):
        reach("late")
        try:
            shoal.barrier("saved", timeout_s=timeout_s)
        except shoal.errors.DeadlineError as error:
            told = {"name": error.name, "missing": error.missing, "stacks": error.stacks}
            say("deadline", json.dumps(told))
            raise
