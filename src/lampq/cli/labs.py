"""What lampq reproduce works on: a classifier or a detector, and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lampq.cli.jobs import Places, coco_samples, open_detector
from lampq.data import Samples, list_folder
from lampq.errors import ConfigError, DataError
from lampq.inputs import calibration_samples, load_alone, pictures
from lampq.models import BUNDLED, FloatModel, LoadedModel
from lampq.progress import Progress
from lampq.reproduce.detection import ap_row
from lampq.reproduce.full import Given
from lampq.reproduce.lab import Asked, Lab
from lampq.reproduce.part import Part
from lampq.runfolder import check_labels
from lampq.typed import preprocessing_with

if TYPE_CHECKING:
    from lampq.detection.samples import DetectionSamples

DETECTION = "detection"


@dataclass(frozen=True, slots=True)
class Place:
    """Where pictures are, and what to do with the results."""

    calib: Path | None
    calib_annotations: Path | None
    evaluation: Path | None
    eval_annotations: Path | None
    mean: str | None
    std: str | None
    crop_pct: float | None
    out: Path
    with_pictures: bool
    progress: Callable[[], Progress]
    tell: bool
    detector: Mapping[str, Any] = field(default_factory=dict)

    def given(self, task: str) -> Given:
        """Calibration and evaluation pictures that a task can use."""
        if task != DETECTION:
            return self.calib, self.evaluation
        return (
            None if self.calib_annotations is None else self.calib,
            None if self.eval_annotations is None else self.evaluation,
        )

    def files(self, weights: Path | None) -> dict[str, Path | None]:
        """Weights and pictures, by their flags."""
        return {
            "--weights": weights,
            "--calib": self.calib,
            "--calib-annotations": self.calib_annotations,
            "--eval": self.evaluation,
            "--eval-annotations": self.eval_annotations,
        }

    def places(self, model: str, weights: Path | None) -> Places:
        """A detector and its files."""
        return Places(
            *(model, weights, self.calib, self.calib_annotations),
            *(self.evaluation, self.eval_annotations, self.out, self.detector),
        )

    def inputs(self, model: str, weights: Path | None) -> dict[str, Any]:
        """What tells the inputs of a folder from those of another."""
        found: dict[str, Any] = {
            "model": model,
            "weights": str(weights),
            "calib": str(self.calib),
            "eval": str(self.evaluation),
            "mean": self.mean,
            "std": self.std,
            "crop_pct": self.crop_pct,
        }
        if self.calib_annotations is not None or self.eval_annotations is not None:
            found["calib_annotations"] = str(self.calib_annotations)
            found["eval_annotations"] = str(self.eval_annotations)
            found["detector"] = dict(self.detector)
        return found


def check_task(task: str, options: Mapping[str, Any], place: Place) -> None:
    """Raise if flags or options are those of another task."""
    if options.get("task", task) != task:
        raise ConfigError(
            f"the tables and figures asked for are of {task}: leave task = {options['task']!r} out"
        )
    if task == DETECTION:
        if any(value is not None for value in (place.mean, place.std, place.crop_pct)):
            raise ConfigError("--mean, --std and --crop-pct are for classifiers: leave them out")
    elif place.calib_annotations is not None or place.eval_annotations is not None:
        raise ConfigError(
            "--calib-annotations and --eval-annotations are for detectors: name the table, "
            "lampq reproduce detection"
        )


def check_pictures(parts: Sequence[Part], model: str, place: Place) -> None:
    """Raise if pictures are missing that a part of classifiers needs."""
    for folder in (place.calib, place.evaluation):
        if folder is not None:
            list_folder(folder)
    own = model in BUNDLED
    for part in parts:
        if part.calibrated and place.calib is None and not own:
            raise ConfigError(f"{part.name} needs calibration pictures: give --calib DIR")
        alone = place.evaluation is None and (not own or place.calib is not None)
        if part.scored and alone:
            raise ConfigError(f"{part.name} needs evaluation pictures: give --eval DIR")


def check_detector(model: str, weights: Path | None, place: Place) -> None:
    """Raise if something is missing that a detector needs; what is missing is listed."""
    missing = ["MODEL"] if model in BUNDLED else []
    missing += [
        f"{flag} {'DIR' if flag in ('--calib', '--eval') else 'FILE'}"
        for flag, path in place.files(weights).items()
        if path is None
    ]
    if missing:
        raise ConfigError(
            "detection needs a detector (scene_swin, or a Swin of timm) with trained weights, and "
            f"pictures in COCO's format: give {', '.join(missing)} too"
        )


def load(task: str, model: str, weights: Path | None, place: Place) -> FloatModel:
    """The float model."""
    if task != DETECTION:
        return load_alone(model, weights)
    from lampq.detection.source import DetectorSource

    found = open_detector(place.places(model, weights))
    return FloatModel(found, DetectorSource.of(found.options))


def classifier_lab(
    loaded: LoadedModel, weights: Path | None, place: Place, asked: Asked, work: Path, scored: bool
) -> Lab:
    """A lab for a classifier, with evaluation pictures if it is to be scored."""
    how = preprocessing_with(loaded.preprocessing, place.mean, place.std, place.crop_pct)
    limit = asked.eval_images
    evaluation = None
    if scored:
        options = {"limit": limit, "seed": 0, "progress": place.progress()}
        evaluation = pictures("eval", place.evaluation, how, **options)
        evaluation = evaluation if limit is None else evaluation.subset(limit, 0)
        check_labels(evaluation, loaded.model)
        evaluation.require_labels("an accuracy")

    @lru_cache(maxsize=1)
    def calibration(seed: int) -> Samples:
        count = int(asked.options["images"])
        samples = calibration_samples(place.calib, how, count, seed, place.progress())
        check_labels(samples, loaded.model)
        return samples

    return Lab.open(
        work,
        loaded=loaded,
        weights=weights,
        how=how,
        calibration=calibration,
        evaluation=evaluation,
        asked=asked,
        progress=place.progress,
    )


def detector_lab(
    loaded: FloatModel, weights: Path | None, place: Place, asked: Asked, work: Path
) -> Lab:
    """A lab for a detector; both sets of pictures are read at once, so that errors come early."""
    from lampq.detection.rle import coco_package

    coco_package()
    classes = int(loaded.source.options["classes"])
    evaluation = coco_samples(
        *(place.eval_annotations, place.evaluation, classes, place.progress()),
        limit=asked.eval_images,
    )
    if not any(bool((one.iscrowd == 0).any()) for one in evaluation.objects):
        raise DataError(f"{str(place.eval_annotations)!r} has no object to find: no AP is defined")

    @lru_cache(maxsize=1)
    def calibration(seed: int) -> DetectionSamples:
        return coco_samples(
            *(place.calib_annotations, place.calib, classes, place.progress()),
            limit=int(asked.options["images"]),
            seed=seed,
        )

    calibration(int(asked.options.get("seed") or 0))
    return Lab.open(
        work,
        loaded=loaded,
        weights=weights,
        how=None,
        calibration=calibration,
        evaluation=evaluation,
        asked=asked,
        progress=place.progress,
        score=ap_row,
    )
