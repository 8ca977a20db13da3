"""A quantizer with a finer part for the first tokens: class and register tokens.

A ViT answers from its class token, one of hundreds: a width of its own costs next to nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lampq.errors import ConfigError
from lampq.quant.base import Quantizer, describe, register


@register
class PrefixQuantizer(Quantizer):
    """``prefix`` for the first ``count`` tokens, ``body`` for all others.

    ``axis`` is where the channels of a token are: -1, or -2 for keys, which come transposed; the
    tokens are on the other of the two. ``bits`` are those of the body.
    """

    kind: ClassVar[str] = "prefix"

    def __init__(
        self, bits: int, prefix: Quantizer, body: Quantizer, *, count: int, axis: int = -1
    ) -> None:
        super().__init__()
        if axis not in (-1, -2):
            raise ConfigError(f"the channels of a token are on axis -1 or -2, got {axis}")
        if count < 1:
            raise ConfigError(f"a prefix has at least one token, got {count}")
        if bits != body.bits:
            raise ConfigError(f"the width is that of the body, {body.bits}, got {bits}")
        self.bits, self.count, self.axis = bits, count, axis
        self.prefix, self.body = prefix, body

    @property
    def n_codes(self) -> int:
        return max(self.prefix.n_codes, self.body.n_codes)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first tokens, and the others."""
        axis = -3 - self.axis
        length = x.shape[axis]
        return x.narrow(axis, 0, self.count), x.narrow(axis, self.count, length - self.count)

    def joined(self, prefix: Tensor, body: Tensor) -> Tensor:
        """The tokens of both parts."""
        return torch.cat([prefix, body], dim=-3 - self.axis)

    def encode(self, x: Tensor) -> Tensor:
        first, others = self.parts(x)
        return self.joined(self.prefix.encode(first), self.body.encode(others))

    def forward(self, x: Tensor) -> Tensor:
        """Each part by its own quantizer."""
        first, others = self.parts(x)
        return self.joined(self.prefix(first), self.body(others))

    def on_rows(self, rows: Tensor, first: Tensor) -> Tensor:
        """Single tokens (rows, channels); ``first`` tells which of them are of the prefix."""
        return torch.where(first[:, None], self.prefix(rows), self.body(rows))

    def options(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "axis": self.axis,
            "prefix": describe(self.prefix),
            "body": describe(self.body),
        }


def applied_to_rows(quantizer: Quantizer | None, rows: Tensor, first: Tensor | None) -> Tensor:
    """Single tokens as the quantizer gives them, or as they are if there is none."""
    if quantizer is None:
        return rows
    if isinstance(quantizer, PrefixQuantizer):
        assert first is not None, "statistics say which tokens are of the prefix"
        return quantizer.on_rows(rows, first)
    quantized: Tensor = quantizer(rows)
    return quantized
