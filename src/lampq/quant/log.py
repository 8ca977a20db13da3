"""Logarithmic quantizers for non-negative inputs: log2, log-sqrt2 and the adaptive base of AdaLog.

AdaLog (Wu et al., ECCV 2024): the base is 2**(step / DENOMINATOR) with a searched whole step, so
that decoding is a shift times a small table of fixed-point numbers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lampq.quant.base import CodedQuantizer, register

DENOMINATOR = 37
ZeroCode = Literal["extra", "reserved"]
SMALLEST = 1e-15


def log_levels(bits: int, step: int, denominator: int, *, table: bool) -> Tensor:
    """Decoded values of codes 0..2**bits - 1 at scale one, in float64.

    With ``table`` the fractional powers are fixed-point numbers over 2**(bits + 1) - 2, as AdaLog
    stores them. Below three bits the denominator stays at 14: a coarser table would merge
    neighbouring levels, and a decoded value would not encode to itself.
    """
    codes = torch.arange(2**bits, dtype=torch.int64)
    if not table:
        return torch.exp2(-codes.double() * step / denominator)
    whole = torch.div(codes * step, denominator, rounding_mode="floor")
    part = (codes * step - whole * denominator).double() / denominator
    steps = max(14, 2 ** (bits + 1) - 2)
    table_values: Tensor = (torch.exp2(-part) * steps).round() / steps
    return torch.exp2(-whole.double()) * table_values


@register
class LogQuantizer(CodedQuantizer):
    """Powers scale * 2**(-code * step / denominator), and zero, of x + shift, minus offset.

    ``zero_code="extra"`` has 2**bits powers and zero beside them, as the published log quantizers
    do; ``"reserved"`` gives the last code to zero and keeps within 2**bits values. ``shift`` makes
    a slightly negative input (GELU) non-negative; ``offset`` equals it unless the layer's bias has
    absorbed it. ``scale`` is one number, or one for each token, (..., 1).
    """

    kind: ClassVar[str] = "log"
    scale: Tensor
    shift: Tensor
    offset: Tensor
    # decoded values of the codes; at scale one, before the offset, where there are many scales
    levels: Tensor

    def __init__(
        self,
        bits: int,
        scale: Tensor,
        shift: Tensor,
        offset: Tensor,
        *,
        step: int,
        denominator: int = DENOMINATOR,
        table: bool = True,
        zero_code: ZeroCode = "extra",
    ) -> None:
        super().__init__()
        self.bits, self.step, self.denominator = bits, step, denominator
        self.table, self.zero_code = table, zero_code
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.register_buffer("offset", offset.clone())
        powers = log_levels(bits, step, denominator, table=table).to(scale)
        levels = torch.cat([powers[: self.n_codes - 1], powers.new_zeros(1)])
        if scale.numel() == 1:
            levels = levels * scale.flatten() - offset.flatten()
        self.register_buffer("levels", levels, persistent=False)

    @property
    def n_codes(self) -> int:
        return int(2**self.bits) + (self.zero_code == "extra")

    @property
    def lift(self) -> Tensor | float:
        return self.shift - self.offset

    def options(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "denominator": self.denominator,
            "table": self.table,
            "zero_code": self.zero_code,
        }

    def _round(self, x: Tensor) -> Tensor:
        ratio = ((x + self.shift) / self.scale).clamp_(SMALLEST, 1.0)
        codes = ratio.log2_().mul_(-self.denominator / self.step).round_()
        return codes.clamp_max_(self.n_codes - 1)

    def _value(self, codes: Tensor) -> Tensor:
        values = self.levels.index_select(0, codes.int().flatten()).view(codes.shape)
        return values if self.scale.numel() == 1 else values.mul_(self.scale).sub_(self.offset)

    @classmethod
    def log2(cls, bits: int, scale: Tensor, zero_code: ZeroCode = "extra") -> LogQuantizer:
        """Powers of two."""
        none = torch.zeros_like(scale)
        return cls(bits, scale, none, none, step=1, denominator=1, table=False, zero_code=zero_code)

    @classmethod
    def log_sqrt2(cls, bits: int, scale: Tensor, zero_code: ZeroCode = "extra") -> LogQuantizer:
        """Powers of the square root of two (RepQ-ViT)."""
        none = torch.zeros_like(scale)
        return cls(bits, scale, none, none, step=1, denominator=2, table=False, zero_code=zero_code)
