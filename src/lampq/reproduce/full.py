"""The public weights and images that the paper's own rows need, and which of them are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lampq.config import make_config
from lampq.errors import ConfigError
from lampq.reproduce.part import Part
from lampq.reproduce.published import DETECTORS, MODELS
from lampq.reproduce.table import Cell, Column, Table

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model of the paper: its name there, timm's name, its weights, and where they are here."""

    label: str
    name: str
    weights: str
    path: Path | None


# calibration and evaluation pictures of a task, None where they are not given
Given = tuple[Path | None, Path | None]


def checkpoints(parts: Sequence[Part], folder: Path | None) -> list[Checkpoint]:
    """The models of these parts, in the order of the paper."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"no folder of checkpoints {str(folder)!r}")
    wanted = {label for part in parts for label in part.models}
    found = [
        Checkpoint(label, name, f"timm/{name}", _local(name, folder) or _cached(name))
        for label, name in MODELS.items()
        if label in wanted
    ]
    return found + [
        Checkpoint(label, one.name, f"{one.file}.pth", _local(one.file, folder))
        for label, one in DETECTORS.items()
        if label in wanted
    ]


def _local(name: str, folder: Path | None) -> Path | None:
    """A file of that name, with or without what timm has behind the dot."""
    if folder is None:
        return None
    stems = dict.fromkeys((name, name.split(".")[0]))
    paths = (folder / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _cached(name: str) -> Path | None:
    """The weights that timm has downloaded before; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(f"timm/{name}", "model.safetensors")
    return Path(found) if isinstance(found, str) else None


def needs_table(
    parts: Sequence[Part], found: Sequence[Checkpoint], given: Callable[[str], Given]
) -> Table:
    """What every table and figure needs, and what is there of it; ``given`` for a task."""
    rows: list[tuple[Cell, ...]] = []
    rules = []
    for part in parts:
        rules.append(len(rows))
        for one in found:
            if one.label in part.models:
                here = "no" if one.path is None else str(one.path)
                rows.append((part.name, part.place, one.label, one.weights, here))
    notes = [
        note
        for task in dict.fromkeys(part.task for part in parts)
        for note in _needed_images([part for part in parts if part.task == task], given(task))
    ]
    columns = tuple(Column(name) for name in ("part", "paper", "model", "weights", "here"))
    caption = "What the paper's own rows need."
    return Table("full", caption, columns, tuple(rows), tuple(rules), tuple(notes))


def _needed_images(parts: Sequence[Part], given: Given) -> list[str]:
    """The images that parts of one task need, and where they are."""
    first = parts[0]
    count = make_config({"preset": "paper", "task": first.task}).images
    more = " with --{}-annotations FILE" if first.task == "detection" else ""
    return [
        f"calibration images: {count:,} of the training images of {first.images}: "
        f"{_given(given[0], '--calib DIR' + more.format('calib'))}",
        f"evaluation images: the validation images of {first.images}: "
        f"{_given(given[1], '--eval DIR' + more.format('eval'))}",
    ]


def _given(folder: Path | None, flag: str) -> str:
    return f"not given ({flag})" if folder is None else str(folder)


def runnable(part: Part, given: Given) -> bool:
    """Whether the images that the part needs are given."""
    calib, evaluation = given
    missing = (part.calibrated and calib is None) or (part.scored and evaluation is None)
    return not missing
