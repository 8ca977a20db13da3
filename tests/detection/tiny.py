"""A tiny detector with random weights, and tiny pictures of two sizes for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lampq.detection.models import Detector, detector
from lampq.detection.samples import DetectionSamples
from lampq.detection.scenes import SceneStyle, bundled_scenes

STYLE = SceneStyle(size=48, items=(2, 3), clutter=(0, 1), edge=(16, 28))
OPTIONS: dict[str, Any] = {
    "embed_dim": 8,
    "depths": (1, 1),
    "num_heads": (1, 2),
    "window_size": 4,
    "anchor_sizes": (12, 24, 48),
    "fpn_channels": 8,
    "box_channels": 12,
    "mask_channels": 8,
    "mask_convs": 1,
    "min_size": 48,
    "max_size": 64,
    "proposals_before": (50, 30),
    "proposals_after": (30, 20),
    "rpn_samples": 32,
    "box_samples": 16,
}
# one pass with few widths
QUICK: dict[str, Any] = {
    "method": "minmax",
    "bits": 4,
    "choices": (3, 4, 5),
    "exchanges": 2,
    "patience": 1,
}


@cache
def tiny_detector(*, cascade: bool = False) -> Detector:
    """Random weights from a seed, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return detector("scene_swin", classes=10, cascade=cascade, **OPTIONS)


@cache
def tiny_samples(count: int = 4) -> DetectionSamples:
    """Scenes, every second one with fewer rows than the others."""
    made = bundled_scenes("calib", count, seed=3, style=STYLE)
    sizes = [(40, 48) if i % 2 else (48, 48) for i in range(count)]
    images = tuple(im[:, :rows] for im, (rows, _) in zip(made.images, sizes, strict=True))
    objects = []
    for found, (rows, _) in zip(made.objects, sizes, strict=True):
        masks = [type(m).of(m.pixels()[:rows]) for m in found.masks]
        seen = [(m, int(label)) for m, label in zip(masks, found.labels, strict=True) if m.area]
        objects.append(type(found).of([m for m, _ in seen], [label for _, label in seen]))
    return replace(made, images=images, objects=tuple(objects), sizes=tuple(sizes))
