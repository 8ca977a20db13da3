"""Where a detector looks: anchors and pooled regions, at fixed strides.

torchvision takes the strides from the sizes of the maps and rounds the anchors; the published
detectors do neither, and they align the bins of a region to the centres of the pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align


class Anchors(nn.Module):
    """Anchors of one size and several shapes at every place of every level."""

    def __init__(
        self, sizes: tuple[int, ...], ratios: tuple[float, ...], strides: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.sizes, self.ratios, self.strides = sizes, ratios, strides

    def num_anchors_per_location(self) -> list[int]:
        """How many anchors each level has at one place."""
        return [len(self.ratios)] * len(self.sizes)

    def level(self, index: int, rows: int, columns: int, like: Tensor) -> Tensor:
        """The anchors of a level, by row, column and shape."""
        stretch = torch.tensor(self.ratios, dtype=like.dtype, device=like.device).sqrt()
        half = self.sizes[index] / 2
        shapes = torch.stack([-half / stretch, -half * stretch, half / stretch, half * stretch], 1)
        y = torch.arange(rows, dtype=like.dtype, device=like.device) * self.strides[index]
        x = torch.arange(columns, dtype=like.dtype, device=like.device) * self.strides[index]
        corner = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1).repeat(1, 1, 2)
        return (corner[:, :, None] + shapes).reshape(-1, 4)

    def forward(self, images: Any, features: list[Tensor]) -> list[Tensor]:
        """The anchors of all levels, for each image."""
        levels = [
            self.level(i, feature.shape[-2], feature.shape[-1], feature)
            for i, feature in enumerate(features)
        ]
        anchors = torch.cat(levels)
        return [anchors for _ in images.image_sizes]


class RegionPool(nn.Module):
    """Regions of the pyramid as maps of one size, each from the level of its scale."""

    def __init__(self, output_size: int, strides: tuple[int, ...], finest: int) -> None:
        super().__init__()
        self.output_size, self.strides, self.finest = output_size, strides, finest

    def levels(self, boxes: Tensor) -> Tensor:
        """The level of each box."""
        scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
        last = len(self.strides) - 1
        return (scale / self.finest + 1e-6).log2().floor().clamp(0, last).long()

    def forward(
        self, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        """Maps (boxes of all images, channels, size, size)."""
        joined = torch.cat(boxes)
        image = torch.cat([box.new_full((len(box), 1), i) for i, box in enumerate(boxes)])
        regions, levels = torch.cat([image, joined], dim=1), self.levels(joined)
        maps = list(features.values())
        size = self.output_size
        pooled = maps[0].new_zeros(len(joined), maps[0].shape[1], size, size)
        for level, stride in enumerate(self.strides):
            chosen = torch.where(levels == level)[0]
            pooled = pooled.index_copy(
                0,
                chosen,
                roi_align(maps[level], regions[chosen], size, 1 / stride, aligned=True),
            )
        return pooled
