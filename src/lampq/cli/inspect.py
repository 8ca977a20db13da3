"""lampq eval, lampq show and lampq report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lampq.artifact.checkpoint import Header, load_checkpoint, read_checkpoint
from lampq.artifact.onnx.file import read_onnx
from lampq.cli import app, arguments, guarded
from lampq.cli.jobs import coco_samples
from lampq.data import list_folder
from lampq.errors import ConfigError
from lampq.evaluate import interval95
from lampq.export import profile_of
from lampq.inputs import pictures
from lampq.models import preprocessing_of
from lampq.progress import Progress
from lampq.report.folder import remake_page
from lampq.report.scores import markdown
from lampq.runfolder import check_labels, score
from lampq.runtime import check_runtime, load
from lampq.terminal import TerminalProgress, plan_table
from lampq.typed import preprocessing_with
from lampq.types import BitPlan


@app.command("eval")
@guarded
def eval_command(
    checkpoint: Annotated[Path, typer.Argument(help="model.safetensors of a run, or model.onnx")],
    runtime: Annotated[
        str | None,
        typer.Option(help="torch, onnxruntime or openvino, default: torch; onnxruntime for .onnx"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="pictures; bundled ones if absent")] = None,
    annotations: Annotated[
        Path | None, typer.Option(help="COCO file of what is in them (detectors)")
    ] = None,
    images: Annotated[int | None, typer.Option(help="how many pictures to score")] = None,
    seed: Annotated[int, typer.Option(help="seed of the choice of pictures")] = 0,
    mean: Annotated[str | None, typer.Option(help="pixel mean")] = None,
    std: arguments.Std = None,
    crop_pct: arguments.CropPct = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """Score a quantized model on pictures, in the form in which it is deployed."""
    onnx = checkpoint.suffix == ".onnx"
    engine = runtime or ("onnxruntime" if onnx else "torch")
    check_runtime(engine)
    header = Header(read_onnx(checkpoint)[0]) if onnx else read_checkpoint(checkpoint)[0]
    if images is not None and images < 1:
        raise ConfigError(f"images must be at least 1, got {images}")
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    about = {"model": header.source.name, "file": str(checkpoint), "runtime": engine}
    if header.source.kind == "detector":
        if onnx or engine != "torch" or (mean, std, crop_pct) != (None, None, None):
            raise ConfigError(
                "a detector is scored in torch, from model.safetensors, on pictures as they are"
            )
        found = _detector_scores(checkpoint, annotations, data, images, seed, progress)
        print(json.dumps({**found, **about}) if as_json else "\n".join(markdown({"": found})))
        return
    if annotations is not None:
        raise ConfigError("--annotations is for detectors: leave it out")
    if data is not None:
        list_folder(data)
    model = load(checkpoint, engine)
    bundled = header.source.kind == "bundled"
    own = header.preprocessing or preprocessing_of(header.source.build())
    how = preprocessing_with(own, mean, std, crop_pct)
    if data is None and not bundled:
        raise ConfigError("give the pictures to score with --data DIR")
    samples = pictures("eval", data, how, limit=images, seed=seed)
    if images is not None:
        samples = samples.subset(images, seed)
    check_labels(samples, model)
    result = score(model, samples, progress, "scoring")
    if as_json:
        print(json.dumps({**result, **about}))
    else:
        half = interval95(result["top1"], int(result["images"]))
        where = "" if engine == "torch" else f" in {engine}"
        print(f"top-1 {result['top1']:.2f} % (±{half:.2f}) on {result['images']} images{where}")


def _detector_scores(
    checkpoint: Path,
    annotations: Path | None,
    data: Path | None,
    images: int | None,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Box and mask AP of a quantized detector."""
    from lampq.detection.task import DetectionTask

    if data is None or annotations is None:
        raise ConfigError("give the pictures to score with --data DIR and --annotations FILE")
    model = load_checkpoint(checkpoint)
    classes = model.options.classes  # type: ignore[union-attr]
    samples = coco_samples(annotations, data, classes, progress, limit=images, seed=seed)  # type: ignore[arg-type]
    return DetectionTask().score(model, samples, progress, "scoring")


@app.command("show")
@guarded
def show_command(
    checkpoint: Annotated[Path, typer.Argument(help="model.safetensors of a run")],
    as_json: Annotated[bool, typer.Option("--json", help="print the header as JSON")] = False,
) -> None:
    """Show the plan and the contents of a quantized model."""
    header, tensors = read_checkpoint(checkpoint)
    if as_json:
        print(json.dumps(dict(header.content), indent=2))
        return
    console = Console()
    listed = list(header.layers())
    names = header.content.get("plan", {})
    searched = [(spec, bits) for spec, bits in listed if spec.name in names]
    plan = BitPlan(tuple(s for s, _ in searched), tuple(b for _, b in searched))
    console.print(
        f"{header.source.name}, lampq {header.content['lampq_version']}, format "
        f"{header.content['format_version']}, {checkpoint.stat().st_size / 1e6:.3f} MB, "
        f"method {header.content['config']['method']}, profile {profile_of(header)}",
        highlight=False,
    )
    console.print(
        f"mean weight bits of the searched layers {plan.mean_weight_bits:.4f}, "
        f"mean activation bits {plan.mean_activation_bits:.4f}",
        highlight=False,
    )
    console.print(plan_table(plan))
    others = [(spec, bits) for spec, bits in listed if spec.name not in names]
    for spec, bits in others:
        console.print(f"{spec.name} ({spec.role.value}): {bits} bits", highlight=False)
    codes = sum(t.numel() for k, t in tensors.items() if k.endswith(".codes"))
    console.print(
        f"{codes / 1e6:.3f} MB of codes, {len(header.content['matmuls'])} quantized matmuls",
        highlight=False,
    )


@app.command("report")
@guarded
def report_command(
    folder: Annotated[Path, typer.Argument(help="folder of a finished run")],
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", help="another run of the model, to show its score; repeatable"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing")] = False,
) -> None:
    """Make report.html of a run again, from the files in its folder."""
    path = remake_page(folder, tuple(others or ()))
    if not quiet:
        print(f"report {path}")
