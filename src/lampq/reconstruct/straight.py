"""Rounding with a gradient: straight through inside the range, none beyond it.

The gradient of a scale follows LSQ (Esser et al., ICLR 2020): inside the range the rounding error,
beyond it the distance of the last level from zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Uniform(torch.autograd.Function):
    """``scale * (code - zero)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
        position = (x / scale).add_(zero)
        ctx.save_for_backward(position, scale, zero)
        ctx.top = top
        return position.round().clamp_(0, top).sub_(zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        position, scale, zero = ctx.saved_tensors
        inside = (position >= -0.5) & (position <= ctx.top + 0.5)
        of_scale = None
        if ctx.needs_input_grad[1]:
            code = position.round().clamp_(0, ctx.top)
            slope = code.sub_(torch.where(inside, position, zero))
            of_scale = slope.mul_(gradient).sum_to_size(scale.shape)
        return gradient * inside, of_scale, None, None


class _Log(torch.autograd.Function):
    """``scale * level`` of the nearest power of a base; ``levels`` are at scale one, zero last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, levels: Tensor, codes_per_octave: float) -> Any:
        ratio = x / scale
        codes = ratio.clamp(1e-15, 1.0).log2_().mul_(-codes_per_octave).round_()
        index = codes.clamp_max_(len(levels) - 1).int().flatten()
        level = levels.index_select(0, index).view(x.shape)
        ctx.save_for_backward(ratio, level, scale)
        return level * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        ratio, level, scale = ctx.saved_tensors
        inside = ratio <= 1
        of_scale = None
        if ctx.needs_input_grad[1]:
            slope = level - ratio * inside
            of_scale = slope.mul_(gradient).sum_to_size(scale.shape)
        return gradient * inside, of_scale, None, None


def uniform(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """X on a uniform grid."""
    rounded: Tensor = _Uniform.apply(x, scale, zero, 2**bits - 1)
    return rounded


def logarithmic(x: Tensor, scale: Tensor, levels: Tensor, codes_per_octave: float) -> Tensor:
    """X, not negative, on the powers of a base."""
    rounded: Tensor = _Log.apply(x, scale, levels, codes_per_octave)
    return rounded
