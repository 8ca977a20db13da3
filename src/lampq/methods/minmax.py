"""Round to nearest between the extremes: the baseline every method must beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.quant.base import compact
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec

PICTURE_BITS = 8
Ranges = Callable[[Tensor, int], UniformQuantizer]
"""The grid of a tensor at a width."""


def per_row(weight: Tensor, bits: int) -> UniformQuantizer:
    """One grid per output channel, from its smallest to its largest weight."""
    low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    return UniformQuantizer.between(bits, low, high, whole=bits > 1)


def per_tensor(x: Tensor, bits: int) -> UniformQuantizer:
    """One grid from the smallest to the largest value."""
    return UniformQuantizer.between(bits, x.min(), x.max(), whole=bits > 1)


def nearest_fit(
    layer: LinearView, bits: LayerBits, stats: LayerStats, *, of_rows: Ranges, of_tensor: Ranges
) -> LayerFit:
    """The layer rounded to nearest on grids of its rows and of its input; pictures keep 8 bits."""
    weight_quantizer = of_rows(layer.weight, bits.weight)
    picture = layer.spec.role is LayerRole.PATCH_EMBED
    inputs = of_tensor(stats.inputs, PICTURE_BITS if picture else bits.activation)
    codes = compact(weight_quantizer.encode(layer.weight), bits.weight)
    return LayerFit(layer.spec, bits, codes, layer.bias, weight_quantizer, inputs)


@dataclass(frozen=True, slots=True)
class MinMax:
    """Weights per output channel, activations per tensor, no search.

    At one bit the grid is the pair {smallest, largest}.
    """

    name: ClassVar[str] = "minmax"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        return nearest_fit(layer, bits, stats, of_rows=per_row, of_tensor=per_tensor)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """One grid per operand."""
        return MatmulFit(
            site, per_tensor(stats.left, left_bits), per_tensor(stats.right, right_bits)
        )
