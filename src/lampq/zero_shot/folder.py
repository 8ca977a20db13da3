"""A folder of made pictures: PNG files, labels.csv, a contact sheet, and how they were made."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lampq.artifact.checkpoint import write_atomically
from lampq.artifact.states import StateFolder
from lampq.data import Preprocessing, Samples, list_folder, read_folder
from lampq.errors import ConfigError, DataError
from lampq.models import LoadedModel, ModelSource
from lampq.progress import Progress
from lampq.reconstruct.precision import chosen
from lampq.version import __version__
from lampq.zero_shot.base import Subject, Synthesis, options_of
from lampq.zero_shot.canvas import Canvas
from lampq.zero_shot.painter import Batch, batches, recipe_of

ABOUT = "synthesis.json"
WORK = ".lampq"
STAMP = "synthesis.stamp"
SHEET = "contact_sheet.png"
# pictures on the sheet, and the least size of one there
ON_SHEET, COLUMNS, LEAST, GAP = 64, 8, 64, 4


def _stamp(
    loaded: LoadedModel, weights: Path | None, how: Preprocessing, settings: Synthesis
) -> dict[str, Any]:
    """Everything that the pictures depend on."""
    return {
        "model": loaded.source.to_json(),
        "weights": str(weights),
        "preprocessing": {"mean": how.mean, "std": how.std, "size": how.size},
        "settings": {**asdict(settings), "steps": recipe_of(settings).steps},
        "recipe": options_of(recipe_of(settings)),
        "lampq": __version__,
    }


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise if pictures cannot be made, or with ``resume`` made further, in that folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {str(folder)!r} is a file, not a folder")
    begun = (folder / WORK / STAMP).exists()
    if (folder / ABOUT).exists():
        what = "there is nothing to resume" if resume else "choose another --out"
        raise ConfigError(f"{str(folder)!r} already holds finished pictures: {what}")
    if resume and not begun:
        raise ConfigError(f"{str(folder)!r} holds no interrupted synthesis to resume")
    if begun and not resume:
        raise ConfigError(
            f"{str(folder)!r} holds an interrupted synthesis: continue it with --resume, or "
            "choose another --out"
        )
    if not begun and any((folder / name).exists() for name in ("images", "labels.csv")):
        raise ConfigError(f"{str(folder)!r} already holds pictures: choose another --out")


def make_folder(
    loaded: LoadedModel,
    weights: Path | None,
    how: Preprocessing,
    settings: Synthesis,
    folder: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the pictures, or those that an interrupted run with the same options left open.

    Gives the content of synthesis.json. A folder that is finished already is left as it is.
    """
    stamp = _stamp(loaded, weights, how, settings)
    text = json.dumps(stamp, sort_keys=True)
    if (folder / ABOUT).exists():
        about = read_about(folder)
        if any(about.get(key) != json.loads(text)[key] for key in stamp):
            raise ConfigError(
                f"the pictures in {str(folder)!r} were made with other options: "
                "choose another folder"
            )
        return about
    known = folder / WORK / STAMP
    if known.exists() and known.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"the interrupted synthesis in {str(folder)!r} had other options: "
            "give the same ones, or another folder"
        )
    canvas = Canvas(how)
    subject = Subject.of(loaded.model, canvas)
    write_atomically(known, text.encode())
    store = StateFolder(folder / WORK / "batches")
    made = batches(subject, canvas, settings, progress=progress, store=store)
    computed_in = str(chosen(settings.precision)).removeprefix("torch.")
    about = {**stamp, "synthesis_version": 1, "computed_in": computed_in, **summary(made)}
    # the table comes first: without its pictures it is an error, pictures without it are a class
    write_atomically(folder / "labels.csv", _table(made))
    number = 0
    for batch in made:
        for image in batch.images:
            write_atomically(folder / "images" / _file(number), png(image))
            number += 1
    write_atomically(folder / SHEET, png(contact_sheet(made)))
    write_atomically(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return about


def summary(made: list[Batch]) -> dict[str, float | None]:
    """How well the model knows its pictures of classes, in percent, and the seconds all took.

    None where all pictures are plain.
    """
    named = torch.cat([batch.named for batch in made])
    probabilities = torch.cat([batch.probabilities for batch in made])[named]
    right = torch.cat([batch.right for batch in made])[named]
    return {
        "plain": int((~named).sum()),
        "accuracy": 100 * float(right.double().mean()) if len(right) else None,
        "mean_probability": float(probabilities.double().mean()) if len(right) else None,
        "seconds": float(sum(float(batch.seconds) for batch in made)),
    }


def read_about(folder: Path) -> dict[str, Any]:
    """The content of synthesis.json of a finished folder."""
    path = folder / ABOUT
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = about["synthesis_version"]
    except OSError as error:
        raise DataError(
            f"{str(folder)!r} holds no finished synthesis ({ABOUT}): make one with lampq synthesize"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error!r}") from error
    if version != 1:
        raise DataError(f"{str(path)!r} has version {version}, this lampq reads version 1")
    return about


def read_made(
    folder: Path,
    source: ModelSource,
    how: Preprocessing,
    *,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Samples:
    """The pictures of a finished folder, as they are; they must have been made for this model."""
    check_synthetic(folder, source)
    # they have the size of the input: nothing is cropped
    whole = replace(how, crop_pct=1.0, recrop=False)
    return read_folder(folder, whole, limit=limit, seed=seed, progress=progress)


def check_synthetic(folder: Path, source: ModelSource) -> None:
    """Raise if the folder holds no finished pictures that were made for this model."""
    made_for = read_about(folder).get("model", {})
    list_folder(folder)
    if (made_for.get("kind"), made_for.get("name")) != (source.kind, source.name):
        raise DataError(
            f"the pictures in {str(folder)!r} were made for the model {made_for.get('name')!r}, "
            f"not for {source.name!r}"
        )


def _file(number: int) -> str:
    return f"{number:05d}.png"


def _table(made: list[Batch]) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["file", "label", "probability"])
    number = 0
    for batch in made:
        for label, probability in zip(batch.labels, batch.probabilities, strict=True):
            rows.writerow([_file(number), int(label), f"{float(probability):.4f}"])
            number += 1
    return text.getvalue().encode()


def png(image: Tensor) -> bytes:
    """A picture (channels, height, width) of bytes as a PNG file."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def contact_sheet(made: list[Batch]) -> Tensor:
    """The first pictures side by side, on white; small ones enlarged."""
    images = torch.cat([batch.images for batch in made])[:ON_SHEET]
    factor = max(1, math.ceil(LEAST / images.shape[-1]))
    images = images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    count, channels, height, width = images.shape
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    shape = (channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP)
    sheet = torch.full(shape, 255, dtype=torch.uint8)
    for number, image in enumerate(images):
        top = GAP + number // columns * (height + GAP)
        left = GAP + number % columns * (width + GAP)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def described(about: Mapping[str, Any]) -> str:
    """One sentence for people."""
    count, plain = about["settings"]["images"], about.get("plain", 0)
    if plain == count:
        return f"{count} plain pictures by {about['settings']['recipe']}"
    which = f"the other {count - plain}" if plain else "them"
    return (
        f"{count} pictures by {about['settings']['recipe']}"
        f"{f', {plain} of them plain' if plain else ''}; the model gives "
        f"{about['accuracy']:.1f} % of {which} their class (mean probability "
        f"{about['mean_probability']:.2f})"
    )
