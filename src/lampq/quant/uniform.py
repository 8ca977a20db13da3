"""Asymmetric uniform quantizer, per tensor or per channel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lampq.quant.base import CodedQuantizer, register


def uniform_round(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes clamp(round(x / scale + zero), 0, 2**bits - 1), as floats."""
    if torch.is_grad_enabled() and x.requires_grad:
        return (x / scale + zero).round().clamp(0, 2**bits - 1)
    return (x / scale).add_(zero).round_().clamp_(0, 2**bits - 1)


@register
class UniformQuantizer(CodedQuantizer):
    """The grid scale * (code - zero).

    A whole-numbered ``zero`` keeps 0.0 exact. A real one is the grid between two bounds,
    which at one bit is the pair {low, high}.
    """

    kind: ClassVar[str] = "uniform"
    scale: Tensor
    zero: Tensor

    def __init__(self, bits: int, scale: Tensor, zero: Tensor) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def _round(self, x: Tensor) -> Tensor:
        return uniform_round(x, self.scale, self.zero, self.bits)

    def _value(self, codes: Tensor) -> Tensor:
        return (codes - self.zero).mul_(self.scale)

    @classmethod
    def between(cls, bits: int, low: Tensor, high: Tensor, *, whole: bool) -> UniformQuantizer:
        """The grid from low to high; ``whole`` rounds the zero point so that 0.0 is exact."""
        scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(low.dtype).tiny * 1e4)
        zero = -low / scale
        return cls(bits, scale, zero.round() if whole else zero)
