"""The pictures of docs/: `make pictures` draws them again, and a test compares their structure.

A line `$ shoal … --svg docs/NAME.svg` of a page is the command that draws that picture. `DRAWN` has
the others, from what was recorded: transcripts of docs/why.md, docs/watching.json (a job as `shoal
watch --json` saw it), docs/failed.json (the `failure.json` of README's program), and the checkpoint
of tests/golden.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.text import Text
from typer.testing import CliRunner

from draw.terminal_svg import svg
from shoal import Layout, Mesh, planning
from shoal.cli.main import build
from shoal.cli.report import read_failure
from shoal.draw.media.terminal import plain
from shoal.draw.ribbons import ribbons_svg
from shoal.draw.roll import Roll, ServiceRow, render_roll
from shoal.runtime.failures.rendering import Style, report
from shoal.runtime.rules.point import Member

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WATCHING_PAGE = DOCS / "watching.md"
COMMAND = re.compile(r"^\$ (shoal \w+ .* --svg docs/([\w-]+\.svg))$", re.MULTILINE)
_SAMPLE = re.compile(r"(?<=\$ shoal watch\n).*?(?=```)", re.DOTALL)
_TRANSCRIPT = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WIDE, _NARROW = 80, 46  # columns; a telephone shows the narrow one in letters of 12 pixels


def pictures() -> dict[str, str]:
    """Draw all pictures: name → SVG."""
    return {name: draw() for name, draw in DRAWN.items()} | commanded()


def commanded() -> dict[str, str]:
    """Run the commands of pages that draw pictures."""
    pages = [page.read_text("utf-8") for page in sorted(DOCS.rglob("*.md"))]
    lines = {name: line for page in pages for line, name in COMMAND.findall(page)}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("docs").mkdir()
        for line in lines.values():
            _shoal(shlex.split(line)[1:])
        return {name: Path("docs", name).read_text("utf-8") for name in lines}


def _shoal(arguments: list[str]) -> str:
    done = CliRunner().invoke(build(arguments[:1]), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# ---- A process is killed, with JAX alone and with shoal.


def killed() -> str:
    """Draw the first two transcripts of docs/why.md."""
    page = (DOCS / "why.md").read_text("utf-8")
    alone, shoal = _TRANSCRIPT.findall(page)[:2]
    screen = Text.assemble("# JAX alone\n", _drawn(alone), "\n# with shoal\n", _drawn(shoal))
    return svg(screen, _WIDE, "kill -9, in one of four processes", "killed")


def _drawn(transcript: str) -> Text:
    """Wrap long lines, and highlight the command and the lines that say what happened."""
    lines = []
    for line in transcript.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, _WIDE, subsequent_indent=indent, break_on_hyphens=False)
    text = Text("\n".join(lines) + "\n")
    text.highlight_regex(r"(?m)^\$ .*", "bold")
    text.highlight_regex(r"(?m)^process \d: still running.*", "yellow")
    text.highlight_regex(r"(?m)^shoal run: .*", "bold green")
    return text


def failed() -> str:
    """Draw the report of docs/failed.json."""
    lines = report(read_failure(str(DOCS / "failed.json")), Style(_NARROW, colour=True))
    return svg(
        Text.from_ansi("\n".join(lines)), _NARROW, "one of four processes is killed", "failed"
    )


# ---- A job that hangs.


def recorded() -> Roll:
    """Return the job of docs/watching.json."""
    told = json.loads((DOCS / "watching.json").read_text("utf-8"))
    members = [{name: row[name] for name in Member._fields} for row in told["processes"]]
    services = tuple(ServiceRow(**row) for row in told["services"])
    return Roll(told["address"], tuple(Member(**row) for row in members), services)


def watching() -> str:
    """Draw the table of that job."""
    return svg(render_roll(recorded()), 100, "shoal watch", "watch")


def watching_page() -> str:
    """Return the page on watching, its sample as it must be."""
    sample = plain(render_roll(recorded(), most_rows=6), 100) + "\n"
    return _SAMPLE.sub(lambda _: sample, WATCHING_PAGE.read_text("utf-8"), count=1)


# ---- A move, and a checkpoint.


def moving() -> str:
    """Draw the traffic of a move on two hosts."""
    mesh = Mesh({"data": 2, "model": 4})
    source, target = Layout(mesh, ("data", "model"), None), Layout(mesh, None, "model")
    hosts = planning.topology.parse("gpu:2 hosts x 4")
    plan = planning.plan_transfer(source, target, (8192, 4096), 4, topology=hosts)
    return ribbons_svg(planning.traffic_of(plan, hosts))


def checkpoint() -> str:
    """Draw what `shoal ckpt show` prints of a checkpoint with leaves of every kind."""
    shown = _shoal(["ckpt", "show", str(ROOT / "tests/golden/checkpoint")])
    shown = shown.replace(f"{ROOT}/tests/golden/checkpoint", "/shared/model")
    width = max(map(len, shown.splitlines()))
    return svg(Text(shown), width, "shoal ckpt show /shared/model", "checkpoint")


DRAWN: Mapping[str, Callable[[], str]] = {
    "checkpoint.svg": checkpoint,
    "failed.svg": failed,
    "killed.svg": killed,
    "moving.svg": moving,
    "watching.svg": watching,
}


def structure(picture: str) -> list[tuple[str, str]]:
    """Return the elements of a picture, each with its text: no colors, sizes or positions."""
    elements = ET.fromstring(picture).iter()
    named = [(element.tag.rpartition("}")[2], (element.text or "").strip()) for element in elements]
    return [(tag, text) for tag, text in named if tag != "style"]


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (DOCS / name).write_text(drawn, encoding="utf-8")
        print(f"docs/{name}")
    WATCHING_PAGE.write_text(watching_page(), encoding="utf-8")
