"""The command line: `ssmspec`. Registers the commands, and turns what goes wrong into a sentence and an exit code."""

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import typer

import ssmspec

from . import bench, compare, doctor, helped, play, presets, serve_check, soak, tune
from .console import complain
from .errors import sentence

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
COULD_NOT_RUN, INTERRUPTED, NO_READER = 2, 130, 141  # 1: something is not as expected; 141: 128 + SIGPIPE


class Sentences(helped.Group):
    """A complaint about the input is a sentence, not a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            complain(sentence(error))
            raise typer.Exit(COULD_NOT_RUN) from None
        except KeyboardInterrupt:
            complain("interrupted; nothing was written")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Sentences,
    help="Speculative decoding on hybrid models: what each way to undo rejected drafts costs, and whether it changes"
    " the output.",
    context_settings=helped.NAMES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssmspec {ssmspec.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None: ...


app.add_typer(compare.app, name="compare")
for name, command, example in (
    ("bench", bench.bench, "--batch 1,32,256 --draft 3 --mode exact,fast --json"),
    ("doctor", doctor.doctor, "--json"),
    ("play", play.play, "script.jsonl --policy recover,checkpointing"),
    ("presets", presets.presets, "--json"),
    ("serve-check", serve_check.serve_check, "Qwen/Qwen3.5-4B --policy checkpointing"),
    ("soak", soak.soak, "--minutes 5 --seed 1"),
    ("tune", tune.tune, "--model qwen3.5-4b --batch 1,32,256 -o nvidia-h200.json"),
):
    app.command(name, cls=helped.Command, epilog=f"Example: ssmspec {name} {example}")(command)


def run() -> None:
    """The entry point. Output that cannot be written is a sentence; a reader that left, as behind `| head`, is told
    nothing."""
    try:
        app(prog_name="ssmspec")
    except OSError as error:
        with suppress(OSError):
            complain(_told(error))
        _end(COULD_NOT_RUN)
    except SystemExit as end:
        # Typer and rich exit 1 where the pipe is broken, which here says that a promise is.
        if isinstance(end.__context__, BrokenPipeError):
            _end(NO_READER)
        raise


def _told(error: OSError) -> str:
    """About the file, or about the output where its writing is what fails like this."""
    if error.filename is None and error.errno not in UNWRITTEN:
        return " ".join(str(error).split())
    return f"{error.filename or 'the output'}: {error.strerror}"


def _end(code: int) -> None:
    """What is still buffered goes nowhere: Python would try to write it once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
