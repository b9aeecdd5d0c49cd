"""The pictures of docs/watching.md, from docs/watching.json: a job as `shoal watch --json` saw it.

`python tests/draw/watching_pictures.py` rewrites them; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from draw.terminal_svg import svg
from shoal.draw.media.terminal import plain
from shoal.draw.roll import Roll, ServiceRow, render_roll
from shoal.runtime.rules.point import Member

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "watching.md", DOCS / "watching.svg"
SAMPLE = re.compile(r"(?<=\$ shoal watch\n).*?(?=```)", re.DOTALL)


def recorded() -> Roll:
    """Return the job that was recorded."""
    told = json.loads((DOCS / "watching.json").read_text(encoding="utf-8"))
    members = [{name: row[name] for name in Member._fields} for row in told["processes"]]
    services = tuple(ServiceRow(**row) for row in told["services"])
    return Roll(told["address"], tuple(Member(**row) for row in members), services)


def picture() -> str:
    """Return the table as SVG."""
    return svg(render_roll(recorded()), 100, "shoal watch", "watch")


def page() -> str:
    """Return the page, its sample as it must be."""
    sample = plain(render_roll(recorded(), most_rows=6), 100) + "\n"
    return SAMPLE.sub(lambda _: sample, PAGE.read_text(encoding="utf-8"), count=1)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
