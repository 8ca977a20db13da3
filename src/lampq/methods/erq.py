"""ERQ (Zhong et al., ICML 2024): ridge regression against the errors of input and weight.

Quantizers and folds are those of RepQ-ViT, with more percentiles for the weights. First *Aqer*
refits weight and bias to the quantized input. Then *Wqer* rounds the weight, half of the columns
that are left at a time: some roundings are turned over where that lowers the output error, and the
columns still free, with the bias, are refitted to make up for what remains.

Deviations: the published ridge is an absolute number for one size of the calibration set; here it
is per token, 1000 for 32 images of 197 tokens, and the same for the head, which has its own in the
published code. Swin's reductions are folded into their norm too. The later journal version splits
the weight columns into two groups with a scale each; that is left out, as a stored quantizer has
one scale per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.compensate import ridge
from lampq.methods.repq import QuantizedInput, RepQ, percentile_rows, repq_input
from lampq.quant.base import compact
from lampq.quant.log import ZeroCode
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, MatmulSpec

WEIGHT_PERCENTILES = (0.97, 0.98, 0.99, 0.995, 0.9995, 0.9997, 0.9999, 0.99995, 0.99999, 1.0)
RIDGE = 1000 / (32 * 197)
PICTURE_FACTOR = 10  # the published ridge of the patch embedding is larger by this


def with_ones(x: Tensor) -> Tensor:
    """Inputs (tokens, channels + 1) in float64; the last column stands for the bias."""
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1).double()


def refit_to_input(weight: Tensor, exact: Tensor, quantized: Tensor, penalty: float) -> Tensor:
    """Aqer: weights (outputs, channels + 1) moved towards the exact output on quantized inputs.

    The squared move, times the penalty, is added to the squared output error.
    """
    gram = quantized.T @ quantized
    gram.diagonal().add_(penalty)
    return weight + ridge(gram, quantized.T @ (exact - quantized @ weight.T)).T


def refine_rounding(
    codes: Tensor, weight: Tensor, grid: UniformQuantizer, gram: Tensor, sweeps: int
) -> Tensor:
    """Codes (outputs, columns) with single roundings turned over, all rows side by side.

    With e the rounding errors of a row, the output error is e C e. Each sweep takes the column
    with the largest gradient 2 C e among those whose error has the gradient's sign, and rounds it
    the other way; a row whose output error does not fall keeps its codes and is done.
    """
    scale, zero = grid.scale.double(), grid.zero.double()
    codes = codes.clone()
    error = (codes - zero) * scale - weight
    slope = 2 * error @ gram
    power, rows = gram.diagonal(), torch.arange(len(codes), device=codes.device)
    active = torch.ones(len(codes), dtype=torch.bool, device=codes.device)
    for _ in range(sweeps):
        turned = codes - error.sign()
        open_ = (error * slope > 0) & (turned >= 0) & (turned < grid.n_codes)
        column = slope.abs().masked_fill(~open_, -1.0).argmax(dim=1)
        move = (turned - codes)[rows, column] * scale[:, 0]
        change = move * (slope[rows, column] + move * power[column])
        active &= open_[rows, column] & (change < 0)
        if not bool(active.any()):
            break
        who, where = rows[active], column[active]
        codes[who, where] = turned[who, where]
        error[who, where] += move[active]
        slope[who] += 2 * move[active][:, None] * gram[where]
    return codes


@dataclass(frozen=True, slots=True)
class ERQ:
    """RepQ-ViT with weights and biases that make up for the errors of input and weight.

    ``ridge`` is the penalty per token of moving a weight, ``sweeps`` the largest number of
    roundings of a row that are turned over in each half.
    """

    name: ClassVar[str] = "erq"
    ridge: float = RIDGE
    sweeps: int = 100
    zero_code: ZeroCode = "extra"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; the patch embedding's input stays in float."""
        picture = layer.spec.role is LayerRole.PATCH_EMBED
        if picture:
            given = QuantizedInput(layer.weight, layer.bias, stats.inputs, None)
        else:
            given = repq_input(layer, bits.activation, stats.inputs)
        quantized = with_ones(given.quantized())
        penalty = self.ridge * len(quantized) * (PICTURE_FACTOR if picture else 1)
        weight = torch.cat([given.weight, given.bias[:, None]], dim=1).double()
        if not picture:
            exact = with_ones(given.inputs) @ weight.T
            weight = refit_to_input(weight, exact, quantized, penalty)
        grid = percentile_rows(
            weight[:, :-1].to(given.weight.dtype), bits.weight, WEIGHT_PERCENTILES
        )
        gram = quantized.T @ quantized
        sweeps = 0 if picture else self.sweeps
        codes, bias = rounded_by_halves(weight, gram, grid, penalty, sweeps)
        bias = bias.to(given.bias.dtype)
        return LayerFit(layer.spec, bits, codes, bias, grid, given.quantizer, given.fold)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """The quantizers of RepQ-ViT."""
        return RepQ(self.zero_code).fit_matmul(site, left_bits, right_bits, stats)


def rounded_by_halves(
    weight: Tensor, gram: Tensor, grid: UniformQuantizer, penalty: float, sweeps: int
) -> tuple[Tensor, Tensor]:
    """Wqer: codes (outputs, channels) and bias (outputs,).

    Weight (outputs, channels + 1) and Gram matrix of the quantized inputs have the bias last,
    which is refitted but not rounded.
    """
    weight = weight.clone()
    scale, zero = grid.scale.double(), grid.zero.double()
    channels = weight.shape[1] - 1
    codes = weight.new_empty(len(weight), channels)
    start = 0
    while start < channels:
        stop = start + max(1, (channels - start) // 2)
        now, later = slice(start, stop), slice(stop, None)
        part = weight[:, now]
        nearest = (part / scale + zero).round().clamp(0, grid.n_codes - 1)
        codes[:, now] = refine_rounding(nearest, part, grid, gram[now, now], sweeps)
        error = (codes[:, now] - zero) * scale - part
        damped = gram[later, later].clone()
        damped.diagonal().add_(penalty)
        weight[:, later] -= ridge(damped, gram[later, now] @ error.T).T
        start = stop
    return compact(codes, grid.bits), weight[:, -1]
