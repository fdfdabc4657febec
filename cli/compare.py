"""`ssmspec compare`: bits, bytes and requests at once; its subcommands look closer at one of them."""

import typer

from ssmspec.measure.sweep import Part

from . import study
from .errors import UsageError
from .helped import Command, Group
from .options import ALL, CAPACITY, EXACT, TRAFFIC, Options, flag, takes

app = typer.Typer(cls=Group, no_args_is_help=False)


@app.callback(
    invoke_without_command=True, epilog="Example: ssmspec compare --model qwen3.5-35b-a3b --draft 1,3,5"
)
@takes(*ALL)
def everything(ctx: typer.Context, o: Options) -> None:
    """Compare the policies: exactness, traffic and capacity in one table. A LIST is a comma list, and sweeps."""
    if ctx.invoked_subcommand is None:
        study.run(ctx, o, *Part)
        return
    given = [
        name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"{flag(given[0])} belongs behind the subcommand: ssmspec compare {ctx.invoked_subcommand} {flag(given[0])} ..."
        )


@app.command(cls=Command, epilog="Example: ssmspec compare exact --state-dtype fp16 --mode exact,fast")
@takes(*EXACT)
def exact(ctx: typer.Context, o: Options) -> None:
    """Play one random life under each policy, and compare outputs and states with native's, bit for bit."""
    study.run(ctx, o, Part.EXACT)


@app.command(
    cls=Command, epilog="Example: ssmspec compare traffic --draft 1,3,5,7 --ring 16,32 --plot bytes.svg"
)
@takes(*TRAFFIC)
def traffic(ctx: typer.Context, o: Options) -> None:
    """Bytes read and written in a step, from the layout and a simulated acceptance process."""
    study.run(ctx, o, Part.TRAFFIC)


@app.command(cls=Command, epilog="Example: ssmspec compare capacity --gpu-memory 141 --context 8192,32768")
@takes(*CAPACITY)
def capacity(ctx: typer.Context, o: Options) -> None:
    """Bytes of a request, and how many requests fit on a GPU."""
    study.run(ctx, o, Part.CAPACITY)
