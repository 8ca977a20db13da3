"""Dead leaves: pictures of nothing with the statistics of photographs.

Opaque shapes of all sizes lie over one another until they cover the picture (Lee, Mumford and
Huang, IJCV 2001). With radii from a power law the model has what photographs have: edges where one
thing ends before another, and about equal contrast at all scales. Networks trained on such pictures
alone see well (Baradad et al., NeurIPS 2021). Here every leaf has a texture of its own.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.float32]

SMALLEST, LARGEST = 0.025, 0.5
"""Radii, as shares of the edge of the picture."""
LEAVES = 3000


def pink_noise(count: int, size: int, power: float, generator: torch.Generator) -> Tensor:
    """Noise whose amplitude falls as frequency to that power; mean zero, deviation one each."""
    white = torch.randn(count, size, size, generator=generator)
    rows = torch.fft.fftfreq(size)[:, None]
    columns = torch.fft.rfftfreq(size)[None]
    frequency = (rows.square() + columns.square()).sqrt()
    frequency[0, 0] = torch.inf  # no mean
    noise: Tensor = torch.fft.irfft2(torch.fft.rfft2(white) / frequency**power, s=(size, size))
    deviation = noise.std(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    scaled: Tensor = noise / deviation
    return scaled


def radii(count: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Radii of density r**-3 between the smallest and LARGEST, as shares of the edge."""
    u = torch.rand(count, generator=generator)
    low, high = smallest**-2, LARGEST**-2
    return (low + u * (high - low)).rsqrt()


def dead_leaves(channels: int, size: int, generator: torch.Generator) -> Tensor:
    """One picture of leaves, (channels, size, size), pixels in 0..1.

    Leaves are laid from the front to the back: each shows where none was before. What the last one
    leaves open is the ground.
    """
    draw = partial(torch.rand, generator=generator)
    contrast, middle = 0.15 + 0.2 * float(draw(())), 0.3 + 0.4 * float(draw(()))
    power = 0.8 + 0.8 * float(draw(()))
    texture = pink_noise(2, 2 * size, power, generator).numpy()
    # no leaf is smaller than three pixels
    sizes = (radii(LEAVES, max(SMALLEST, 1.5 / size), generator) * size).tolist()
    places = (draw(LEAVES, 2) * size).tolist()
    forms = draw(LEAVES, 3).tolist()  # stretch, angle, kind
    tones = middle + contrast * torch.randn(LEAVES, generator=generator)
    tints = 0.3 * contrast * torch.randn(LEAVES, channels, generator=generator)
    colours = (tones[:, None] + (tints if channels > 1 else 0)).numpy()[:, :, None, None]
    rough = (0.6 * contrast * draw(LEAVES)).tolist()
    corners = torch.randint(0, size, (LEAVES, 2), generator=generator).tolist()
    picture = np.tile(middle + 0.3 * contrast * texture[0, :size, :size], (channels, 1, 1))
    empty = np.ones((size, size), dtype=bool)
    left_open = empty.size
    for leaf, ((y, x), radius) in enumerate(zip(places, sizes, strict=True)):
        reach = 1.5 * radius + 1
        top, bottom = max(0, math.floor(y - reach)), min(size, math.ceil(y + reach))
        left, right = max(0, math.floor(x - reach)), min(size, math.ceil(x + reach))
        rows = np.arange(top, bottom, dtype=np.float32)[:, None] - y
        columns = np.arange(left, right, dtype=np.float32)[None] - x
        shown = _inside(rows, columns, radius, *forms[leaf]) & empty[top:bottom, left:right]
        count = int(shown.sum())
        if not count:
            continue
        down, along = corners[leaf]
        own = texture[1, down : down + bottom - top, along : along + right - left]
        part = picture[:, top:bottom, left:right]
        np.copyto(part, colours[leaf] + rough[leaf] * own, where=shown)
        empty[top:bottom, left:right] &= ~shown
        left_open -= count
        if not left_open:
            break
    return torch.from_numpy(picture).float().clamp(0, 1)


def _inside(
    rows: Pixels, columns: Pixels, radius: float, stretch: float, angle: float, kind: float
) -> NDArray[np.bool_]:
    """Which pixels a leaf covers: an ellipse or a rectangle, of any direction."""
    turn = math.pi * angle
    along = columns * math.cos(turn) + rows * math.sin(turn)
    across = rows * math.cos(turn) - columns * math.sin(turn)
    narrow = 0.4 + 0.6 * stretch
    if kind < 0.6:
        covered: NDArray[np.bool_] = (along / radius) ** 2 + (across / (narrow * radius)) ** 2 <= 1
        return covered
    return (np.abs(along) <= radius) & (np.abs(across) <= narrow * radius)
