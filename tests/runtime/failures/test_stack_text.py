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
    assert package_of(f"{place}/shoal/draw/of_a_user.py") == package_of(name) == ""


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
    """But for one that runs the program, as a reader of `feed` does."""
    threads = {"MainThread": PROGRAM[0], "shoal watcher": LIBRARIES[0], "shoal feed": PROGRAM[0]}
    text = "\n\n".join(
        f"Thread {name!r} (most recent call first):\n{frame}" for name, frame in threads.items()
    )
    assert shown_stacks(text).splitlines() == [
        'File "train.py", line 4, in step', "  loss = f(x)", "",
        "Thread 'shoal feed':", 'File "train.py", line 4, in step', "  loss = f(x)",
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


def test_the_first_thread_is_the_main_one_whatever_its_name():
    text = f"Thread 'shoal trainer' (most recent call first):\n{PROGRAM[0]}"
    assert shown_stacks(text).splitlines() == ['File "train.py", line 4, in step', "  loss = f(x)"]


def test_source_lines_hide_secrets_and_are_one_line_whatever_is_in_them():
    odd = "u = 'https://me:pw@host'; API_TOKEN='sk-1'  # \x1b[31m\u2028Thread 'evil':\x0c\xff"
    text = f'{HEAD}\n  File "train.py", line 4 in step: {odd}\n{PROGRAM[1]}'
    (thread,) = threads_of(text)
    assert [frame.line for frame in thread.frames] == [5, 4]
    shown = shown_stacks(text)
    assert not {"\x1b", "\u2028", "\x0c"} & {*shown}
    assert "sk-1" not in shown
    assert "me:pw" not in shown
    assert r"\x1b[31m\u2028Thread 'evil':\x0c" in shown


def test_generated_code_is_the_program_s_only_where_nothing_else_is():
    generated = '  File "<string>", line 3 in __init__'
    (thread,) = threads_of("\n".join([HEAD, LIBRARIES[0], generated, *PROGRAM]))
    assert [frame.function for frame in thread.of_program] == ["<module>", "step"]
    (thread,) = threads_of("\n".join([HEAD, LIBRARIES[0], generated]))
    assert [frame.function for frame in thread.of_program] == ["__init__"]


def test_recursion_and_truncated_stacks_are_noted():
    shown = shown_stacks("\n".join([HEAD, *[PROGRAM[0]] * 100, "  ..."]))
    assert shown.splitlines() == [
        "… more frames", 'File "train.py", line 4, in step', "  loss = f(x)",
        "… the same frame 99 times",
    ]  # fmt: skip


def test_quoted_names_of_threads_are_taken_apart():
    text = f'{HEAD}\n\nThread "it\'s" (most recent call first):\n{PROGRAM[0]}'
    assert [thread.name for thread in threads_of(text)] == ["MainThread", "it's"]
    current = f"{HEAD}\n\nCurrent thread 0x00ab (most recent call first):\n{PROGRAM[0]}"
    assert [len(thread.frames) for thread in threads_of(current)] == [0, 1]


def test_frames_of_a_path_that_is_not_ascii_have_their_sources(tmp_path):
    file = tmp_path / "jürgen.py"
    file.write_text("def call(it):\n    return it()  # here\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    (frame,) = [f for f in threads_of(names["call"](stacks))[0].frames if f.file == str(file)]
    assert frame.source == "return it()  # here"


@given(st.text(max_size=300))
def test_any_text_is_shown(text):
    assert isinstance(shown_stacks(text), str)
    assert isinstance(shown_stacks(f"{HEAD}\n  File {text}"), str)
