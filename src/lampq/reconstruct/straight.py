"""Rounding with a gradient: straight through inside the range, none beyond it.

The gradient of a scale follows LSQ (Esser et al., ICLR 2020): inside the range the rounding error,
beyond it the distance of the last level from zero.

Tensors are large and operations on them cheap, so the passes over memory are what counts: first
tokens with values of their own are written over the others' instead of being cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class First:
    """The first tokens along ``axis``: they have these values, and their gradient passes whole."""

    values: Tensor
    axis: int

    def of(self, x: Tensor) -> Tensor:
        """These tokens of a tensor, as a view."""
        return x.narrow(self.axis, 0, self.values.shape[self.axis])


class _Uniform(torch.autograd.Function):
    """``scale * (code - zero)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, top: int, first: First | None
    ) -> Tensor:
        codes = (x / scale).add_(zero).round_().clamp_(0, top)
        decoded = codes.sub_(zero).mul_(scale)
        if first is not None:
            first.of(decoded).copy_(first.values)
        ctx.save_for_backward(x, decoded, scale, zero)
        ctx.top, ctx.first = top, first
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
            of_scale = _of_scale(x, decoded, scale, gradient, inside, ctx.first)
        if ctx.first is not None:
            ctx.first.of(inside).copy_(ctx.first.of(gradient))
        return inside, of_scale, None, None, None


class _Log(torch.autograd.Function):
    """``scale * level - offset`` of the nearest power of a base to ``x + shift``.

    ``levels`` are at scale one, zero last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        levels: Tensor,
        codes_per_octave: float,
        shift: float,
        offset: float,
        first: First | None,
    ) -> Any:
        codes = (x + shift).div_(scale) if shift else x / scale
        codes = codes.clamp_(1e-15, 1.0).log2_().mul_(-codes_per_octave).round_()
        index = codes.clamp_max_(len(levels) - 1).int().flatten()
        decoded = (levels * scale - offset).index_select(0, index).view(x.shape)
        if first is not None:
            first.of(decoded).copy_(first.values)
        ctx.save_for_backward(x, decoded, scale)
        ctx.shift, ctx.offset, ctx.first = shift, offset, first
        return decoded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, decoded, scale = ctx.saved_tensors
        inside = _between(gradient, x, -math.inf, float(scale) - ctx.shift)
        of_scale = None
        if ctx.needs_input_grad[1]:
            moved = (ctx.offset, ctx.shift)
            of_scale = _of_scale(x, decoded, scale, gradient, inside, ctx.first, moved)
        if ctx.first is not None:
            ctx.first.of(inside).copy_(ctx.first.of(gradient))
        return inside, of_scale, None, None, None, None, None


class _Weight(torch.autograd.Function):
    """``scale * (code - zero)`` of weights in units of their scale, shifted to codes."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
        steps = latent.round().clamp_(0, top).sub_(zero)
        ctx.save_for_backward(latent, steps, scale)
        ctx.top = top
        return steps * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        latent, steps, scale = ctx.saved_tensors
        inside = _between(gradient * scale, latent, -0.5, ctx.top + 0.5)
        of_scale = (steps * gradient).sum_to_size(scale.shape)
        return inside, of_scale, None, None


def _between(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """The gradient where x is between two values, zero elsewhere; in one pass."""
    kept: Tensor = torch.ops.aten.hardtanh_backward(gradient, x, low, high)
    return kept


def _of_scale(
    x: Tensor,
    decoded: Tensor,
    scale: Tensor,
    gradient: Tensor,
    inside: Tensor,
    first: First | None = None,
    moved: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """The gradient of a scale, given that of the decoded values and its part inside the range.

    ``first`` have no part in it. ``moved`` is what decoded values and x lack to be in proportion to
    the scale.
    """
    if scale.numel() == 1:
        # sums of products without a tensor of their terms
        total = _scaled_sum(x, decoded, gradient, inside, moved)
        if first is not None:
            own = [first.of(part) for part in (x, decoded, gradient, inside)]
            total = total - _scaled_sum(own[0], own[1], own[2], own[3], moved)
        return (total / scale.flatten()).view(scale.shape)
    assert not any(moved), "only grids of one scale are moved"
    terms = (decoded * gradient).addcmul_(x, inside, value=-1)
    if first is not None:
        first.of(terms).zero_()
    return terms.sum_to_size(scale.shape) / scale


def _scaled_sum(
    x: Tensor, decoded: Tensor, gradient: Tensor, inside: Tensor, moved: tuple[float, float]
) -> Tensor:
    total = _dot(decoded, gradient) - _dot(x, inside)
    if any(moved):
        total = total + moved[0] * gradient.sum() - moved[1] * inside.sum()
    return total


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def uniform(
    x: Tensor, scale: Tensor, zero: Tensor, bits: int, first: First | None = None
) -> Tensor:
    """X on a uniform grid, and ``first`` as they are given."""
    rounded: Tensor = _Uniform.apply(x, scale, zero, 2**bits - 1, first)
    return rounded


def logarithmic(
    x: Tensor,
    scale: Tensor,
    levels: Tensor,
    codes_per_octave: float,
    *,
    shift: float = 0.0,
    offset: float = 0.0,
    first: First | None = None,
) -> Tensor:
    """X + shift on the powers of a base, minus offset, and ``first`` as they are given."""
    rounded: Tensor = _Log.apply(x, scale, levels, codes_per_octave, shift, offset, first)
    return rounded


def of_codes(latent: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The weight of codes that are held as floats."""
    rounded: Tensor = _Weight.apply(latent, scale, zero, 2**bits - 1)
    return rounded
