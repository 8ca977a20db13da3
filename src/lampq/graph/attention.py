"""Attention with explicit matmuls: the same float result as timm's fused forms, quantizable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lampq.graph.blocks import known_blocks
from lampq.quant.modules import replace_module


class MatMul(nn.Module):
    """The product of two operands, as a site that can be quantized."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """A @ b."""
        return a @ b


class ExplicitAttention(nn.Module):
    """Multi-head self-attention that takes what timm's ``Attention`` takes."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = original.num_heads, original.scale
        self.qkv, self.proj = original.qkv, original.proj
        self.q_norm, self.k_norm = original.q_norm, original.k_norm
        self.norm = getattr(original, "norm", nn.Identity())
        self.gate = getattr(original, "gate", None)
        self.qk, self.av = MatMul(), MatMul()

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attention over tokens (images, tokens, channels)."""
        images, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(images, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # (images, heads, tokens, head channels)
        q, k = self.q_norm(q), self.k_norm(k)
        scores = self.qk(q * self.scale, k.transpose(-2, -1))
        if is_causal:
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        mixed = self.av(scores.softmax(dim=-1), v).transpose(1, 2).reshape(images, tokens, -1)
        mixed = self.norm(mixed)
        if self.gate is not None:
            mixed = mixed * self.gate(x).sigmoid()
        projected: Tensor = self.proj(mixed)
        return projected


class ExplicitWindowAttention(nn.Module):
    """Window attention of Swin, with its relative position bias in float."""

    relative_position_index: Tensor

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = original.num_heads, original.scale
        self.qkv, self.proj = original.qkv, original.proj
        self.relative_position_bias_table = original.relative_position_bias_table
        index = original.relative_position_index
        self.register_buffer("relative_position_index", index, persistent=False)
        self.qk, self.av = MatMul(), MatMul()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention inside windows (images * windows, tokens, channels)."""
        windows, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(windows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.view(tokens, tokens, self.num_heads).permute(2, 0, 1)
        scores = self.qk(q * self.scale, k.transpose(-2, -1)) + bias
        if mask is not None:
            grouped = scores.view(-1, mask.shape[0], self.num_heads, tokens, tokens)
            scores = (grouped + mask[None, :, None]).view(scores.shape)
        mixed = self.av(scores.softmax(dim=-1), v).transpose(1, 2).reshape(windows, tokens, -1)
        projected: Tensor = self.proj(mixed)
        return projected


def _known_attentions() -> dict[type[nn.Module], Callable[[Any], nn.Module]]:
    from timm.models import swin_transformer, vision_transformer

    # timm has moved its attention between modules; this name has stayed
    attention: Any = vision_transformer.Attention  # type: ignore[attr-defined]
    return {attention: ExplicitAttention, swin_transformer.WindowAttention: ExplicitWindowAttention}


def explicit(model: nn.Module) -> nn.Module:
    """A frozen copy of the model for evaluation, with known attentions and sums made explicit."""
    return explicit_(copy.deepcopy(model))


def explicit_(model: nn.Module) -> nn.Module:
    """The model itself, frozen for evaluation, with known attentions and sums made explicit."""
    converters = {**known_blocks(), **_known_attentions()}
    for name, module in list(model.named_modules()):
        convert = converters.get(type(module))
        if convert is not None:
            replace_module(model, name, convert(module))
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model.eval()
