"""Parameters whose texts are not converted have the values that typer gives them."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.cli.main import TypedCommand, TypedGroup

WORDS = ["-n", "-n3", "--count", "--count=4", "--flag", "--no-flag", "--many", "--many=a"]
WORDS += ["--upper", "--upper=b", "", "x", "3", "1.5", "ä", "\udcff", "--", "--help", "--ready"]


def shout(value: str | None) -> str | None:
    if value == "x":
        raise typer.BadParameter("not x")
    return value and value.upper()


def program(
    words: Annotated[list[str] | None, typer.Argument()] = None,
    text: Annotated[str, typer.Option("-n")] = "1",
    count: Annotated[int | None, typer.Option()] = None,
    flag: Annotated[bool, typer.Option("--flag/--no-flag")] = True,
    many: Annotated[list[str] | None, typer.Option()] = None,
    upper: Annotated[str | None, typer.Option(callback=shout)] = None,
) -> None:
    print(ascii([words, text, count, flag, many, upper]))


def about(is_ready: Annotated[bool, typer.Option("--ready")] = False) -> None:
    print(is_ready)


def application(command: type | None, group: type | None) -> typer.Typer:
    app = typer.Typer(cls=group, rich_markup_mode=None, add_completion=False)
    app.callback()(about)
    app.command("program", cls=command)(program)
    return app


PLAIN, TYPED = application(None, None), application(TypedCommand, TypedGroup)


@given(st.lists(st.sampled_from(WORDS), max_size=5), st.booleans())
def test_a_command_gets_the_same_values_and_refuses_the_same(words, is_ready):
    arguments = [*(["--ready"] if is_ready else []), "program", *words]
    plain, typed = (CliRunner().invoke(app, arguments) for app in (PLAIN, TYPED))
    assert (typed.exit_code, typed.output) == (plain.exit_code, plain.output)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], "[None, '1', None, True, None, None]"),
        (["-n", "", "--upper", "a", "b"], "[['b'], '', None, True, None, 'A']"),
        (["--count", "4", "--many", "a", "--many", "b"], "[None, '1', 4, True, ['a', 'b'], None]"),
    ],
)
def test_numbers_are_numbers_and_texts_are_as_typed(words, values):
    ended = CliRunner().invoke(TYPED, ["program", *words])
    assert ended.output.splitlines() == ["False", values]
