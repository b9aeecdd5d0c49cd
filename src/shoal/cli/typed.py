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

    def get_params(self, ctx: Any) -> Any:
        """See `click.Command.get_params`."""
        return _as_typed(self.callback, super().get_params(ctx))


class TypedGroup(typer.core.TyperGroup):
    """The same for the options before a command."""

    def get_params(self, ctx: Any) -> Any:
        """See `click.Command.get_params`."""
        return _as_typed(self.callback, super().get_params(ctx))


def _as_typed(function: Callable[..., Any] | None, parameters: Any) -> Any:
    """Return the parameters of a function, each with a `process_value` of its own."""
    new = [one for one in parameters if "process_value" not in vars(one) and not one.required]
    hints = get_type_hints(function) if new and function is not None else {}
    for one in new:
        hint = hints.get(one.name)
        vars(one)["process_value"] = partial(_processed, one, hint, one.process_value)
    return parameters


def _processed(
    parameter: Any, hint: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any
) -> Any:
    """Return the value of a parameter, converted if necessary; call the callback for it."""
    if hint in _TEXTS:
        value = [] if value is None else [*value]
    elif not (value is None or (hint is bool and isinstance(value, bool)) or hint in _TEXT):
        return convert(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)
