"""The public weights and images that the paper's own rows need, and which of them are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lampq.errors import ConfigError
from lampq.reproduce.part import Part
from lampq.reproduce.published import MODELS
from lampq.reproduce.table import Cell, Column, Table

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model of the paper: its name there, timm's name, and its weights if they are here."""

    label: str
    name: str
    path: Path | None


def checkpoints(parts: Sequence[Part], folder: Path | None) -> list[Checkpoint]:
    """The models of these parts, in the order of the paper."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"no folder of checkpoints {str(folder)!r}")
    wanted = {label for part in parts for label in part.models}
    return [
        Checkpoint(label, name, _local(name, folder) or _cached(name))
        for label, name in MODELS.items()
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
    parts: Sequence[Part], found: Sequence[Checkpoint], calib: Path | None, evaluation: Path | None
) -> Table:
    """What every table and figure needs, and what is there of it."""
    rows: list[tuple[Cell, ...]] = []
    rules = []
    for part in parts:
        rules.append(len(rows))
        for one in found:
            if one.label in part.models:
                here = "no" if one.path is None else str(one.path)
                rows.append((part.name, part.place, one.label, f"timm/{one.name}", here))
    names = {
        True: sorted({part.images for part in parts if part.calibrated}),
        False: sorted({part.images for part in parts if part.scored}),
    }
    notes = (
        f"calibration images: 1,024 of the training images of {', '.join(names[True])}: "
        f"{_given(calib, '--calib DIR')}",
        f"evaluation images: the validation images of {', '.join(names[False])}: "
        f"{_given(evaluation, '--eval DIR')}",
    )
    columns = tuple(Column(name) for name in ("part", "paper", "model", "weights", "here"))
    caption = "What the paper's own rows need."
    return Table("full", caption, columns, tuple(rows), tuple(rules), notes)


def _given(folder: Path | None, flag: str) -> str:
    return f"not given ({flag})" if folder is None else str(folder)


def runnable(part: Part, calib: Path | None, evaluation: Path | None) -> bool:
    """Whether the images that the part needs are given."""
    missing = (part.calibrated and calib is None) or (part.scored and evaluation is None)
    return not missing
