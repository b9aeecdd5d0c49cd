"""The transcripts of README.md and docs/: programs and what they print, made by running them.

A `py` block whose first line is `# train.py` (any name) is a file. A `console` block directly below
a line `<!-- run -->` is a transcript: lines that begin with `$ ` are commands, and below each is
what it prints. They run in a new directory that has the files of the page up to there; of two files
of one name, the later one.

`python tests/processes/transcripts.py [PAGE…]` rewrites the transcripts that have changed, and
`test_transcripts.py` compares them.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- run -->\n"
_PART = re.compile(
    rf"^#+ (?P<heading>[^\n]*)$|^(?P<mark>{MARK})?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
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
    (re.compile(r"\S*… \d+ characters …\S*"), "…"),
    # Which of several equal failures was the first.
    (re.compile(r"p\d+\.log \(process \d+ was the first\)"), "p0000.log (process 0 was the first)"),
    (re.compile(r"(processes raised .*?)process \d+ of", re.DOTALL), r"\1process 0 of"),
)


class Transcript(NamedTuple):
    """A block of commands and what they print."""

    page: str
    heading: str  # above it
    files: Mapping[str, str]
    text: str
    start: int  # of the text in its page

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


def pages() -> list[str]:
    """Return the names of the pages."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found]


def transcripts(page: str, content: str) -> Iterator[Transcript]:
    """Yield those of a page."""
    heading, files, marks = "", {}, 0
    for part in _PART.finditer(content):
        text = part["text"] or ""
        if part["heading"]:
            heading = part["heading"]
        elif part["mark"]:
            marks += 1
            yield Transcript(page, heading, dict(files), text, part.start("text"))
        elif part["language"] in ("py", "python") and (named := _FILE.match(text)):
            files[named[1]] = text
    if content.count(MARK) != marks:
        raise ValueError(f"{page}: a line {MARK.strip()} is not directly above a block")


def run(one: Transcript, env: Mapping[str, str]) -> str:
    """Run its commands; return the block anew, with other names for the directory and the host."""
    with tempfile.TemporaryDirectory(prefix="job") as folder:
        for name, text in one.files.items():
            Path(folder, name).write_text(text, "utf-8")
        printed = "".join(f"$ {line}\n{_output(line, folder, env)}" for line in one.commands)
        printed = printed.replace(os.path.realpath(folder), "/runs")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "a", printed)


def _output(line: str, folder: str, env: Mapping[str, str]) -> str:
    given, words = {}, shlex.split(line, comments=True)
    while "=" in words[0]:
        name, _, given[name] = words.pop(0).partition("=")
    done = subprocess.run(
        [sys.executable, *_PROGRAMS[words[0]], *words[1:]],
        cwd=folder, env={**environment(env), **given}, text=True, timeout=60,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.stdout


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    # So that processes that fail alike are one group, however busy the host is.
    fixed = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "SHOAL_FAILURE_GRACE_S": "3"}
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


def main(names: list[str]) -> None:
    """Rewrite the transcripts of pages, by default all."""
    for page in [Path(name).resolve().relative_to(ROOT).as_posix() for name in names] or pages():
        content = Path(ROOT, page).read_text("utf-8")
        for one in reversed([*transcripts(page, content)]):  # those above keep their places
            printed = run(one, os.environ)
            changed = steady(printed) != steady(one.text)
            print(f"{page}: {one.heading}: {'changed' if changed else 'as before'}", flush=True)
            if changed:
                content = content[: one.start] + printed + content[one.start + len(one.text) :]
        Path(ROOT, page).write_text(content, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
