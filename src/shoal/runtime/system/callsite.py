"""Call sites: the innermost line of code outside shoal."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from shoal.tracebacks import is_ours


def callsite() -> str:
    """Return `file:line (function)` of the innermost frame outside shoal.

    The file is relative to the import root (`pkg/train.py` for module `pkg.train`), so that it is
    the same on every host wherever the program is installed.
    """
    frame = _outside(sys._getframe(1))
    return site_of(frame, frame.f_lineno)


class Caller(NamedTuple):
    """A call site as `warnings.warn_explicit` takes it: it warns once for each."""

    file: str
    line: int
    module: str
    registry: dict[Any, Any]  # of the warnings that its module has shown

    @classmethod
    def here(cls) -> Caller:
        """Return the innermost line of code outside shoal."""
        frame = _outside(sys._getframe(1))
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, _module_of(frame), registry)


def _outside(frame: FrameType) -> FrameType:
    """Return the innermost frame outside shoal; the outermost one if there is none."""
    while is_ours(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def site_of(frame: FrameType, line: int | None) -> str:
    """Return `file:line (function)` of a frame."""
    code = frame.f_code
    path = _relative(code.co_filename, _module_of(frame))
    return f"{path}:{line} ({code.co_qualname})"


def split_site(site: str) -> tuple[str, int]:
    """Return the file and the line of a call site; empty and 0 if it has none.

    >>> split_site("pkg/train.py:31 (main)")
    ('pkg/train.py', 31)
    """
    match = re.fullmatch(r"(.+):(\d{1,9})(?: \(.*)?", site, re.DOTALL)
    return (match[1], int(match[2])) if match else ("", 0)


def line_of(site: str) -> str:
    """Return a call site without its function.

    >>> line_of("pkg/train.py:31 (main)")
    'pkg/train.py:31'
    """
    file, line = split_site(site)
    return f"{file}:{line}" if file else site


def source_at(site: str) -> str:
    """Return the source line of a call site, stripped; empty if it is not found.

    A call site names a file relative to its import root, on this process or on another one: it is
    looked up among the modules that are loaded here. Read only to explain a failure.
    """
    path, line_number = split_site(site)
    if not path:
        return ""
    import linecache

    lines = set()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # a lazy module is not loaded
        file = names.get("__file__")
        if isinstance(file, str) and file.endswith(path.rpartition("/")[2]):
            spec = getattr(names.get("__spec__"), "name", None)
            name = spec or names.get("__name__")
            if isinstance(name, str) and _relative(file, name) == path:
                lines.add(linecache.getline(file, line_number, names).strip())
    lines.discard("")
    return lines.pop() if len(lines) == 1 else ""


def _module_of(frame: FrameType) -> str:
    """Return the module's full name; under `python -m pkg.train` its __name__ is "__main__"."""
    spec = frame.f_globals.get("__spec__")
    name = getattr(spec, "name", None) or frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


@lru_cache(maxsize=1024)
def _relative(file: str, module: str) -> str:
    """Return the last components of `file`, as many as `module` has (one more for a package)."""
    parts = file.replace(os.sep, "/").split("/")
    depth = module.count(".") + 1
    if parts[-1] == "__init__.py" and module:
        depth += 1
    return "/".join(parts[-depth:])
