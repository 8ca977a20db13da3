"""lampq synthesize."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lampq.cli import app, arguments, guarded
from lampq.models import DEFAULT_MODEL, load_model
from lampq.reconstruct.precision import precision_named
from lampq.terminal import TerminalProgress
from lampq.typed import preprocessing_with
from lampq.zero_shot import (
    DEFAULT_IMAGES,
    DEFAULT_RECIPE,
    RECIPES,
    Synthesis,
    check_folder,
    described,
    make_folder,
    recipe_of,
)


@app.command("synthesize")
@guarded
def synthesize_command(
    model: Annotated[str, typer.Argument(help="a timm name, or a bundled one")] = DEFAULT_MODEL,
    weights: arguments.Weights = None,
    images: Annotated[int, typer.Option(help="how many pictures")] = DEFAULT_IMAGES,
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("runs/synthetic"),
    recipe: Annotated[str, typer.Option(help=" or ".join(RECIPES))] = DEFAULT_RECIPE,
    steps: Annotated[
        int | None, typer.Option(help="steps of a batch, default: the recipe's")
    ] = None,
    batch: Annotated[int, typer.Option(help="pictures at a time; memory grows with it")] = 32,
    seed: Annotated[int, typer.Option(help="seed of every random draw")] = 0,
    precision: Annotated[str, typer.Option(help="of passes: auto, float32 or bfloat16")] = "auto",
    mean: arguments.Mean = None,
    std: arguments.Std = None,
    resume: arguments.Resume = False,
    as_json: Annotated[bool, typer.Option("--json", help="print synthesis.json")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, no summary")] = False,
) -> None:
    """Make calibration pictures from a model alone, with the classes they stand for."""
    settings = Synthesis(images, recipe, steps, batch, seed, precision_named(precision))
    recipe_of(settings)
    check_folder(out, resume=resume)
    loaded = load_model(model, weights)
    how = preprocessing_with(loaded.preprocessing, mean, std, None)
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    try:
        about = make_folder(loaded, weights, how, settings, out, progress)
    except KeyboardInterrupt:
        print(
            "lampq: interrupted; continue with the same command and --resume (finished batches "
            "are kept)",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(about, indent=2))
    elif not quiet:
        print(f"{described(about)}\npictures {out}")
