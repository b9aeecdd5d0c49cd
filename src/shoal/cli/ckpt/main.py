"""`shoal ckpt`: inspect checkpoints, verify them, and clean up after a crash. Needs no JAX."""

from __future__ import annotations

import typer

from shoal.cli.ckpt.diff import diff
from shoal.cli.ckpt.ls import ls
from shoal.cli.ckpt.show import show
from shoal.cli.ckpt.tend import gc, recover
from shoal.cli.ckpt.verify import verify


def ckpt() -> typer.Typer:
    """Inspect checkpoints, verify them, clean up after a crash; PATH: a history or a checkpoint.

    \b
    Exit code:
      0   success: committed, whole, equal
      1   nothing is committed there; diff: they differ
      2   wrong usage
      76  bytes on disk differ from those saved
    """
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.callback(help=ckpt.__doc__)(_about)
    for command in (ls, show, verify, diff, recover, gc):
        app.command()(command)
    return app


def _about() -> None:
    """The group itself does nothing."""
