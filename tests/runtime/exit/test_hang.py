"""What a process reports of a hang, in a job of threads."""

from __future__ import annotations

import math

from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.exit import hang
from shoal.runtime.exit.hang import HangTimeout, HangWatch


def test_the_place_of_a_hang_is_read_once(monkeypatch, shoal_log):
    """The main thread may move between two readings, so that the second finds no place."""
    here = LocalJob(2).clients[0]
    here.call_records.found = object()
    places = iter(["train.py:31 (main)"])
    monkeypatch.setattr(hang, "position_in_program", lambda frame: next(places, ""))
    HangWatch(here, HangTimeout(0.0, math.inf), ends=False).look(1.0)
    ((_, line),) = shoal_log.lines
    assert "is in native code at train.py:31, after calls that differ between processes" in line
