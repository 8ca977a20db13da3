"""lampq compare."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lampq import compare
from lampq.cli import app, arguments, fail, guarded
from lampq.config import make_config, read_toml
from lampq.data import Samples
from lampq.errors import ConfigError
from lampq.inputs import calibration_samples, evaluation_samples, load_float
from lampq.models import DEFAULT_MODEL
from lampq.report.table import Row, cells
from lampq.runfolder import check_out
from lampq.terminal import TerminalProgress, print_comparison
from lampq.typed import names, numbers, preprocessing_with


@app.command("compare")
@guarded
def compare_command(
    model: Annotated[str, typer.Argument(help="a timm name, or a bundled one")] = DEFAULT_MODEL,
    weights: arguments.Weights = None,
    calib: arguments.Calib = None,
    evaluation: arguments.Evaluation = None,
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("runs/compare"),
    methods: Annotated[str | None, typer.Option(help="base methods: adalog,repq")] = None,
    plans: Annotated[
        str, typer.Option(help=f"how widths are found: {', '.join(compare.PLANS)}")
    ] = "uniform,lampq",
    bits: Annotated[str | None, typer.Option(help="mean weight bits: 4,3")] = None,
    reconstruct: Annotated[
        str | None, typer.Option(help="done after the plan: none,align,distill")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", "--seed", help="seeds: 0,1,2")] = None,
    preset: Annotated[str | None, typer.Option(help="best or paper")] = None,
    images: arguments.Images = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of common options")] = None,
    mean: arguments.Mean = None,
    std: arguments.Std = None,
    crop_pct: arguments.CropPct = None,
    resume: arguments.Resume = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Run every combination of methods, plans and widths and write one table."""
    given: dict[str, Any] = {"preset": preset, "images": images}
    from_file = {} if config is None else read_toml(config)
    options = {**from_file, **{k: v for k, v in given.items() if v is not None}}
    trials = compare.make_trials(
        options,
        methods=names(methods, "methods"),
        plans=names(plans, "plans"),
        bits=numbers(bits, "bits", float) or (),
        reconstruct=[None if n == "none" else n for n in names(reconstruct, "reconstruct")],
        seeds=numbers(seeds, "seeds", int) or (),
    )
    limit = make_config(options).images
    loaded = load_float(model, weights, calib, evaluation)
    compare.check(loaded, trials)
    check_out(out, resume=resume)
    how = preprocessing_with(loaded.preprocessing, mean, std, crop_pct)
    console = Console(stderr=True)

    def progress() -> TerminalProgress:
        return TerminalProgress(console, quiet=quiet or as_json)

    scored = evaluation_samples(loaded, calib, evaluation, how, progress())
    if scored is None:
        raise ConfigError("a comparison needs evaluation pictures: give --eval DIR")

    @lru_cache(maxsize=1)
    def calibration(seed: int) -> Samples:
        return calibration_samples(calib, how, limit, seed, progress())

    def tell(row: Row, done: int, total: int) -> None:
        name, found = " ".join(filter(None, cells(row)[:4])), row.get("error")
        progress().note(f"{done}/{total} {name}: {found or format(row['top1'], '.2f')}")

    inputs = {
        "model": model,
        "weights": str(weights),
        "calib": str(calib),
        "eval": str(evaluation),
        "mean": mean,
        "std": std,
        "crop_pct": crop_pct,
    }
    job = compare.Comparison(loaded, calibration, scored, trials, how, inputs)
    try:
        table = compare.run(job, out, resume=resume, progress=progress, on_row=tell)
    except KeyboardInterrupt:
        kept = " (the table so far is written)" if (out / "table.md").exists() else ""
        print(
            f"lampq: interrupted{kept}; continue with the same command and --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(table, indent=2))
    elif not quiet:
        print_comparison(table, out)
    if all("error" in row for row in table["rows"][1:]):
        fail(f"every trial failed, the first because {table['rows'][1]['error']}")
