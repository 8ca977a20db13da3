"""PSAQ-ViT (Li et al., ECCV 2022): the plain quantizers of its zero-shot setting.

Weights are symmetric per output channel, from their largest magnitude. Activations have one grid
per tensor between the extremes, at more sites than other methods quantize: the output of every
linear layer but fc1, the attention scores before the softmax, and the residual sums. Queries, keys
and values are those of the quantized qkv output, and the softmax stays in float.

A few enormous channels in the residual stream, which some models have, leave nothing of the rest on
such a grid. So the same quantizers are also there without outputs and sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.minmax import PICTURE_BITS, per_tensor
from lampq.quant.base import compact
from lampq.quant.modules import LayerFit, MatmulFit, SumFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec, Profile, SumSpec


def symmetric_rows(weight: Tensor, bits: int) -> UniformQuantizer:
    """One grid per output channel, whole steps on both sides of zero, one more below.

    At one bit the levels are plus and minus the largest magnitude.
    """
    largest = weight.abs().amax(dim=1, keepdim=True)
    grid = UniformQuantizer.between(bits, -largest, largest, whole=False)
    middle = 2 ** (bits - 1) if bits > 1 else 0.5
    return UniformQuantizer(bits, grid.scale, grid.zero.new_full(grid.zero.shape, middle))


@dataclass(frozen=True, slots=True)
class PSAQ:
    """PSAQ-ViT's quantizers at all of its sites; a layer's output has the width of its input."""

    name: ClassVar[str] = "psaq"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width, with its output quantized; pictures keep eight bits."""
        fit = PSAQInputs().fit(layer, bits, stats)
        if layer.spec.role is LayerRole.FC1:
            return fit
        output = per_tensor(stats.inputs @ layer.weight.T + layer.bias, bits.activation)
        return replace(fit, output_quantizer=output)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """The scores of q @ k; the product with the values is quantized as the input of proj."""
        if site.kind == "av":
            return MatmulFit(site, None, None)
        bits = max(left_bits, right_bits)
        return MatmulFit(site, None, None, per_tensor(stats.left @ stats.right, bits))

    def fit_sum(self, site: SumSpec, bits: int, stats: LayerStats) -> SumFit:
        """One grid between the extremes of the sum."""
        return SumFit(site, per_tensor(stats.inputs, bits))


@dataclass(frozen=True, slots=True)
class PSAQInputs:
    """The same quantizers at the sites of the other methods: layer inputs, q, k and v."""

    name: ClassVar[str] = "psaq"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        picture = layer.spec.role is LayerRole.PATCH_EMBED
        grid = symmetric_rows(layer.weight, bits.weight)
        codes = compact(grid.encode(layer.weight), bits.weight)
        inputs = per_tensor(stats.inputs, PICTURE_BITS if picture else bits.activation)
        return LayerFit(layer.spec, bits, codes, layer.bias, grid, inputs)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """One grid each for q, k and v; the softmax stays in float."""
        left = None if site.kind == "av" else per_tensor(stats.left, left_bits)
        return MatmulFit(site, left, per_tensor(stats.right, right_bits))


def psaq(
    sites: Literal["published", "inputs"] = "published", profile: Profile = "accuracy"
) -> PSAQ | PSAQInputs:
    """PSAQ-ViT's quantizers at its own sites, or at those of the other methods.

    Integer kernels take inputs of layers and nothing else: for speed it is always the latter.
    """
    return PSAQ() if sites == "published" and profile == "accuracy" else PSAQInputs()
