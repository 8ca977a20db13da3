"""APQ-ViT (Ding et al., ACM MM 2022): PTQ4ViT's grids, calibrated on the output of the block.

A scale is searched by the gradient-weighted error of the output of its block, with all else in the
block in float. Before the sum, the smallest errors are set to zero (bottom elimination), so that
the search looks at the large ones. The softmax output gets an asymmetric uniform grid that ends at
the largest value of each head, so that the large attentions, their order and their maximum are
kept (Matthew-effect preserving); its lower end is searched.

Written from the paper's abstract and from what later papers say of it. Not known, and chosen here:
the share of eliminated errors, the grid of the softmax per head and its search, the scoring of 20
of PTQ4ViT's 100 candidates in one round, on few images. Layers outside the blocks (patch embedding,
head, reductions) are scored by their own output. The deviations of ``ptq4vit`` apply here too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.calibrate import BlockView, LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.ptq4vit import (
    LayerErrors,
    ProductError,
    fit_layer,
    fit_product,
    importance,
    operand_candidates,
    output_errors,
    product_error,
)
from lampq.quant.base import Quantizer
from lampq.quant.modules import LayerFit, MatmulFit, replace_module
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, MatmulSpec, Profile


def without_bottom(error: Tensor, share: float) -> Tensor:
    """The errors with this share of them, the smallest, set to zero."""
    count = int(share * error.numel())
    if not count:
        return error
    size = error.abs()
    return error.masked_fill(size <= size.flatten().kthvalue(count).values, 0.0)


class Trial(nn.Module):
    """A site of a block with quantizers and weight that are tried out."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.weight: Tensor | None = None
        self.left: Quantizer | None = None
        self.right: Quantizer | None = None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """The linear layer, or the product with the other operand."""
        x = x if self.left is None else self.left(x)
        if other is None:
            assert self.weight is not None, "a linear layer has a weight"
            return F.linear(x, self.weight, self.bias)
        return x @ (other if self.right is None else self.right(other))


class BlockError:
    """The error of a block's output with one site replaced in a copy of the block."""

    def __init__(self, view: BlockView, site: str, trial: Trial, eliminated: float) -> None:
        self._view, self._eliminated = view, eliminated
        self._block = copy.deepcopy(view.module)
        self._weights = importance(view.gradient, view.output)
        replace_module(self._block, site.removeprefix(f"{view.name}."), trial)

    def __call__(self) -> Tensor:
        """The weighted squared error, (1,), with the trial as it is now."""
        output = self._block(*self._view.arguments, **self._view.keywords)
        error = without_bottom(output - self._view.output, self._eliminated)
        return error.mul_(self._weights).square_().sum().reshape(1)


@dataclass(frozen=True, slots=True)
class APQ:
    """Block-wise calibration with bottom elimination, and a softmax grid that keeps the maximum.

    ``eliminated`` is the share of the smallest errors that do not count, ``block_images`` the
    number of images on which blocks are run, ``candidates`` and ``rounds`` are those of PTQ4ViT.
    ``tokens`` and ``maps`` bound what sites outside the blocks are scored on.
    """

    name: ClassVar[str] = "apq"
    wants_gradients: ClassVar[bool] = True
    block_images: int = 4
    eliminated: float = 0.2
    candidates: int = 20
    rounds: int = 1
    tokens: int = 512
    maps: int = 8
    profile: Profile = "accuracy"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width."""
        errors = self._layer_errors(layer, stats)
        return fit_layer(
            layer,
            bits,
            stats.inputs,
            errors,
            candidates=self.candidates,
            rounds=self.rounds,
            profile=self.profile,
        )

    def _layer_errors(self, layer: LinearView, stats: LayerStats) -> LayerErrors:
        if stats.block is not None:
            trial = Trial(layer.bias)
            error = BlockError(stats.block, layer.spec.name, trial, self.eliminated)

            def of_block(weight: Tensor, quantizer: Quantizer | None) -> Tensor:
                trial.weight, trial.left = weight, quantizer
                return error()

            return of_block
        return output_errors(layer, stats, self.tokens, self._kept)

    def _kept(self, error: Tensor) -> Tensor:
        return without_bottom(error, self.eliminated)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """Operands with one scale; a grid per head for the softmax output."""
        lefts = (
            top_preserving(stats.left, left_bits, self.candidates)
            if site.kind == "av"
            else operand_candidates(stats.left, left_bits, self.candidates)
        )
        rights = operand_candidates(stats.right, right_bits, self.candidates)
        return fit_product(site, lefts, rights, self._product_error(site, stats), self.rounds)

    def _product_error(self, site: MatmulSpec, stats: MatmulStats) -> ProductError:
        if stats.block is not None:
            trial = Trial()
            error = BlockError(stats.block, site.name, trial, self.eliminated)

            def of_block(left: Quantizer | None, right: Quantizer | None) -> Tensor:
                trial.left, trial.right = left, right
                return error()

            return of_block
        return product_error(stats, self.maps, self._kept)


def top_preserving(maps: Tensor, bits: int, count: int) -> list[Quantizer]:
    """Grids per head that end at the head's largest value and start between zero and its mean.

    Attention maps (maps, heads, rows, columns). The start matters where most attentions are
    smaller than a step: a grid from zero loses them all, one from their mean keeps their sum.
    """
    by_head = maps.transpose(0, 1).flatten(1)
    high, mean = (value[:, None, None] for value in (by_head.amax(dim=1), by_head.mean(dim=1)))
    starts = torch.linspace(0, 1, count).tolist()
    return [UniformQuantizer.between(bits, start * mean, high, whole=False) for start in starts]
