"""The picture of README: one of four processes is killed, with JAX alone and with shoal.

It shows the first two transcripts of docs/why.md, which are made by running the programs there.
`python tests/draw/failing_picture.py` rewrites it; a test compares.
"""

from __future__ import annotations

import re
import textwrap

from rich.text import Text

from draw.terminal_svg import svg
from draw.watching_pictures import DOCS

PAGE, PICTURE = DOCS / "why.md", DOCS / "killed.svg"
TRANSCRIPT = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
WIDTH = 80


def picture() -> str:
    """Return the transcripts as SVG."""
    alone, shoal = TRANSCRIPT.findall(PAGE.read_text(encoding="utf-8"))[:2]
    screen = Text.assemble("# JAX alone\n", drawn(alone), "\n# with shoal\n", drawn(shoal))
    return svg(screen, WIDTH, "kill -9, in one of four processes", "killed")


def drawn(transcript: str) -> Text:
    """Wrap long lines, and highlight the command and the lines that say what happened."""
    lines = []
    for line in transcript.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    text = Text("\n".join(lines) + "\n")
    text.highlight_regex(r"(?m)^\$ .*", "bold")
    text.highlight_regex(r"(?m)^process \d: still running.*", "yellow")
    text.highlight_regex(r"(?m)^shoal run: .*", "bold green")
    return text


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
