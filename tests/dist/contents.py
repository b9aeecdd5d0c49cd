"""`python tests/dist/contents.py WHEEL SDIST`: print what they contain, and fail if it is not this.

The wheel has the package and its metadata; the sdist has what the wheel is built from, and what a
packager reads. Neither has tests or benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {
    "CHANGELOG.md",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    ".gitignore",  # hatchling adds it
    "pyproject.toml",
}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def tracked() -> set[str]:
    """Return the files of the package that git tracks: `shoal/errors.py`."""
    listing = subprocess.run(
        ["git", "ls-files", "src/shoal"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return {line.removeprefix("src/") for line in listing.stdout.splitlines()}


def names_of_wheel(path: Path) -> set[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(path) as file:
        return set(file.namelist())


def names_of_sdist(path: Path) -> set[str]:
    """Return the files of an sdist, below its one folder."""
    with tarfile.open(path) as file:
        return {member.name.split("/", 1)[1] for member in file if member.isfile()}


def differences(what: str, names: set[str], expected: set[str]) -> list[str]:
    """Return a line for each file that is lacking or too many."""
    lines = [f"{what} lacks {name}" for name in sorted(expected - names)]
    return lines + [f"{what} has {name}" for name in sorted(names - expected)]


def show(what: str, names: Iterable[str]) -> None:
    """Print how many files each folder has."""
    names = list(names)
    folders = Counter("/".join(name.split("/")[:2]) if "/" in name else name for name in names)
    print(f"{what}: {len(names)} files")
    for folder, count in sorted(folders.items()):
        print(f"  {folder}" + (f" ({count})" if count > 1 else ""))


def main(wheel: str, sdist: str) -> int:
    """Compare; return the exit code."""
    package = tracked()
    assert "shoal/py.typed" in package
    folder = "-".join(Path(wheel).name.split("-")[:2]) + ".dist-info"
    in_wheel, in_sdist = names_of_wheel(Path(wheel)), names_of_sdist(Path(sdist))
    show("wheel", in_wheel)
    show("sdist", in_sdist)
    problems = differences("the wheel", in_wheel, package | {f"{folder}/{n}" for n in METADATA})
    problems += differences("the sdist", in_sdist, {f"src/{n}" for n in package} | BESIDE)
    print("\n".join(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
