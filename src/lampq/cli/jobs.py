"""What lampq quantize works on: models and pictures of a classifier or of a detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lampq.cli.zero_shot import GivenPictures, NewPictures, Run
from lampq.config import RunConfig
from lampq.errors import ConfigError, DataError
from lampq.inputs import calibration_samples, evaluation_samples, load_alone, load_float
from lampq.models import DEFAULT_MODEL
from lampq.prepare import prepare
from lampq.progress import Progress
from lampq.runfolder import Job, check_labels, fingerprint_of, open_work, read_plan
from lampq.typed import preprocessing_with

if TYPE_CHECKING:
    from lampq.detection.models import Detector
    from lampq.detection.samples import DetectionSamples

OUT = Path("runs/lampq")


@dataclass(frozen=True, slots=True)
class Places:
    """The model of a run and where its files are.

    Attributes:
        model: A name.
        weights: Of the float model.
        calib: Calibration pictures.
        calib_annotations: What is in them, for a detector.
        eval: Evaluation pictures.
        eval_annotations: What is in them, for a detector.
        out: The run folder.
        detector: Options of a detector that its weights do not tell.
    """

    model: str = DEFAULT_MODEL
    weights: Path | None = None
    calib: Path | None = None
    calib_annotations: Path | None = None
    eval: Path | None = None
    eval_annotations: Path | None = None
    out: Path = OUT
    detector: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, typed: Mapping[str, Any], options: dict[str, Any], folder: Path) -> Places:
        """What was typed, else what a file says; that is taken out of its other options.

        Paths of a file are relative to its folder.
        """
        values: dict[str, Any] = {}
        for name in (one.name for one in fields(cls)):
            noted = options.pop(name, None)
            if name == "detector":
                noted = detector_table(noted)
            elif noted is not None and not isinstance(noted, str):
                raise ConfigError(f"{name} must be text, got {noted!r}")
            elif noted is not None and name != "model":
                noted = folder / noted
            value = noted if typed.get(name) is None else typed[name]
            if value is not None:
                values[name] = value
        return cls(**values)

    def to_json(self, plan: Path | None) -> dict[str, Any]:
        """What tells the inputs of a run from those of another."""
        names = ("weights", "calib", "eval")
        return {"model": self.model, "plan": str(plan)} | {n: str(getattr(self, n)) for n in names}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command was asked for beside the options of the run."""

    places: Places
    settings: RunConfig
    plan: Path | None
    resume: bool
    progress: Progress


@dataclass(frozen=True, slots=True)
class Begun:
    """A checked job whose run folder is open; ``job`` reads its pictures."""

    work: Path
    job: Callable[[], Job]


def detector_table(noted: Any) -> dict[str, Any] | None:
    """The table [detector] of a TOML file, if it has one."""
    if noted is not None and not isinstance(noted, dict):
        raise ConfigError(f"detector must be a table of options, got {noted!r}")
    return noted


def classifier_job(
    wanted: Wanted, made: GivenPictures | NewPictures | None, pixels: Mapping[str, Any]
) -> Begun:
    """The job of a classifier; ``pixels`` are mean, std and crop_pct as they were typed."""
    places, settings, progress = wanted.places, wanted.settings, wanted.progress
    for name in ("calib_annotations", "eval_annotations"):
        if getattr(places, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is for detectors: give --task detection too")
    layer_plan = None if wanted.plan is None else read_plan(wanted.plan)
    load = load_float if made is None else load_alone
    loaded = load(places.model, places.weights, places.calib, places.eval)
    prepare(loaded.model, settings, plan=layer_plan)
    inputs = {**places.to_json(wanted.plan), **pixels}
    if made is not None:
        inputs["zero_shot"] = made.to_json()
    how = preprocessing_with(loaded.preprocessing, **pixels)
    if made is not None:
        made.check(loaded, how)
    work = open_work(places.out, fingerprint_of(settings, inputs), resume=wanted.resume)

    def job() -> Job:
        scored = evaluation_samples(loaded, places.calib, places.eval, how, progress)
        if scored is not None:
            check_labels(scored, loaded.model)
        if made is None:
            options = (settings.images, settings.seed, progress)
            samples = calibration_samples(places.calib, how, *options)
        else:
            run = Run(loaded, places.weights, how, settings, places.out, progress)
            samples, inputs["synthesis"] = made.samples(run)
        check_labels(samples, loaded.model)
        return Job(loaded.model, loaded.source, samples, scored, settings, layer_plan, how, inputs)

    return Begun(work, job)


def open_detector(places: Places) -> Detector:
    """The detector of these places, once it is known that its files are there."""
    from lampq.detection.weights import load_detector

    if places.calib is None or places.calib_annotations is None:
        raise ConfigError(
            "a detector needs calibration pictures and what is in them: give --calib DIR and "
            "--calib-annotations FILE"
        )
    if (places.eval is None) != (places.eval_annotations is None):
        raise ConfigError("give --eval DIR and --eval-annotations FILE together, or neither")
    if places.weights is None:
        raise ConfigError("a detector needs trained weights: give --weights FILE")
    for folder in (places.calib, places.eval):
        if folder is not None and not folder.is_dir():
            raise DataError(f"no folder {str(folder)!r}")
    for file in (places.calib_annotations, places.eval_annotations):
        if file is not None and not file.is_file():
            raise DataError(f"no annotations file {str(file)!r}")
    return load_detector(places.model, places.weights, **places.detector)


def detector_job(wanted: Wanted) -> Begun:
    """The job of a detector."""
    from lampq.detection.source import DetectorSource

    places, settings = wanted.places, wanted.settings
    layer_plan = None if wanted.plan is None else read_plan(wanted.plan)
    model = open_detector(places)
    prepare(model, settings, plan=layer_plan)
    inputs = {
        **places.to_json(wanted.plan),
        "calib_annotations": str(places.calib_annotations),
        "eval_annotations": str(places.eval_annotations),
        "detector": dict(places.detector),
    }
    fingerprint = fingerprint_of(settings, inputs)
    work = open_work(places.out, fingerprint, resume=wanted.resume)
    source = DetectorSource.of(model.options)

    def job() -> Job:
        scored = None
        if places.eval is not None and places.eval_annotations is not None:
            scored = coco_samples(
                places.eval_annotations, places.eval, model.options.classes, wanted.progress
            )
        samples = coco_samples(
            places.calib_annotations,
            places.calib,
            model.options.classes,
            wanted.progress,
            limit=settings.images,
            seed=settings.seed,
        )
        return Job(model, source, samples, scored, settings, layer_plan, None, inputs)

    return Begun(work, job)


def coco_samples(
    annotations: Path | None, folder: Path | None, classes: int, progress: Progress, **options: Any
) -> DetectionSamples:
    """Pictures with their objects, of as many classes as the detector has; ``options`` of COCO's.

    Raises ConfigError if one of the places is missing.
    """
    from lampq.detection.coco import read_coco

    if annotations is None or folder is None:
        raise ConfigError("a detector needs a folder of pictures and a file of what is in them")
    samples = read_coco(annotations, folder, progress=progress, **options)
    if len(samples.names) != classes:
        raise DataError(
            f"{str(annotations)!r} lists {len(samples.names)} categories, the detector has "
            f"{classes} classes"
        )
    return samples
