"""The command `shoal`: a table of commands, each imported from its own module on use."""

from __future__ import annotations

import atexit
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer
import typer.core

from shoal.errors import ShoalError
from shoal.runtime.system.service_commands import allow_child_ends, open_standard_streams


class Command(NamedTuple):
    """The module of a command's function, and its settings for typer."""

    module: str
    function: str
    settings: Mapping[str, Any] = {}
    is_group: bool = False  # the function returns an application of its own


COMMANDS: Mapping[str, Command] = {
    # Options after the script belong to the script.
    "run": Command("shoal.cli.run", "run", {"allow_interspersed_args": False}),
    "watch": Command("shoal.cli.watch", "watch"),
    "stacks": Command("shoal.cli.stacks", "stacks"),
    "save": Command("shoal.cli.save", "save"),
    "report": Command("shoal.cli.report", "show_report"),
    "doctor": Command("shoal.cli.doctor", "doctor"),
    "coordinator": Command("shoal.cli.coordinator", "coordinator"),
    "mesh": Command("shoal.cli.mesh", "mesh"),
    "layout": Command("shoal.cli.layout", "layout"),
    "plan": Command("shoal.cli.plan", "plan"),
    "ckpt": Command("shoal.cli.ckpt.main", "ckpt", is_group=True),
}


def build(names: Iterable[str]) -> typer.Typer:
    """Return an application with the commands `names`; only their modules are imported."""
    app = typer.Typer(
        name="shoal",
        cls=TypedGroup,
        help="Start, watch and inspect multi-host JAX jobs, and their checkpoints.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        rich_markup_mode=None,  # it would wrap the examples
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_about)
    for name in names:
        command = COMMANDS[name]
        function = getattr(importlib.import_module(command.module), command.function)
        if command.is_group:
            app.add_typer(function(), name=name)
        else:
            settings = dict(command.settings)
            app.command(name, cls=TypedCommand, context_settings=settings)(function)
    return app


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib import metadata  # 15 ms, for which no other command has to wait

        print(f"shoal {metadata.version('shoal')}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]


def _about(version: _Version = False) -> None:
    """Launch, agree, place, move and save; when something fails, see which process did."""


def _arguments() -> list[str]:
    """Return the arguments; escape a layout such as '-, model', which is not an option."""
    given = sys.argv[1:]
    if given[:1] != ["layout"]:
        return given
    return [f" {text}" if re.match(r"-\s*[,|@]", text) else text for text in given]


def _open_closed_streams() -> None:
    """Open closed standard streams (`shoal run … >&-`) as /dev/null, for Python too."""
    for fd in open_standard_streams():
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[fd]
        setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - never closed


def _escape_unencodable() -> None:
    """Have stdout escape what its encoding lacks (a locale without UTF-8), as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        _run()
    except SystemExit as ended:
        if sys.flags.inspect:
            _end_uninspected(ended)
        raise


def _end_uninspected(ended: SystemExit) -> NoReturn:
    """End this process: with `python -i` or PYTHONINSPECT, Python would end it as by an error."""
    code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run() -> None:
    _open_closed_streams()
    _escape_unencodable()
    allow_child_ends()
    command = sys.argv[1:2]
    is_known = bool(command) and command[0] in COMMANDS
    app = build(command if is_known else COMMANDS)
    try:
        app(_arguments(), prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


# ---- Keep texts of the command line as they were typed.


_TEXT = (str, str | None)
_TEXTS = (list[str], list[str] | None)


class TypedCommand(typer.core.TyperCommand):
    """A command that converts only numbers and the like: what was typed is a text already.

    typer would load pydantic to convert texts and absent values too, which takes longer than the
    rest of `shoal run`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        parameters = self.get_params(ctx)
        _keep_typed(self.callback, parameters)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # an unknown option
                _advise(vars(error), ctx, parameters)
            raise


def _advise(error: dict[str, Any], ctx: Any, parameters: Any) -> None:
    """Propose no hidden option in an error about an unknown one. Where arguments follow that may be
    those of a script, propose a misspelled one alone, and say where the script's options belong."""
    from difflib import get_close_matches

    hidden = {name for parameter in parameters if _is_hidden(parameter) for name in parameter.opts}
    near = {*(error["possibilities"] or ())} - hidden
    if not ctx.allow_interspersed_args:
        typed = error["option_name"].lstrip("-")
        near = {
            option for option in near if get_close_matches(typed, [option.lstrip("-")], cutoff=0.8)
        }
        error["message"] += "; options of the script come after the script"
    error["possibilities"] = sorted(near)


def _is_hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False))  # arguments have no such attribute


class TypedGroup(typer.core.TyperGroup):
    """The same for the options before a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        _keep_typed(self.callback, self.get_params(ctx))
        return super().parse_args(ctx, args)


def _keep_typed(function: Callable[..., Any] | None, parameters: Any) -> None:
    """Give each parameter of a function a `process_value` of its own."""
    hints = {} if function is None else get_type_hints(function)
    for parameter in parameters:
        if not parameter.required and "process_value" not in vars(parameter):
            hint = hints.get(parameter.name)
            vars(parameter)["process_value"] = partial(
                _processed, parameter, hint, parameter.process_value
            )


def _processed(
    parameter: Any, hint: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any
) -> Any:
    """Return the value of a parameter, converted if necessary; call the callback for it."""
    if hint in _TEXTS:
        value = [] if value is None else [*value]
    elif not (value is None or (hint is bool and isinstance(value, bool)) or hint in _TEXT):
        return convert(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)
