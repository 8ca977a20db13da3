"""Quantizers with a range of its own for every token, found at run time.

Ranges per token are common for language models (QuaRot, Ashkboos et al., NeurIPS 2024); IGQ-ViT
(Moon et al., CVPR 2024) finds groups of channels and tokens of a ViT at run time.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lampq.errors import ConfigError
from lampq.quant.base import CodedQuantizer, Quantizer, register
from lampq.quant.log import DENOMINATOR, LogQuantizer, ZeroCode
from lampq.quant.uniform import UniformQuantizer

# the step of a token that is zero everywhere
SMALLEST = 1e-30


def token_grid(x: Tensor, bits: int, axis: int) -> tuple[Tensor, Tensor]:
    """Step and zero point of the whole range of each token, with zero in it; channels on ``axis``.

    A part ``clip`` of the range has the step ``clip * step`` and the same zero point.
    """
    low = x.amin(axis, keepdim=True).clamp(max=0)
    high = x.amax(axis, keepdim=True).clamp(min=0)
    step = ((high - low) / (2**bits - 1)).clamp_min(SMALLEST)
    return step, -low / step


def token_size(x: Tensor, shift: Tensor, axis: int) -> Tensor:
    """The largest value of each token, once all are larger by ``shift``; channels on ``axis``."""
    return (x.amax(axis, keepdim=True) + shift).clamp_min(SMALLEST)


class PerToken(Quantizer):
    """A quantizer that takes the part ``clip`` of the range of each token.

    ``clip`` is one number, or one for each head. ``axis`` is where the channels of a token are: -1,
    or -2 for keys, which come transposed. Codes alone say nothing here: ``at(x)`` decodes them.
    """

    clip: Tensor

    def __init__(self, bits: int, clip: Tensor, *, axis: int = -1) -> None:
        super().__init__()
        if axis not in (-1, -2):
            raise ConfigError(f"the channels of a token are on axis -1 or -2, got {axis}")
        if bool(((clip <= 0) | (clip > 1)).any()):
            raise ConfigError(f"clip is a part of a range, above 0 and up to 1, got {clip}")
        self.bits, self.axis = bits, axis
        self.register_buffer("clip", clip)

    @abstractmethod
    def at(self, x: Tensor) -> CodedQuantizer:
        """What quantizes the tokens of x, each in its range."""

    def encode(self, x: Tensor) -> Tensor:
        return self.at(x).encode(x)

    def forward(self, x: Tensor) -> Tensor:
        """Each token in its own range."""
        quantized: Tensor = self.at(x)(x)
        return quantized

    def options(self) -> dict[str, Any]:
        return {"axis": self.axis}


@register
class TokenQuantizer(PerToken):
    """For every token 2**bits values from clip * min(x, 0) to clip * max(x, 0), evenly spaced.

    Zero is a value, up to the last digit, where all of a token has one sign; elsewhere it may be
    off by half a step. Only with ``clip`` one do quantized values quantize to themselves: a clipped
    token has a smaller range.
    """

    kind: ClassVar[str] = "token"

    def at(self, x: Tensor) -> UniformQuantizer:
        """The grids of the tokens of x."""
        step, zero = token_grid(x, self.bits, self.axis)
        return UniformQuantizer(self.bits, step * self.clip, zero)


@register
class TokenLogQuantizer(PerToken):
    """For every token powers from clip * (max(x) + shift) downwards, and zero, minus shift.

    The powers are those of ``LogQuantizer``. One scale for all tokens has most of its powers above
    what there is in a token of small values: of a softmax, in every row that looks at many places.
    """

    kind: ClassVar[str] = "token_log"
    shift: Tensor

    def __init__(
        self,
        bits: int,
        clip: Tensor,
        shift: Tensor,
        *,
        step: int,
        denominator: int = DENOMINATOR,
        table: bool = True,
        zero_code: ZeroCode = "extra",
        axis: int = -1,
    ) -> None:
        super().__init__(bits, clip, axis=axis)
        self._base: dict[str, Any] = {
            "step": step,
            "denominator": denominator,
            "table": table,
            "zero_code": zero_code,
        }
        self.register_buffer("shift", shift)

    @property
    def n_codes(self) -> int:
        return self.powers(torch.ones(1)).n_codes

    def powers(self, scale: Tensor, shift: Tensor | None = None) -> LogQuantizer:
        """The powers at some scale, or scales that differ from token to token."""
        shift = torch.zeros(1) if shift is None else shift
        return LogQuantizer(self.bits, scale, shift, shift, **self._base)

    def at(self, x: Tensor) -> LogQuantizer:
        """The powers of the tokens of x."""
        return self.powers(token_size(x, self.shift, self.axis) * self.clip, self.shift)

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._base}
