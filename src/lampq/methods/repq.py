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
from lampq.quant.base import Quantizer
from lampq.quant.fold import NormFold
from lampq.quant.log import LogQuantizer, ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec

PERCENTILES = (0.999, 0.9999, 0.99999)


def _by_percentile(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point (groups,) of each row (groups, values), least squared error."""
    best_error = torch.full((len(rows),), float("inf"), dtype=rows.dtype)
    best_scale = torch.ones_like(best_error)
    best_zero = torch.zeros_like(best_error)
    for share in PERCENTILES:
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


@dataclass(frozen=True, slots=True)
class RepQ:
    """RepQ-ViT's quantizers at all six operand sites of a block."""

    name: ClassVar[str] = "repq"
    sequential: ClassVar[bool] = True
    zero_code: ZeroCode = "extra"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        weight, bias, fold = layer.weight, layer.bias, None
        input_quantizer: Quantizer
        if layer.spec.norm is not None:
            scale, zero = _by_percentile(stats.inputs.T.contiguous(), bits.activation)
            to_scale, to_zero = scale.mean(), zero.mean()
            fold = NormFold.between(scale, zero, to_scale, to_zero)
            weight, bias = fold.of_linear(weight, bias)
            input_quantizer = UniformQuantizer(bits.activation, to_scale, to_zero)
        else:
            picture = layer.spec.role is LayerRole.PATCH_EMBED
            width = PICTURE_BITS if picture else bits.activation
            input_quantizer = _per_tensor(stats.inputs, width)
        scale, zero = _by_percentile(weight, bits.weight)
        weight_quantizer = UniformQuantizer(bits.weight, scale[:, None], zero[:, None])
        codes = weight_quantizer.encode(weight).to(torch.uint8)
        return LayerFit(layer.spec, bits, codes, bias, weight_quantizer, input_quantizer, fold)

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
