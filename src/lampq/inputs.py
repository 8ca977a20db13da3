"""The float model and the pictures of a run, by name and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lampq.data import Preprocessing, Samples, list_folder, read_folder
from lampq.errors import ConfigError
from lampq.models import LoadedModel, bundled_samples, load_model
from lampq.progress import Progress


def load_float(
    model: str, weights: Path | None, calib: Path | None, evaluation: Path | None
) -> LoadedModel:
    """The float model, once it is known that its pictures are there."""
    loaded = load_alone(model, weights, calib, evaluation)
    if loaded.source.kind != "bundled" and calib is None:
        raise ConfigError(
            f"model {model!r} needs calibration pictures: give --calib DIR, or quantize it with "
            "--zero-shot"
        )
    return loaded


def load_alone(model: str, weights: Path | None, *folders: Path | None) -> LoadedModel:
    """The float model, once it is known that these folders hold pictures."""
    for folder in folders:
        if folder is not None:
            list_folder(folder)
    return load_model(model, weights)


def pictures(
    split: Literal["calib", "eval"], folder: Path | None, how: Preprocessing, **options: Any
) -> Samples:
    """The pictures of a folder, or bundled ones if there is none; ``options`` of read_folder."""
    return bundled_samples(split) if folder is None else read_folder(folder, how, **options)


def calibration_samples(
    calib: Path | None, how: Preprocessing, limit: int, seed: int, progress: Progress
) -> Samples:
    """The calibration pictures of a run."""
    return pictures("calib", calib, how, limit=limit, seed=seed, progress=progress)


def evaluation_samples(
    loaded: LoadedModel,
    calib: Path | None,
    evaluation: Path | None,
    how: Preprocessing,
    progress: Progress,
) -> Samples | None:
    """The evaluation pictures of a run; bundled ones only where the calibration ones are too."""
    if evaluation is None and (loaded.source.kind != "bundled" or calib is not None):
        return None
    return pictures("eval", evaluation, how, progress=progress)
