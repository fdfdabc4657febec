"""Where text goes: results to stdout, everything else to stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console


def out() -> Console:
    """Made anew for each result, since width and colours belong to the stream of that moment."""
    return Console(highlight=False)


def complain(text: str) -> None:
    Console(stderr=True, highlight=False).print("[red]Error:[/] ", end="")
    typer.echo(text, err=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says how far it is; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")
