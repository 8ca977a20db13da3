"""Weights as int8 numbers with zero point 0, exactly.

A code q stands for scale * (q - zero). For up to seven bits and a whole zero point q - zero is an
int8 number itself; so is 2 * (q - zero) at half the scale for a zero point between two codes.
Otherwise (eight bits off the middle, one bit with free levels) the nearest whole centre is taken
out, and what is left of the zero point is the same for all weights of a row: it multiplies the sum
of the inputs.

Products of eight-bit inputs with int8 weights are summed in pairs to 16 bits on x86 processors
without 8-bit dot products (VNNI), and large ones overflow there. Two halves of the weight cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lampq.quant.modules import QuantLayer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import INTEGER_BITS

LOW, HIGH = -128, 127
PAIR_LIMIT = 2**15 - 1


@dataclass(frozen=True, slots=True)
class FoldedWeight:
    """decoded = scale * values + centre, row by row; ``centre`` is None where it is zero."""

    values: NDArray[np.int8]
    scale: NDArray[np.float32]
    centre: NDArray[np.float32] | None

    def parts(self, top: int, *, any_cpu: bool) -> tuple[NDArray[np.int8], ...]:
        """The weight, or for ``any_cpu`` two that add up to it if inputs up to ``top`` need that.

        Pairs of products of either half fit into 16 bits.
        """
        largest = int(np.abs(self.values.astype(np.int16)).max(initial=0))
        if not any_cpu or 2 * largest * top <= PAIR_LIMIT:
            return (self.values,)
        half = self.values >> 1
        return half, self.values - half


def foldable(layer: QuantLayer) -> bool:
    """Whether the weight is on a uniform grid of at most eight bits with one scale per row."""
    grid = layer.weight_quantizer
    return (
        isinstance(grid, UniformQuantizer)
        and grid.bits <= INTEGER_BITS
        and grid.scale.numel() in (1, len(layer.codes))
    )


def fold(layer: QuantLayer) -> FoldedWeight:
    """The weight of a layer on a uniform grid of at most eight bits."""
    grid = layer.weight_quantizer
    assert isinstance(grid, UniformQuantizer), "only uniform weights are folded"
    assert grid.bits <= INTEGER_BITS, "wider codes are no int8 numbers"
    codes = layer.codes.numpy().astype(np.int32)
    rows = (len(codes), 1)
    scale, zero = (
        np.broadcast_to(t.double().numpy().reshape(-1, 1), rows) for t in (grid.scale, grid.zero)
    )
    # a zero point between two codes: twice as fine a grid, if that has room
    least, most = codes.min(axis=1, keepdims=True), codes.max(axis=1, keepdims=True)
    fine = np.where(zero == np.round(zero), 1, 2)
    fits = (np.round(fine * (least - zero)) >= LOW) & (np.round(fine * (most - zero)) <= HIGH)
    fine = np.where(fits, fine, 1)
    # the whole centre nearest to the zero point that keeps every code in range
    centre = np.clip(np.round(fine * zero), fine * most - HIGH, fine * least - LOW)
    values = (fine * codes - centre).astype(np.int8)
    left = scale * (centre / fine - zero)
    return FoldedWeight(
        values,
        (scale / fine)[:, 0].astype(np.float32),
        left[:, 0].astype(np.float32) if np.any(left) else None,
    )
