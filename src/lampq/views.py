"""Other views of pictures: parts of them, mirrored or not, and mixtures of two."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lampq.data import Samples

# the least part of its picture that a view shows
SMALLEST = 0.7


def with_views(samples: Samples, views: int, seed: int) -> Samples:
    """The images, and other views of each, so that there are ``views`` times as many.

    Labels are repeated: most of a picture mostly shows what the picture shows.
    """
    if views < 2:
        return samples
    generator = torch.Generator().manual_seed(seed)
    originals = samples.images
    parts = [originals]
    for _ in range(views - 1):
        view = shown(originals.float(), SMALLEST, generator, mirror=True)
        if not originals.is_floating_point():
            view = view.round().clamp(0, 255)
        parts.append(view.to(originals.dtype))
    labels = None if samples.labels is None else samples.labels.repeat(views)
    return replace(samples, images=torch.cat(parts), labels=labels)


def shown(images: Tensor, smallest: float, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """Each image cropped to a random part, and mirrored or not."""
    views = []
    for image in images:
        view = _cropped(image, smallest, generator) if smallest < 1 else image
        turned = mirror and float(torch.rand((), generator=generator)) < 0.5
        views.append(view.flip(-1) if turned else view)
    return torch.stack(views)


def mixed(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """This share of the images mixed with the next one each.

    Half of them are blended (mixup, Zhang et al., ICLR 2018), half get a rectangle of the other
    (CutMix, Yun et al., ICCV 2019).
    """
    result = images.clone()
    height, width = images.shape[-2:]
    for number in range(len(images)):
        draw, high, wide, down, right = torch.rand(5, generator=generator).tolist()
        other = images[(number + 1) % len(images)]
        if draw < share / 2:
            result[number] = high * images[number] + (1 - high) * other
        elif draw < share:
            rows, columns = round(height * math.sqrt(high)), round(width * math.sqrt(wide))
            top, left = round((height - rows) * down), round((width - columns) * right)
            part = (..., slice(top, top + rows), slice(left, left + columns))
            result[number][part] = other[part]
    return result


def _cropped(image: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """A random part of the picture, nearly of its proportions, at its size."""
    height, width = image.shape[-2:]
    share = math.sqrt(float(torch.empty(()).uniform_(smallest, 1.0, generator=generator)))
    stretch = math.sqrt(float(torch.empty(()).uniform_(0.8, 1.25, generator=generator)))
    rows = max(1, min(height, round(height * share * stretch)))
    columns = max(1, min(width, round(width * share / stretch)))
    top = int(torch.randint(height - rows + 1, (), generator=generator))
    left = int(torch.randint(width - columns + 1, (), generator=generator))
    part = image[None, :, top : top + rows, left : left + columns]
    return F.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)[0]
