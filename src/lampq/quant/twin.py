"""Twin uniform quantizers (PTQ4ViT, Yuan et al., ECCV 2022): a fine and a coarse uniform grid.

Half of the codes belong to each grid. An input takes one grid or the other; the published code adds
both halves, which lifts every large value by the end of the fine range.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lampq.quant.base import CodedQuantizer, register

GELU_MINIMUM = 0.16997124254703522


@register
class TwinSoftmaxQuantizer(CodedQuantizer):
    """One half of the codes are multiples of ``low``, the other of ``high``, for inputs in 0..1.

    Every input goes to the nearest value of either grid. Coarse values inside the fine range are
    not used. At one bit the values are 0 and ``high``.
    """

    kind: ClassVar[str] = "twin_softmax"
    low: Tensor
    high: Tensor

    def __init__(self, bits: int, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.bits = bits
        self.n_fine = int(2 ** (bits - 1))
        # at one bit the only coarse code stands for one step, not for zero
        self.zero = self.n_fine if bits > 1 else 0
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    @classmethod
    def splitting(cls, bits: int, split: Tensor) -> TwinSoftmaxQuantizer:
        """The fine grid from 0 to the split, the coarse one from 0 to 1.

        At one bit the split is the only value beside zero.
        """
        steps = max(int(2 ** (bits - 1)) - 1, 1)
        return cls(bits, split / steps, (torch.ones_like(split) if bits > 1 else split) / steps)

    def _round(self, x: Tensor) -> Tensor:
        end = self.low * (self.n_fine - 1)
        first = (end / self.high).floor() + 1  # the first coarse step beyond the fine range
        last = self.n_codes - 1 - self.zero
        fine = (x / self.low).round().clamp(0, self.n_fine - 1)
        coarse = (x / self.high).round().clamp(max=last).maximum(first) + self.zero
        beyond = (x > (end + first * self.high) / 2) & (first <= last)
        return torch.where(beyond, coarse, fine)

    def _value(self, codes: Tensor) -> Tensor:
        return torch.where(codes < self.n_fine, codes * self.low, (codes - self.zero) * self.high)


@register
class TwinGeluQuantizer(CodedQuantizer):
    """Negative inputs are multiples of ``low``, positive ones of ``high``; zero is exact.

    At one bit there is no negative value.
    """

    kind: ClassVar[str] = "twin_gelu"
    low: Tensor
    high: Tensor

    def __init__(self, bits: int, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.bits = bits
        self.zero = int(2 ** (bits - 1)) if bits > 1 else 0
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    @classmethod
    def reaching(cls, bits: int, least: Tensor, high: Tensor) -> TwinGeluQuantizer:
        """The grid whose negative end is minus ``least``, and whose positive step is ``high``."""
        return cls(bits, least / 2 ** (bits - 1), high)

    def _round(self, x: Tensor) -> Tensor:
        steps = torch.where(x < 0, x / self.low, x / self.high).round()
        return (steps + self.zero).clamp(0, self.n_codes - 1)

    def _value(self, codes: Tensor) -> Tensor:
        steps = codes - self.zero
        return steps * torch.where(steps < 0, self.low, self.high)
