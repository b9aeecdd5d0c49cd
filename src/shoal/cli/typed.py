"""Keep texts of the command line as they were typed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import typer.core

_TEXT = (str, str | None)
_TEXTS = (list[str], list[str] | None)


class TypedCommand(typer.core.TyperCommand):
    """A command that converts only numbers and the like: what was typed is a text already.

    typer would load pydantic to convert texts and absent values too, which takes longer than the
    rest of `shoal run`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        _keep_typed(self.callback, self.get_params(ctx))
        return super().parse_args(ctx, args)


class TypedGroup(typer.core.TyperGroup):
    """The same for the options before a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        _keep_typed(self.callback, self.get_params(ctx))
        return super().parse_args(ctx, args)


def _keep_typed(function: Callable[..., Any] | None, parameters: Any) -> None:
    """Give each parameter of a function a `process_value` of its own."""
    hints = {} if function is None else get_type_hints(function)
    for one in parameters:
        if not one.required and "process_value" not in vars(one):
            hint = hints.get(one.name)
            vars(one)["process_value"] = partial(_processed, one, hint, one.process_value)


def _processed(
    parameter: Any, hint: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any
) -> Any:
    """Return the value of a parameter, converted if necessary; call the callback for it."""
    if hint in _TEXTS:
        value = [] if value is None else [*value]
    elif not (value is None or (hint is bool and isinstance(value, bool)) or hint in _TEXT):
        return convert(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)
