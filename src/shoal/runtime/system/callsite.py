"""Call sites: the innermost line of code outside shoal."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import FrameType

from shoal.tracebacks import is_ours


def callsite() -> str:
    """Return `file:line (function)` of the innermost frame outside shoal.

    The file is relative to the import root (`pkg/train.py` for module `pkg.train`), so that it is
    the same on every host wherever the program is installed.
    """
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and is_ours(frame):
        outermost, frame = frame, frame.f_back
    frame = frame or outermost
    return "" if frame is None else site_of(frame, frame.f_lineno)


def site_of(frame: FrameType, line: int | None) -> str:
    """Return `file:line (function)` of a frame."""
    code = frame.f_code
    path = _relative(code.co_filename, _module_of(frame))
    return f"{path}:{line} ({code.co_qualname})"


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
