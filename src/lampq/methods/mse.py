"""Round to nearest within ranges of least error: where QDrop and PD-Quant start from.

QDrop (Wei et al., ICLR 2022) and PD-Quant (Liu et al., CVPR 2023) find the range of every weight
row and of every activation by a search on the tensor itself, and train from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView
from lampq.methods.minmax import nearest_fit
from lampq.methods.search import spread
from lampq.quant.modules import LayerFit, MatmulFit
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, MatmulSpec

# of the published search; above two, so that large values count a little more
POWER = 2.4
# parts of the whole range; a few enormous values may leave the others a hundredth of it
SHARES = torch.logspace(0, -2, 60).tolist()
# values of an activation that are looked at
VALUES = 2**17


def of_rows(rows: Tensor, bits: int) -> UniformQuantizer:
    """One grid per row, zero within its range, of least error of the row.

    Both ends are drawn in together, then each alone. The published search has a list of zero
    points for each range instead.
    """
    low = rows.amin(dim=1, keepdim=True).clamp(max=0)
    high = rows.amax(dim=1, keepdim=True).clamp(min=0)
    least = torch.full_like(low, torch.inf)
    for moves_low, moves_high in ((True, True), (False, True), (True, False)):
        from_low, from_high = low, high
        for share in SHARES:
            ends = from_low * (share if moves_low else 1), from_high * (share if moves_high else 1)
            decoded = UniformQuantizer.between(bits, *ends, whole=bits > 1)(rows)
            error = decoded.sub_(rows).abs_().pow_(POWER).sum(dim=1, keepdim=True)
            better = error < least
            least = torch.where(better, error, least)
            low, high = (
                torch.where(better, new, old) for new, old in zip(ends, (low, high), strict=True)
            )
    return UniformQuantizer.between(bits, low, high, whole=bits > 1)


def of_tensor(x: Tensor, bits: int) -> UniformQuantizer:
    """One grid of least error of some of the values, the largest and the smallest among them."""
    values = x.flatten()
    ends = torch.stack([values.min(), values.max()])
    grid = of_rows(torch.cat([spread(values, VALUES), ends])[None], bits)
    return UniformQuantizer(bits, grid.scale.reshape(()), grid.zero.reshape(()))


@dataclass(frozen=True, slots=True)
class MSE:
    """Weights per output channel, activations per tensor, each in its range of least error."""

    name: ClassVar[str] = "mse"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width; pictures keep eight bits."""
        return nearest_fit(layer, bits, stats, of_rows=of_rows, of_tensor=of_tensor)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """One grid per operand."""
        return MatmulFit(site, of_tensor(stats.left, left_bits), of_tensor(stats.right, right_bits))
