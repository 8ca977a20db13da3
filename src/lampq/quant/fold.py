"""Changes of variable that leave the float function as it is.

RepQ-ViT (Li et al., ICCV 2023): channel-wise scales of a LayerNorm output are moved into the norm
and the next weight. AdaLog: the shift of a log quantizer is moved into the next bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NormFold:
    """The change of variable x' = x / ratio - shift on the output of a norm."""

    ratio: Tensor
    shift: Tensor

    def of_norm(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the norm that gives x' instead of x."""
        return weight / self.ratio, bias / self.ratio - self.shift

    def of_linear(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the linear layer that takes x' instead of x."""
        scaled = weight * self.ratio
        return scaled, bias + scaled @ self.shift

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """What comes out of the changed norm where ``inputs`` came out before."""
        return inputs / self.ratio - self.shift

    @classmethod
    def between(cls, scale: Tensor, zero: Tensor, to_scale: Tensor, to_zero: Tensor) -> NormFold:
        """The fold that takes a grid per channel to one grid for all channels."""
        ratio = scale / to_scale
        return cls(ratio, to_zero * to_scale - zero * scale / ratio)

    @classmethod
    def partly(cls, scale: Tensor, zero: Tensor, power: float, top: int) -> NormFold:
        """The fold that evens out this power of the scales; the middle of each grid is aligned.

        ``top`` is the highest code. Power one takes every channel to the mean scale.
        """
        to_scale, to_zero = scale.mean(), zero.mean().round()
        ratio = (scale / to_scale).pow(power)
        shift = scale * (top / 2 - zero) / ratio - to_scale * (top / 2 - to_zero)
        return cls(ratio, shift)


class PaddedNorm(nn.LayerNorm):
    """A norm with the value that its output is padded with, which a fold changes too."""

    padding: Tensor

    def __init__(self, original: nn.LayerNorm) -> None:
        super().__init__(original.normalized_shape, eps=original.eps)
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("padding", torch.zeros_like(original.weight.detach()))


def fold_norm_(norm: nn.LayerNorm, fold: NormFold) -> None:
    """Change a norm so that it gives x' instead of x."""
    weight, bias = fold.of_norm(norm.weight.detach(), norm.bias.detach())
    norm.weight = nn.Parameter(weight, requires_grad=False)
    norm.bias = nn.Parameter(bias, requires_grad=False)
    if isinstance(norm, PaddedNorm):
        norm.padding = fold.of_inputs(norm.padding)


def absorb_shift(bias: Tensor, decoded_weight: Tensor, shift: Tensor) -> Tensor:
    """The bias of a layer whose input arrives larger by ``shift`` in every channel."""
    return bias - shift * decoded_weight.sum(dim=1)
