"""Detections drawn on their pictures, one model beside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from lampq.detection.ap import Detection
from lampq.detection.samples import DetectionSamples
from lampq.errors import DataError

SURE = 0.5  # detections below this score are not drawn
GAP, LINE = 8, 16  # pixels between pictures, and of a line of text
PAPER, INK = (255, 255, 255), (20, 20, 20)
# told apart by most people, also those who do not see all colours
COLOURS = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (240, 228, 66),
    (148, 103, 189),
)


def _colour(label: int) -> tuple[int, int, int]:
    return COLOURS[(label - 1) % len(COLOURS)]


def drawn(
    image: Tensor,
    found: Detection,
    names: Sequence[str],
    *,
    least: float = SURE,
    zoom: int = 1,
) -> Image.Image:
    """A picture, bytes (3, height, width), with the masks, boxes and names of what was found."""
    pixels = image.permute(1, 2, 0).numpy().astype(np.float32)
    kept = [i for i in found.scores.argsort().tolist() if float(found.scores[i]) >= least]
    for i in kept:
        inside = found.masks[i].pixels().astype(bool)
        pixels[inside] = 0.55 * pixels[inside] + 0.45 * np.array(_colour(int(found.labels[i])))
    picture = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
    picture = picture.resize(
        (picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST
    )
    canvas = ImageDraw.Draw(picture)
    for i in kept:
        box = [zoom * value for value in found.boxes[i].tolist()]
        canvas.rectangle(box, outline=_colour(int(found.labels[i])), width=2)
    for i in kept:
        _caption(canvas, found, i, names, zoom)
    return picture


def _caption(canvas: Any, found: Detection, i: int, names: Sequence[str], zoom: int) -> None:
    """Name and score on a plate at the upper left corner of the box."""
    label = int(found.labels[i])
    left, top = (zoom * value for value in found.boxes[i, :2].tolist())
    text = f"{names[label - 1]} {float(found.scores[i]):.2f}"
    corner = (left, max(0.0, top - LINE + 3))
    plate = canvas.textbbox(corner, text)
    canvas.rectangle([plate[0] - 1, plate[1] - 1, plate[2] + 1, plate[3] + 1], fill=_colour(label))
    dark = sum(_colour(label)) < 380
    canvas.text(corner, text, fill=PAPER if dark else INK)


def side_by_side(
    samples: DetectionSamples,
    columns: Mapping[str, Sequence[Detection]],
    *,
    count: int = 6,
    least: float = SURE,
    zoom: int = 2,
) -> Image.Image:
    """The first pictures, a row each, with what every model found in them in a column each."""
    if not columns or count < 1:
        raise DataError("a picture of detections needs a model and a sample at least")
    for name, found in columns.items():
        if len(found) != len(samples):
            raise DataError(f"{len(samples)} pictures but {name} has detections of {len(found)}")
    rows = range(min(count, len(samples)))
    height, width = (zoom * max(samples.sizes[row][axis] for row in rows) for axis in (0, 1))
    sheet = Image.new(
        "RGB",
        (GAP + len(columns) * (width + GAP), LINE + GAP + len(rows) * (height + GAP)),
        PAPER,
    )
    canvas = ImageDraw.Draw(sheet)
    for column, (name, found) in enumerate(columns.items()):
        left = GAP + column * (width + GAP)
        canvas.text((left, 4), name, fill=INK)
        for row in rows:
            picture = drawn(samples.images[row], found[row], samples.names, least=least, zoom=zoom)
            sheet.paste(picture, (left, LINE + GAP + row * (height + GAP)))
    return sheet


def save_side_by_side(
    path: Path,
    samples: DetectionSamples,
    columns: Mapping[str, Sequence[Detection]],
    **options: Any,
) -> None:
    """Write such a picture as a file; it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    side_by_side(samples, columns, **options).save(temporary, format="PNG")
    temporary.replace(path)
