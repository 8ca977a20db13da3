"""Uniform quantizer with a grid of its own for every token, found at run time.

Ranges per token are common for language models (QuaRot, Ashkboos et al., NeurIPS 2024); IGQ-ViT
(Moon et al., CVPR 2024) finds groups of channels and tokens of a ViT at run time.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from lampq.errors import ConfigError
from lampq.quant.base import Quantizer, register
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


@register
class TokenQuantizer(Quantizer):
    """For every token 2**bits values from clip * min(x, 0) to clip * max(x, 0), evenly spaced.

    ``clip`` is one number, or one for each head. ``axis`` is where the channels of a token are: -1,
    or -2 for keys, which come transposed. Codes alone say nothing here: ``at(x)`` is the grid
    that decodes them.

    Zero is a value, up to the last digit, where all of a token has one sign; elsewhere it may be
    off by half a step. Only with ``clip`` one do quantized values quantize to themselves: a clipped
    token has a smaller range.
    """

    kind: ClassVar[str] = "token"
    clip: Tensor

    def __init__(self, bits: int, clip: Tensor, *, axis: int = -1) -> None:
        super().__init__()
        if axis not in (-1, -2):
            raise ConfigError(f"the channels of a token are on axis -1 or -2, got {axis}")
        if bool(((clip <= 0) | (clip > 1)).any()):
            raise ConfigError(f"clip is a part of a range, above 0 and up to 1, got {clip}")
        self.bits, self.axis = bits, axis
        self.register_buffer("clip", clip)

    def at(self, x: Tensor) -> UniformQuantizer:
        """The grids of the tokens of x."""
        step, zero = token_grid(x, self.bits, self.axis)
        return UniformQuantizer(self.bits, step * self.clip, zero)

    def encode(self, x: Tensor) -> Tensor:
        return self.at(x).encode(x)

    def forward(self, x: Tensor) -> Tensor:
        """Each token on its own grid."""
        quantized: Tensor = self.at(x)(x)
        return quantized

    def options(self) -> dict[str, Any]:
        return {"axis": self.axis}
