"""RepQ-ViT (Li et al., ICCV 2023): channel-wise scales behind a LayerNorm, folded into it.

All ranges are the best of three percentiles by squared error. Like the published code it is
calibrated on inputs that are already quantized upstream, at the target width (`sequential`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.minmax import PICTURE_BITS
from lampq.methods.search import quantiles
from lampq.quant.base import Quantizer, compact
from lampq.quant.fold import NormFold
from lampq.quant.log import LogQuantizer, ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec

PERCENTILES = (0.999, 0.9999, 0.99999)


def _by_percentile(
    rows: Tensor, bits: int, percentiles: tuple[float, ...] = PERCENTILES
) -> tuple[Tensor, Tensor]:
    """Scale and zero point (groups,) of each row (groups, values), least squared error."""
    best_error = torch.full((len(rows),), float("inf"), dtype=rows.dtype)
    best_scale = torch.ones_like(best_error)
    best_zero = torch.zeros_like(best_error)
    for share in percentiles:
        low, high = quantiles(rows, share)
        grid = UniformQuantizer.between(bits, low[:, None], high[:, None], whole=bits > 1)
        error = (grid(rows) - rows).square_().sum(dim=1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, grid.scale[:, 0], best_scale)
        best_zero = torch.where(better, grid.zero[:, 0], best_zero)
    return best_scale, best_zero


def _per_tensor(x: Tensor, bits: int) -> UniformQuantizer:
    scale, zero = _by_percentile(x.reshape(1, -1), bits)
    return UniformQuantizer(bits, scale[0], zero[0])


def percentile_rows(
    weight: Tensor, bits: int, percentiles: tuple[float, ...] = PERCENTILES
) -> UniformQuantizer:
    """One grid per output channel, the best of the percentiles."""
    scale, zero = _by_percentile(weight, bits, percentiles)
    return UniformQuantizer(bits, scale[:, None], zero[:, None])


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """A layer whose input has its quantizer: weight, bias and float inputs are folded."""

    weight: Tensor
    bias: Tensor
    inputs: Tensor
    quantizer: UniformQuantizer | None
    fold: NormFold | None = None

    def quantized(self) -> Tensor:
        """The inputs as the layer gets them, (tokens, channels)."""
        return self.inputs if self.quantizer is None else self.quantizer(self.inputs)


def repq_input(layer: LinearView, bits: int, inputs: Tensor) -> QuantizedInput:
    """The layer behind RepQ-ViT's input quantizer: folded into the norm where there is one."""
    if layer.spec.norm is None:
        return QuantizedInput(layer.weight, layer.bias, inputs, _per_tensor(inputs, bits))
    scale, zero = _by_percentile(inputs.T.contiguous(), bits)
    to_scale, to_zero = scale.mean(), zero.mean()
    fold = NormFold.between(scale, zero, to_scale, to_zero)
    weight, bias = fold.of_linear(layer.weight, layer.bias)
    quantizer = UniformQuantizer(bits, to_scale, to_zero)
    return QuantizedInput(weight, bias, fold.of_inputs(inputs), quantizer, fold)


@dataclass(frozen=True, slots=True)
class RepQ:
    """RepQ-ViT's quantizers at all six operand sites of a block."""

    name: ClassVar[str] = "repq"
    sequential: ClassVar[bool] = True
    zero_code: ZeroCode = "extra"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        given = self.input_of(layer, bits, stats)
        grid = percentile_rows(given.weight, bits.weight)
        codes = compact(grid.encode(given.weight), bits.weight)
        return LayerFit(layer.spec, bits, codes, given.bias, grid, given.quantizer, given.fold)

    def input_of(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> QuantizedInput:
        """The layer with its input quantizer, and float weights still."""
        picture = layer.spec.role is LayerRole.PATCH_EMBED
        return repq_input(layer, PICTURE_BITS if picture else bits.activation, stats.inputs)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """Uniform operands per tensor; powers of sqrt(2) for the softmax output."""
        left: Quantizer = (
            self._softmax(stats.left, left_bits)
            if site.kind == "av"
            else _per_tensor(stats.left, left_bits)
        )
        return MatmulFit(site, left, _per_tensor(stats.right, right_bits))

    def _softmax(self, x: Tensor, bits: int) -> LogQuantizer:
        fits = [
            LogQuantizer.log_sqrt2(bits, quantiles(x.reshape(1, -1), share)[1], self.zero_code)
            for share in PERCENTILES
        ]
        return min(fits, key=lambda fit: float((fit(x) - x).square_().sum()))
