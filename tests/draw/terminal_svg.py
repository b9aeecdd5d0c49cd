"""A picture of a terminal."""

from __future__ import annotations

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType


def svg(shown: RenderableType, width: int, title: str, name: str) -> str:
    """Draw a terminal that shows something. Fonts are the reader's own: nothing is fetched.

    Args:
      width: columns.
      name: of the picture, for its styles: unique on a page.
    """
    console = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor"
    )
    console.print(shown)
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    # Without it, some programs leave out the spaces at the beginning of a line.
    form = form.replace("<svg ", '<svg xml:space="preserve" ')
    drawn = console.export_svg(title=title, code_format=form, unique_id=name)
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"
