"""The program that a bench runs: a script, or a function imported again in each process."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.errors import UsageError, UsageTypeError
from shoal.paths import local_path
from shoal.testing.values import encoded

__all__ = ["Program", "program_of"]

_IMPORTABLE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")


class Program(NamedTuple):
    """A validated program: either a script's path and its arguments, or the spec of a function."""

    script: str | None
    arguments: tuple[str, ...] = ()
    spec: Mapping[str, object] | None = None

    @property
    def is_function(self) -> bool:
        """Whether it has a value to return."""
        return self.spec is not None

    def command(self, spec_path: Path) -> list[str]:
        """Return the arguments of the interpreter; writes the spec if there is one."""
        if self.spec is None:
            return [str(self.script), *self.arguments]
        spec_path.write_text(json.dumps(self.spec), encoding="utf-8")
        return ["-m", "shoal.testing.child", str(spec_path)]


def program_of(
    program: Callable[..., object] | str | os.PathLike[str],
    arguments: Sequence[object],
    named: Mapping[str, object],
    *,
    folder: str,
    initialize: bool,
) -> Program:
    """Return the program to run.

    Raises:
      UsageError: it is not a function of a module, a `module:function` or an existing script.
      UsageTypeError: an argument is not a plain value.
    """
    if callable(program):
        module, name, file = _place(program)
    elif isinstance(program, str) and _IMPORTABLE.fullmatch(program):
        module, _, name = program.partition(":")
        file = None
        if not _exists(module):
            raise UsageError(f"{program!r}: there is no module {module!r} to import")
    else:
        return _script(program, arguments, named)
    spec = {
        "module": module,
        "name": name,
        "file": file,
        "path": [os.path.abspath(folder) for folder in sys.path],
        "folder": folder,
        "initialize": initialize,
        "arguments": encoded(list(arguments), "arguments"),
        "named": encoded(dict(named), "arguments"),
    }
    return Program(None, (), spec)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _place(function: Callable[..., object]) -> tuple[str, str, str]:
    """Return the module, the name in it and the file of a function."""
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        raise UsageTypeError(f"{function!r} is not a function, a 'module:function' or a script")
    if "<" in name:
        raise UsageError(
            f"{name} cannot be imported by another process: it is not at the top of its module\n"
            "move it there, and pass it the values it needs as arguments"
        )
    file = inspect.getsourcefile(inspect.unwrap(function))
    if file is None or not os.path.exists(file):
        raise UsageError(f"{name} has no source file that another process could import")
    return function.__module__, name, os.path.abspath(file)


def _script(
    program: str | os.PathLike[str], arguments: Sequence[object], named: Mapping[str, object]
) -> Program:
    path = os.path.abspath(local_path(program))
    if not os.path.exists(path):
        raise UsageError(f"there is no script {os.fspath(program)!r}; a function is module:name")
    if named:
        raise UsageError(f"a script takes no named arguments: {', '.join(named)}")
    wrong = [a for a in arguments if not isinstance(a, str | int | float | os.PathLike)]
    if wrong:
        raise UsageTypeError(f"arguments of a script are strings, numbers and paths, not {wrong!r}")
    return Program(
        path, tuple(os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments)
    )
