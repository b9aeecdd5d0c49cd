"""The transcripts of README.md and docs/: programs and what they print, made by running them.

A `py` block whose first line is `# train.py` (any name) is a file. A `console` block directly below
a line `<!-- run -->` is a transcript: lines that begin with `$ ` are commands, and below each is
what it prints. They run in a new directory that has the files of the page up to there; of two files
of one name, the later one.

`<!-- run on -->`: in the directory of the transcript above, as a reader goes on. `<!-- run in
examples/why -->`: in a copy of that directory. `<!-- run with orbax -->`: where it is installed.

`python tests/processes/transcripts.py [PAGE…]` rewrites the transcripts that have changed; with
`--check` it only compares, as `test_transcripts.py` does. It needs nothing but shoal.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(
    r"<!-- run(?P<on> on)?(?: in (?P<copied>[\w/-]+))?(?: with (?P<package>\w+))? -->\n"
)
_PART = re.compile(
    rf"^#+ (?P<heading>[^\n]*)$"
    rf"|^(?P<mark>{MARK.pattern})?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# ([\w.-]+)\n")
_PROGRAMS = {"python": [], "shoal": ["-m", "shoal"]}
_LEFT_OUT = ("CI", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "XLA_FLAGS")
_VARIES = (  # from run to run, or from host to host
    (re.compile(r"\b\d+(\.\d+)? (s|ms|µs|min)\b"), "1.0 s"),
    (re.compile(r"\b\d+(\.\d+)? ([KMG]i?B|cores?)\b"), "1 GiB"),
    (re.compile(r"(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?"), "12:00:00"),
    (re.compile(r"\b\d+\.\d+\.\d+(\.\w+)*"), "1.0.0"),  # a version or an address
    (re.compile(r"(?<=:)\d{4,5}\b"), "4711"),  # a port
    (re.compile(r"\bpid \d+"), "pid 4711"),
    (re.compile(r"\b([0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{64})\b"), "5447d6786ecf"),  # a hash
    (re.compile(r"(\.\.|/tmp)/shoal-run-\w+"), "/tmp/shoal-run"),
    (re.compile(r"^(p\d+\| )?shoal \S+ was tested with JAX up to .*\n", re.MULTILINE), ""),
    (re.compile(r"\S*…( \d+ characters …)?\S*"), "…"),
    (re.compile(r"\[external/.*"), "…"),  # what Gloo saw of a connection that broke
    (re.compile(r", and the cgroup recorded no OOM kill"), ""),  # where there is a counter
    # Which of several equal failures was the first.
    (re.compile(r"p\d+\.log \(process \d+ was the first\)"), "p0000.log (process 0 was the first)"),
    (re.compile(r"(processes raised .*?)process \d+ of", re.DOTALL), r"\1process 0 of"),
    # The end of a notice of gloo, whose threads print into each other's lines.
    (re.compile(r"^p\d+\| *\d*\n", re.MULTILINE), ""),
)


class Block(NamedTuple):
    """A block of commands and what they print."""

    files: Mapping[str, str]  # of the page up to there
    text: str
    start: int  # of the text in its page

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


class Transcript(NamedTuple):
    """Blocks that run in one directory, one after the other."""

    page: str
    heading: str  # above the first
    copied: str | None  # a directory of the tree
    package: str | None  # that its commands need
    blocks: list[Block]

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks)

    @property
    def can_run(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def pages() -> list[str]:
    """Return the names of the pages."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found]


def transcripts(page: str, content: str) -> Iterator[Transcript]:
    """Yield those of a page."""
    heading, files, found = "", {}, []
    for part in _PART.finditer(content):
        text = part["text"] or ""
        if part["heading"]:
            heading = part["heading"]
        elif part["mark"]:
            if part["on"] and (not found or part["copied"] or part["package"]):
                raise ValueError(
                    f"{page}: {part['mark'].strip()} goes on, with nothing more to say"
                )
            if not part["on"]:
                found.append(Transcript(page, heading, part["copied"], part["package"], []))
            found[-1].blocks.append(Block(dict(files), text, part.start("text")))
        elif part["language"] in ("py", "python") and (named := _FILE.match(text)):
            files[named[1]] = text
    if content.count("<!-- run") != sum(len(one.blocks) for one in found):
        raise ValueError(f"{page}: a line <!-- run --> is not directly above a block")
    yield from found


def run(one: Transcript, env: Mapping[str, str]) -> list[str]:
    """Run its commands; return its blocks anew, with other names for the directory and the host."""
    blocks = []
    with tempfile.TemporaryDirectory(prefix="j") as outer:
        folder = os.path.join(outer, "r")  # below, so that /tmp/… is shorter than ../../…
        if one.copied is None:
            os.mkdir(folder)
        else:
            shutil.copytree(ROOT / one.copied, folder)
        for block in one.blocks:
            for name, text in block.files.items():
                if one.copied is None:
                    Path(folder, name).write_text(text, "utf-8")
            printed = "".join(f"$ {line}\n{_output(line, folder, env)}" for line in block.commands)
            printed = printed.replace(os.path.realpath(folder), "/runs")
            blocks.append(re.sub(rf"\b{re.escape(socket.gethostname())}\b", "a", printed))
    return blocks


def _output(line: str, folder: str, env: Mapping[str, str]) -> str:
    given, words = {}, shlex.split(re.sub(r"\s# .*", "", line))
    while "=" in words[0]:
        name, _, given[name] = words.pop(0).partition("=")
    done = subprocess.run(
        [sys.executable, *_PROGRAMS[words[0]], *words[1:]],
        cwd=folder, env={**environment(env), **given}, text=True, timeout=100,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.stdout


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command."""
    # So that processes that fail alike are one group, however busy the host is.
    fixed = {"JAX_PLATFORMS": "cpu", "SHOAL_FAILURE_GRACE_S": "3"}
    return {**{name: value for name, value in env.items() if name not in _LEFT_OUT}, **fixed}


def steady(text: str) -> list[str]:
    """Return the words of a transcript, without what differs between two runs."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "a", text)
    for pattern, same in _VARIES:
        text = pattern.sub(same, text)
    # Lines of different processes come in any order. Where lines are broken depends on names.
    by_process = re.compile(r"(^p\d+\|.*\n)+", re.MULTILINE)
    return by_process.sub(lambda part: "".join(_sorted(part[0])), text).split()


def _sorted(lines: str) -> list[str]:
    return sorted(lines.splitlines(keepends=True), key=lambda line: line.partition("|")[0])


def main(names: list[str]) -> int:
    """Rewrite the transcripts of pages, by default all; return the exit code."""
    only_compares, any_changed = "--check" in names, False
    names = [name for name in names if name != "--check"]
    for page in [Path(name).resolve().relative_to(ROOT).as_posix() for name in names] or pages():
        content = Path(ROOT, page).read_text("utf-8")
        for one in reversed([*transcripts(page, content)]):  # those above keep their places
            printed = run(one, os.environ) if one.can_run else []
            changed = bool(printed) and steady("".join(printed)) != steady(one.text)
            print(f"{page}: {one.heading}: {'changed' if changed else 'as before'}", flush=True)
            if changed and only_compares:
                print("".join(printed))
            any_changed |= changed
            for block, now in reversed([*zip(one.blocks, printed, strict=True)] if changed else []):
                content = content[: block.start] + now + content[block.start + len(block.text) :]
        if not only_compares:
            Path(ROOT, page).write_text(content, "utf-8")
    return int(only_compares and any_changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
