"""`ssmspec presets`: the models that are known by name."""

import json as json_format
from dataclasses import asdict
from typing import Annotated

import typer

from ssmspec.model import Model
from ssmspec.presets import PRESETS

from . import table
from .console import out
from .names import short

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def presets(json: Json = False) -> None:
    """List the models that --model knows by name. Nothing is downloaded: their shapes are part of the package."""
    if json:
        typer.echo(json_format.dumps([asdict(model) for model in PRESETS.values()], indent=2))
        return
    table.show(out(), [_cells(model) for model in PRESETS.values()], ["preset"])


def _cells(model: Model) -> table.Cells:
    g, a = model.geometry, model.attention
    return {
        "preset": model.name,
        "arch": g.arch,
        "layers": f"{g.num_layers} of {model.num_layers}",
        "H / HV": f"{g.num_k_heads} / {g.num_v_heads}",
        "K / V": f"{g.head_k} / {g.head_v}",
        "state": short(g.state_dtype),
        "KV": f"{a.num_layers} x {a.latent} latent"
        if a.latent
        else f"{a.num_layers} x {a.num_kv_heads} x {a.head_dim}",
        "weights GiB": "" if model.weights_gib is None else f"{model.weights_gib:,.1f}",
        "Hub id": model.source.removeprefix("config.json of "),
    }
