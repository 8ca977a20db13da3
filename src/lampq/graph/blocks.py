"""Transformer blocks with explicit residual sums: the same float result, quantizable."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from lampq.graph.windows import padded_swin_block
from lampq.quant.fold import PaddedNorm
from lampq.types import LayerRole


class Sum(nn.Module):
    """A residual sum behind the layer of that role, as a site that can be quantized."""

    def __init__(self, role: LayerRole) -> None:
        super().__init__()
        self.role = role

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A + b."""
        return a + b


class ExplicitBlock(nn.Module):
    """A block that takes what timm's ``Block`` of a ViT takes, in evaluation."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = original.norm1, original.attn, original.ls1
        self.norm2, self.mlp, self.ls2 = original.norm2, original.mlp, original.ls2
        self.sum1, self.sum2 = Sum(LayerRole.PROJ), Sum(LayerRole.FC2)

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        """The block on tokens (images, tokens, channels); what is named goes to the attention."""
        x = self.sum1(x, self.ls1(self.attn(self.norm1(x), **named)))
        output: Tensor = self.sum2(x, self.ls2(self.mlp(self.norm2(x))))
        return output


def _explicit_swin_block(kind: type[nn.Module]) -> type[nn.Module]:
    class ExplicitSwinBlock(kind):  # type: ignore[misc, valid-type]
        """A block of Swin, in evaluation; shifts and windows are those of its kind."""

        def __init__(self, original: Any) -> None:
            nn.Module.__init__(self)
            self.__dict__.update(original.__dict__)
            self._modules = dict(original._modules)
            if issubclass(kind, padded_swin_block()):
                self.norm1 = PaddedNorm(original.norm1)
            self.sum1, self.sum2 = Sum(LayerRole.PROJ), Sum(LayerRole.FC2)

        def forward(self, x: Tensor) -> Tensor:
            """The block on tokens (images, rows, columns, channels)."""
            x = self.sum1(x, self._attn(self.norm1(x)))
            tokens = x.flatten(1, 2)
            output: Tensor = self.sum2(tokens, self.mlp(self.norm2(tokens)))
            return output.view(x.shape)

    return ExplicitSwinBlock


@cache
def _swin_blocks() -> dict[type[nn.Module], type[nn.Module]]:
    """The kinds of blocks of Swin and their explicit forms."""
    from timm.models.swin_transformer import SwinTransformerBlock

    kinds = SwinTransformerBlock, padded_swin_block()
    return {kind: _explicit_swin_block(kind) for kind in kinds}


def known_blocks() -> dict[type[nn.Module], Callable[[Any], nn.Module]]:
    """The blocks whose sums can be made explicit, and how."""
    from timm.models.vision_transformer import Block

    return {Block: ExplicitBlock, **_swin_blocks()}


def explicit_blocks() -> tuple[type[nn.Module], ...]:
    """The kinds of blocks that have explicit sums."""
    return ExplicitBlock, *_swin_blocks().values()
