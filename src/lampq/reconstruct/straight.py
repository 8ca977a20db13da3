"""Rounding with a gradient: straight through inside the range, none beyond it.

The gradient of a scale follows LSQ (Esser et al., ICLR 2020): inside the range the rounding error,
beyond it the distance of the last level from zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class _Uniform(torch.autograd.Function):
    """``scale * (code - zero)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
        codes = (x / scale).add_(zero).round_().clamp_(0, top)
        decoded = codes.sub_(zero).mul_(scale)
        ctx.save_for_backward(x, decoded, scale, zero)
        ctx.top = top
        return decoded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, decoded, scale, zero = ctx.saved_tensors
        low, high = -0.5, ctx.top + 0.5
        if scale.numel() == 1 and zero.numel() == 1:
            step, point = float(scale), float(zero)
            inside = _between(gradient, x, (low - point) * step, (high - point) * step)
        else:
            inside = _between(gradient, (x / scale).add_(zero), low, high)
        of_scale = None
        if ctx.needs_input_grad[1]:
            of_scale = _of_scale(x, decoded, scale, gradient, inside)
        return inside, of_scale, None, None


class _Log(torch.autograd.Function):
    """``scale * level`` of the nearest power of a base; ``levels`` are at scale one, zero last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, levels: Tensor, codes_per_octave: float) -> Any:
        codes = (x / scale).clamp_(1e-15, 1.0).log2_().mul_(-codes_per_octave).round_()
        index = codes.clamp_max_(len(levels) - 1).int().flatten()
        decoded = levels.index_select(0, index).view(x.shape).mul_(scale)
        ctx.save_for_backward(x, decoded, scale)
        return decoded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, decoded, scale = ctx.saved_tensors
        inside = _between(gradient, x / scale, -math.inf, 1.0)
        of_scale = None
        if ctx.needs_input_grad[1]:
            of_scale = _of_scale(x, decoded, scale, gradient, inside)
        return inside, of_scale, None, None


def _between(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """The gradient where x is between two values, zero elsewhere; in one pass."""
    kept: Tensor = torch.ops.aten.hardtanh_backward(gradient, x, low, high)
    return kept


def _of_scale(
    x: Tensor, decoded: Tensor, scale: Tensor, gradient: Tensor, inside: Tensor
) -> Tensor:
    """The gradient of a scale, given that of the decoded values and its part inside the range."""
    if scale.numel() == 1:
        # two products without a tensor of their terms
        total = _dot(decoded, gradient) - _dot(x, inside)
        return (total / scale.flatten()).view(scale.shape)
    terms = (decoded * gradient).addcmul_(x, inside, value=-1)
    return terms.sum_to_size(scale.shape) / scale


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def uniform(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """X on a uniform grid."""
    rounded: Tensor = _Uniform.apply(x, scale, zero, 2**bits - 1)
    return rounded


def logarithmic(x: Tensor, scale: Tensor, levels: Tensor, codes_per_octave: float) -> Tensor:
    """X, not negative, on the powers of a base."""
    rounded: Tensor = _Log.apply(x, scale, levels, codes_per_octave)
    return rounded
