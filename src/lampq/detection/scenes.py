"""Made pictures with exact boxes and masks: Fashion-MNIST items among clutter.

A picture is painted back to front. Each item and each piece of clutter hides what is behind it, and
what is hidden is taken off the masks. An item that would be hidden too much is not painted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from lampq.detection.rle import Mask
from lampq.detection.samples import DetectionSamples, Objects
from lampq.errors import DataError
from lampq.models import bundled_samples

NAMES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SceneStyle:
    """How scenes look.

    Attributes:
        size: Edge of the picture in pixels.
        items: Fewest and most items that are tried.
        clutter: Fewest and most pieces that are no item.
        edge: Smallest and largest edge of an item's square, in pixels.
        visible: The least share of an item that stays in sight.
        noise: Deviation of the noise of every pixel, of 255.
    """

    size: int = 128
    items: tuple[int, int] = (3, 8)
    clutter: tuple[int, int] = (2, 6)
    edge: tuple[int, int] = (36, 72)
    visible: float = 0.7
    noise: float = 6.0

    def __post_init__(self) -> None:
        if self.edge[1] > self.size or not 4 <= self.edge[0] <= self.edge[1]:
            raise DataError(f"items of {self.edge} pixels do not fit pictures of {self.size}")
        if not 0 < self.items[0] <= self.items[1] or not 0 <= self.clutter[0] <= self.clutter[1]:
            raise DataError(f"no scene has {self.items} items and {self.clutter} of clutter")


@dataclass(frozen=True, slots=True)
class Items:
    """Pictures of single items, bytes (n, 28, 28), and their classes from 0."""

    images: Array
    labels: Array

    def __post_init__(self) -> None:
        if self.images.ndim != 3 or self.images.dtype != np.uint8 or not len(self.images):
            raise DataError(f"items are bytes (n, height, width), got {self.images.shape}")
        if self.labels.shape != self.images.shape[:1] or self.labels.max() >= len(NAMES):
            raise DataError(f"{len(self.images)} items need as many classes from 0 to 9")


class _Canvas:
    """One picture while it is painted, and what is in sight of every item."""

    def __init__(self, style: SceneStyle, draw: np.random.Generator) -> None:
        self.style, self.draw = style, draw
        self.pixels = _background(style, draw)
        self.masks: list[Array] = []
        self.areas: list[int] = []
        self.labels: list[int] = []

    def paint(self, shape: Array, colours: Array, corner: Array, label: int | None) -> None:
        """Put a shape (rows, columns) of colours (3, rows, columns) in front, at a corner.

        What is outside the picture is cut off. Without a label it is clutter. Nothing is painted
        if it would hide too much of an item.
        """
        size = self.style.size
        top, left = (int(value) for value in corner)
        rows = slice(max(0, top), min(size, top + shape.shape[0]))
        columns = slice(max(0, left), min(size, left + shape.shape[1]))
        part = shape[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        area = int(np.count_nonzero(part))
        hidden = [int(np.count_nonzero(mask[rows, columns] & part)) for mask in self.masks]
        seen = (
            np.count_nonzero(mask) - less for mask, less in zip(self.masks, hidden, strict=True)
        )
        least = (self.style.visible * whole for whole in self.areas)
        if area == 0 or any(now < need for now, need in zip(seen, least, strict=True)):
            return
        inner = colours[:, rows.start - top : rows.stop - top, columns.start - left :]
        inner = inner[:, :, : columns.stop - columns.start]
        np.copyto(self.pixels[:, rows, columns], inner, where=part, casting="same_kind")
        for mask in self.masks:
            mask[rows, columns] &= ~part
        if label is not None:
            whole = np.zeros((size, size), bool)
            whole[rows, columns] = part
            self.masks.append(whole)
            self.areas.append(area)
            self.labels.append(label)


def _smooth(cells: int, size: int, draw: np.random.Generator) -> Array:
    """Smooth noise (size, size) of deviation one at the knots, so many cells across."""
    grid = draw.standard_normal((cells + 1, cells + 1), dtype=np.float32)
    place = np.linspace(0, cells, size, dtype=np.float32)
    low = np.minimum(place.astype(int), cells - 1)
    part = place - low.astype(np.float32)
    across = grid[:, low] * (1 - part) + grid[:, low + 1] * part
    noise: Array = across[low] * (1 - part)[:, None] + across[low + 1] * part[:, None]
    return noise


def _uniform(draw: np.random.Generator, low: float, high: float, *shape: int) -> Array:
    """Numbers between two, in single precision."""
    return draw.uniform(low, high, shape).astype(np.float32)


def _background(style: SceneStyle, draw: np.random.Generator) -> Array:
    """A smooth, tinted texture (3, size, size)."""
    coarse = _smooth(int(draw.integers(2, 6)), style.size, draw) * _uniform(draw, 5, 25)
    fine = _smooth(int(draw.integers(16, 48)), style.size, draw) * _uniform(draw, 2, 14)
    base = _uniform(draw, 20, 130) + _uniform(draw, -15, 15, 3, 1, 1)
    texture: Array = base + (coarse + fine)
    return texture


def _resized(picture: Array, edge: int) -> Array:
    """A square picture at another size, linearly."""
    zoom = edge / picture.shape[0]
    grown: Array = ndimage.zoom(
        picture.astype(np.float32), zoom, order=1, mode="nearest", grid_mode=True
    )
    return grown


def _paint_item(canvas: _Canvas, picture: Array, label: int) -> None:
    """An item of random size, place, direction, brightness and tint."""
    style, draw = canvas.style, canvas.draw
    edge = round(float(np.exp(draw.uniform(*np.log(style.edge)))))
    if draw.random() < 0.5:
        picture = picture[:, ::-1]
    # the inside of an item may be black, so its outline is filled
    filled = ndimage.binary_fill_holes(picture > 12)
    shape = _resized(filled, edge) > 0.5
    dark, bright = _uniform(draw, 10, 60), _uniform(draw, 170, 255)
    shade = dark + (bright - dark) / 255 * _resized(picture, edge)
    colours = shade * _uniform(draw, 0.8, 1.0, 3, 1, 1)
    canvas.paint(shape, colours, draw.integers(0, style.size - edge + 1, 2), label)


def _paint_clutter(canvas: _Canvas) -> None:
    """An ellipse, a bar or a blob with a texture of its own."""
    draw = canvas.draw
    long, short, angle = _uniform(draw, 8, 32), _uniform(draw, 2, 9), _uniform(draw, 0, np.pi)
    reach = int(long + short) + 2
    offset = np.arange(-reach, reach + 1, dtype=np.float32)
    x, y = offset[None], offset[:, None]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    kind = draw.integers(3)
    if kind == 0:
        shape = (along / long) ** 2 + (across / (2 * short)) ** 2 < 1
    elif kind == 1:
        shape = (np.abs(along) < long) & (np.abs(across) < short)
    else:
        shape = (along**2 + across**2 < long**2) & (_smooth(6, len(offset), draw) > 0.3)
    texture = _smooth(int(draw.integers(2, 16)), len(offset), draw) * _uniform(draw, 2, 30)
    colours = _uniform(draw, 10, 240) * _uniform(draw, 0.7, 1.0, 3, 1, 1) + texture
    canvas.paint(shape, colours, draw.integers(0, canvas.style.size, 2) - reach, None)


def make_scene(
    items: Items, style: SceneStyle, draw: np.random.Generator
) -> tuple[Tensor, Objects]:
    """One picture, bytes (3, size, size), and its objects; at least one."""
    canvas = _Canvas(style, draw)
    clutter = int(draw.integers(style.clutter[0], style.clutter[1] + 1))
    count = int(draw.integers(style.items[0], style.items[1] + 1))
    for _ in range(clutter - clutter // 3):
        _paint_clutter(canvas)
    # the last third of the clutter may lie in front of items
    order = draw.permutation(count + clutter // 3)
    for turn in order:
        if turn < count:
            chosen = int(draw.integers(len(items.images)))
            _paint_item(canvas, items.images[chosen], int(items.labels[chosen]))
        else:
            _paint_clutter(canvas)
    noise = draw.standard_normal(canvas.pixels.shape, dtype=np.float32)
    noisy = canvas.pixels + np.float32(style.noise) * noise
    image = torch.from_numpy(np.clip(noisy, 0, 255).astype(np.uint8))
    masks = [Mask.of(mask) for mask in canvas.masks]
    return image, Objects.of(masks, [label + 1 for label in canvas.labels])


def scenes(
    items: Items, seed: int, style: SceneStyle | None = None, first: int = 0
) -> Iterator[tuple[Tensor, Objects]]:
    """Scenes without end; each depends on the seed and its number alone."""
    number = first
    while True:
        yield make_scene(items, style or SceneStyle(), np.random.default_rng([seed, number]))
        number += 1


def make_scenes(
    items: Items, count: int, seed: int, style: SceneStyle | None = None
) -> DetectionSamples:
    """So many scenes as samples, the same for the same seed."""
    if count < 1:
        raise DataError(f"a number of scenes is at least 1, got {count}")
    style = style or SceneStyle()
    made = [scene for scene, _ in zip(scenes(items, seed, style), range(count), strict=False)]
    return DetectionSamples(
        tuple(image for image, _ in made),
        tuple(objects for _, objects in made),
        ((style.size, style.size),) * count,
        tuple(range(1, count + 1)),
        tuple(range(1, len(NAMES) + 1)),
        NAMES,
    )


def bundled_items(split: Literal["calib", "eval"]) -> Items:
    """The bundled Fashion-MNIST pictures: 1,024 training items or 2,000 test items."""
    samples = bundled_samples(split)
    labels = samples.require_labels("a scene")
    return Items(samples.images[:, 0].numpy(), labels.numpy())


def bundled_scenes(
    split: Literal["calib", "eval"], count: int, seed: int = 0, style: SceneStyle | None = None
) -> DetectionSamples:
    """Scenes of the bundled pictures: of training items to calibrate, of test items to evaluate."""
    return make_scenes(bundled_items(split), count, seed, style)
