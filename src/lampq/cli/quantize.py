"""lampq quantize."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lampq.cli import app, arguments, guarded
from lampq.cli.jobs import Places, Wanted, classifier_job, detector_job
from lampq.cli.zero_shot import calibration_source
from lampq.config import MADE, RunConfig, make_config, read_toml
from lampq.errors import ConfigError
from lampq.models import DEFAULT_MODEL
from lampq.runfolder import run_job
from lampq.terminal import TerminalProgress, print_result
from lampq.typed import (
    OptionalName,
    bit_operations,
    numbers,
    size_in_bytes,
    width,
)
from lampq.zero_shot import DEFAULT_IMAGES, RECIPES

METHOD, METRIC, EXCHANGES = "Base method", "Metric", "Allocation and exchanges"
RECONSTRUCTION, ZERO_SHOT = "Reconstruction", "Zero-shot"


@app.command("quantize", cls=OptionalName)
@guarded
def quantize_command(
    model: Annotated[
        str, typer.Argument(help="a timm name, a bundled one, or a TOML file that names it")
    ] = DEFAULT_MODEL,
    task: Annotated[str | None, typer.Option(help="classification or detection")] = None,
    weights: arguments.Weights = None,
    calib: arguments.Calib = None,
    calib_annotations: arguments.CalibAnnotations = None,
    evaluation: arguments.Evaluation = None,
    eval_annotations: arguments.EvalAnnotations = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder to write, default: runs/lampq")
    ] = None,
    bits: Annotated[float | None, typer.Option(help="mean weight bits, default: 4")] = None,
    act_bits: Annotated[int | None, typer.Option(help="(mean) activation bits")] = None,
    target_size: Annotated[str | None, typer.Option(help="file size, e.g. 3.5MB")] = None,
    target_bops: Annotated[
        str | None, typer.Option(help="bit operations for one image, e.g. 20G")
    ] = None,
    choices: Annotated[str | None, typer.Option(help="widths to choose from: 1,2,3,4,5")] = None,
    joint: Annotated[
        bool | None,
        typer.Option("--joint/--no-joint", help="one width a layer, or weight and input apart"),
    ] = None,
    act_choices: Annotated[
        str | None, typer.Option(help="input widths to choose from (--no-joint): 2,3,4")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="accuracy, or speed: for integer kernels, attention products in float"),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="best or paper")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.json to use instead of a search")] = None,
    images: arguments.Images = None,
    seed: arguments.Seed = None,
    mean: arguments.Mean = None,
    std: arguments.Std = None,
    crop_pct: arguments.CropPct = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="adalog, apq, erq, gptq, minmax, mse, psaq, ptq4vit or repq",
            rich_help_panel=METHOD,
        ),
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(help="inside attention heads: attention or none", rich_help_panel=METHOD),
    ] = None,
    fit_images: Annotated[
        int | None, typer.Option(help="images that the fits see", rich_help_panel=METHOD)
    ] = None,
    fit_views: Annotated[
        int | None,
        typer.Option(
            help="of fewer than 256 images, fits see up to so many views each",
            rich_help_panel=METHOD,
        ),
    ] = None,
    fit_tokens: Annotated[
        str | None,
        typer.Option(help="how their tokens are drawn: fisher or uniform", rich_help_panel=METHOD),
    ] = None,
    fit_inputs: Annotated[
        str | None,
        typer.Option(
            help="of the float model or behind quantized sites: published, float or quantized",
            rich_help_panel=METHOD,
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="fast or exhaustive (the published depth)", rich_help_panel=METHOD),
    ] = None,
    zero_code: Annotated[
        str | None,
        typer.Option(help="zero of log quantizers: extra or reserved", rich_help_panel=METHOD),
    ] = None,
    onebit: Annotated[
        str | None, typer.Option(help="one-bit levels: affine or adalog", rich_help_panel=METHOD)
    ] = None,
    fold: Annotated[
        str | None,
        typer.Option(
            help="how far a norm evens out its channels: searched or full", rich_help_panel=METHOD
        ),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option(help="that fits minimise: relative or plain", rich_help_panel=METHOD),
    ] = None,
    compensation: Annotated[
        str | None, typer.Option(help="of weight errors: none or gptq", rich_help_panel=METHOD)
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(help="how firmly compensated weights are held", rich_help_panel=METHOD),
    ] = None,
    input_ranges: Annotated[
        str | None,
        typer.Option(
            help="of proj, fc2 and products: static, or token (found at run time)",
            rich_help_panel=METHOD,
        ),
    ] = None,
    prefix_bits: Annotated[
        str | None,
        typer.Option(
            help="class and register tokens of inputs: target or a width", rich_help_panel=METHOD
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="of psaq: inputs, or published (outputs and sums too)", rich_help_panel=METHOD
        ),
    ] = None,
    edge_bits: Annotated[
        str | None,
        typer.Option(
            help="patch embedding, head, reduction: target or a width", rich_help_panel=METHOD
        ),
    ] = None,
    matmul_bits: Annotated[
        str | None,
        typer.Option(help="attention products: target, follow or a width", rich_help_panel=METHOD),
    ] = None,
    head_bits: Annotated[
        str | None,
        typer.Option(
            help="neck and heads of a detector: target, float or a width", rich_help_panel=METHOD
        ),
    ] = None,
    rest_bits: Annotated[
        int | None,
        typer.Option(help="scales, biases, norms, embeddings: 16 or 32", rich_help_panel=METHOD),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="output, fisher, kl, loss, recon, hawq or nuclear", rich_help_panel=METRIC
        ),
    ] = None,
    metric_images: Annotated[
        int | None, typer.Option(help="images that the metric sees", rich_help_panel=METRIC)
    ] = None,
    block_contrast: Annotated[
        float | None,
        typer.Option(
            help="share of the differences between blocks that counts, from 0 to 1",
            rich_help_panel=METRIC,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="of the Fisher metric: model (drawn) or data", rich_help_panel=METRIC),
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="penalty of a missing bit (fisher)", rich_help_panel=METRIC)
    ] = None,
    beta: Annotated[
        int | None, typer.Option(help="probe bits (fisher)", rich_help_panel=METRIC)
    ] = None,
    mu: Annotated[
        float | None, typer.Option(help="share of blocks probed (fisher)", rich_help_panel=METRIC)
    ] = None,
    probe_images: Annotated[
        int | None, typer.Option(help="images that score a probe (fisher)", rich_help_panel=METRIC)
    ] = None,
    trace_images: Annotated[
        int | None,
        typer.Option(help="images of a quantized trace (fisher)", rich_help_panel=METRIC),
    ] = None,
    alpha_signal: Annotated[
        str | None,
        typer.Option(help="of probes: accuracy, loss, kl or ap (fisher)", rich_help_panel=METRIC),
    ] = None,
    alpha_trace: Annotated[
        str | None, typer.Option(help="in alpha: quantized or fp (fisher)", rich_help_panel=METRIC)
    ] = None,
    hessian: Annotated[
        str | None,
        typer.Option(help="trace: fisher or hutchinson (hawq)", rich_help_panel=METRIC),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(help="ilp, vtptq, uniform or random", rich_help_panel=EXCHANGES),
    ] = None,
    configurations: Annotated[
        int | None, typer.Option(help="plans drawn (vtptq)", rich_help_panel=EXCHANGES)
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="of exchanges: allocated, or better (than the uniform plan)",
            rich_help_panel=EXCHANGES,
        ),
    ] = None,
    exchanges: Annotated[
        int | None,
        typer.Option(help="largest number of exchanges tried", rich_help_panel=EXCHANGES),
    ] = None,
    exchange_error: Annotated[
        str | None, typer.Option(help="cost, local or cumulative", rich_help_panel=EXCHANGES)
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="of errors: paper, exact, optimal or measured", rich_help_panel=EXCHANGES
        ),
    ] = None,
    gain_formula: Annotated[
        str | None, typer.Option(help="verbal or printed", rich_help_panel=EXCHANGES)
    ] = None,
    swap_budget: Annotated[
        str | None, typer.Option(help="weighted or unweighted", rich_help_panel=EXCHANGES)
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(help="score of a plan: accuracy, loss, kl or ap", rich_help_panel=EXCHANGES),
    ] = None,
    score_images: Annotated[
        int | None, typer.Option(help="images that score a plan", rich_help_panel=EXCHANGES)
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="rejected exchanges before the end", rich_help_panel=EXCHANGES),
    ] = None,
    fallback: Annotated[
        str | None,
        typer.Option(
            help="where the uniform plan scores better: uniform or none", rich_help_panel=EXCHANGES
        ),
    ] = None,
    reconstruct: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME]",
            help="after the plan: distill (if no name is given), align, qdrop, pdquant or adalog",
            rich_help_panel=RECONSTRUCTION,
        ),
    ] = None,
    reconstruct_images: Annotated[
        int | None, typer.Option(help="images to train on", rich_help_panel=RECONSTRUCTION)
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="training steps", rich_help_panel=RECONSTRUCTION)
    ] = None,
    ridge: Annotated[
        float | None,
        typer.Option(
            help="how strongly align holds weights at their float values, default: 1",
            rich_help_panel=RECONSTRUCTION,
        ),
    ] = None,
    lr_weights: Annotated[
        float | None, typer.Option(help="rate of the codes", rich_help_panel=RECONSTRUCTION)
    ] = None,
    lr_scales: Annotated[
        float | None, typer.Option(help="rate of the scales", rich_help_panel=RECONSTRUCTION)
    ] = None,
    lr_affine: Annotated[
        float | None, typer.Option(help="of biases and norms", rich_help_panel=RECONSTRUCTION)
    ] = None,
    train_precision: Annotated[
        str | None,
        typer.Option(
            help="of training passes: auto, float32 or bfloat16", rich_help_panel=RECONSTRUCTION
        ),
    ] = None,
    zero_shot: Annotated[
        bool,
        typer.Option(
            "--zero-shot",
            help="calibrate on pictures made from the model alone",
            rich_help_panel=ZERO_SHOT,
        ),
    ] = False,
    synthetic: Annotated[
        Path | None,
        typer.Option(
            help="pictures of lampq synthesize, instead of new ones", rich_help_panel=ZERO_SHOT
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help=f"of new pictures: {' or '.join(RECIPES)}", rich_help_panel=ZERO_SHOT),
    ] = None,
    synthesis_steps: Annotated[
        int | None, typer.Option(help="steps of a batch of pictures", rich_help_panel=ZERO_SHOT)
    ] = None,
    synthesis_batch: Annotated[
        int | None,
        typer.Option(help="pictures made at a time, default: 32", rich_help_panel=ZERO_SHOT),
    ] = None,
    resume: arguments.Resume = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Find the width of every layer within a budget and write the quantized model."""
    flags = dict(locals())
    if model.endswith(".toml"):
        if config is not None:
            raise ConfigError("give either a TOML file as the model or --config, not both")
        config, flags["model"] = Path(model), None
    given = {key: flags[key] for key in RunConfig.__slots__ if key in flags}
    given["choices"] = numbers(choices, "choices", int)
    given["act_choices"] = numbers(act_choices, "act-choices", int)
    given["target_size"] = size_in_bytes(target_size)
    given["target_bops"] = bit_operations(target_bops)
    for name in ("edge_bits", "matmul_bits", "head_bits", "prefix_bits"):
        given[name] = width(flags[name])
    options = {} if config is None else read_toml(config)
    folder = Path() if config is None else config.parent
    places = Places.of({**flags, "eval": evaluation}, options, folder)
    options |= {key: value for key, value in given.items() if value is not None}
    if zero_shot:
        options = {**MADE.get(str(options.get("preset", "best")), {}), **options}
    if zero_shot and synthetic is None:
        options.setdefault("images", DEFAULT_IMAGES)
    settings = make_config(options)
    typed = {"recipe": recipe, "steps": synthesis_steps, "batch": synthesis_batch}
    made = calibration_source(zero_shot, places.calib, synthetic, typed, settings)
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    wanted = Wanted(places, settings, plan, resume, progress)
    pixels = {"mean": mean, "std": std, "crop_pct": crop_pct}
    if settings.task == "detection":
        if made is not None or any(value is not None for value in pixels.values()):
            raise ConfigError(
                "--zero-shot, --mean, --std and --crop-pct are for classifiers: leave them out"
            )
        begun = detector_job(wanted)
    else:
        begun = classifier_job(wanted, made, pixels)
    try:
        report, result = run_job(begun.job(), places.out, begun.work, progress)
    except KeyboardInterrupt:
        kept = " (the best plan so far is written)" if (places.out / "plan.json").exists() else ""
        print(
            f"lampq: interrupted{kept}; continue with the same command and --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(report, indent=2))
    elif not quiet:
        print_result(report, result.plan, places.out)
