"""docs/first-job.md, with what its commands print: `python tests/processes/first_job.py` rewrites.

The commands run in order, in one directory that has the files of the page, as a reader types them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-job.md"
TIMEOUT_S = 100
_NOT_ON_A_LAPTOP = ("CI", "COLUMNS", "GITHUB_ACTIONS")
_FILE = re.compile(r"^```py\n# (?P<name>\S+)\n.*?^```$", re.MULTILINE | re.DOTALL)
_TRANSCRIPT = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>[^`]*)^```$", re.MULTILINE)
_LOSS = re.compile(r"(epoch \d: loss) (\d\.\d{4})\b")
_VARIES = (
    (re.compile(r"\bafter \d+\.\d s\b"), "after 1.0 s"),
    (re.compile(r"\S+/shoal-run-\w+/"), "/tmp/shoal-run-x/"),
    (re.compile(r"\d+ MiB"), "200 MiB"),
    (re.compile(r"; its cgroup counted no out-of-memory kill"), ""),  # where it has one
    (re.compile(r"committed +\d+(\.\d+)? KiB( +\d+ +)\d+(\.\d+)? m?s"), r"committed 8 KiB\g<2>1 s"),
    (re.compile(r" {2,}(?=\S)"), "  "),  # columns as wide as what stands in them
    (re.compile(r"-\n +|\n {4,}"), " "),  # where a sentence is broken
)


def played(text: str, folder: Path, env: Mapping[str, str]) -> str:
    """Return the page with what its commands print now, in an empty directory."""
    for file in _FILE.finditer(text):
        (folder / file["name"]).write_text(file[0].removeprefix("```py\n").removesuffix("```"))

    def now(part: re.Match[str]) -> str:
        done = subprocess.run(
            part["command"], shell=True, cwd=folder, env=env, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return f"```console\n$ {part['command']}\n{done.stdout}```"

    return _TRANSCRIPT.sub(now, text)


def steady(text: str) -> str:
    """Return a page without what differs between two runs."""
    for pattern, same in (*_VARIES, (_LOSS, r"\1 0.0000")):
        text = pattern.sub(same, text)
    return text


def losses(text: str) -> list[float]:
    """Return the losses that are printed, in order."""
    return [float(found[2]) for found in _LOSS.finditer(text)]


def with_shoal(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as on a laptop, in which `shoal` is the one beside this Python."""
    kept = {name: value for name, value in env.items() if name not in _NOT_ON_A_LAPTOP}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}


def main() -> None:
    """Rewrite the transcripts."""
    text, env = PAGE.read_text("utf-8"), with_shoal(os.environ)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # far from the logs, as a home is
        PAGE.write_text(played(text, Path(folder), env), "utf-8")


if __name__ == "__main__":
    main()
