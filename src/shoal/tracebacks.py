"""Tracebacks that end at the caller's line.

An error that shoal raises on purpose is explained by its message; the frames in which it was found
say nothing to the caller. They are removed where the error leaves a public function, so that
every reader of a traceback gets the short one: Python's own, a notebook, pytest, a log file.
SHOAL_TRACEBACK=full keeps them. An error that is a bug of shoal keeps all its frames, and says so.

JAX filters tracebacks in the same place (*jax_traceback_filtering* in its documentation).
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from shoal import settings
from shoal.errors import ShoalError, UsageTypeError, counted, nearest
from shoal.names import hint_within

__all__ = [
    "BUG",
    "HIDDEN",
    "at_caller",
    "block_at_caller",
    "class_at_caller",
    "has_hidden",
    "is_bug",
    "is_installed",
    "is_ours",
    "is_own_file",
    "mark_as_bug",
    "shorten",
]

P = ParamSpec("P")
T = TypeVar("T")

BUG = "This is a bug in shoal: please report it, with the log."
HIDDEN = "Frames of shoal are left out: SHOAL_TRACEBACK=full shows them."
# Not TypeError and ValueError: a value of the caller may have reached NumPy, or an operator. Not
# FloatingPointError: NumPy and JAX raise it if the caller has asked for it.
_OF_BUGS = (
    AssertionError, AttributeError, LookupError, NameError, OverflowError, ZeroDivisionError,
)  # fmt: skip
_OF_FACADE = re.compile(r"(dtensor\.|torch_xla )[a-z_]+\b")  # a function, not a class
_MOST = 100  # errors of a chain
_MARK, _BUG_MARK = "_shoal_frames_hidden", "_shoal_has_a_bug"
_SHOAL = os.path.dirname(os.path.abspath(__file__)) + os.sep
_THROUGH = ("contextlib", "functools")  # frames of shoal's `with` blocks and decorators
_FACADES = os.path.join(_SHOAL, "compat") + os.sep
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
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                refusal = _refusal(function, args, kwargs)
                if refusal:
                    raise UsageTypeError(refusal) from error.__cause__  # not from Python's words
                raise
        except Exception as error:
            _name_called(function, error)
            # A bare `raise` takes the traceback from the error, and adds no entry for this frame.
            shorten(error)
            raise

    return call


def _refusal(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why a call does not fit its signature, in the numbers that its caller sees; or ""."""
    import inspect  # which few processes need

    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return ""
    given = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    if given and given[0].name in ("self", "cls"):
        given, args = given[1:], args[1:]
    positional = [
        parameter.name for parameter in given if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    options = [parameter.name for parameter in given if parameter.kind is parameter.KEYWORD_ONLY]
    kinds = {parameter.kind for parameter in given}
    problems = []
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        most = counted(len(positional), "positional argument")
        by_name = "; pass options by name" if options else ""
        were = "was" if len(args) == 1 else "were"
        problems.append(f"takes {most}, but {len(args)} {were} given{by_name}")
    twice = [name for name in positional[: len(args)] if name in kwargs]
    problems += [f"{name}= is also given by position" for name in twice]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        known = [*positional, *options]
        unknown = [name for name in kwargs if name not in known]
        problems += [f"has no argument {name}={nearest(name, known)}" for name in unknown]
    needed = {
        parameter.name
        for parameter in given
        if parameter.default is parameter.empty and parameter.name in positional
    }
    lacking = [name for name in positional[len(args) :] if name in needed - {*kwargs}]
    problems += [f"needs {' and '.join(lacking)}"] if lacking else []
    wrong = list[str](kwargs)
    if not args and not kwargs:
        wrong = [""]  # as barrier()
    hint = hint_within(function.__qualname__, *wrong)
    name = _public_name(function)
    bare = signature.replace(parameters=given, return_annotation=signature.empty)
    return f"{name}: {'; '.join(filter(None, [*problems, hint]))}\ncall it as {name}{bare}"


def _public_name(function: Callable[..., Any]) -> str:
    """Return the name by which programs call a function: that of the outermost module."""
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
    root, module = name.partition(".")[0], function.__module__
    ours = [
        module_name
        for module_name in [*sys.modules]
        if module_name == "shoal" or module_name.startswith("shoal.")
    ]
    for outer in sorted(ours, key=len):
        if getattr(vars(sys.modules[outer]).get(root), "__module__", "") == module:
            return f"{outer}.{name}"
    return f"{module}.{name}"


def _name_called(function: Callable[..., Any], error: Exception) -> None:
    """Let an error name the function of a facade that was called, not one that this has called."""
    if not (isinstance(error, ShoalError) and function.__module__.startswith("shoal.compat.")):
        return
    named = _OF_FACADE.match(str(error))
    if named:
        name = function.__qualname__.removesuffix(".__init__")
        error.args = (f"{named[1]}{name}{named.string[named.end() :]}", *error.args[1:])


def class_at_caller(target: type) -> None:
    """Let the tracebacks of a class's constructor and public methods end at their caller, too."""
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in ("__new__", "__init__"):
            continue
        method: Any = member
        if isinstance(method, staticmethod | classmethod):  # as `type` makes of `__new__`
            setattr(target, name, type(method)(at_caller(method.__func__)))
        elif isinstance(method, FunctionType) and not hasattr(method, "__colour__"):
            setattr(target, name, at_caller(method))


class _Block(contextlib._GeneratorContextManager[Any]):
    """A `with` block whose errors end at its line, and which warns if it was never entered."""

    unused_at: tuple[str, int] | None = None  # the caller's file and line, until it is used

    @at_caller
    def __enter__(self) -> Any:
        self.unused_at = None
        return super().__enter__()

    def __call__(self, func: Any) -> Any:
        """Return a function that runs in such a block."""
        self.unused_at = None
        return super().__call__(func)

    def __del__(self) -> None:
        # As for a coroutine that was never awaited. Never raises: at the end of the program what
        # it calls may be gone.
        with contextlib.suppress(Exception):
            if self.unused_at is not None:
                name = getattr(self.func, "__name__", "it")
                text = f"{name}(…) does nothing by itself: write `with {name}(…):`"
                warnings.warn_explicit(text, RuntimeWarning, *self.unused_at)

    @at_caller
    def __exit__(self, *raised: Any) -> bool | None:
        return super().__exit__(*raised)


def block_at_caller(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Decorate as `contextlib.contextmanager` does a function that user code calls."""

    @functools.wraps(function)
    def helper(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        block = _Block(cast(Any, function), args, kwargs)
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and is_own_file(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None:
            block.unused_at = (caller.f_code.co_filename, caller.f_lineno)
        return block

    return helper


def shorten(error: BaseException) -> None:
    """Remove shoal's frames from an error that shoal raised on purpose, and from its causes.

    Errors of the program stay as they are, also those that it was handling; so do bugs, which are
    marked as such. Never raises: the error that is raised is more important.
    """
    with contextlib.suppress(Exception):
        if settings.text("SHOAL_TRACEBACK") != "full" and not isinstance(error, StopIteration):
            _shorten_all(error)


def has_hidden(error: BaseException) -> bool:
    """Return whether frames were removed from an error."""
    return any(_MARK in vars(linked) for linked in _chain(error))


def is_bug(error: BaseException) -> bool:
    """Return whether an error has been marked as a bug of shoal."""
    return _BUG_MARK in vars(error)


def mark_as_bug(error: BaseException) -> None:
    """Mark an error as a bug of shoal, and let it say so."""
    if not is_bug(error):
        error.add_note(BUG)
        BaseException.__setattr__(error, _BUG_MARK, True)


def _shorten_all(error: BaseException) -> None:
    is_ours_to_cut = isinstance(error, ShoalError)
    for linked in _chain(error) if is_ours_to_cut else [error]:
        first = next(_entries(linked), None)
        if _comes_of_a_bug(linked):
            mark_as_bug(linked)
        elif isinstance(linked, ShoalError) or (
            # Caught within shoal: what the program catches begins with a frame of it.
            is_ours_to_cut and first is not None and is_own_file(_file(first))
        ):
            _shorten(linked)


def _shorten(error: BaseException) -> None:
    entries = [*_entries(error)]
    if not entries:
        return
    kept: list[TracebackType] = []
    is_below = False  # a frame of ours: what that calls is ours, too, but for the program's own
    for trace, below in zip(entries, [*entries[1:], None], strict=True):
        if is_own_file(_file(trace)):
            is_below = True
        elif _is_between(trace) and below is not None and is_own_file(_file(below)):
            pass  # of a `with` block or decorator of ours
        elif not (is_below and is_installed(_file(trace))):
            is_below = False
            kept.append(trace)
    if len(kept) == len(entries):
        return
    for trace, below in zip(kept, [*kept[1:], None], strict=False):
        trace.tb_next = below
    BaseException.with_traceback(error, kept[0] if kept else None)
    BaseException.__setattr__(error, _MARK, True)  # its class may forbid it


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _is_between(trace: TracebackType) -> bool:
    return trace.tb_frame.f_globals.get("__name__") in _THROUGH


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < _MOST:
        linked = todo.pop()
        if linked is not None and id(linked) not in seen:
            seen.add(id(linked))
            yield linked
            todo += [linked.__cause__, linked.__context__]
            if isinstance(linked, BaseExceptionGroup):
                todo += linked.exceptions


def _comes_of_a_bug(error: BaseException) -> bool:
    """Return whether Python raised an error in code of shoal, which has no `raise` there.

    Errors of shoal are raised on purpose, also those of a facade that are AssertionErrors. The
    facades pass what they are given to objects of the program.
    """
    *_, last = [None, *_entries(error)]
    if last is None or isinstance(error, ShoalError) or not isinstance(error, _OF_BUGS):
        return False
    file = _file(last)
    if not is_own_file(file) or file.startswith(_FACADES):
        return False
    return not linecache.getline(file, last.tb_lineno).lstrip().startswith("raise")
