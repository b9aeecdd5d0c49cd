"""The transcripts of docs/why.md, made by the programs of examples/why.

A `console` block directly below the line MARK is a transcript: its lines that begin with `$ ` are
commands, and below each is what it prints. `python tests/processes/why.py` writes them anew.
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
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "why.md"
PROGRAMS = ROOT / "examples" / "why"
MARK = "<!-- run in examples/why -->"
TRANSCRIPT = re.compile(rf"(?<=^{MARK}\n```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```py\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

COMMANDS = {"python": [], "shoal": ["-m", "shoal"]}
VARIES = (  # between two runs, two hosts, or two versions of JAX
    (re.compile(r"\d+\.\d s\b"), "1.0 s"),
    (re.compile(r" after 1\.0 s"), ""),  # a long headline has it elsewhere
    (re.compile(r"\d+ MiB"), "100 MiB"),
    (re.compile(r"\[external/.*"), "…"),  # what Gloo saw of a connection that broke
    (re.compile(r"\S+/(?=ck\b|data-)"), ""),
    (re.compile(r"data-[0-9a-f]{12}"), "data-0123456789ab"),
)


def transcripts() -> list[str]:
    """Return the transcripts of the page."""
    return TRANSCRIPT.findall(PAGE.read_text("utf-8"))


def programs() -> dict[str, str]:
    """Return the programs that the page shows, or what it shows of them, by name."""
    return dict(SHOWN.findall(PAGE.read_text("utf-8")))


def can_run(transcript: str) -> bool:
    """Return whether the packages of its programs are installed."""
    return "orbax" not in transcript or importlib.util.find_spec("orbax") is not None


def run(transcript: str, env: Mapping[str, str]) -> str:
    """Run the commands of a transcript in a copy of the programs; return it as it is now."""
    with tempfile.TemporaryDirectory(prefix="job") as temporary:
        folder = Path(temporary).resolve()
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
        text = ""
        for line in re.findall(r"^\$ (.*)$", transcript, re.MULTILINE):
            program, *arguments = shlex.split(line)
            done = subprocess.run(
                [sys.executable, *COMMANDS[program], *arguments],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=100,
            )
            text += f"$ {line}\n{done.stdout}"
        text = text.replace(str(folder), "/runs")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "a", text)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command: of a terminal with 80 columns, on CPU devices."""
    left_out = ("CI", "COLUMNS", "GITHUB_ACTIONS", "XLA_FLAGS")
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    given = {name: value for name, value in env.items() if name not in left_out}
    return {**given, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def steady(transcript: str) -> list[str]:
    """Return the words of a transcript, without what varies: lines may break elsewhere."""
    for pattern, same in VARIES:
        transcript = pattern.sub(same, transcript)
    return transcript.split()


def main() -> None:
    """Write the transcripts of the page anew, except those whose packages are not installed."""

    def again(match: re.Match[str]) -> str:
        return run(match[0], environment(os.environ)) if can_run(match[0]) else match[0]

    PAGE.write_text(TRANSCRIPT.sub(again, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
