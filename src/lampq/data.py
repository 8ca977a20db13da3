"""Samples: images with their labels, from a folder or from tensors."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lampq.errors import DataError
from lampq.progress import Progress


class AnySamples(Protocol):
    """Images with what is known of them, whatever the task: labels, or objects and their boxes."""

    def __len__(self) -> int: ...

    def inputs(self, index: slice) -> Any:
        """Network input of some samples."""
        ...

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Network inputs and what is known of them, in order."""
        ...

    def subset(self, count: int, seed: int) -> Self:
        """A random subset, the same for the same seed; all if count is large."""
        ...


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a picture becomes network input: resize, centre crop, scale to 0..1, normalise.

    A picture that has the input size already is taken whole, unless ``recrop`` is set: it has been
    cropped before, and a second crop would cost accuracy.

    Attributes:
        mean: Of the pixels from 0 to 1, one per channel.
        std: Their deviation, one per channel.
        crop_pct: Edge of the crop over the shorter side of the resized picture.
        size: Edge of the network input.
        recrop: Resize and crop also pictures that have the input size.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    size: int = 224
    recrop: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"crop-pct must be in (0, 1], got {self.crop_pct}")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if len(self.mean) != len(self.std) or not finite or min(self.std) <= 0:
            raise DataError(f"mean {self.mean} and std {self.std} must match, std above zero")


@dataclass(frozen=True, slots=True)
class Samples:
    """Images (bytes or floats) and their labels; bytes are normalised batch by batch.

    Attributes:
        images: (n, channels, height, width); floats must be normalised already.
        labels: One class index per image, or None.
        mean: Of the pixels from 0 to 1, one per channel; for bytes.
        std: Their deviation, one per channel; for bytes.
    """

    images: Tensor
    labels: Tensor | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or not len(self.images):
            raise DataError(
                f"images must have shape (n, channels, height, width) with n > 0, "
                f"got {tuple(self.images.shape)}"
            )
        if not self.images.is_floating_point() and len(self.mean) != self.images.shape[1]:
            raise DataError(
                f"byte images of {self.images.shape[1]} channels need as many values of mean and "
                f"std, got {len(self.mean)}; or give normalised float images"
            )
        if self.labels is not None and len(self.labels) != len(self.images):
            raise DataError(f"{len(self.images)} images but {len(self.labels)} labels")
        if self.images.is_floating_point() and not bool(torch.isfinite(self.images).all()):
            raise DataError("the images contain NaN or infinite values")

    def __len__(self) -> int:
        return len(self.images)

    def inputs(self, index: Tensor | slice) -> Tensor:
        """Network input of some samples."""
        images = self.images[index]
        if images.dtype != torch.uint8:
            return images
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return (images.float() / 255 - mean) / std

    def batches(self, size: int = 32) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Network inputs and labels, in order."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.inputs(part), None if self.labels is None else self.labels[part]

    def subset(self, count: int, seed: int) -> Samples:
        """A random subset, in random order, the same for the same seed; all if count is large."""
        if count >= len(self):
            return self
        generator = torch.Generator().manual_seed(seed)
        index = torch.randperm(len(self), generator=generator)[:count]
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=self.images[index], labels=labels)

    def split(self, count: int, seed: int) -> tuple[Samples, Samples]:
        """Two parts without a common sample: the second, drawn at random, has ``count``."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        first, second = (
            replace(
                self,
                images=self.images[part],
                labels=None if self.labels is None else self.labels[part],
            )
            for part in (order[count:].sort().values, order[:count].sort().values)
        )
        return first, second

    def require_labels(self, purpose: str) -> Tensor:
        """The labels, or a DataError that says what they are needed for."""
        if self.labels is None:
            raise DataError(f"{purpose} needs labels, and the samples have none")
        return self.labels


def gather(samples: Iterable[object] | Samples) -> Samples:
    """Samples of any iterable of (images, labels), of images, or of single pairs."""
    if isinstance(samples, Samples):
        return samples
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for item in samples:
        parts = tuple(item) if isinstance(item, tuple | list) else (item,)
        picture, label = parts[0], parts[1] if len(parts) > 1 else None
        if not isinstance(picture, Tensor):
            raise DataError(f"samples must be tensors, got {type(picture).__name__}")
        images.append(picture if picture.ndim == 4 else picture[None])
        if label is not None:
            labels.append(torch.as_tensor(label).reshape(-1))
    if not images:
        raise DataError("there are no samples; give at least one batch of images")
    shapes = sorted({tuple(picture.shape[1:]) for picture in images})
    if len(shapes) > 1:
        raise DataError(f"all images must have one shape, got {shapes[0]} and {shapes[1]}")
    return Samples(torch.cat(images), torch.cat(labels).long() if labels else None)


def list_folder(folder: Path) -> list[tuple[Path, int]]:
    """Pictures and labels of ``images/`` + ``labels.csv``, or of one folder a class."""
    if not folder.is_dir():
        raise DataError(f"no folder {str(folder)!r}")
    table = folder / "labels.csv"
    if table.is_file():
        return _listed(folder, table)
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    found = [
        (path, label)
        for label, one in enumerate(classes)
        for path in sorted(one.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise DataError(
            f"{str(folder)!r} has neither labels.csv with images/ nor one folder of pictures "
            f"a class ({', '.join(SUFFIXES)})"
        )
    return found


def _listed(folder: Path, table: Path) -> list[tuple[Path, int]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as handle:
            rows = list(csv.DictReader(handle))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise DataError(f"{str(table)!r} is no readable CSV file: {error}") from error
    if not rows or not {"file", "label"} <= set(rows[0]):
        found = ", ".join(rows[0]) if rows else "no rows"
        raise DataError(f"{str(table)!r} needs the columns file and label, found {found}")
    listed = []
    for line, row in enumerate(rows, start=2):
        path = folder / "images" / (row["file"] or "")
        if not (row["label"] or "").isdecimal():
            raise DataError(f"{str(table)!r} line {line}: label {row['label']!r} is no class index")
        if not path.is_file():
            raise DataError(f"{str(table)!r} line {line}: no picture {str(path)!r}")
        listed.append((path, int(row["label"])))
    return listed


def read_picture(path: Path, how: Preprocessing) -> Tensor:
    """One picture, resized and cropped, as bytes (channels, size, size)."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    mode = "L" if len(how.mean) == 1 else "RGB"
    try:
        with Image.open(path) as opened:
            picture = opened.convert(mode)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"cannot read picture {str(path)!r}: {error}") from error
    edge = math.floor(how.size / how.crop_pct)
    if picture.size == (how.size, how.size) and not how.recrop:
        edge = how.size
    short = min(picture.size)
    if short != edge:
        width, height = (int(side * edge / short) for side in picture.size)
        picture = picture.resize((max(width, edge), max(height, edge)), Image.Resampling.BICUBIC)
    left, top = (round((side - how.size) / 2) for side in picture.size)
    cropped = picture.crop((left, top, left + how.size, top + how.size))
    pixels = torch.from_numpy(np.asarray(cropped).copy())
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def read_folder(
    folder: Path,
    how: Preprocessing,
    *,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Samples:
    """Samples of a data folder; with a limit, a random choice of pictures kept in order."""
    listed = list_folder(folder)
    if limit is not None and limit < len(listed):
        generator = torch.Generator().manual_seed(seed)
        chosen = sorted(torch.randperm(len(listed), generator=generator)[:limit].tolist())
        listed = [listed[i] for i in chosen]
    tracked = (progress or Progress()).track(listed, "reading pictures", len(listed))
    images = torch.stack([read_picture(path, how) for path, _ in tracked])
    return Samples(images, torch.tensor([label for _, label in listed]), how.mean, how.std)
