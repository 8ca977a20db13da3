"""GPTQ, also called OPTQ (Frantar et al., ICLR 2023), on the activations of RepQ-ViT.

Input quantizers, norm folds and the quantizers of the attention products are those of RepQ-ViT.
The weights keep RepQ-ViT's grids but are rounded column by column, each rounding error being spread
over the columns still free so that the output on the quantized inputs changes least. This is how
tables of Vision Transformers use GPTQ as a baseline; it was published for weights alone.

Deviations: the grid of a row is the best of RepQ-ViT's percentiles, not the range of the row with
zero in it, so that only the rounding differs from ``repq``. Every layer is fitted on float inputs
that are quantized on the spot, so that a fit depends on its own width only; the published code runs
through the layers with those before already quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.compensate import DAMPING, damp, gptq_codes
from lampq.methods.repq import RepQ, percentile_rows
from lampq.quant.log import ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.types import LayerBits, MatmulSpec


def hessian(quantized: Tensor) -> Tensor:
    """Second derivative of the mean squared output error by the weights of a row, in float64."""
    x = quantized.double()
    return x.T @ x * (2 / len(x))


@dataclass(frozen=True, slots=True)
class GPTQ:
    """RepQ-ViT with weights rounded by GPTQ.

    ``damping`` is the share of the mean diagonal that is added to the Hessian's diagonal.
    ``act_order`` rounds the columns with the largest inputs first, not from left to right.
    A column whose input is always zero gets the weight zero.
    """

    name: ClassVar[str] = "gptq"
    damping: float = DAMPING
    act_order: bool = False
    zero_code: ZeroCode = "extra"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        given = self._repq.input_of(layer, bits, stats)
        grid = percentile_rows(given.weight, bits.weight)
        curvature = hessian(given.quantized())
        dead = curvature.diagonal() == 0
        curvature[dead, dead] = 1.0
        weight = given.weight.double().masked_fill(dead, 0.0)
        damped = damp(curvature, self.damping)
        codes = gptq_codes(weight, damped, grid, act_order=self.act_order)
        return LayerFit(layer.spec, bits, codes, given.bias, grid, given.quantizer, given.fold)

    @property
    def _repq(self) -> RepQ:
        return RepQ(self.zero_code)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """The quantizers of RepQ-ViT."""
        return self._repq.fit_matmul(site, left_bits, right_bits, stats)
