"""Entry point of each process of a `Cluster` that runs a function: `child.py SPEC [INDEX]`.

It imports the function's module again, joins the job, calls the function, and writes the value or
the traceback to a file. Then it exits as any program does: an error propagates to the interpreter,
so that peers see it as they would a real one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import UsageError
from shoal.testing.values import decoded, encoded

__all__ = ["main", "result_path", "run_script"]

_MAIN = "__mp_main__"  # as in multiprocessing: the program's `__main__` block must not run


def result_path(folder: str, process: int) -> Path:
    """Return the file to which a process writes its function's result or error."""
    return Path(folder) / f"result{process}.json"


def main(arguments: list[str]) -> None:
    """Run the function of a spec in this process."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    process = int(arguments[1] if len(arguments) > 1 else os.environ["SHOAL_PROCESS_ID"])
    path = result_path(spec["folder"], process)
    if spec["initialize"]:
        # Imported before the test's own path is set, which may shadow standard modules.
        from shoal.runtime.process import initialize
    sys.path[:] = spec["path"]
    sys.argv[:] = [spec["name"]]
    try:
        if spec["initialize"]:
            initialize()
        positional: Any = decoded(spec["arguments"])
        named: Any = decoded(spec["named"])
        value = _function(spec)(*positional, **named)
        outcome = {"value": encoded(value, f"what {spec['name']} returned")}
    except SystemExit as left:
        _leave(path, {"error": f"SystemExit: {left.code}", "kind": "SystemExit"})
        sys.exit(left.code)  # whose hook sees it, even if raised without it
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, trace))
        _leave(path, {"error": text, "kind": type(error).__name__})
        raise
    _leave(path, outcome)


def run_script(arguments: list[str]) -> None:
    """Run a script as `python SCRIPT` does: as `__main__`, its directory first in sys.path."""
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _leave(path: Path, outcome: object) -> None:
    """Write the result atomically."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(outcome), encoding="utf-8")
    part.replace(path)


def _function(spec: dict[str, Any]) -> Callable[..., object]:
    """Return the function; for a method, that of a new instance of its class."""
    target: Any = _module(spec["module"], spec["file"])
    *owners, name = spec["name"].split(".")
    for owner in owners:
        target = getattr(target, owner)
    if isinstance(target, type):
        target = target()
    function: Callable[..., object] = getattr(target, name)
    return function


def _module(name: str, file: str | None) -> ModuleType:
    """Import a module under its own name if that leads to `file`, else from the file itself."""
    name = _MAIN if name == "__main__" else name
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if file is not None and (
        spec is None or not spec.origin or not os.path.exists(spec.origin)
        or not os.path.samefile(spec.origin, file)
    ):  # fmt: skip
        spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"there is no module {name!r} to import")
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
