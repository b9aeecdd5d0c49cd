"""Stacks as text: taken apart, and shown as Python shows a traceback."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.failures.stack_text import package_of, shown_stacks, threads_of
from shoal.runtime.system.stacks import stacks

HEAD = "Thread 'MainThread' (most recent call first):"
LIBRARIES = [
    '  File "/usr/lib/python3.13/threading.py", line 1 in wait',
    '  File "/opt/shoal/runtime/barrier.py", line 2 in barrier',
    '  File "/venv/lib64/python3.11/site-packages/jax/api.py", line 3 in f',
    '  File "<frozen runpy>", line 6 in run',
]
PROGRAM = [
    '  File "train.py", line 4 in step: loss = f(x)',
    '  File "/home/lib/train.py", line 5 in <module>: step()',
]


@pytest.mark.parametrize("place", ["/srv/code/src", "/srv/shoal.zip", "/home/me/a link", "."])
@pytest.mark.parametrize("name", ["launch/child.py", "draw/roll.py", "plan/mesh.py", "settings.py"])
def test_shoal_is_not_the_program_wherever_it_lies(place, name):
    assert package_of(f"{place}/shoal/{name}") == "shoal"
    assert package_of(f"{place}/shoal/my_{name}") == ""


def test_the_program_is_shown_as_a_traceback_and_libraries_below_it_are_counted():
    shown = shown_stacks("\n".join([HEAD, *LIBRARIES[:3], *PROGRAM, *LIBRARIES[3:]]))
    assert shown.splitlines() == [
        'File "/home/lib/train.py", line 5, in <module>',
        "  step()",
        'File "train.py", line 4, in step',
        "  loss = f(x)",
        "… 1 frame in jax, 1 in threading, 1 in shoal",
    ]


def test_all_frames_are_shown_if_asked_for(monkeypatch):
    monkeypatch.setenv("SHOAL_TRACEBACK", "full")
    shown = shown_stacks("\n".join([HEAD, *LIBRARIES[:3], *PROGRAM, *LIBRARIES[3:]]))
    assert shown.count("File ") == 6
    assert "…" not in shown


def test_the_innermost_frames_stand_for_a_program_that_has_none():
    (thread,) = threads_of("\n".join([HEAD, *LIBRARIES]))
    assert [frame.package for frame in thread.of_program] == ["jax", "shoal", "threading"]
    assert thread.below == {}


def test_other_threads_are_named_and_those_of_shoal_left_out():
    text = "\n\n".join(
        f"Thread {name!r} (most recent call first):\n{PROGRAM[0]}"
        for name in ("MainThread", "shoal watcher", "loader")
    )
    assert shown_stacks(text).splitlines() == [
        'File "train.py", line 4, in step', "  loss = f(x)", "",
        "Thread 'loader':", 'File "train.py", line 4, in step', "  loss = f(x)",
    ]  # fmt: skip


def test_own_stacks_are_taken_apart_whole():
    begun, ends = threading.Event(), threading.Event()

    def wait_in_thread():
        begun.set()
        ends.wait()

    thread = threading.Thread(target=wait_in_thread, name="an idle one")
    thread.start()
    begun.wait()
    try:
        found = {one.name: one for one in threads_of(stacks())}
    finally:
        ends.set()
        thread.join()
    assert found["an idle one"].of_program[-1].source == "ends.wait()"
    assert found["an idle one"].below == {"threading": 2}
    here = found["MainThread"].of_program[-1]
    assert (here.function, here.source) == (
        "test_own_stacks_are_taken_apart_whole",
        "found = {one.name: one for one in threads_of(stacks())}",
    )


@given(st.text(max_size=300))
def test_any_text_is_shown(text):
    assert isinstance(shown_stacks(text), str)
    assert isinstance(shown_stacks(f"{HEAD}\n  File {text}"), str)
