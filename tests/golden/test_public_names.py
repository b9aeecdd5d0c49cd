"""Public names, their parameters and exit codes are those of a list: a change breaks programs.

docs/promises.md says when one may go. For a new name, run this file, which rewrites the list.
"""

import inspect
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shoal
import shoal.testing.clock
import shoal.testing.cluster
import shoal.testing.strategies
from shoal import errors
from shoal.cli.main import COMMANDS
from shoal.settings import SETTINGS

LIST = Path(__file__).with_name("public_names.txt")
MODULES = (
    "shoal", "shoal.compat", "shoal.planning", "shoal.planning.topology", "shoal.preemption",
    "shoal.preemption.clouds", "shoal.retention", "shoal.testing.clock", "shoal.testing.cluster",
    "shoal.testing.strategies",
)  # fmt: skip
PASSED_ON = (  # set by shoal for processes that it starts: not public
    "SHOAL_BENCH_MARK", "SHOAL_MEMBER", "SHOAL_PROGRESS_FILE", "SHOAL_RECORD_FILE",
    "SHOAL_REPORTED",
)  # fmt: skip


def lines() -> Iterator[str]:
    """Yield one line for each public name."""
    for module in MODULES:
        for name in sorted(look_up(f"{module}.__all__")):
            target = look_up(f"{module}.{name}")
            yield f"{module}.{name}{parameters(target)}"
            yield from (f"{module}.{name}.{member}" for member in members(target))
    for name, kind in sorted(vars(errors).items()):
        if inspect.isclass(kind) and issubclass(kind, errors.ShoalError):
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            yield f"shoal.errors.{name}({bases}): exit code {kind.exit_code}"
    yield from (f"shoal {command}" for command in sorted(COMMANDS))
    yield from (f"{name}={SETTINGS[name].default}" for name in sorted({*SETTINGS} - {*PASSED_ON}))


def look_up(path: str) -> Any:
    """Return what `shoal.a.b` is; some doors are no modules that could be imported by this name."""
    return operator.attrgetter(path.removeprefix("shoal."))(shoal)


def members(target: object) -> Iterator[str]:
    """Yield the methods and attributes that a class has from shoal."""
    if not inspect.isclass(target) or issubclass(target, Exception):
        return
    for name in dir(target):
        owner = next((base for base in target.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and owner.__module__.startswith("shoal."):
            yield f"{name}{parameters(getattr(target, name))}"


def parameters(target: object) -> str:
    """Return what a call takes, without the types; nothing of modules and exceptions."""
    is_error = inspect.isclass(target) and issubclass(target, Exception)
    if not callable(target) or is_error:
        return ""
    signature = inspect.signature(target)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_public_names_are_those_of_the_list():
    assert [*lines()] == LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
