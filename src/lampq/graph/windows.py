"""Swin blocks for inputs of any size: padded to whole windows first, shifted after."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def shift_mask(rows: int, columns: int, window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """What is added to the scores of shifted windows: -100 between tokens that are not neighbours.

    Shape (windows, tokens, tokens). Rows and columns are multiples of the window.
    """

    def parts(size: int, length: int, step: int) -> Tensor:
        place = torch.arange(size)
        return (place >= size - length).long() + (place >= size - step).long()

    vertical = parts(rows, window[0], shift[0])
    horizontal = parts(columns, window[1], shift[1])
    region = (3 * vertical[:, None] + horizontal[None]).reshape(
        rows // window[0], window[0], columns // window[1], window[1]
    )
    tokens = region.transpose(1, 2).reshape(-1, window[0] * window[1])
    return torch.where(tokens[:, None] == tokens[:, :, None], 0.0, -100.0)


def _padded(x: Tensor, below: int, right: int, value: Tensor | None) -> Tensor:
    """A map (images, rows, columns, channels) with more rows and columns of zeros or one value."""
    if value is None or not (below or right):
        return F.pad(x, (0, 0, 0, right, 0, below))
    images, rows, columns, channels = x.shape
    padded = value.to(x).expand(images, rows + below, columns + right, channels).clone()
    padded[:, :rows, :columns] = x
    return padded


@cache
def padded_swin_block() -> type[nn.Module]:
    """The class of a Swin block that takes any size, as the reference detectors have it.

    timm shifts first and pads the shifted map, which is another function where a map is not a
    whole number of windows.
    """
    from timm.models.swin_transformer import SwinTransformerBlock, window_partition, window_reverse

    class PaddedSwinBlock(SwinTransformerBlock):
        """A block of Swin that pads with zeros behind its first norm."""

        def __init__(self, original: nn.Module) -> None:
            nn.Module.__init__(self)
            self.__dict__.update(original.__dict__)
            self._modules = dict(original._modules)

        def _attn(self, x: Tensor) -> Tensor:
            """Attention inside the windows of a map (images, rows, columns, channels)."""
            window: Any = tuple(self.window_size)
            shift: Any = tuple(self.shift_size)
            rows, columns, channels = x.shape[1:]
            below, right = -rows % window[0], -columns % window[1]
            padded = _padded(x, below, right, getattr(self.norm1, "padding", None))
            mask = None
            if any(shift):
                padded = torch.roll(padded, (-shift[0], -shift[1]), dims=(1, 2))
                mask = shift_mask(rows + below, columns + right, window, shift).to(x)
            tokens = window_partition(padded, window).flatten(1, 2)
            mixed = self.attn(tokens, mask=mask).view(-1, *window, channels)
            merged: Tensor = window_reverse(mixed, window, rows + below, columns + right)
            if any(shift):
                merged = torch.roll(merged, shift, dims=(1, 2))
            return merged[:, :rows, :columns]

    return PaddedSwinBlock
