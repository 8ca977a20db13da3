"""lampq quantize | eval | show."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from torch import nn

from lampq.artifact.checkpoint import load_checkpoint, read_checkpoint, write_atomically
from lampq.artifact.fits import FitFolder
from lampq.config import RunConfig, make_config, read_toml
from lampq.data import Preprocessing, Samples, list_folder, read_folder
from lampq.errors import ConfigError, DataError, LampqError
from lampq.evaluate import BATCH, interval95, top1
from lampq.models import DEFAULT_MODEL, LoadedModel, bundled_samples, load_model, preprocessing_of
from lampq.pipeline import Result, Run, packed, quantize
from lampq.progress import Journal, Progress
from lampq.report import (
    build_report,
    plan_json,
    plan_rows,
    report_markdown,
    sensitivity_json,
    uniform_bytes,
)
from lampq.types import BitPlan, LayerBits
from lampq.version import __version__

T = TypeVar("T")
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Layer-wise mixed-precision quantization of Vision Transformers.",
)
WORK = ".lampq"


class TerminalProgress(Progress):
    """Bars with time left on standard error."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__()
        self.console, self.quiet = console, quiet

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        if self.quiet:
            yield from items
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            for item in items:
                yield item
                bar.advance(task)

    def note(self, message: str) -> None:
        if not self.quiet:
            self.console.print(message, highlight=False)


def _fail(message: str) -> NoReturn:
    print(f"lampq: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """One sentence and exit code 2 for a LampqError; 130 for Ctrl-C."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LampqError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            print("lampq: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


def _numbers(text: str | None, name: str, kind: type[T]) -> tuple[T, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))  # type: ignore[call-arg]
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas between, got {text!r}") from None


def _width(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdigit() else text


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    units = {
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "b": 1,
        "": 1,
    }
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().lower()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"target-size must be like 3.5MB or 2000000, got {text!r}") from None


def _preprocessing(
    own: Preprocessing, mean: str | None, std: str | None, crop_pct: float | None
) -> Preprocessing:
    def stretched(
        values: tuple[float, ...] | None, fallback: tuple[float, ...]
    ) -> tuple[float, ...]:
        if values is None:
            return fallback
        if len(values) not in (1, len(fallback)):
            raise ConfigError(f"the model has {len(fallback)} channels, got {len(values)} numbers")
        return values * len(fallback) if len(values) == 1 else values

    return Preprocessing(
        mean=stretched(_numbers(mean, "mean", float), own.mean),
        std=stretched(_numbers(std, "std", float), own.std),
        crop_pct=own.crop_pct if crop_pct is None else crop_pct,
        size=own.size,
    )


def _check_labels(samples: Samples, loaded: nn.Module) -> None:
    with torch.no_grad():
        try:
            classes = loaded(samples.inputs(slice(0, 1))).shape[-1]
        except RuntimeError as error:
            raise DataError(
                f"the model cannot take pictures of shape {tuple(samples.images.shape[1:])}: "
                f"{str(error).splitlines()[0]}"
            ) from error
    if samples.labels is not None and int(samples.labels.max()) >= classes:
        raise DataError(
            f"label {int(samples.labels.max())} is outside the model's {classes} classes"
        )


def _score(model: nn.Module, samples: Samples, progress: Progress, label: str) -> dict[str, float]:
    labels = samples.require_labels("an accuracy")
    batches = -(-len(samples) // BATCH)
    with torch.no_grad():
        logits = torch.cat(
            [model(x) for x, _ in progress.track(samples.batches(BATCH), label, batches)]
        )
    return {"top1": top1(logits, labels), "images": len(samples)}


def _read_plan(path: Path) -> dict[str, LayerBits]:
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
        return {n: LayerBits(int(b["weight"]), int(b["activation"])) for n, b in layers.items()}
    except FileNotFoundError:
        raise ConfigError(f"no plan {str(path)!r}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{str(path)!r} is no plan: expected {{"layers": {{name: {{"weight": 3, '
            f'"activation": 3}}}}}} ({error})'
        ) from error


def _fingerprint(config: RunConfig, inputs: dict[str, Any]) -> str:
    return json.dumps({"config": config.to_json(), **inputs, "lampq": __version__}, sort_keys=True)


def _open_work(out: Path, fingerprint: str, *, resume: bool) -> Path:
    """The folder of unfinished work; with ``resume`` that of the same run before."""
    work = out / WORK
    stamp = work / "run.json"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file, not a folder")
    if resume:
        if (out / "report.json").exists() and not work.exists():
            raise ConfigError(f"{str(out)!r} holds a finished run: there is nothing to resume")
        if not stamp.exists():
            raise ConfigError(f"{str(out)!r} holds no interrupted run to resume")
        if stamp.read_text(encoding="utf-8") != fingerprint:
            raise ConfigError(
                f"the interrupted run in {str(out)!r} had other options or inputs: "
                "give the same ones, or another --out"
            )
        return work
    if (out / "report.json").exists():
        raise ConfigError(f"{str(out)!r} already holds a finished run: choose another --out")
    shutil.rmtree(work, ignore_errors=True)
    write_atomically(stamp, fingerprint.encode())
    return work


def _dump(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


@app.command("quantize")
@_guarded
def quantize_command(
    model: Annotated[str, typer.Argument(help="a timm name, or a bundled one")] = DEFAULT_MODEL,
    weights: Annotated[Path | None, typer.Option(help=".safetensors or .pth state dict")] = None,
    calib: Annotated[Path | None, typer.Option(help="calibration pictures")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="evaluation pictures")] = None,
    out: Annotated[Path, typer.Option(help="run folder to write")] = Path("runs/lampq"),
    bits: Annotated[float | None, typer.Option(help="mean weight bits [4]")] = None,
    act_bits: Annotated[int | None, typer.Option(help="activation bits at the target")] = None,
    target_size: Annotated[str | None, typer.Option(help="file size, e.g. 3.5MB")] = None,
    choices: Annotated[str | None, typer.Option(help="widths to choose from: 1,2,3,4,5")] = None,
    preset: Annotated[str | None, typer.Option(help="best or paper")] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.json to use instead of a search")] = None,
    images: Annotated[int | None, typer.Option(help="calibration images to use")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of every random draw")] = None,
    mean: Annotated[str | None, typer.Option(help="pixel mean, one or three numbers")] = None,
    std: Annotated[str | None, typer.Option(help="pixel deviation")] = None,
    crop_pct: Annotated[float | None, typer.Option(help="crop / resized edge")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options")] = None,
    method: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    fit_images: Annotated[int | None, typer.Option(rich_help_panel="Base method")] = None,
    search: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    zero_code: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    onebit: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    compensation: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    edge_bits: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    matmul_bits: Annotated[str | None, typer.Option(rich_help_panel="Base method")] = None,
    metric: Annotated[str | None, typer.Option(rich_help_panel="Metric")] = None,
    metric_images: Annotated[int | None, typer.Option(rich_help_panel="Metric")] = None,
    labels: Annotated[str | None, typer.Option(rich_help_panel="Metric")] = None,
    gamma: Annotated[float | None, typer.Option(rich_help_panel="Metric")] = None,
    beta: Annotated[int | None, typer.Option(rich_help_panel="Metric")] = None,
    mu: Annotated[float | None, typer.Option(rich_help_panel="Metric")] = None,
    probe_images: Annotated[int | None, typer.Option(rich_help_panel="Metric")] = None,
    trace_images: Annotated[int | None, typer.Option(rich_help_panel="Metric")] = None,
    alpha_signal: Annotated[str | None, typer.Option(rich_help_panel="Metric")] = None,
    alpha_trace: Annotated[str | None, typer.Option(rich_help_panel="Metric")] = None,
    allocator: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    update: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    exchanges: Annotated[int | None, typer.Option(rich_help_panel="Exchanges")] = None,
    exchange_error: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    ratios: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    gain_formula: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    swap_budget: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    accept: Annotated[str | None, typer.Option(rich_help_panel="Exchanges")] = None,
    score_images: Annotated[int | None, typer.Option(rich_help_panel="Exchanges")] = None,
    patience: Annotated[int | None, typer.Option(rich_help_panel="Exchanges")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue in --out")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, no table")] = False,
) -> None:
    """Find the width of every layer within a budget and write the quantized model."""
    flags = dict(locals())
    given = {key: flags[key] for key in RunConfig.__slots__ if key in flags}
    given["choices"] = _numbers(choices, "choices", int)
    given["target_size"] = _bytes(target_size)
    given["edge_bits"], given["matmul_bits"] = _width(edge_bits), _width(matmul_bits)
    from_file = {} if config is None else read_toml(config)
    settings = make_config({**from_file, **{k: v for k, v in given.items() if v is not None}})
    layer_plan = None if plan is None else _read_plan(plan)
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    for folder in (calib, evaluation):
        if folder is not None:
            list_folder(folder)
    loaded = load_model(model, weights)
    if loaded.source.kind != "bundled" and calib is None:
        raise ConfigError(f"model {model!r} needs calibration pictures: give --calib DIR")
    inputs = {
        "model": model,
        "weights": str(weights),
        "calib": str(calib),
        "plan": str(plan),
        "eval": str(evaluation),
        "mean": mean,
        "std": std,
        "crop_pct": crop_pct,
    }
    work = _open_work(out, _fingerprint(settings, inputs), resume=resume)
    how = _preprocessing(loaded.preprocessing, mean, std, crop_pct)
    progress.note(f"reading pictures for {model}")
    samples = (
        bundled_samples("calib")
        if calib is None
        else read_folder(calib, how, limit=settings.images, seed=settings.seed)
    )
    scored = _evaluation_samples(loaded, calib, evaluation, how)
    for some in (samples, scored):
        if some is not None:
            _check_labels(some, loaded.model)
    job = _Job(loaded, samples, scored, settings, layer_plan, how, inputs)
    report, result = _run(job, out, work, progress)
    if as_json:
        print(json.dumps(report, indent=2))
    elif not quiet:
        _print_result(report, result.plan, out)


def _evaluation_samples(
    loaded: LoadedModel, calib: Path | None, evaluation: Path | None, how: Preprocessing
) -> Samples | None:
    if evaluation is not None:
        return read_folder(evaluation, how)
    return bundled_samples("eval") if loaded.source.kind == "bundled" and calib is None else None


@dataclass(frozen=True, slots=True)
class _Job:
    """All that one quantize command works on."""

    loaded: LoadedModel
    samples: Samples
    scored: Samples | None
    settings: RunConfig
    layer_plan: dict[str, LayerBits] | None
    how: Preprocessing
    inputs: dict[str, Any]


def _run(
    job: _Job, out: Path, work: Path, progress: TerminalProgress
) -> tuple[dict[str, Any], Result]:
    loaded, scored, settings = job.loaded, job.scored, job.settings
    journal = Journal(work / "journal.jsonl")

    def keep(plan: BitPlan, model: nn.Module) -> None:
        """The best so far is always on disk."""
        _dump(out / "plan.json", plan_json(plan))
        content = packed(model, loaded.source, plan, settings, job.how)
        write_atomically(out / "model.safetensors", content)

    run = Run(progress, journal, FitFolder(work / "fits"), keep)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = quantize(
                loaded.model, job.samples, config=settings, plan=job.layer_plan, run=run
            )
        for notice in result.notices:
            progress.note(f"[yellow]note:[/] {notice}")
        scores = {}
        if scored is not None:
            with progress.stage("evaluate"):
                for name, model in (
                    ("fp32", lambda: loaded.model),
                    ("uniform", result.uniform_model),
                    ("mixed", lambda: result.model),
                ):
                    scores[name] = journal.once(
                        f"evaluation {name}",
                        lambda name=name, model=model: _score(  # type: ignore[misc]
                            model(), scored, progress, f"scoring {name}"
                        ),
                    )
    except KeyboardInterrupt:
        kept = " (the best plan so far is written)" if (out / "plan.json").exists() else ""
        print(
            f"lampq: interrupted{kept}; continue with the same command and --resume",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if result.sensitivity is not None:
        table, details = result.sensitivity.table, result.sensitivity.details
        _dump(out / "sensitivity.json", sensitivity_json(table, details))
    files = {"model.safetensors": (out / "model.safetensors").stat().st_size}
    float_bytes = 4 * sum(p.numel() for p in loaded.model.parameters())
    report = build_report(
        result,
        scores=scores,
        seconds=progress.seconds,
        files=files,
        float_bytes=float_bytes,
        extra={
            "uniform_bytes": uniform_bytes(result),
            "data": {
                **job.inputs,
                "preprocessing": asdict(job.how),
                "calibration_images": min(len(job.samples), settings.images),
            },
        },
    )
    write_atomically(out / "report.md", report_markdown(report, result.plan).encode())
    _dump(out / "report.json", report)
    shutil.rmtree(work, ignore_errors=True)
    return report, result


def _print_result(report: dict[str, Any], plan: BitPlan, out: Path) -> None:
    console = Console()
    table = Table(title=f"{report['model']['name']} at {report['bits']['target']:.3g} bits")
    for column in ("model", "top-1 [%]", "±", "mean weight bits", "file", "smaller"):
        table.add_column(column, justify="left" if column == "model" else "right")
    float_bytes = report["float_bytes"]
    sizes = {
        "fp32": float_bytes,
        "uniform": report["uniform_bytes"],
        "mixed": report["files"]["model.safetensors"],
    }
    means = {
        "fp32": 32.0,
        "uniform": report["uniform_bits"],
        "mixed": report["bits"]["mean_weight_searched"],
    }
    for name in ("fp32", "uniform", "mixed"):
        score = report["scores"].get(name)
        table.add_row(
            name,
            f"{score['top1']:.2f}" if score else "-",
            f"{interval95(score['top1'], int(score['images'])):.2f}" if score else "-",
            f"{means[name]:.3g}",
            f"{sizes[name] / 1e6:.3f} MB",
            f"{float_bytes / sizes[name]:.1f}x",
        )
    console.print(table)
    console.print(_plan_table(plan))
    console.print(f"report: {out / 'report.md'} and {out / 'report.json'}", highlight=False)
    console.print(f"model:  {out / 'model.safetensors'}", highlight=False)


def _plan_table(plan: BitPlan) -> Table:
    table = Table(title="weight bits by block")
    roles = ("qkv", "proj", "fc1", "fc2")
    for column in ("block", *roles):
        table.add_column(column, justify="right")
    for block, row in plan_rows(plan):
        table.add_row(block, *(row.get(role, "") for role in roles))
    return table


@app.command("eval")
@_guarded
def eval_command(
    checkpoint: Annotated[Path, typer.Argument(help="model.safetensors of a run")],
    data: Annotated[Path | None, typer.Option(help="pictures; bundled ones if absent")] = None,
    images: Annotated[int | None, typer.Option(help="how many pictures to score")] = None,
    seed: Annotated[int, typer.Option(help="seed of the choice of pictures")] = 0,
    mean: Annotated[str | None, typer.Option(help="pixel mean")] = None,
    std: Annotated[str | None, typer.Option(help="pixel deviation")] = None,
    crop_pct: Annotated[float | None, typer.Option(help="crop / resized edge")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """Score a quantized model on pictures."""
    header, _ = read_checkpoint(checkpoint)
    if data is not None:
        list_folder(data)
    if images is not None and images < 1:
        raise ConfigError(f"images must be at least 1, got {images}")
    model = load_checkpoint(checkpoint)
    bundled = header.source.kind == "bundled"
    own = header.preprocessing or preprocessing_of(header.source.build())
    how = _preprocessing(own, mean, std, crop_pct)
    if data is None and not bundled:
        raise ConfigError("give the pictures to score with --data DIR")
    samples = (
        bundled_samples("eval") if data is None else read_folder(data, how, limit=images, seed=seed)
    )
    if images is not None:
        samples = samples.subset(images, seed)
    _check_labels(samples, model)
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    score = _score(model, samples, progress, "scoring")
    if as_json:
        print(json.dumps({**score, "model": header.source.name, "file": str(checkpoint)}))
    else:
        half = interval95(score["top1"], int(score["images"]))
        print(f"top-1 {score['top1']:.2f} % (±{half:.2f}) on {score['images']} images")


@app.command("show")
@_guarded
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
        f"method {header.content['config']['method']}",
        highlight=False,
    )
    console.print(
        f"mean weight bits of the searched layers {plan.mean_weight_bits:.4f}", highlight=False
    )
    console.print(_plan_table(plan))
    others = [(spec, bits) for spec, bits in listed if spec.name not in names]
    for spec, bits in others:
        console.print(f"{spec.name} ({spec.role.value}): {bits} bits", highlight=False)
    codes = sum(t.numel() for k, t in tensors.items() if k.endswith(".codes"))
    console.print(
        f"{codes / 1e6:.3f} MB of codes, {len(header.content['matmuls'])} quantized matmuls",
        highlight=False,
    )


@app.command("version")
def version_command() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point of the lampq command."""
    app()


if __name__ == "__main__":
    main()
