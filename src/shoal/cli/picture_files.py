"""The options `--svg` and `--html`, which write pictures to files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import UsageError
from shoal.paths import why_refused

Svg = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Also write it as SVG.")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write it as an HTML page.")
]


def write_pictures(
    svg: str | None, html: str | None, drawn: Callable[[], tuple[str, str]], *, quiet: bool = False
) -> None:
    """Write the requested files, and print their names.

    Args:
      svg: path of the SVG; None: do not write it.
      html: path of the page.
      drawn: returns the SVG and the page.
      quiet: print to stderr instead of stdout.

    Raises:
      UsageError: a file cannot be written.
    """
    if svg is None and html is None:
        return
    for option, name, text in zip(("--svg", "--html"), (svg, html), drawn(), strict=True):
        if name is not None:
            _write(option, name, text)
            print(f"wrote {name}", file=sys.stderr if quiet else sys.stdout)


def _write(option: str, name: str, text: str) -> None:
    if name in ("", "-"):
        raise UsageError(f"{option} {name!r} is not a file; for standard output give /dev/stdout")
    path = Path(name)
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = why_refused(error, name) if isinstance(error, OSError) else error
        folder = path.parent
        missing = "" if folder.is_dir() else f"; there is no folder {str(folder)!r}"
        raise UsageError(f"{option} {name!r} cannot be written: {reason}{missing}") from None
