"""A run folder: its files, the work of an unfinished run, and the run itself."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lampq.artifact.checkpoint import write_atomically
from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.config import RunConfig
from lampq.data import AnySamples, Preprocessing, Samples
from lampq.errors import ConfigError, DataError
from lampq.models import ModelSource
from lampq.pipeline import Result, packed, quantize
from lampq.progress import Journal, Progress
from lampq.report import (
    PICTURES,
    build_report,
    plan_json,
    report_markdown,
    sensitivity_json,
    uniform_bytes,
)
from lampq.report.folder import files_of, write_page
from lampq.report.histograms import histograms_json
from lampq.scoring import Run, widths_of
from lampq.sharing import Shared
from lampq.task import CLASSIFICATION, Task
from lampq.tasks import task_of
from lampq.types import BitPlan, LayerBits
from lampq.version import __version__

WORK = ".lampq"
STAMP = "run.json"
# of a classifier, in whatever runtime
score = CLASSIFICATION.score
# what says that a folder holds results, of quantize, of compare or of sweep
RESULTS = ("report.json", "results.jsonl", "sweep.sqlite")


def read_plan(path: Path) -> dict[str, LayerBits]:
    """The widths of a plan.json."""
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
        return {n: LayerBits(int(b["weight"]), int(b["activation"])) for n, b in layers.items()}
    except OSError as error:
        raise ConfigError(f"no plan {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{str(path)!r} is no plan: expected {{"layers": {{name: {{"weight": 3, '
            f'"activation": 3}}}}}} ({error})'
        ) from error


def fingerprint_of(config: RunConfig, inputs: dict[str, Any]) -> str:
    """Text that is the same for two runs only if their results would be."""
    return json.dumps({"config": config.to_json(), **inputs, "lampq": __version__}, sort_keys=True)


def check_out(out: Path, *, resume: bool) -> None:
    """Raise if a run cannot be started, or with ``resume`` continued, in that folder."""
    work = out / WORK
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file, not a folder")
    results = any((out / name).exists() for name in RESULTS)
    if results and not work.exists():
        if resume:
            raise ConfigError(f"{str(out)!r} holds a finished run: there is nothing to resume")
        raise ConfigError(f"{str(out)!r} already holds a finished run: choose another --out")
    if resume and not (work / STAMP).exists():
        raise ConfigError(f"{str(out)!r} holds no interrupted run to resume")
    if results and not resume:
        raise ConfigError(
            f"{str(out)!r} holds an unfinished run: continue it with --resume, or choose "
            "another --out"
        )


def open_work(out: Path, fingerprint: str, *, resume: bool) -> Path:
    """The folder of unfinished work; with ``resume`` that of the same run before."""
    check_out(out, resume=resume)
    work = out / WORK
    stamp = work / STAMP
    if resume:
        if stamp.read_text(encoding="utf-8") != fingerprint:
            raise ConfigError(
                f"the interrupted run in {str(out)!r} had other options or inputs: "
                "give the same ones, or another --out"
            )
        return work
    shutil.rmtree(work, ignore_errors=True)
    write_atomically(stamp, fingerprint.encode())
    return work


def _dump(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def check_labels(samples: Samples, loaded: Callable[[Tensor], Tensor]) -> None:
    """Raise if the model cannot take the pictures, or has no class for a label."""
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


@dataclass(frozen=True, slots=True)
class Job:
    """All that one quantize command works on."""

    model: nn.Module
    source: ModelSource
    samples: AnySamples
    scored: AnySamples | None
    settings: RunConfig
    layer_plan: dict[str, LayerBits] | None
    how: Preprocessing | None
    inputs: dict[str, Any]


def _scored(
    task: Task, build: Callable[[], nn.Module], samples: AnySamples, progress: Progress, label: str
) -> dict[str, Any]:
    return task.score(build(), samples, progress, label)


def _calibrated_on(job: Job) -> dict[str, Any]:
    """The inputs that calibration depends on."""
    names = ("model", "weights", "calib", "mean", "std", "crop_pct")
    return {name: job.inputs.get(name) for name in names}


def _beside(job: Job, work: Path, progress: Progress, shared: Shared | None) -> Run:
    """Journal and stores of a run alone, or of one that shares with others."""
    if shared is None:
        return Run(progress, Journal(work / "journal.jsonl"), FitFolder(work / "fits"))
    return shared.run(job.settings, progress, _calibrated_on(job))


def _scores(job: Job, result: Result, run: Run, shared: Shared | None) -> dict[str, dict[str, Any]]:
    """Accuracies of the float model, of the uniform one, and of the one in the file."""
    if job.scored is None:
        return {}
    of_float = run.journal if shared is None else shared.evaluations(_calibrated_on(job))
    own = widths_of(result.fits, result.plan)
    models: dict[str, tuple[Callable[[], nn.Module], Journal, str]] = {
        "fp32": (lambda: job.model, of_float, "fp32"),
        "uniform": (result.uniform_model, run.journal, widths_of(result.fits, result.uniform)),
        "mixed": (lambda: result.model, run.journal, own),
    }
    if result.reconstruction is not None:
        models["before_reconstruction"] = (lambda: result.of_plan(result.plan), run.journal, own)
        trained = f"{own} {json.dumps(job.settings.to_json())}"
        models["mixed"] = (lambda: result.model, run.journal, trained)
    scores, task = {}, task_of(job.settings)
    with run.progress.stage("evaluate"):
        for name, (model, journal, key) in models.items():
            compute = partial(_scored, task, model, job.scored, run.progress, f"scoring {name}")
            scores[name] = journal.once(f"evaluation {job.inputs.get('eval')} {key}", compute)
    return scores


def _pictures(job: Job, result: Result, run: Run) -> bytes | None:
    """What the float model and the one in the file answer to evaluation images, to look at."""
    if job.scored is None:
        return None
    models = {"fp32": job.model, "mixed": result.model}
    with run.progress.stage("evaluate"):
        return task_of(job.settings).pictures(models, job.scored, run.progress)


def run_job(
    job: Job, out: Path, work: Path, progress: Progress, shared: Shared | None = None
) -> tuple[dict[str, Any], Result]:
    """Quantize, score and write the run folder; the best plan so far is always on disk.

    ``shared`` is what the job shares with others.
    """
    settings = job.settings

    def keep(plan: BitPlan, model: nn.Module) -> None:
        _dump(out / "plan.json", plan_json(plan))
        content = packed(model, job.source, plan, settings, job.how)
        write_atomically(out / "model.safetensors", content)

    run = _beside(job, work, progress, shared)
    run = replace(run, on_plan=keep, states=StateFolder(work / "states"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they come back as notices
        result = quantize(job.model, job.samples, config=settings, plan=job.layer_plan, run=run)
    for notice in result.notices:
        progress.note(f"note: {notice}")
    scores = _scores(job, result, run, shared)
    if result.sensitivity is not None:
        table, details = result.sensitivity.table, result.sensitivity.details
        _dump(out / "sensitivity.json", sensitivity_json(table, details))
    files = {"model.safetensors": (out / "model.safetensors").stat().st_size}
    pictures = _pictures(job, result, run)
    if pictures is not None:
        write_atomically(out / PICTURES, pictures)
        files[PICTURES] = len(pictures)
    float_bytes = 4 * sum(p.numel() for p in job.model.parameters())
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
                "preprocessing": None if job.how is None else asdict(job.how),
                "calibration_images": min(len(job.samples), settings.images),
            },
        },
    )
    write_atomically(out / "report.md", report_markdown(report, result.plan).encode())
    write_atomically(
        out / "histograms.json", json.dumps(histograms_json(result.fits, result.plan)).encode()
    )
    write_page(out, files_of(out, report))
    _dump(out / "report.json", report)
    shutil.rmtree(work, ignore_errors=True)
    return report, result
