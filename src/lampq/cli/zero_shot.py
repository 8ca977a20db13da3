"""Where a zero-shot run has its calibration pictures from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lampq.config import RunConfig
from lampq.data import Preprocessing, Samples
from lampq.errors import ConfigError
from lampq.models import LoadedModel
from lampq.progress import Progress
from lampq.zero_shot import (
    Synthesis,
    check_model,
    check_synthetic,
    described,
    make_folder,
    read_about,
    read_made,
    recipe_of,
)

FOLDER = "synthetic"


@dataclass(frozen=True, slots=True)
class Run:
    """What the pictures of a run depend on."""

    loaded: LoadedModel
    weights: Path | None
    how: Preprocessing
    settings: RunConfig
    out: Path
    progress: Progress


@dataclass(frozen=True, slots=True)
class GivenPictures:
    """Pictures that lampq synthesize has made."""

    folder: Path

    def to_json(self) -> dict[str, Any]:
        """What tells them from others."""
        return {"synthetic": str(self.folder)}

    def check(self, loaded: LoadedModel, how: Preprocessing) -> None:
        """Raise if they are not there, or were made for another model."""
        del how
        check_synthetic(self.folder, loaded.source)

    def samples(self, run: Run) -> tuple[Samples, dict[str, Any]]:
        """The pictures, and how they were made."""
        source, settings = run.loaded.source, run.settings
        options: dict[str, Any] = {"limit": settings.images, "seed": settings.seed}
        samples = read_made(self.folder, source, run.how, **options, progress=run.progress)
        return samples, read_about(self.folder)


@dataclass(frozen=True, slots=True)
class NewPictures:
    """Pictures that are made for this run, in its folder."""

    synthesis: Synthesis

    def to_json(self) -> dict[str, Any]:
        """What tells them from others."""
        return asdict(self.synthesis)

    def check(self, loaded: LoadedModel, how: Preprocessing) -> None:
        """Raise if they cannot be made for this model."""
        recipe_of(self.synthesis)
        check_model(loaded.model, how)

    def samples(self, run: Run) -> tuple[Samples, dict[str, Any]]:
        """The pictures, made or made further, and how."""
        folder = run.out / FOLDER
        about = make_folder(run.loaded, run.weights, run.how, self.synthesis, folder, run.progress)
        run.progress.note(described(about))
        return read_made(folder, run.loaded.source, run.how), about


def calibration_source(
    zero_shot: bool,
    calib: Path | None,
    synthetic: Path | None,
    typed: Mapping[str, Any],
    settings: RunConfig,
) -> GivenPictures | NewPictures | None:
    """The source of a zero-shot run by its flags; None for a run on real pictures.

    ``typed`` are options of new pictures by their names in Synthesis; None means not typed.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    if not zero_shot:
        if given or synthetic is not None:
            raise ConfigError(
                "--recipe, --synthesis-steps, --synthesis-batch and --synthetic are for runs "
                "without images: give --zero-shot too"
            )
        return None
    if calib is not None:
        raise ConfigError("a zero-shot run takes no calibration pictures: leave --calib out")
    if synthetic is None:
        given |= {"images": settings.images, "seed": settings.seed}
        return NewPictures(Synthesis(**given, precision=settings.train_precision))
    if given:
        raise ConfigError(
            "the pictures of --synthetic are made already: leave --recipe, --synthesis-steps and "
            "--synthesis-batch out"
        )
    return GivenPictures(synthetic)


def pictures_of_run(folder: Path, data: Mapping[str, Any]) -> GivenPictures | None:
    """The made pictures of a finished run, as its report tells; None for one on real pictures."""
    made = data.get("zero_shot")
    if made is None:
        return None
    return GivenPictures(Path(made["synthetic"]) if "synthetic" in made else folder / FOLDER)
