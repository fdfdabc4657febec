"""How commands explain themselves: paragraphs that fill the terminal, and flags without a type."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

NAMES = {"help_option_names": ["-h", "--help"]}


def filled(text: str | None) -> str | None:
    """The text with its paragraphs in one line each; indented lines stay as they are."""
    return text and re.sub(r"(?<=\S)\n(?=\S)", " ", text)


class _Helped:
    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        super().__init__(*args, help=filled(help), **settings)  # type: ignore[call-arg]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_Helped, TyperCommand):
    """A command."""


class Group(_Helped, TyperGroup):
    """A command with subcommands."""
