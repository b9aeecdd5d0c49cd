"""Tracebacks that end at the caller's line.

An error that shoal raises on purpose is explained by its message; the frames in which it was found
say nothing to the caller. They are removed where the error leaves a public function, so that
every reader of a traceback gets the short one: Python's own, a notebook, pytest, a log file.
SHOAL_TRACEBACK=full keeps them. An error that is a bug of shoal keeps all its frames, and says so.

JAX filters tracebacks in the same place (*jax_traceback_filtering* in its documentation).
"""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from shoal import settings
from shoal.errors import ShoalError

__all__ = [
    "BUG",
    "HIDDEN",
    "at_caller",
    "has_hidden",
    "is_installed",
    "is_ours",
    "is_own_file",
    "shorten",
]

P = ParamSpec("P")
T = TypeVar("T")

BUG = "This is a bug in shoal: please report it, with the log."
HIDDEN = "Frames of shoal are left out: SHOAL_TRACEBACK=full shows them."
_OF_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
_MARK = "_shoal_frames_hidden"
_SHOAL = os.path.dirname(os.path.abspath(__file__)) + os.sep
_THROUGH = ("contextlib", "functools")  # frames of shoal's `with` blocks and decorators
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to shoal, or to the machinery between it and its caller."""
    return is_own_file(frame.f_code.co_filename) or frame.f_globals.get("__name__") in _THROUGH


def is_own_file(file: str) -> bool:
    """Return whether a file is of shoal."""
    return file.startswith(_SHOAL)


def is_installed(file: str) -> bool:
    """Return whether a file is of Python or of a package."""
    return file.startswith(_STDLIB) or any(part in file for part in _INSTALLED)


def at_caller(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that user code calls: tracebacks of its errors end there."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # A bare `raise` takes the traceback from the error, and adds no entry for this frame.
            shorten(error)
            raise

    return call


def class_at_caller(target: type) -> None:
    """Let the tracebacks of a class's constructor end at its caller, too."""
    for name in ("__new__", "__init__"):
        if name in vars(target) and not isinstance(vars(target)[name], staticmethod):
            setattr(target, name, at_caller(cast(Any, vars(target)[name])))


def shorten(error: BaseException) -> None:
    """Remove shoal's frames from an error that shoal raised on purpose, and from its causes."""
    if settings.text("SHOAL_TRACEBACK") == "full" or isinstance(error, StopIteration):
        return
    if isinstance(error, ShoalError) or _is_refused(error):
        for one in _chain(error):
            _shorten(one)
    elif _is_bug(error) and BUG not in getattr(error, "__notes__", ()):
        error.add_note(BUG)


def has_hidden(error: BaseException) -> bool:
    """Return whether frames were removed from an error."""
    return any(hasattr(one, _MARK) for one in _chain(error))


def _shorten(error: BaseException) -> None:
    kept: list[TracebackType] = []
    is_below = False  # a frame of ours: what that calls is ours, too, but for the program's own
    for trace in _entries(error):
        if is_ours(trace.tb_frame):
            is_below = True
        elif not (is_below and is_installed(trace.tb_frame.f_code.co_filename)):
            is_below = False
            kept.append(trace)
    if len(kept) < len([*_entries(error)]):
        setattr(error, _MARK, True)
    for trace, below in zip(kept, [*kept[1:], None], strict=False):
        trace.tb_next = below
    error.__traceback__ = kept[0] if kept else None


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all that led to it."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [one.__cause__, one.__context__]
            todo += getattr(one, "exceptions", ())


def _is_refused(error: BaseException) -> bool:
    """Return whether Python refused the arguments of a call: no decorated function was entered."""
    *_, last = [None, *_entries(error)]
    if not isinstance(error, TypeError) or last is None:
        return False
    return is_ours(last.tb_frame) and last.tb_frame.f_code.co_name == "call"


def _is_bug(error: BaseException) -> bool:
    """Return whether Python raised an error in code of shoal, which has no `raise` there."""
    *_, last = [None, *_entries(error)]
    if last is None or not isinstance(error, _OF_BUGS) or not is_ours(last.tb_frame):
        return False
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    return not line.lstrip().startswith("raise")
