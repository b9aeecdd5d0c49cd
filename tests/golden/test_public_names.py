"""Public names, their parameters and exit codes are those of a list: a change breaks programs.

docs/promises.md says when one may go. For a new name, run this file, which rewrites the list.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # a script finds what lies beside it, not the package that it is in
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meta import public_names
from shoal.cli.main import COMMANDS
from shoal.settings import SETTINGS

LIST = Path(__file__).with_name("public_names.txt")
PASSED_ON = (  # set by shoal for processes that it starts: not public
    "SHOAL_BENCH_MARK", "SHOAL_CACHE_SUSPECT_SINCE", "SHOAL_LAUNCHED", "SHOAL_MEMBER",
    "SHOAL_PROGRESS_FILE", "SHOAL_RECORD_FILE", "SHOAL_REPORTED",
)  # fmt: skip


def lines() -> Iterator[str]:
    """Yield one line for each public name."""
    named = public_names.documented()
    for name, target in sorted(named.items()):
        if inspect.isclass(target) and issubclass(target, Exception):
            bases = ", ".join(base.__name__ for base in target.__bases__)
            code = getattr(target, "exit_code", None)
            yield f"{name}({bases})" + (f": exit code {code}" if code is not None else "")
            yield from (f"{name}.{fact}" for fact in facts(target))
        else:
            yield f"{name}{parameters(target)}"
            yield from (f"{name}.{member}" for member in members(target))
    for name, kind in sorted(public_names.returned().items()):
        yield name
        yield from (f"{name}.{member}" for member in members(kind))
    yield from (f"shoal {command}" for command in sorted(COMMANDS))
    yield from (f"{name}={SETTINGS[name].default}" for name in sorted({*SETTINGS} - {*PASSED_ON}))


def facts(error: type[Exception]) -> list[str]:
    """Return the attributes of an error: what its constructor takes by keyword."""
    if "__init__" not in vars(error):
        return []
    found = inspect.signature(error).parameters.values()
    return sorted(one.name for one in found if one.kind == one.KEYWORD_ONLY)


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
    if not callable(target):
        return ""
    signature = inspect.signature(target)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_public_names_are_those_of_the_list():
    listed = LIST.read_text(encoding="utf-8").splitlines()
    assert [*lines()] == listed, "if so it is meant: python tests/golden/test_public_names.py"


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
